"""A condition variable that costs next to nothing while nobody waits."""

from __future__ import annotations

import threading

__all__ = ["QuietCondition"]


class QuietCondition(threading.Condition):
    """As :class:`threading.Condition`, but to notify when nobody waits is one look at a number.

    A store notifies after every call that may give room to others, and mostly nobody waits for any.
    """

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__(lock)
        self._waiting = 0

    def wait(self, timeout: float | None = None) -> bool:
        """See :meth:`threading.Condition.wait`."""
        self._waiting += 1  # the lock is held, here and when the wait is over
        try:
            return super().wait(timeout)
        finally:
            self._waiting -= 1

    def notify(self, n: int = 1) -> None:
        """See :meth:`threading.Condition.notify`."""
        if self._waiting:
            super().notify(n)

    def notify_all(self) -> None:
        """See :meth:`threading.Condition.notify_all`."""
        if self._waiting:
            super().notify_all()
