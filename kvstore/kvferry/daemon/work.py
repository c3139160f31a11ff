"""How many requests are being served, so that a daemon can wait for the last one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.core.clock import is_past, time_left

__all__ = ["Work"]


class Work:
    """Counts what is under way. Thread safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self.total = 0
        """Requests served so far."""

    @property
    def count(self) -> int:
        """Requests under way."""
        with self._changed:
            return self._count

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Held while a request is served."""
        with self._changed:
            self._count += 1
            self.total += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                if not self._count:
                    self._changed.notify_all()

    def wait_idle(self, deadline: float) -> bool:
        """Wait until nothing is under way; ``False`` at the deadline."""
        with self._changed:
            while self._count and not is_past(deadline):
                self._changed.wait(time_left(deadline))
            return not self._count
