"""What clients' requests cost: counts, times and bytes of each verb, and the slowest of late."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Final, NamedTuple

__all__ = ["BOUNDS_S", "Operations", "Slow", "VerbFigures"]

BOUNDS_S: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
)
"""Upper bounds of the buckets of times, in seconds; one more bucket holds what is above."""

_SLOWEST: Final = 10
_WINDOW_S: Final = 300.0


class Slow(NamedTuple):
    """One slow request."""

    seconds: float
    at: float
    """``time.time()`` at its end."""
    verb: str
    session: str
    tenant: str
    blocks: int
    nbytes: int
    failed: bool


class VerbFigures:
    """Figures of one verb since the start; a snapshot is a copy."""

    __slots__ = ("blocks", "buckets", "failed", "nbytes", "seconds")

    def __init__(self) -> None:
        self.failed = 0
        self.seconds = 0.0
        self.blocks = 0
        self.nbytes = 0
        self.buckets = [0] * (len(BOUNDS_S) + 1)

    @property
    def count(self) -> int:
        """Requests, those that failed too."""
        return sum(self.buckets)

    def copy(self) -> VerbFigures:
        """The figures as they are now."""
        other = VerbFigures()
        other.failed, other.seconds = self.failed, self.seconds
        other.blocks, other.nbytes = self.blocks, self.nbytes
        other.buckets = list(self.buckets)
        return other

    def quantile(self, share: float) -> float:
        """The bound of seconds below which ``share`` of the requests were; 0 if there were none."""
        count, below = self.count, 0
        for bound, number in zip(BOUNDS_S, self.buckets, strict=False):
            below += number
            if count and below >= share * count:
                return bound
        return BOUNDS_S[-1] if count else 0.0


class Operations:
    """Counts requests as they end. Thread safe.

    Args:
        window_s: How long a slow request is remembered, at least; twice that at most.
        clock: Monotonic seconds.
    """

    def __init__(self, *, window_s: float = _WINDOW_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._verbs: dict[str, VerbFigures] = {}
        self._window_s = window_s
        self._clock = clock
        self._since = clock()
        self._slow: list[Slow] = []
        self._slow_before: list[Slow] = []

    def done(
        self, verb: str, session: str, tenant: str, *,
        seconds: float, blocks: int = 0, nbytes: int = 0, failed: bool = False,
    ) -> None:  # fmt: skip
        """A request has ended."""
        with self._lock:
            figures = self._verbs.get(verb)
            if figures is None:
                figures = self._verbs[verb] = VerbFigures()
            figures.buckets[bisect_left(BOUNDS_S, seconds)] += 1
            figures.seconds += seconds
            figures.blocks += blocks
            figures.nbytes += nbytes
            figures.failed += failed
            self._turn()
            slow = self._slow
            if len(slow) < _SLOWEST or seconds > slow[-1].seconds:
                slow.append(Slow(seconds, time.time(), verb, session, tenant, blocks, nbytes, failed))
                slow.sort(reverse=True)
                del slow[_SLOWEST:]

    def _turn(self) -> None:
        now = self._clock()
        if now - self._since >= self._window_s:
            self._slow_before = self._slow if now - self._since < 2 * self._window_s else []
            self._slow = []
            self._since = now

    def figures(self) -> dict[str, VerbFigures]:
        """Those of each verb that was asked for so far."""
        with self._lock:
            return {verb: figures.copy() for verb, figures in self._verbs.items()}

    def slowest(self) -> list[Slow]:
        """The slowest requests of the last minutes, the slowest first."""
        with self._lock:
            self._turn()
            return sorted([*self._slow, *self._slow_before], reverse=True)[:_SLOWEST]
