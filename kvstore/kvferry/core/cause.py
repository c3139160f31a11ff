"""Why something does not work: the present reason, and when another kind of reason is to be told."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Final

__all__ = ["LEFT_ALONE", "Cause", "kind_of"]

LEFT_ALONE: Final = "is left alone for a while, after: "
"""In reasons of those who were not asked, before the reason for that."""
_LEAST_S: Final = 10.0
_IDS: Final = re.compile(r"\b(?:0x)?[0-9a-f]{12,}\b")
_NUMBERS: Final = re.compile(r"(?<!status )(?<!status \d)(?<!status \d\d)\d+(?:\.\d+)?")


def kind_of(reason: str) -> str:
    """``reason`` without what differs from one time to the next: names of blocks, times, ports."""
    return _NUMBERS.sub("#", _IDS.sub("#", reason.rpartition(LEFT_ALONE)[2]))


class Cause:
    """One lasting problem. Another kind of reason is told at most once in 10 s. Not thread safe.

    Args:
        reason: The first, which has been told.
        clock: Monotonic seconds.

    Attributes:
        reason: The present one.
    """

    def __init__(self, reason: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.reason = reason
        self._clock = clock
        self._told = kind_of(reason)
        self._told_at = clock()

    def now(self, reason: str, *, told: bool = False) -> bool:
        """Take what is the reason now; whether a line about it is due.

        Args:
            reason: The present one.
            told: Whether somebody else tells of it.
        """
        self.reason = reason
        kind, now = kind_of(reason), self._clock()
        if kind == self._told or now < self._told_at + _LEAST_S:
            return False
        self._told, self._told_at = kind, now
        return not told
