"""Deadlines: absolute ``time.monotonic()`` values by which a call returns.

On the wire a deadline travels as the seconds left, since two hosts share no clock.
"""

from __future__ import annotations

import time
from typing import Final

from kvferry.core.errors import ConfigError

__all__ = ["checked_deadline", "deadline_in", "earliest", "is_past", "remaining", "time_left"]


_FAR_S: Final = 1e9  # further than any wait
_LONGEST_WAIT_S: Final = 1e6  # sockets count milliseconds in 31 bits
_NAN: Final = "a deadline is NaN; it is a time.monotonic() value, a float"


def checked_deadline(deadline: float) -> float:
    """A deadline as a caller gave it; infinity becomes one in some thirty years.

    Raises:
        ConfigError: If it is no number, or not a number (NaN).
    """
    if isinstance(deadline, bool) or not hasattr(type(deadline), "__float__"):
        raise _no_number(deadline)
    seconds = float(deadline)
    if seconds != seconds:
        raise ConfigError(_NAN)
    return seconds if seconds < _FAR_S else min(seconds, time.monotonic() + _FAR_S)


def _no_number(deadline: object) -> ConfigError:
    return ConfigError(
        f"a deadline is a time.monotonic() value, got {deadline!r}; "
        "kvferry.core.clock.deadline_in(seconds) makes one"
    )


def deadline_in(seconds: float) -> float:
    """The deadline ``seconds`` from now.

    Raises:
        ConfigError: If that is NaN.
    """
    deadline = time.monotonic() + seconds
    if deadline != deadline:
        raise ConfigError(_NAN)
    return deadline


def remaining(deadline: float) -> float:
    """Seconds until ``deadline``; negative once it has passed.

    Every wait comes through here, or through what is made of it below, so what is no deadline is found
    without a check of its own in each call. One of NaN is neither past nor to come, and a wait for it would
    be one for ever.

    Raises:
        ConfigError: If it is no number, or NaN.
    """
    try:
        left = deadline - time.monotonic()
    except TypeError:
        raise _no_number(deadline) from None
    if left != left:
        raise ConfigError(_NAN)
    return left


def time_left(deadline: float) -> float:
    """Seconds until ``deadline`` for calls that take a timeout: never negative, and no more than they take.

    Raises:
        ConfigError: As :func:`remaining`.
    """
    return min(max(0.0, remaining(deadline)), _LONGEST_WAIT_S)


def is_past(deadline: float) -> bool:
    """Whether ``deadline`` has passed.

    Raises:
        ConfigError: As :func:`remaining`.
    """
    return remaining(deadline) <= 0


def earliest(*deadlines: float | None) -> float:
    """The first of several deadlines, some of which may not be set.

    Raises:
        ValueError: If none is set; no wait is without a deadline.
    """
    found = [d for d in deadlines if d is not None]
    if not found:
        raise ValueError("every wait needs a deadline, none was given")
    return min(found)
