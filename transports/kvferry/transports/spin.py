"""Looking for bytes for a moment before a thread sleeps for them, while they come that fast.

A sleep and a wake-up take longer than most answers of a peer that is at work. Who looks only after a wait
that was short costs nothing on an idle connection, or one whose peer takes its time; and a look in vain is
not repeated for a while. Others may run in between. If they keep the processor, or the GIL, nobody in this
process looks for a while: they would have it for milliseconds, while a thread that slept is preferred when
it wakes up. The native library has the same in ``look.h``, for the short ways of channels; it also tells
others from the host of a virtual machine, who takes the processor away.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

from kvferry.core.errors import ConfigError
from kvferry.core.units import parse_seconds

__all__ = ["DEFAULT_SPIN_S", "MAX_SPIN_S", "TLS_SPIN_S", "Crowd", "Look", "parse_spin"]

DEFAULT_SPIN_S: Final = 300e-6
"""How long ``tcp`` and ``unix`` look: to move a block of 1 MiB, or to use one, takes 100 to 250 µs."""
TLS_SPIN_S: Final = 100e-6
"""How long ``tls`` looks, in Python: about twice as long as a wake-up takes."""
MAX_SPIN_S: Final = 0.01
_LATER: Final = 2.0
_FEWEST_SKIPPED: Final = 8
_MOST_SKIPPED: Final = 1024
_GAP_S: Final = 100e-6
_PEER_S: Final = 1e-3  # what is there now may be of the peer, who ran here meanwhile
_OFF: Final = 32.0  # so many times as long as others ran, at first
_MOST_OFF_S: Final = 3.2


def parse_spin(text: str) -> float:
    """The option ``spin``: seconds, 0 for never.

    Raises:
        ConfigError: If it is none, or longer than :data:`MAX_SPIN_S`.
    """
    spin_s = parse_seconds(text)
    if spin_s > MAX_SPIN_S:
        raise ConfigError(
            f"spin is {spin_s:g} s, it is meant to be about as long as a wake-up takes (50us), and may be "
            f"{MAX_SPIN_S:g} s at most"
        )
    return spin_s


class Crowd:
    """Whether others want the processor, as far as this process has noticed. Any thread."""

    def __init__(self) -> None:
        self._until = 0.0
        self._off_s = 0.0

    def is_here(self, now: float) -> bool:
        """Whether nobody is to look at ``now``, a monotonic time."""
        return now < self._until

    def noticed(self, gap_s: float, now: float) -> None:
        """Others ran for ``gap_s``: nobody looks for a while in proportion.

        For twice as long as last time, if that is over for no longer than it was: then they always want it.
        """
        off_s = gap_s * _OFF
        if now - self._until <= self._off_s:
            off_s = max(off_s, 2 * self._off_s)
        self._off_s = min(off_s, _MOST_OFF_S)
        self._until = now + self._off_s


CROWD: Final = Crowd()
"""That of this process."""


class Look:
    """Looks before a wait, if it is worth it; one direction of a connection, one thread at a time.

    Args:
        most_s: How long to look at most; 0: never.
        crowd: That of the process.
    """

    __slots__ = ("_crowd", "_last_s", "_left", "_skips", "most_s")

    def __init__(self, most_s: float, crowd: Crowd = CROWD) -> None:
        self.most_s = most_s
        self._crowd = crowd
        self._last_s = MAX_SPIN_S * _LATER  # the first wait is without
        self._skips = self._left = 0

    def look(self, there: Callable[[], object], start: float, deadline: float) -> bool:
        """Ask ``there`` again and again if the last wait was short, a sleep in it included.

        Args:
            there: Whether to look no more, at once.
            start: The time now.
            deadline: Not to be passed.

        Returns:
            Whether it looked, for :meth:`waited`.
        """
        if self._left:
            self._left -= 1
            return False
        if not self._last_s < self.most_s * _LATER or self._crowd.is_here(start):
            return False
        until, now = min(start + self.most_s, deadline), start
        while now < until and not there():
            before = time.monotonic()
            os.sched_yield()
            now = time.monotonic()
            if now - before > _GAP_S and (now - before > _PEER_S or not there()):
                self._crowd.noticed(now - before, now)
                break
        return True

    def waited(self, seconds: float, *, looked: bool) -> None:
        """A wait is over. After a look in vain some go without, twice as many each time."""
        self._last_s = seconds
        if not looked:
            return
        if seconds < self.most_s:
            self._skips = 0
            return
        self._skips = self._left = min(max(2 * self._skips, _FEWEST_SKIPPED), _MOST_SKIPPED)
