"""What connections over stream sockets have in common: names, pacing, and lists of views that shrink."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence

from kvferry.core.buffers import Buf, as_bytes_view, total_nbytes
from kvferry.core.clock import remaining
from kvferry.core.errors import ConnectionClosedError, TransferTimeoutError
from kvferry.transports.base import Connection
from kvferry.transports.pacing import Pacer

__all__ = ["StreamConnection", "advance", "sending", "take"]


class StreamConnection(Connection):
    """A connection that sends whole lists of views, at a rate if it has one.

    Args:
        local_address: URL of this end.
        peer_address: URL of the other end.
        rate: Bytes a second at which it sends; ``None`` for as fast as it goes.
    """

    def __init__(self, *, local_address: str, peer_address: str, rate: float | None) -> None:
        self._local_address = local_address
        self._peer_address = peer_address
        self._name = f"the connection {local_address} to {peer_address}"
        self._pacer = Pacer(rate, time.monotonic()) if rate is not None else None

    @property
    def local_address(self) -> str:
        """URL of this end."""
        return self._local_address

    @property
    def peer_address(self) -> str:
        """URL of the other end."""
        return self._peer_address

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._local_address} to {self._peer_address}>"

    def send(self, parts: Sequence[Buf], deadline: float) -> None:
        """See :meth:`Connection.send`; paced if the connection has a rate."""
        views = [view for part in parts if len(view := as_bytes_view(part))]
        self._enter()
        try:
            if self._pacer is None:
                self._send_all(views, deadline, 0, total_nbytes(views))
            else:
                self._send_paced(self._pacer, views, deadline)
        finally:
            self._leave()

    def _send_paced(self, pacer: Pacer, views: list[memoryview], deadline: float) -> None:
        now = time.monotonic()
        until = now + remaining(deadline)
        pacer.begin(now)
        first, done, total = 0, 0, total_nbytes(views)
        while first < len(views):
            piece, nbytes = take(views, first, pacer.limit(now))
            due = pacer.reserve(nbytes, now)
            if due > now and self._sleep(max(0.0, min(due, until) - time.monotonic())):
                raise ConnectionClosedError(f"{self._name} was closed while it was sending")
            if due >= until:
                raise self._timed_out(f"{sending(done, total)}, at its rate")
            stalled = self._send_all(piece, deadline, done, total)
            now = time.monotonic()
            pacer.sent(now, stalled=stalled)
            first = advance(views, first, nbytes)
            done += nbytes

    @abstractmethod
    def _enter(self) -> None:
        """A call starts; raises :class:`ConnectionClosedError` if this end was closed."""

    @abstractmethod
    def _leave(self) -> None:
        """A call ends."""

    @abstractmethod
    def _send_all(self, views: list[memoryview], deadline: float, before: int, total: int) -> bool:
        """Send ``views``, none of them empty (the list is used up); whether it had to wait for the peer.

        They are ``total`` bytes with those of the same call of :meth:`send`, of which ``before`` have gone.
        """

    @abstractmethod
    def _sleep(self, seconds: float) -> bool:
        """Sleep; ``True``, at once, when this end is closed."""

    def _timed_out(self, doing: str) -> TransferTimeoutError:
        return TransferTimeoutError(f"{self._name}: the deadline passed while {doing}")


def sending(done: int, total: int) -> str:
    """What a call does that has handed over ``done`` of its ``total`` bytes, for messages."""
    return f"sending, {done} of {total} bytes had gone"


def advance(views: list[memoryview], first: int, nbytes: int) -> int:
    """Skip ``nbytes`` of ``views[first:]``; the first that is left, a view begun shortened in place."""
    while nbytes:
        view = views[first]
        if nbytes < len(view):
            views[first] = view[nbytes:]
            break
        nbytes -= len(view)
        first += 1
    return first


def take(views: list[memoryview], first: int, limit: int) -> tuple[list[memoryview], int]:
    """Views of at most ``limit`` bytes from ``views[first:]``, and how many bytes they have."""
    taken: list[memoryview] = []
    nbytes = 0
    while first < len(views) and nbytes < limit:
        view = views[first]
        if len(view) > limit - nbytes:
            view = view[: limit - nbytes]
        taken.append(view)
        nbytes += len(view)
        first += 1
    return taken, nbytes
