"""Deadlines: absolute ``time.monotonic()`` values by which a call returns.

On the wire a deadline travels as the seconds left, since two hosts share no clock.
"""

from __future__ import annotations

import time

__all__ = ["deadline_in", "earliest", "is_past", "remaining", "time_left"]


def deadline_in(seconds: float) -> float:
    """The deadline ``seconds`` from now."""
    return time.monotonic() + seconds


def remaining(deadline: float) -> float:
    """Seconds until ``deadline``; negative once it has passed."""
    return deadline - time.monotonic()


def time_left(deadline: float) -> float:
    """Seconds until ``deadline``, never negative: for calls that take a timeout."""
    return max(0.0, deadline - time.monotonic())


def is_past(deadline: float) -> bool:
    """Whether ``deadline`` has passed."""
    return time.monotonic() >= deadline


def earliest(*deadlines: float | None) -> float:
    """The first of several deadlines, some of which may not be set.

    Raises:
        ValueError: If none is set; no wait is without a deadline.
    """
    found = [d for d in deadlines if d is not None]
    if not found:
        raise ValueError("every wait needs a deadline, none was given")
    return min(found)
