"""Seconds a byte, from noisy samples: of single calls, and of a flow of pieces."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

__all__ = ["CallCost", "FlowCost"]

_RECENT: Final = 9
_RECENT_WINDOWS: Final = 25
_SETTLED_WINDOWS: Final = 25
"""With so many there is no doubt any more in favour of what is in use."""
_USUAL_SPREAD: Final = 0.2
"""Of windows, relative, where nothing is known of it yet; counts as much as one window."""
_MEDIAN: Final = 1.25
"""How much less certain than a mean of as many a median is."""
_WINDOW_S: Final = 0.01
_WINDOW_PIECES: Final = 2
_LONG_S: Final = 0.05
_CHANGED: Final = 1.6
_SURE: Final = 5


class CallCost:
    """What a call costs where nothing disturbs it: near the lowest of the last ones.

    One that waited for a core took longer, and none takes less than it must.
    """

    __slots__ = ("_costs", "at", "value")

    def __init__(self) -> None:
        self._costs: deque[float] = deque(maxlen=_RECENT)
        self.value = 0.0
        self.at = -math.inf

    def add(self, nbytes: float, seconds: float, now: float) -> None:
        """A call for ``nbytes``."""
        if nbytes <= 0 or seconds < 0:
            return
        self._costs.append(seconds / nbytes)
        self.value = sorted(self._costs)[len(self._costs) // 4]
        self.at = now

    @property
    def count(self) -> int:
        """Calls that are known, up to some."""
        return len(self._costs)


class FlowCost:
    """What pieces that follow one another cost: the median of the last windows, each of 10 ms or more.

    A window has what really took place in it, delays too; the median forgets the few in which something
    else had the cores. Where the last five say the same and all before said otherwise, the flow has
    changed, and those before are forgotten.

    Args:
        recent: How many windows are known at most.
    """

    __slots__ = ("_costs", "_nbytes", "_pieces", "_seconds", "doubt", "value")

    def __init__(self, recent: int = _RECENT_WINDOWS) -> None:
        self._costs: deque[float] = deque(maxlen=recent)
        self._nbytes = self._seconds = 0.0
        self._pieces = 0
        self.value = 0.0
        self.doubt = 0.0  # standard error of the value, relative: how much windows differ, how many they are

    @property
    def windows(self) -> int:
        """Windows that are known, up to some."""
        return len(self._costs)

    @property
    def settled(self) -> bool:
        """Whether windows are so many that there is no doubt any more."""
        return len(self._costs) >= _SETTLED_WINDOWS

    def slower(self, factor: float) -> bool:
        """Whether the last window is above ``factor`` times the value."""
        return bool(self._costs) and self._costs[-1] > self.value * factor

    def add(self, nbytes: float, seconds: float) -> bool:
        """A piece of ``nbytes`` was in place so long after the one before; whether a window is full."""
        if nbytes <= 0 or seconds < 0:
            return False
        self._nbytes += nbytes
        self._seconds += seconds
        self._pieces += 1
        if self._seconds < _WINDOW_S or (self._pieces < _WINDOW_PIECES and self._seconds < _LONG_S):
            return False
        self._costs.append(self._seconds / self._nbytes)
        self._nbytes = self._seconds = 0.0
        self._pieces = 0
        self._drop_outdated()
        self._sum_up()
        return True

    def add_all(self, other: FlowCost) -> None:
        """The windows of another flow, as the last ones."""
        self._costs.extend(other._costs)
        self._drop_outdated()
        self._sum_up()

    def keep(self, windows: int) -> None:
        """Forget all but the last ones."""
        while len(self._costs) > windows:
            self._costs.popleft()
        if self._costs:
            self._sum_up()

    def _sum_up(self) -> None:
        self.value = value = statistics.median(self._costs)
        count = len(self._costs)
        apart = sum(min(cost / value - 1.0, 1.0) ** 2 for cost in self._costs)
        self.doubt = _MEDIAN * math.sqrt((_USUAL_SPREAD**2 + apart) / (count + 1) / count)

    def _drop_outdated(self) -> None:
        costs = list(self._costs)
        last, before = costs[-_SURE:], costs[:-_SURE]
        if not before:
            return
        usual = statistics.median(before)
        if min(last) > _CHANGED * usual or max(last) < usual / _CHANGED:
            self._costs = deque(last, maxlen=self._costs.maxlen)

    def at_most(self, cost: float) -> None:
        """It is known to cost no more."""
        if self._costs and self.value > cost:
            self._costs = deque((min(one, cost) for one in self._costs), maxlen=self._costs.maxlen)
            self._sum_up()
