"""The sockets of the port: which of them ask, which are lanes, and which just speak.

One that says nothing for five seconds is taken for a plain connection whose peer waits for the first word,
like one that begins with anything else than a question or the preamble of a lane.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvferry.core.log import LogLimiter
from kvferry.transports.auto.offers import (
    MAGIC,
    PREFIX_NBYTES,
    Ask,
    Offer,
    Offers,
    Taken,
    pack,
    parse_body,
    parse_prefix,
)
from kvferry.transports.ip import SockAddr, reason_of
from kvferry.transports.lanes import MAGIC as LANE_MAGIC
from kvferry.transports.lanes import LaneAssembler, Laned
from kvferry.transports.sockets import poll_timeout_ms

__all__ = ["Answer", "Arrival", "Port"]

_log = logging.getLogger(__name__)
_SAY_S: Final = 5.0
_MAX_GUESTS: Final = 256
_PAUSE_S: Final = 0.05
_MAGIC_NBYTES: Final = len(MAGIC)

Answer: TypeAlias = "Callable[[Ask], tuple[str, list[Offer], bytes, dict[str, str], list[str]]]"
"""What is answered to a question: host, offers, ticket, what is lacking, and regions."""


@dataclass(frozen=True)
class Arrival:
    """The sockets of one connection, in the order of lanes, and the question before it, if there was one."""

    sockets: list[tuple[socket.socket, SockAddr]]
    ask: Ask | None = None


class _Guest:
    """A socket that was accepted, on its way to a connection."""

    def __init__(self, sock: socket.socket, sockaddr: SockAddr) -> None:
        self.sock = sock
        self.sockaddr = sockaddr
        self.until = time.monotonic() + _SAY_S
        self.begun = False
        self.asks = False
        self.ask: Ask | None = None  # once it was answered
        self.expect()

    def expect(self) -> None:
        """A message comes next."""
        self.received = bytearray()
        self.wanted = PREFIX_NBYTES


class Port:
    """One thread calls :meth:`turn`; any other may :meth:`wake` it.

    Args:
        sock: Bound and listening; owned from here on.
        answer: See :data:`Answer`.
        deliver: Takes a connection and owns its sockets from then on.
        name: For messages.
    """

    def __init__(
        self, sock: socket.socket, answer: Answer, deliver: Callable[[Arrival], None], name: str
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._answer = answer
        self._deliver = deliver
        self._name = name
        self._guests: dict[int, _Guest] = {}
        self._assembler = LaneAssembler()
        self._limiter = LogLimiter(_log)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._end = threading.Lock()

    def wake(self) -> None:
        """Let :meth:`turn` come back."""
        with self._end, suppress(OSError):
            self._wake.send(b"x")

    def forget(self) -> None:
        """Close a forked child's copies of what is open here."""
        for sock in (self._sock, self._wake, self._woken, *(guest.sock for guest in self._guests.values())):
            sock.close()

    def close(self) -> None:
        """Close everything that was not delivered."""
        with self._end:
            self._wake.close()
        for sock in (self._sock, self._woken, *(guest.sock for guest in self._guests.values())):
            sock.close()
        self._guests.clear()
        self._assembler.close()
        self._limiter.flush()

    def turn(self) -> None:
        """Wait for one round of events, and see to them."""
        try:
            self._turn()
        except OSError as error:  # of one connection; the others must not end with it
            self._limiter.log(logging.WARNING, "turn", "%s: %s", self._name, error)
            time.sleep(_PAUSE_S)

    def _turn(self) -> None:
        for fd in self._wait():
            if fd == self._woken.fileno():
                return
            if fd in self._guests:
                self._hear(self._guests[fd])
            elif fd == self._sock.fileno():
                self._take_guest()
            elif fd in self._assembler.silent:
                self._deliver_lanes(self._assembler.look(fd))
        now = time.monotonic()
        self._deliver_lanes(self._assembler.expire(now))
        for guest in [guest for guest in self._guests.values() if guest.until <= now]:
            self._expire(guest)

    def _wait(self) -> list[int]:
        poll = select.poll()
        for fd in (self._sock.fileno(), self._woken.fileno(), *self._guests, *self._assembler.silent):
            poll.register(fd, select.POLLIN)
        until = min([guest.until for guest in self._guests.values()], default=float("inf"))
        until = min(until, self._assembler.next_expiry)
        return [fd for fd, _ in poll.poll(poll_timeout_ms(until))]

    def _take_guest(self) -> None:
        try:
            sock, sockaddr = self._sock.accept()
        except OSError as error:  # gone again, or no descriptor is left
            if not isinstance(error, (BlockingIOError, ConnectionAbortedError)):
                self._limiter.log(
                    logging.WARNING, "accept", "cannot accept on %s: %s", self._name, reason_of(error)
                )
                time.sleep(_PAUSE_S)
            return
        sock.setblocking(False)
        if len(self._guests) >= _MAX_GUESTS:
            self._expire(min(self._guests.values(), key=lambda guest: guest.until))
        guest = self._guests[sock.fileno()] = _Guest(sock, sockaddr)
        self._hear(guest)  # what it has to say mostly came with it

    def _expire(self, guest: _Guest) -> None:
        """Its time is over."""
        if guest.asks:
            self._dismiss(guest, f"said nothing complete within {_SAY_S:g} s")
        else:
            self._pass_on(guest)

    def _dismiss(self, guest: _Guest, reason: str) -> None:
        del self._guests[guest.sock.fileno()]
        guest.sock.close()
        self._limiter.log(
            logging.INFO, (guest.sockaddr[0], reason), "%s: %s was turned away: it %s",
            self._name, guest.sockaddr[0], reason,
        )  # fmt: skip

    def _pass_on(self, guest: _Guest) -> None:
        """It is a connection of one socket."""
        del self._guests[guest.sock.fileno()]
        with suppress(OSError):
            guest.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        self._deliver(Arrival([(guest.sock, guest.sockaddr)], guest.ask))

    def _deliver_lanes(self, complete: list[Laned]) -> None:
        for laned in complete:
            self._deliver(Arrival(laned.sockets))

    # -- what a guest says -----------------------------------------------------------------------------

    def _hear(self, guest: _Guest) -> None:
        try:
            if guest.asks or self._find_out(guest):
                self._read(guest)
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            if guest.sock.fileno() in self._guests:
                self._dismiss(guest, f"broke off: {error}")

    def _find_out(self, guest: _Guest) -> bool:
        """See by its first bytes what it is; whether it asks."""
        head = guest.sock.recv(_MAGIC_NBYTES, socket.MSG_PEEK)
        if not head:
            del self._guests[guest.sock.fileno()]
            guest.sock.close()
            return False
        if len(head) < _MAGIC_NBYTES and (MAGIC.startswith(head) or LANE_MAGIC.startswith(head)):
            if not guest.begun:
                # let poll wait for the rest, or the end, instead of finding the same bytes again and again
                guest.begun = True
                guest.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _MAGIC_NBYTES)
                return False
            self._pass_on(guest)  # the stream ended behind them
            return False
        guest.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        if head == MAGIC:
            guest.asks = True
        elif head == LANE_MAGIC:
            del self._guests[guest.sock.fileno()]
            self._deliver_lanes(self._assembler.add(guest.sock, guest.sockaddr, time.monotonic()))
        else:
            self._pass_on(guest)
        return guest.asks

    def _read(self, guest: _Guest) -> None:
        """Read on, never beyond the end of a message; what is behind it may be the stream."""
        while len(guest.received) < guest.wanted:
            data = guest.sock.recv(guest.wanted - len(guest.received))
            if not data:  # it dials what it chose
                del self._guests[guest.sock.fileno()]
                guest.sock.close()
                return
            guest.received += data
            if len(guest.received) == guest.wanted == PREFIX_NBYTES:
                guest.wanted += parse_prefix(guest.received)
        body = memoryview(guest.received)[PREFIX_NBYTES:]
        if guest.ask is None:
            self._reply(guest, parse_body(body, Ask))
        elif parse_body(body, Taken).scheme == "tcp":
            self._pass_on(guest)
        else:
            raise ValueError("took a transport that is not had on this socket")

    def _reply(self, guest: _Guest, ask: Ask) -> None:
        host, offers, ticket, lacking, regions = self._answer(ask)
        answer = Offers(host=host, offers=offers, ticket=ticket, lacking=lacking, regions=regions)
        guest.sock.send(pack(answer))  # fits the empty buffer of a new socket
        guest.ask = ask
        guest.until = time.monotonic() + _SAY_S
        guest.expect()
