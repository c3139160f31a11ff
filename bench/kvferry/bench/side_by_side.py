"""Work of several threads, timed from the moment on which all of them are ready."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

__all__ = ["SideBySide"]

_WAIT_S: Final = 60.0
_Part = TypeVar("_Part")


class SideBySide:
    """Threads that each have a CPU of their own, as far as there are enough.

    Left to itself the kernel may keep threads that work for some milliseconds on the CPU that woke them, one
    behind the other, and move one of them only later; what is measured then is that, not the work. The thread
    of the caller stays free to run anywhere. Not thread safe.

    Args:
        threads: How many; with one the caller does the work.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._barrier = threading.Barrier(threads)
        self._pool = ThreadPoolExecutor(threads, "kvferry-bench") if threads > 1 else None
        if self._pool is not None:
            cpus = sorted(os.sched_getaffinity(0))
            # each waits for the others, so that no thread takes two
            self.run(_stay_on, [cpus[n % len(cpus)] for n in range(threads)])

    def run(self, work: Callable[[_Part], object], parts: Sequence[_Part]) -> float:
        """Do each of ``parts`` in a thread of its own.

        Returns:
            Seconds from when all were ready until the last one was done.

        Raises:
            ValueError: If there are not as many parts as threads.
        """
        if len(parts) != self.threads:
            raise ValueError(f"{len(parts)} parts for {self.threads} threads")

        def one(part: _Part) -> tuple[float, float]:
            self._barrier.wait(_WAIT_S)
            begun = time.perf_counter()
            work(part)
            return begun, time.perf_counter()

        spans = [one(parts[0])] if self._pool is None else list(self._pool.map(one, parts))
        return max(end for _, end in spans) - min(begun for begun, _ in spans)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _stay_on(cpu: int) -> None:
    os.sched_setaffinity(0, {cpu})
