"""Which calls of a pipeline are decoded again, and compared: what it counts."""

from __future__ import annotations

import threading
from typing import Final

from kvferry.core.errors import CodecError
from kvferry.core.forks import renewed_in_child
from kvferry.core.nearest import shown

__all__ = ["CallChecks"]

_EVERY: Final = 16
_AFTER_FAILURE: Final = 1024  # more than a model has layers: the next block has the same one outside
_FIRST_FOREIGN: Final = 64
_WORD: Final = (1 << 64) - 1


class CallChecks:
    """Counts the calls of one pipeline, and says which of them are compared. Thread safe.

    Args:
        how: ``"sample"``: the first call and one of each 16, and each of the 1024 calls after one that was
            outside; ``"always"``, ``"never"``.
        lossy: Whether something may be lost.
        foreign: Whether there is a stage of others: then calls are compared lossy or not, and each of the
            first 64, since threads begin together.

    Raises:
        CodecError: For another word.
    """

    def __init__(self, how: str, *, lossy: bool, foreign: bool) -> None:
        if how not in ("sample", "always", "never"):
            raise CodecError(f"check is {shown(how)}; write sample, always or never")
        self.how: Final = how
        self._needed = lossy or foreign
        self._lock = threading.Lock()
        renewed_in_child(self, "_lock")
        self._calls = 0
        self._suspect_until = _FIRST_FOREIGN if foreign else 0
        self._out_of_bound = 0
        self._stored_raw = 0

    def counts(self) -> dict[str, int]:
        """As :attr:`kvferry.codecs.CodecPipeline.counts`."""
        return {"calls": self._calls, "stored_raw": self._stored_raw, "out_of_bound": self._out_of_bound}

    def counted(self, calls: int = 1) -> int:
        """The number of the first of some more calls."""
        with self._lock:
            self._calls += calls
            return self._calls - calls

    def due(self, number: int) -> bool:
        """Whether what call ``number`` encoded is compared."""
        if not self._needed:
            return False
        if self.how != "sample":
            return self.how == "always"
        return number % _EVERY == _place(number // _EVERY) or number < self._suspect_until

    def kept(self, number: int, *, outside: bool) -> None:
        """Count that slices of call ``number`` were stored as they are, for being outside or otherwise."""
        with self._lock:
            self._stored_raw += 1
            self._out_of_bound += outside
        if outside:
            self.suspect(number)

    def suspect(self, number: int) -> None:
        """Something is wrong with call ``number``: those that follow are compared."""
        with self._lock:
            self._suspect_until = max(self._suspect_until, number + 1 + _AFTER_FAILURE)


def _place(group: int) -> int:
    """Which of each 16 calls is checked, 0 of the first: in no order, since layers come in turn."""
    mixed = group * 0x9E3779B97F4A7C15 & _WORD
    return ((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & _WORD) >> 60
