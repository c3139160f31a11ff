"""A few threads that work through batches, one item after another, with a deadline a batch.

Items of several batches take turns, so that a small batch does not wait for a large one. The caller comes
back at its deadline even when a device hangs; what still runs then is told by an event. The threads are
daemons for the same reason: a device that hangs must not keep the process from ending.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from kvferry.core.clock import deadline_in, time_left

__all__ = ["Batch", "IoPool"]

T = TypeVar("T")

_CLOSE_S: Final = 5.0
_LAST_S: Final = 0.25
_log = logging.getLogger(__name__)


class Batch(Generic[T]):
    """One call's items and their results.

    Attributes:
        settled: Set when no item is running and none will be started.
        wake: Set when nobody should wait for it any more: it is settled, or the pool was closed.
    """

    def __init__(self, count: int, work: Callable[[int], T]) -> None:
        self._lock = threading.Lock()
        self._work = work
        self._next = 0
        self._running = 0
        self._count = count  # how many may be started; lowered by cancel
        self._results: list[T | None] = [None] * count
        self.settled, self.wake = threading.Event(), threading.Event()
        if not count:
            self._settle()

    def _settle(self) -> None:
        self.settled.set()
        self.wake.set()

    def step(self) -> bool:
        """Do the next item; returns whether more are left. Called by the pool."""
        with self._lock:
            if self._next >= self._count:
                return False
            index = self._next
            self._next += 1
            self._running += 1
        result: T | None = None
        try:
            result = self._work(index)
        except Exception:  # noqa: BLE001  thread root: the item has no result, its caller makes that a failure
            _log.exception("an item of a batch failed unexpectedly")
        finally:
            with self._lock:
                self._results[index] = result
                self._running -= 1
                more = self._next < self._count
                if not more and not self._running:
                    self._settle()
        return more

    def cancel(self) -> tuple[list[T | None], range]:
        """Start no further item; returns the results so far and the range of items that were started."""
        with self._lock:
            self._count = self._next
            if not self._running:
                self._settle()
            return list(self._results), range(self._next)


class IoPool:
    """Owns the threads. :meth:`run` may be called from any thread but its own.

    Args:
        name: Of the threads, with their number.
        threads: How many items run at once.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._queue: queue.SimpleQueue[Batch[object] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._waited_for: set[Batch[object]] = set()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, count: int, work: Callable[[int], T], deadline: float) -> Batch[T]:
        """Call ``work(0)`` to ``work(count - 1)`` in the threads and wait until all are done.

        Returns:
            The batch; :meth:`Batch.cancel` gives what was done by the deadline.
        """
        batch: Batch[T] = Batch(count, work)
        waited_for: Batch[object] = batch  # type: ignore[assignment]  # the queue does not care what T is
        try:
            with self._lock:
                self._waited_for.add(waited_for)
            for _ in range(min(count, len(self._threads))):
                self._queue.put(waited_for)
            if self._closed.is_set():
                batch.cancel()
                batch.wake.set()
            if count:
                batch.wake.wait(time_left(deadline))
        except BaseException:  # a signal handler raised it: nobody waits for the others any more
            batch.cancel()
            raise
        finally:
            self._waited_for.discard(waited_for)
        return batch

    def _serve(self) -> None:
        while True:
            batch = self._queue.get()  # ends by the None that close puts there
            if batch is None:
                return
            while not self._closed.is_set() and batch.step():
                if not self._queue.empty():  # others take their turn
                    self._queue.put(batch)
                    break
            if self._closed.is_set():  # maybe since: nobody may be left who takes it from the queue
                batch.cancel()
            del batch  # and with it the buffers that its work refers to

    def close(self, deadline: float | None = None) -> Sequence[str]:
        """End the threads and all waits; returns the names of those that hang in the device and are left."""
        self._closed.set()
        with self._lock:
            waited_for = list(self._waited_for)
        for batch in waited_for:
            batch.cancel()
        for _ in self._threads:
            self._queue.put(None)
        deadline = deadline_in(_CLOSE_S) if deadline is None else deadline
        for batch in waited_for:
            batch.settled.wait(min(time_left(deadline), _LAST_S))  # what runs normally ends normally
            batch.wake.set()
        for thread in self._threads:
            thread.join(time_left(deadline))
        return [t.name for t in self._threads if t.is_alive()]
