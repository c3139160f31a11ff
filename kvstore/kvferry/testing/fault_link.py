"""What a bad link does to the bytes of one connection: part of :mod:`kvferry.testing.fault_proxy`."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

import numpy as np

from kvferry.core.errors import ConfigError

__all__ = ["GOOD", "Direction", "Faults", "Flow", "Pair"]

_Link: TypeAlias = Literal["up", "cut", "reset", "half_open"]
Direction: TypeAlias = Literal["to_server", "to_client"]
"""To the listener, or to who dialled."""

_READ_NBYTES: Final = 256 << 10
_QUEUE_NBYTES: Final = 1 << 20
_DELAYED_QUEUE_NBYTES: Final = 64 << 20  # a long link holds what is on its way
_BURST_S: Final = 0.005
_MIN_BURST_NBYTES: Final = 1024
_RESET: Final = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What is wrong with the link; the default is a good one.

    Attributes:
        delay_s: Every byte arrives so much later; as on a long cable, as many are on their way as fit.
        lane_delays_s: More delay by connection: the n-th that was made gets the n-th, counted round, so
            that the connections of one peer overtake each other.
        rate: Bytes a second, each connection and direction; ``None``: as fast as it goes.
        link: ``up``; ``cut``: nothing passes, nothing is lost, and all goes on when it is up again;
            ``reset``: all connections are reset, and each new one; ``half_open``: the proxy acknowledges
            what comes and forwards nothing. What was swallowed is lost: when the link is up again, the
            connections that lost bytes are reset.
        flip_at: Positions in the stream (of each connection, from its start) of bytes that arrive with one
            bit flipped.
        flip_rate: The chance of each byte to be flipped, as 1e-6.
        only: The one direction in which delays, rate, ``cut``, ``half_open`` and flips apply; ``None``: both.

    Raises:
        ConfigError: For a value that is none of these: it would make a good link.
    """

    delay_s: float = 0.0
    lane_delays_s: tuple[float, ...] = ()
    rate: float | None = None
    link: _Link = "up"
    flip_at: tuple[int, ...] = ()
    flip_rate: float = 0.0
    only: Direction | None = None

    def __post_init__(self) -> None:
        if self.link not in get_args(_Link):
            raise ConfigError(f"link={self.link!r}: write one of {', '.join(get_args(_Link))}")
        if self.only is not None and self.only not in get_args(Direction):
            raise ConfigError(f"only={self.only!r}: write one of {', '.join(get_args(Direction))}, or None")
        for seconds in (self.delay_s, *self.lane_delays_s):
            if not 0 <= seconds < math.inf:
                raise ConfigError(f"a delay of {seconds!r}: write seconds, 0 or more")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"rate={self.rate!r}: write bytes a second, more than 0, or None")
        if not 0 <= self.flip_rate <= 1:
            raise ConfigError(f"flip_rate={self.flip_rate!r}: write a chance from 0 to 1")
        if any(position < 0 for position in self.flip_at):
            raise ConfigError(f"flip_at={self.flip_at!r}: write positions from 0 on")

    def apply_to(self, direction: Direction) -> bool:
        """Whether they count in ``direction``."""
        return self.only in (None, direction)


GOOD: Final = Faults()


class Flow:
    """Bytes of one connection in one direction; used by the proxy's thread alone."""

    def __init__(
        self, direction: Direction, number: int, source: socket.socket, sink: socket.socket, seed: int
    ) -> None:
        self.direction: Direction = direction
        self.source = source
        self.sink = sink
        self.forwarded = self.flipped = self.swallowed = 0
        self.lost = False  # bytes, or the end
        self.done = False  # the end has been passed on
        self._number = number
        self._queue: deque[tuple[float, bytearray | None]] = deque()
        self._queued = 0
        self._offset = 0  # of the first chunk
        self._position = 0
        self._ended = False
        self._free_at = 0.0
        self._random = np.random.default_rng((seed, number, direction == "to_client"))

    def _faults(self, faults: Faults) -> Faults:
        return faults if faults.apply_to(self.direction) else GOOD

    def wants_read(self, faults: Faults) -> bool:
        """Whether more may be taken from the source."""
        own = self._faults(faults)
        room = _DELAYED_QUEUE_NBYTES if own.delay_s or own.lane_delays_s else _QUEUE_NBYTES
        return not self._ended and own.link != "cut" and self._queued < room

    def due_at(self, faults: Faults) -> float | None:
        """When something can be passed on; ``None`` if there is nothing, or the link is cut."""
        if not self._queue or self._faults(faults).link == "cut":
            return None
        return max(self._queue[0][0], self._free_at)

    def read(self, faults: Faults, now: float) -> None:
        """Take what the source has; raises :class:`OSError` if it was reset."""
        chunk = bytearray(_READ_NBYTES)
        try:
            nbytes = self.source.recv_into(chunk)
        except BlockingIOError:
            return
        own = self._faults(faults)
        if own.link == "half_open":
            self.swallowed += nbytes
            self.lost = True
            self._ended = self._ended or nbytes == 0
            return
        del chunk[nbytes:]
        delay = own.delay_s
        if own.lane_delays_s:
            delay += own.lane_delays_s[self._number % len(own.lane_delays_s)]
        # a shorter delay from now on does not let later bytes overtake
        due = max(now + delay, self._queue[-1][0] if self._queue else 0.0)
        if nbytes:
            self._flip(chunk, own)
            self._queue.append((due, chunk))
            self._queued += nbytes
            self._position += nbytes
        else:
            self._ended = True
            self._queue.append((due, None))

    def _flip(self, chunk: bytearray, own: Faults) -> None:
        places = {at - self._position for at in own.flip_at}
        places = {at for at in places if 0 <= at < len(chunk)}
        if own.flip_rate:
            hits = int(self._random.binomial(len(chunk), own.flip_rate))
            places |= {int(at) for at in self._random.integers(0, len(chunk), hits)}
        for at in places:
            chunk[at] ^= 1 << int(self._random.integers(8))
        self.flipped += len(places)

    def write(self, faults: Faults, now: float) -> None:
        """Pass on what is due; raises :class:`OSError` if the sink was reset."""
        own = self._faults(faults)
        while self._queue and self._queue[0][0] <= now and self._free_at <= now:
            chunk = self._queue[0][1]
            if chunk is None:
                self._queue.popleft()
                self.done = True
                with contextlib.suppress(OSError):  # gone already
                    self.sink.shutdown(socket.SHUT_WR)
                return
            limit = max(_MIN_BURST_NBYTES, int(own.rate * _BURST_S)) if own.rate else len(chunk)
            try:
                sent = self.sink.send(memoryview(chunk)[self._offset : self._offset + limit])
            except BlockingIOError:
                return
            self._count(sent, len(chunk))
            if own.rate:
                self._free_at = max(self._free_at, now - _BURST_S) + sent / own.rate

    def _count(self, sent: int, chunk_nbytes: int) -> None:
        self.forwarded += sent
        self._queued -= sent
        self._offset += sent
        if self._offset == chunk_nbytes:
            self._queue.popleft()
            self._offset = 0


class Pair:
    """A connection that was accepted and the one that was made for it."""

    def __init__(self, number: int, client: socket.socket, server: socket.socket, seed: int) -> None:
        self.client, self.server = client, server
        self.flows = (
            Flow("to_server", number, client, server, seed),
            Flow("to_client", number, server, client, seed),
        )

    def interest(self, sock: socket.socket, faults: Faults, now: float) -> int:
        """What to wait for on ``sock``."""
        events = 0
        for flow in self.flows:
            if flow.source is sock and flow.wants_read(faults):
                events |= select.POLLIN
            due = flow.due_at(faults) if flow.sink is sock else None
            if due is not None and due <= now:
                events |= select.POLLOUT
        return events

    def move(self, faults: Faults, now: float) -> bool:
        """Read and write what can be; whether the pair lives on."""
        try:
            for flow in self.flows:
                if flow.wants_read(faults):
                    flow.read(faults, now)
                if (due := flow.due_at(faults)) is not None and due <= now:
                    flow.write(faults, now)
        except OSError:
            self.reset()
            return False
        if all(flow.done for flow in self.flows):
            self.client.close()
            self.server.close()
            return False
        return True

    def reset(self) -> None:
        """End both sides at once."""
        for sock in (self.client, self.server):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sock.close()
