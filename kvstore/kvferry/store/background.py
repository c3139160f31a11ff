"""A few threads for jobs of one store, whose end has a bound."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from kvferry.core.clock import time_left

__all__ = ["Workers"]


class Workers:
    """Threads that do one job after another. They are daemons: one that hangs in a tier can be left.

    Args:
        name: Of the threads, with their number.
        count: How many jobs run at once.
    """

    def __init__(self, name: str, count: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Have ``job`` done, which raises nothing; not done if :meth:`close` comes first."""
        self._jobs.put(job)

    def close(self, deadline: float) -> bool:
        """Begin no further job and wait for the threads; ``False`` if one was left behind at the deadline."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(time_left(deadline))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:  # close puts an end there
            if self._closed:
                return
            job()
            del job
