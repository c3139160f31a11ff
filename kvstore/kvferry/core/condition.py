"""A condition variable that costs next to nothing while nobody waits."""

from __future__ import annotations

import threading
from collections import deque

__all__ = ["QuietCondition"]


class QuietCondition(threading.Condition):
    """As :class:`threading.Condition`, but to notify when nobody waits is one look at a number.

    A store notifies after every call that may give room to others, and mostly nobody waits for any.

    Take the lock itself (``with lock:``), not the condition: between taking and the body of the ``with``
    there is no Python code then, in which an exception of a signal handler could leave the lock taken. In
    :meth:`wait` one exception of a handler leaves the lock held, as the caller's ``with`` needs it; a
    second one, while the first is on its way and others hold the lock, may not.
    """

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__(lock)
        self._mutex = lock
        self._sleepers: deque[threading.Lock] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        """See :meth:`threading.Condition.wait`."""
        sleeper = threading.Lock()
        sleeper.acquire()
        self._sleepers.append(sleeper)
        woken = False
        try:
            self._mutex.release()  # inside: whatever is raised from here on, the lock is taken again
            woken = sleeper.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        finally:
            self._mutex.acquire()
            if sleeper in self._sleepers:
                self._sleepers.remove(sleeper)
        return woken

    def notify(self, n: int = 1) -> None:
        """See :meth:`threading.Condition.notify`."""
        while self._sleepers and n > 0:
            self._wake(self._sleepers[0])  # before it is taken out: an exception in between forgets nobody
            self._sleepers.popleft()
            n -= 1

    def notify_all(self) -> None:
        """See :meth:`threading.Condition.notify_all`."""
        if self._sleepers:
            for sleeper in self._sleepers:
                self._wake(sleeper)
            self._sleepers.clear()

    @staticmethod
    def _wake(sleeper: threading.Lock) -> None:
        if sleeper.locked():  # not if it was woken by a call that an exception ended
            sleeper.release()
