"""Each end of a connection on a CPU of its own.

The scheduler may put the two ends on the same CPU, where nothing overlaps, and those of a baseline apart, and
change that between two rounds; on two machines, which is what is stood in for, they never share one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, TypeVar

import numpy as np

from kvferry.bench.results import Sample

__all__ = ["MemcpyHanded", "cpu_pair", "on_cpu", "staying_on"]

_HANDED_NBYTES: Final = 256 << 10
_HANDED_TIMES: Final = 16
T = TypeVar("T")


def cpu_pair() -> tuple[int | None, int | None]:
    """A CPU for this end and one for the other; none where there are not two."""
    cpus = sorted(os.sched_getaffinity(0))
    return (cpus[0], cpus[1]) if len(cpus) > 1 else (None, None)


@contextmanager
def staying_on(cpu: int | None) -> Iterator[None]:
    """The calling thread, and processes that it starts meanwhile, run on ``cpu``; anywhere if ``None``."""
    if cpu is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def on_cpu(cpu: int | None, subjects: Mapping[str, Callable[[], T]]) -> dict[str, Callable[[], T]]:
    """``subjects``, each run by the calling thread on ``cpu``."""

    def bound(run: Callable[[], T]) -> Callable[[], T]:
        def runs() -> T:
            with staying_on(cpu):
                return run()

        return runs

    return {name: bound(run) for name, run in subjects.items()}


class MemcpyHanded:
    """Copies into memory that the other CPU has just read, as the buffers of the system are between two ends.

    They are several times as slow while the two CPUs share no cache, and every socket between them is slow
    too. Those of a virtual machine may share one now and not a minute later, whatever it is told of them.

    Args:
        here: The CPU that copies.
        there: The one that reads.
    """

    def __init__(self, here: int, there: int) -> None:
        self._here = here
        self._mine, self._handed, self._theirs = np.ones((3, _HANDED_NBYTES), np.uint8)
        self._reader = ThreadPoolExecutor(
            1, "kvferry-bench-reader", initializer=os.sched_setaffinity, initargs=(0, {there})
        )

    def __call__(self) -> Sample:
        """One run."""
        seconds = 0.0
        with staying_on(self._here):
            for _ in range(_HANDED_TIMES):
                self._reader.submit(np.copyto, self._theirs, self._handed).result()
                start = time.perf_counter()
                np.copyto(self._handed, self._mine)
                seconds += time.perf_counter() - start
        return Sample(seconds, _HANDED_TIMES * _HANDED_NBYTES)

    def close(self) -> None:
        """End its thread."""
        self._reader.shutdown()
