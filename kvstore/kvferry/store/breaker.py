"""A breaker: keeps a tier that fails from being asked again for a while. One for reads, one for writes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from kvferry.core.cause import Cause
from kvferry.core.errors import ConfigError

__all__ = ["Breaker"]

_LOG = logging.getLogger(__name__)

_Line = tuple[Any, ...]  # level, message, arguments


class Breaker:
    """Closed while the tier works, open after errors, half open for one try after a pause. Thread safe.

    One log line when it opens, one when it closes again, and between them one when it fails for another kind
    of reason. Every further pause is twice as long as the last,
    up to ``max_pause_s``.

    Args:
        name: Of the tier.
        work: What it is about, for messages: ``reads`` or ``writes``.
        errors: Failures without a success between them that open it.
        pause_s: Seconds until the first try.
        max_pause_s: The longest pause.
        clock: Monotonic seconds.

    Attributes:
        opened: How often it has opened.

    Raises:
        ConfigError: If a value cannot be used.
    """

    def __init__(
        self,
        name: str,
        *,
        work: str = "reads",
        errors: int = 3,
        pause_s: float = 1.0,
        max_pause_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if errors < 1 or not 0 < pause_s <= max_pause_s:
            raise ConfigError(
                f"breaker of tier {name} for {work}: errors={errors}, pause_s={pause_s}, "
                f"max_pause_s={max_pause_s}; needs errors >= 1 and 0 < pause_s <= max_pause_s"
            )
        self.name = name
        self.work = work
        self.opened = 0
        self._errors = errors
        self._first_pause_s = pause_s
        self._max_pause_s = max_pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._retry_at: float | None = None  # None: closed
        self._pause_s = pause_s
        self._trying = False
        self._cause: Cause | None = None

    @property
    def reason(self) -> str:
        """Why it is open: what the last try said; empty while it is closed."""
        cause = self._cause
        return "" if cause is None else cause.reason

    @property
    def is_open(self) -> bool:
        """Whether the last word is that the tier fails."""
        return self._retry_at is not None

    @property
    def ready(self) -> bool:
        """Whether :meth:`enter` may be granted now; takes nothing."""
        retry_at = self._retry_at
        return retry_at is None or (not self._trying and self._clock() >= retry_at)

    def enter(self) -> bool:
        """Whether the tier may be asked now; ends with :meth:`leave` if so. Half open, one at a time may."""
        if self._retry_at is None:
            return True
        with self._lock:
            if self._retry_at is None:
                return True
            if self._trying or self._clock() < self._retry_at:
                return False
            self._trying = True
            return True

    def leave(self, *, failures: int, successes: int, reason: str = "", told: bool = False) -> None:
        """What came of it.

        Args:
            failures: Operations that the tier failed.
            successes: Those that show that it works.
            reason: Of the failures.
            told: Whether somebody else tells when it is another kind of reason than before.
        """
        if not failures and not self._failures and self._retry_at is None:
            return  # nothing was wrong, and nothing is
        with self._lock:
            line = self._take(failures=failures, successes=successes, reason=reason, told=told)
        if line is not None:  # by now without the lock: a slow handler holds up nobody who asks
            _LOG.log(*line)

    def _take(self, *, failures: int, successes: int, reason: str, told: bool) -> _Line | None:
        """See :meth:`leave`; the line that is due."""
        self._trying = False
        if successes:
            self._failures = 0
            if self._retry_at is None:
                return None
            self._retry_at = self._cause = None
            self._pause_s = self._first_pause_s
            return logging.INFO, "tier %s: %s work again", self.name, self.work
        if failures and self._retry_at is not None:
            if self._clock() < self._retry_at:
                return None  # a call that was under way when it opened
            self._pause_s = min(2 * self._pause_s, self._max_pause_s)
            self._retry_at = self._clock() + self._pause_s
            return self._still_fails(reason, told=told)
        self._failures += failures
        if self._failures < self._errors:
            return None
        self._failures = 0
        self.opened += 1
        self._retry_at = self._clock() + self._pause_s
        self._cause = Cause(reason or "no reason given", self._clock)
        return (
            logging.WARNING, "tier %s: no %s for %g s after %d errors, and until they work again: %s",
            self.name, self.work, self._pause_s, self._errors, self._cause.reason,
        )  # fmt: skip

    def _still_fails(self, reason: str, *, told: bool) -> _Line | None:
        if self._cause is None or not reason or not self._cause.now(reason, told=told):
            return None
        return (
            logging.WARNING, "tier %s: still no %s, and the reason is another now: %s",
            self.name, self.work, reason,
        )  # fmt: skip
