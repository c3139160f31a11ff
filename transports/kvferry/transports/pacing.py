"""A pacer: makes a connection send as a link of a given rate would.

Bytes are handed over in pieces of a few milliseconds, each at the time at which a link of that rate would
have carried its last byte. The time when the link is free again is kept as a number that sending moves on,
not as a sleep after each piece: a thread that is woken late sends at once what has become due meanwhile, so
late wake-ups do not add up. A sender that had nothing to send, or whose peer did not read, gets no such
credit but a few milliseconds, so an idle link does not end in a burst.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Pacer"]

_PIECE_S: Final = 0.004
_CREDIT_S: Final = 0.006  # with one piece: the largest burst, 10 ms of the rate
_MIN_PIECE_NBYTES: Final = 1024
_MAX_PIECE_NBYTES: Final = 1 << 19  # fits into the send buffer: the pacer is what waits
_SLACK_S: Final = 0.0002  # a shorter sleep costs more than it orders
_MAX_LATE_S: Final = 0.5


class Pacer:
    """When the next piece may be sent. One sender at a time; reads no clock, the caller passes ``now``.

    Args:
        rate: Bytes a second.
        now: The time of ``time.monotonic()``.
    """

    __slots__ = ("_free_at", "_last", "_late", "_piece_nbytes", "_rate")

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._free_at = now
        self._last = now
        self._late = 0.0
        self._piece_nbytes = int(min(max(rate * _PIECE_S, _MIN_PIECE_NBYTES), _MAX_PIECE_NBYTES))

    def begin(self, now: float) -> None:
        """A call that sends starts."""
        if now - self._last > _CREDIT_S:
            self._late = 0.0
        behind = self._last - self._free_at  # what follows short pauses must not add up: they are no lateness
        self._free_at = max(self._free_at, now - max(behind, _CREDIT_S))

    def limit(self, now: float) -> int:
        """The size of the next piece, larger if more than one is due."""
        behind = min(now - self._free_at, _CREDIT_S + self._late)
        return self._piece_nbytes + max(0, min(int(behind * self._rate), _MAX_PIECE_NBYTES))

    def reserve(self, nbytes: int, now: float) -> float:
        """Take the next ``nbytes`` of the link.

        Returns:
            When to send them; in the past, or up to a fraction of a millisecond ahead, means now.
        """
        self._free_at = max(self._free_at, now - _CREDIT_S - self._late) + nbytes / self._rate
        return self._free_at if self._free_at > now + _SLACK_S else now

    def sent(self, now: float, *, stalled: bool) -> None:
        """The piece was handed over.

        Args:
            now: When that was done.
            stalled: Whether it had to wait for the peer: the link was not what was slow, so nothing is
                caught up.
        """
        self._last = now
        self._late = 0.0 if stalled else min(max(0.0, now - self._free_at), _MAX_LATE_S)
