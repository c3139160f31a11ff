"""The warnings and errors that kvferry has logged of late, for the status."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from typing import Final, NamedTuple

from kvferry.core.log import redact

__all__ = ["FaultLine", "Faults"]

_KEPT: Final = 50
_MESSAGE_LENGTH: Final = 500


class FaultLine(NamedTuple):
    """One log line of level warning or above."""

    at: float
    """``time.time()``."""
    level: str
    logger: str
    message: str


class Faults(logging.Handler):
    """Keeps the last warnings and errors of kvferry's loggers, and counts all. Thread safe.

    It is attached when made and detached by :meth:`close`.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: deque[FaultLine] = deque(maxlen=_KEPT)
        self._counts: Counter[str] = Counter({"warning": 0, "error": 0})
        self._own = threading.Lock()
        logging.getLogger("kvferry").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line; without its traceback, which is the log's business."""
        try:
            message = redact(record.getMessage())[:_MESSAGE_LENGTH]
        except Exception:  # noqa: BLE001 - a wrong format must not end whoever logs
            self.handleError(record)
            return
        level = "warning" if record.levelno < logging.ERROR else "error"
        with self._own:
            self._counts[level] += 1
            self._kept.append(FaultLine(record.created, level, record.name, message))

    @property
    def counts(self) -> dict[str, int]:
        """How many there were, by level."""
        with self._own:
            return dict(self._counts)

    def recent(self) -> list[FaultLine]:
        """The last ones, the newest first."""
        with self._own:
            return list(reversed(self._kept))

    def close(self) -> None:
        """Keep no more."""
        logging.getLogger("kvferry").removeHandler(self)
        super().close()
