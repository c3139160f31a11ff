"""How many requests are being served, so that a daemon can wait for the last one."""

from __future__ import annotations

import threading

from kvferry.core.clock import is_past, time_left

__all__ = ["Work"]


class Work:
    """Counts what is under way: a context manager, held while a request is served. Thread safe.

    Attributes:
        total: Requests served so far.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # taken as it is by each request: through the condition it takes longer
        self._idle = threading.Condition(self._lock)
        self._count = 0
        self.total = 0

    @property
    def count(self) -> int:
        """Requests under way."""
        with self._lock:
            return self._count

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            self.total += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._idle.notify_all()

    def wait_idle(self, deadline: float) -> bool:
        """Wait until nothing is under way; ``False`` at the deadline."""
        with self._idle:
            while self._count and not is_past(deadline):
                self._idle.wait(time_left(deadline))
            return not self._count
