"""The ``tcp`` transport, IPv4 and IPv6: ``tcp://host:port?rate=1GB/s&lanes=4&spin=50us``.

``rate`` limits what each connection sends, all its lanes together. ``lanes`` is the number of sockets that
one connection has. A listener puts both into its address, so that who dials the address sends at that rate
too, as over a link that is that fast in both directions, and over as many lanes. A listener with lanes takes
connections of any number of them. ``spin`` is how long to look for the next message before sleeping, while
messages come that fast.
"""

from __future__ import annotations

import errno
import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import ClassVar, Final, NamedTuple

from kvferry.core.address import Address, parse_url
from kvferry.core.clock import is_past, time_left
from kvferry.core.errors import (
    ConfigError,
    ConnectError,
    ConnectionClosedError,
    TransferTimeoutError,
    TransportError,
)
from kvferry.core.units import parse_rate
from kvferry.transports.base import Connection, Listener, Transport
from kvferry.transports.hashed_socket import HashedSocketConnection
from kvferry.transports.ip import SockAddr, bind, dial, dialable_address, reason_of, tune, url_of
from kvferry.transports.lanes import (
    LaneAssembler,
    LaneConnection,
    Laned,
    parse_lanes,
    preambles,
    wait_for_any,
)
from kvferry.transports.sockets import GuardedSocket, SocketConnection, poll_timeout_ms
from kvferry.transports.spin import DEFAULT_SPIN_S, parse_spin

__all__ = ["TcpListener", "TcpTransport"]

_OPTIONS: Final = ("rate", "lanes", "spin")


class _Settings(NamedTuple):
    """What the options of an address say."""

    rate: float | None
    lanes: int
    spin_s: float


class TcpTransport(Transport):
    """Makes TCP connections; has no state, any thread may use it."""

    scheme: ClassVar[str] = "tcp"

    def connect(self, address: str, deadline: float) -> Connection:
        """Connect to ``address``, trying each address that its host name has until the deadline."""
        parsed, settings = _parse(address)
        rate, lanes, spin_s = settings
        if lanes == 1:
            return _connection(dial(parsed, deadline), parsed.url, rate, spin_s)
        made: list[SocketConnection] = []
        try:
            for preamble in preambles(lanes):
                made.append(_connection(dial(parsed, deadline), parsed.url, None, spin_s))
                made[-1].send([preamble], deadline)
        except BaseException as error:
            for one in made:
                one.abort()
            if isinstance(error, ConnectionClosedError | TransferTimeoutError):
                raise ConnectError(f"cannot connect to {parsed.url} with {lanes} lanes: {error}") from error
            raise
        return LaneConnection(made, rate=rate)

    def listen(self, address: str) -> TcpListener:
        """Listen on the first address of the host that can be bound."""
        parsed, settings = _parse(address)
        return TcpListener(bind(parsed), parsed, settings)


class TcpListener(Listener):
    """A listening socket. Any thread may accept or close."""

    def __init__(self, sock: socket.socket, asked: Address, settings: _Settings) -> None:
        sock.setblocking(False)
        self._guard = GuardedSocket(sock)
        self._settings = settings
        self._address: Final = dialable_address(sock, asked)
        self._name = f"the listener on {self._address}"
        self._assembler = LaneAssembler() if settings.lanes > 1 else None
        self._turn = threading.Lock()
        self._ready: deque[Laned] = deque()

    @property
    def address(self) -> str:
        """The URL to dial, with the port that the kernel bound and the options that were asked for."""
        return self._address

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._address}>"

    def accept(self, deadline: float) -> Connection:
        """The next connection; see :meth:`Listener.accept`."""
        self._guard.enter(self._name)
        try:
            if self._assembler is None:
                return _accepted(Laned([self._accept(deadline)]), self._settings)
            return self._accept_lanes(self._assembler, deadline)
        finally:
            self._guard.leave()

    def _accept(self, deadline: float) -> tuple[socket.socket, SockAddr]:
        poll = select.poll()
        poll.register(self._guard.sock, select.POLLIN)
        while True:
            ready = poll.poll(poll_timeout_ms(deadline))
            self._check_open()
            if not ready:
                if not is_past(deadline):
                    continue
                raise self._nobody()
            if (taken := self._take()) is not None:
                return taken

    def _take(self) -> tuple[socket.socket, SockAddr] | None:
        """What waits to be accepted; ``None`` if it has gone again."""
        try:
            return self._guard.sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError as error:
            self._check_open()
            raise TransportError(f"cannot accept on {self._address}: {reason_of(error)}") from error

    def _accept_lanes(self, assembler: LaneAssembler, deadline: float) -> Connection:
        # One thread puts sockets together, the others wait for their turn, which ends with a connection.
        if not self._turn.acquire(timeout=time_left(deadline)):
            raise self._nobody()
        try:
            while not self._ready:
                now = time.monotonic()
                self._check_open()
                self._ready.extend(assembler.expire(now))
                if self._ready:
                    break
                if is_past(deadline):
                    raise self._nobody()
                until = min(deadline, assembler.next_expiry)
                for fd in wait_for_any(self._guard.sock, assembler.silent, until):
                    self._check_open()
                    if fd != self._guard.sock.fileno():
                        self._ready.extend(assembler.look(fd))
                    elif (taken := self._take()) is not None:
                        self._ready.extend(assembler.add(*taken, time.monotonic()))
            return _accepted(self._ready.popleft(), self._settings)
        finally:
            self._turn.release()

    def _check_open(self) -> None:
        if self._guard.closed:
            raise ConnectionClosedError(f"{self._name} was closed while accepting")

    def _nobody(self) -> TransferTimeoutError:
        return TransferTimeoutError(f"nobody connected to {self._address} by the deadline")

    def close(self) -> None:
        """Stop listening and wake a waiting thread."""
        if not self._guard.begin_close():
            return
        try:
            self._guard.sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # what some systems say of a listening socket
                raise
        finally:
            self._guard.leave()
        if self._assembler is not None:
            with self._turn:  # whoever has it was just woken
                self._assembler.close()
                for laned in self._ready:
                    for sock, _ in laned.sockets:
                        sock.close()
                self._ready.clear()


def _parse(address: str) -> tuple[Address, _Settings]:
    parsed = parse_url(address, options=_OPTIONS)
    if parsed.scheme != "tcp":
        raise ConfigError(f"address {address!r}: is not a tcp address")
    options = parsed.options
    try:
        lanes = parse_lanes(options.get("lanes", "1"))
        spin_s = parse_spin(options["spin"]) if "spin" in options else DEFAULT_SPIN_S
        rate = parse_rate(options["rate"]) if "rate" in options else None
        return parsed, _Settings(rate, lanes, spin_s)
    except ConfigError as error:
        raise ConfigError(f"address {address!r}: {error}") from error


def _connection(sock: socket.socket, peer_url: str, rate: float | None, spin_s: float) -> SocketConnection:
    try:
        tune(sock)
        local = url_of("tcp", sock.getsockname())
        return HashedSocketConnection(
            sock, local_address=local, peer_address=peer_url, rate=rate, spin_s=spin_s
        )
    except BaseException:
        sock.close()
        raise


def _accepted(laned: Laned, settings: _Settings) -> Connection:
    made: list[SocketConnection] = []
    alone = len(laned.sockets) == 1
    rate = settings.rate if alone else None
    try:
        for sock, sockaddr in laned.sockets:
            made.append(_connection(sock, url_of("tcp", sockaddr), rate, settings.spin_s))
    except OSError as error:
        for sock, _ in laned.sockets:
            with suppress(OSError):
                sock.close()
        raise TransportError(f"a connection ended while it was accepted: {reason_of(error)}") from error
    return made[0] if alone else LaneConnection(made, rate=settings.rate)
