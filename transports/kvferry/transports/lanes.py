"""Lanes: one connection over several sockets.

The bytes of each message are cut into stripes of a fixed size, dealt to the lanes in turn from the first one
on. So both ends know from the position in the message alone which lane has which byte: nothing is added to
the bytes, their order is that of the stream whatever the lanes do to each other, and a message no longer than
a stripe goes over the first lane as if there were no other. Each end works with one thread a direction, in
the order of the stream; the buffers of the kernel keep the other lanes busy meanwhile.

Whoever dials opens all sockets and sends a preamble on each, with the same random id; the listener puts them
together. A connection that starts with other bytes is an ordinary one of one lane.
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import struct
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvferry.core.buffers import Buf, as_bytes_view, as_places, total_nbytes
from kvferry.core.clock import is_past, remaining
from kvferry.core.errors import ConfigError, ConnectionClosedError, KVFerryError, TransferTimeoutError
from kvferry.core.log import LogLimiter
from kvferry.transports.ip import SockAddr
from kvferry.transports.sockets import SocketConnection, flush_all, poll_timeout_ms
from kvferry.transports.streams import StreamConnection, advance, take

__all__ = [
    "MAX_LANES",
    "LaneAssembler",
    "LaneConnection",
    "Laned",
    "parse_lanes",
    "preambles",
]

log = logging.getLogger(__name__)

MAX_LANES: Final = 16
STRIPE_NBYTES: Final = 1028 << 10  # room for a head beside a payload, whose size often is a power of two
MAGIC: Final = b"\x89KVLANE\n"
_VERSION: Final = 2  # of how messages are dealt; the first one had the size of its stripes here, 1 MiB
_PREAMBLE: Final = struct.Struct("<8s16sHHI")  # magic, id, lane, lanes, version
_PREAMBLE_S: Final = 5.0
_MAX_WAITING: Final = 256
_LOOK_S: Final = 0.5
_LOST_S: Final = 1.0
_SENT, _RECEIVED = 0, 1


def parse_lanes(text: str) -> int:
    """The option ``lanes``: a number from 1 to 16.

    Raises:
        ConfigError: If it is none.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 2 and 1 <= int(text) <= MAX_LANES):
        raise ConfigError(f"lanes={text}: write a number from 1 to {MAX_LANES}")
    return int(text)


def preambles(lanes: int) -> list[bytes]:
    """What is sent first on each lane of a new connection."""
    connection = secrets.token_bytes(16)
    return [_PREAMBLE.pack(MAGIC, connection, lane, lanes, _VERSION) for lane in range(lanes)]


class LaneConnection(StreamConnection):
    """A connection over the sockets of ``lanes``, in the order of their numbers; owns them.

    The loss of one lane ends the whole connection: what the lane that is due still delivers is taken for up
    to a second after its last byte, then all lanes are reset, so that the other end knows too.

    Args:
        lanes: Connections of one socket each, without a rate; their sockets carried nothing yet.
        rate: Bytes a second at which all lanes together send; ``None`` for as fast as it goes.
    """

    def __init__(self, lanes: Sequence[SocketConnection], *, rate: float | None = None) -> None:
        super().__init__(local_address=lanes[0].local_address, peer_address=lanes[0].peer_address, rate=rate)
        self._name += f" of {len(lanes)} lanes"
        self._lanes: Final = tuple(lanes)
        self._closing = threading.Event()
        self.positions: Final = array("Q", (0, 0))
        """Bytes of the message that were sent, and received: who moves them otherwise counts them here."""

    @property
    def bare_lanes(self) -> tuple[SocketConnection, ...]:
        """The lanes, if to send and to receive is to call them by :attr:`positions`, and nothing else."""
        return self._lanes if self._pacer is None else ()

    @property
    def stripe_nbytes(self) -> int:
        """Bytes that one lane has before the next one is due."""
        return STRIPE_NBYTES

    # -- stripes ---------------------------------------------------------------------------------------

    def begin_sending(self) -> None:
        """See :meth:`Connection.begin_sending`."""
        self.positions[_SENT] = 0

    def begin_receiving(self, ahead: int) -> None:
        """See :meth:`Connection.begin_receiving`."""
        self.positions[_RECEIVED] = ahead

    def _stripes(self, views: list[memoryview], position: int) -> Iterator[tuple[int, list[memoryview], int]]:
        """``views`` cut at the ends of stripes, the first byte lying at ``position`` of the message.

        Yields:
            The lane, its views, their bytes.
        """
        first = 0
        while first < len(views):
            stripe, into = divmod(position, STRIPE_NBYTES)
            piece, nbytes = take(views, first, STRIPE_NBYTES - into)
            yield stripe % len(self._lanes), piece, nbytes
            first = advance(views, first, nbytes)
            position += nbytes

    # -- sending ---------------------------------------------------------------------------------------

    def _enter(self) -> None:
        if self._closing.is_set():
            raise ConnectionClosedError(f"{self._name} is closed")

    def _leave(self) -> None:
        """The lanes keep track of who is inside them."""

    def _sleep(self, seconds: float) -> bool:
        return self._closing.wait(seconds)

    def send(self, parts: Sequence[Buf], deadline: float) -> None:
        """See :meth:`Connection.send`; paced if the connection has a rate."""
        stripe, into = divmod(self.positions[_SENT], STRIPE_NBYTES)
        nbytes = 0
        for part in parts:
            nbytes += part.nbytes if type(part) is memoryview else nbytes_of(part)
        if nbytes > STRIPE_NBYTES - into or self._pacer is not None:
            super().send(parts, deadline)
            return
        self._enter()
        self._lanes[stripe % len(self._lanes)].send(parts, deadline)
        self.positions[_SENT] += nbytes

    def _send_all(self, views: list[memoryview], deadline: float, before: int, total: int) -> bool:
        waited = False
        for lane, piece, nbytes in self._stripes(views, self.positions[_SENT]):
            waited |= self._lanes[lane].send_views(piece, deadline, before, total)
            before += nbytes
            self.positions[_SENT] += nbytes
        return waited

    # -- receiving -------------------------------------------------------------------------------------

    def recv_into(self, views: Sequence[memoryview], deadline: float) -> None:
        """See :meth:`Connection.recv_into`."""
        self._enter()
        left = [view for view in as_places(views) if len(view)]
        wanted, got = total_nbytes(left), 0
        stripe, into = divmod(self.positions[_RECEIVED], STRIPE_NBYTES)
        if 0 < wanted <= STRIPE_NBYTES - into:
            self._fill(stripe % len(self._lanes), left, wanted, 0, wanted, deadline)
            self.positions[_RECEIVED] += wanted
            return
        for lane, piece, nbytes in self._stripes(left, self.positions[_RECEIVED]):
            self._fill(lane, piece, nbytes, got, wanted, deadline)
            got += nbytes
            self.positions[_RECEIVED] += nbytes

    def recv_at_least(self, view: memoryview, minimum: int, deadline: float) -> int:
        """See :meth:`Connection.recv_at_least`.

        More than the minimum is taken of the first stripe only: behind another one is no next message.
        """
        self._enter()
        room = STRIPE_NBYTES - self.positions[_RECEIVED]
        if minimum > room:
            return super().recv_at_least(view, minimum, deadline)
        lane = self._lanes[0]
        place = view[:room] if len(view) > room else view
        n = got = lane.receive_some_by(place, _next_look(deadline), 0, minimum)
        if got < minimum:  # else there is nothing to look after
            watch = _Watch(self, deadline)
            while got < minimum:
                watch.look(n, f"receiving, {got} of {minimum} bytes had come")
                n = lane.receive_some_by(place[got:], watch.until, got, minimum)
                got += n
        self.positions[_RECEIVED] += got
        return got

    def _fill(
        self, lane: int, piece: list[memoryview], nbytes: int, before: int, wanted: int, deadline: float
    ) -> None:
        """Fill ``piece`` from ``lane``, looking after the other lanes while nothing comes."""
        until = _next_look(deadline)
        n = got = self._lanes[lane].receive_by(piece, nbytes, until, before, wanted)
        if got == nbytes:
            return
        watch = _Watch(self, deadline)
        while got < nbytes:
            del piece[: advance(piece, 0, n)]
            watch.look(n, f"receiving, {before + got} of {wanted} bytes had come")
            n = self._lanes[lane].receive_by(piece, nbytes - got, watch.until, before + got, wanted)
            got += n

    def timed_out(self, doing: str) -> TransferTimeoutError:
        """What is raised at a deadline."""
        return self._timed_out(doing)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]} of {len(self._lanes)} lanes>"

    def lost_lane(self) -> int | None:
        """A lane whose stream has ended, whatever it still holds."""
        poll, lanes = select.poll(), {}
        for number, lane in enumerate(self._lanes):
            if (fd := lane.fileno()) >= 0:
                lanes[fd] = number
                poll.register(fd, select.POLLRDHUP)
        ready = poll.poll(0)
        return min((lanes[fd] for fd, _ in ready), default=None)

    def wait_readable(self, deadline: float) -> bool:
        """See :meth:`Connection.wait_readable`."""
        self._enter()
        return self._wait_readable(self.positions[_RECEIVED] // STRIPE_NBYTES % len(self._lanes), deadline)

    def _wait_readable(self, lane: int, deadline: float) -> bool:
        lost_at = 0.0
        while True:
            now = time.monotonic()
            if self._lanes[lane].wait_readable(_next_look(deadline)):
                return True
            if is_past(deadline):
                return False
            if self.lost_lane() is None:
                continue
            lost_at = lost_at or now
            if now - lost_at >= _LOST_S:
                return True  # the end of the stream, which the next call reports

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the stream; what was sent still arrives. Waits as the connection of one socket does."""
        if self._closing.is_set():
            return
        self._closing.set()
        ending = [lane for lane in self._lanes if lane.begin_end()]
        flush_all(ending)
        for lane in ending:
            lane.finish_end(flush=False)

    def abort(self) -> None:
        """End the stream at once: the peer gets a reset, what it has not received is dropped."""
        self._closing.set()
        for lane in self._lanes:
            with suppress(KVFerryError):
                lane.abort()


def _next_look(deadline: float) -> float:
    """When who waits until ``deadline`` looks at all lanes."""
    return time.monotonic() + min(remaining(deadline), _LOOK_S)


class _Watch:
    """Looks after all lanes of a connection while a call waits for one of them."""

    __slots__ = ("_connection", "_deadline", "_lost_at", "until")

    def __init__(self, connection: LaneConnection, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self._lost_at = 0.0
        self.until = _next_look(deadline)
        """How long to wait for the lane before the next look."""

    def look(self, nbytes: int, doing: str) -> None:
        """The lane gave ``nbytes`` until then.

        Raises:
            TransferTimeoutError: At the deadline.
            ConnectionClosedError: If another lane is lost, and this one has given nothing for a while.
        """
        now = time.monotonic()
        if now >= self._deadline:
            raise self._connection.timed_out(doing)
        self.until = _next_look(self._deadline)
        if nbytes:
            self._lost_at = 0.0
        elif (lost := self._connection.lost_lane()) is not None:
            self._lost_at = self._lost_at or now
            if now - self._lost_at >= _LOST_S:
                self._connection.abort()
                raise ConnectionClosedError(f"{self._connection!r}: lane {lost} was cut while {doing}")


@dataclass(frozen=True)
class Laned:
    """The sockets of one accepted connection, in the order of lanes; one of an ordinary connection."""

    sockets: list[tuple[socket.socket, SockAddr]]


@dataclass
class _Waiting:
    sock: socket.socket
    sockaddr: SockAddr
    until: float
    begun: bool = False


class LaneAssembler:
    """Puts accepted sockets together to connections; one thread at a time.

    Every accepted socket has five seconds to say what it is. One that says nothing, or something else than
    a preamble, is an ordinary connection; the sockets of a group that does not get complete are closed. At
    most 256 sockets wait; when more come, those that have waited longest are treated as if their time were
    over.
    """

    def __init__(self) -> None:
        self._silent: dict[int, _Waiting] = {}
        self._groups: dict[bytes, dict[int, _Waiting]] = {}
        self._lanes: dict[bytes, int] = {}
        self._others = LogLimiter(log)

    @property
    def silent(self) -> list[int]:
        """The descriptors that have not yet said what they are."""
        return list(self._silent)

    @property
    def next_expiry(self) -> float:
        """When :meth:`expire` has something to do, as a deadline; infinity if nothing waits."""
        first = [waiting.until for waiting in self._silent.values()]
        first += [waiting.until for group in self._groups.values() for waiting in group.values()]
        return min(first, default=float("inf"))

    def add(self, sock: socket.socket, sockaddr: SockAddr, now: float) -> list[Laned]:
        """Take an accepted socket; the connections that are complete with it."""
        sock.setblocking(False)
        self._silent[sock.fileno()] = _Waiting(sock, sockaddr, now + _PREAMBLE_S)
        done = self.look(sock.fileno())
        if len(self._silent) + sum(map(len, self._groups.values())) > _MAX_WAITING:
            done += self.expire(self.next_expiry)
        return done

    def look(self, fd: int) -> list[Laned]:
        """See what the silent socket ``fd`` has said; the connections that are complete with it."""
        waiting = self._silent[fd]
        try:
            head = waiting.sock.recv(_PREAMBLE.size, socket.MSG_PEEK)
        except BlockingIOError:
            return []
        except OSError:
            head = b""
        begun = 0 < len(head) < _PREAMBLE.size and MAGIC.startswith(head[: len(MAGIC)])
        if begun and not waiting.begun:
            # let poll wait for the rest, or the end, instead of finding the same bytes again and again
            waiting.begun = True
            waiting.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _PREAMBLE.size)
            return []
        del self._silent[fd]
        waiting.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        if not head.startswith(MAGIC) or len(head) < _PREAMBLE.size:
            return [Laned([(waiting.sock, waiting.sockaddr)])]
        waiting.sock.recv(_PREAMBLE.size)
        return self._join(waiting, head)

    def _join(self, waiting: _Waiting, head: bytes) -> list[Laned]:
        _, name, lane, lanes, version = _PREAMBLE.unpack(head)
        group = self._groups.setdefault(name, {})
        peer = waiting.sockaddr[0]
        fits = version == _VERSION and lane < lanes <= MAX_LANES
        if not fits or lane in group or self._lanes.setdefault(name, lanes) != lanes:
            if version == _VERSION:
                log.info("%s: a lane that does not fit was closed (lane %d of %d)", peer, lane, lanes)
            else:
                self._others.log(
                    *(logging.WARNING, peer),
                    "%s: a lane was closed, its end deals messages to lanes otherwise (version %d, here %d); "
                    "update the older end, or dial without lanes",
                    *(peer, version, _VERSION),
                )
            waiting.sock.close()
            if not group:
                self._forget(name)
            return []
        group[lane] = waiting
        if len(group) < lanes:
            return []
        self._forget(name)
        return [Laned([(one.sock, one.sockaddr) for _, one in sorted(group.items())])]

    def _forget(self, name: bytes) -> None:
        self._groups.pop(name, None)
        self._lanes.pop(name, None)

    def expire(self, now: float) -> list[Laned]:
        """Give up on what has waited until ``now``: the silent ones become ordinary connections."""
        for name, group in list(self._groups.items()):
            if any(one.until <= now for one in group.values()):
                lanes = self._lanes[name]
                peer = next(iter(group.values())).sockaddr[0]
                log.info("%s: only %d of %d lanes came within %g s", peer, len(group), lanes, _PREAMBLE_S)
                for one in group.values():
                    one.sock.close()
                self._forget(name)
        over = [fd for fd, one in self._silent.items() if one.until <= now]
        silent = [self._silent.pop(fd) for fd in over]
        for one in silent:
            one.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return [Laned([(one.sock, one.sockaddr)]) for one in silent]

    def close(self) -> None:
        """Close everything that waits."""
        for waiting in [*self._silent.values(), *(w for g in self._groups.values() for w in g.values())]:
            waiting.sock.close()
        self._silent.clear()
        self._groups.clear()
        self._lanes.clear()
        self._others.flush()


def nbytes_of(part: Buf) -> int:
    """Bytes of ``part``."""
    return len(part) if isinstance(part, bytes) else as_bytes_view(part).nbytes


def wait_for_any(listener: socket.socket, fds: list[int], until: float) -> list[int]:
    """Of ``listener`` and ``fds``, the descriptors that have something; nothing at ``until``."""
    poll = select.poll()
    for fd in (listener.fileno(), *fds):
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(poll_timeout_ms(until))]
