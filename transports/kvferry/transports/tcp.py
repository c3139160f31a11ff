"""The ``tcp`` transport, IPv4 and IPv6: ``tcp://host:port?rate=1GB/s``.

``rate`` limits what each connection sends. A listener puts it into its address, so that who dials the
address sends at that rate too, as over a link that is that fast in both directions.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from typing import Any, ClassVar, Final, TypeAlias

from kvferry.core.address import Address, parse_url
from kvferry.core.errors import (
    ConfigError,
    ConnectError,
    ConnectionClosedError,
    TransferTimeoutError,
    TransportError,
)
from kvferry.core.units import parse_rate
from kvferry.transports.base import Connection, Listener, Transport
from kvferry.transports.sockets import GuardedSocket, SocketConnection, poll_timeout_ms

__all__ = ["TcpListener", "TcpTransport"]

_OPTIONS: Final = ("rate",)
_BACKLOG: Final = 1024
_SockAddr: TypeAlias = "tuple[Any, ...]"
_AddrInfo: TypeAlias = "tuple[socket.AddressFamily, _SockAddr]"
# Documentation addresses: connecting a datagram socket sends nothing, it only asks the routing table.
_ROUTED: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
_LOOPBACK: Final = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
_WILDCARDS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - recognised here, never a default


class TcpTransport(Transport):
    """Makes TCP connections; has no state, any thread may use it."""

    scheme: ClassVar[str] = "tcp"

    def connect(self, address: str, deadline: float) -> Connection:
        """Connect to ``address``, trying each address that its host name has until the deadline.

        The look-up of a name itself is the system's and cannot be cut short; numeric hosts need none.
        """
        parsed, rate = _parse(address)
        if parsed.port == 0:
            raise ConfigError(f"address {address!r}: port 0 cannot be dialled, only listened on")
        reasons: list[str] = []
        for family, sockaddr in _resolve(parsed, address):
            if time.monotonic() >= deadline:
                reasons.append("the deadline passed")
                break
            try:
                sock = _connect_one(family, sockaddr, deadline)
            except OSError as error:
                reasons.append(f"{_host_text(sockaddr)}: {_reason(error)}")
                continue
            return _connection(sock, parsed.url, rate)
        raise ConnectError(
            f"cannot connect to {parsed.url}: {'; '.join(reasons)}. Check that it is running and reachable"
        )

    def listen(self, address: str) -> TcpListener:
        """Listen on the first address of the host that can be bound."""
        parsed, rate = _parse(address)
        failure: OSError | None = None
        for family, sockaddr in _resolve(parsed, address, passive=True):
            try:
                return TcpListener(_bind(family, sockaddr), parsed, rate)
            except OSError as error:
                failure = failure or error
        remedy = {
            errno.EADDRINUSE: "stop what listens there, or choose another port (0 takes a free one)",
            errno.EADDRNOTAVAIL: "this machine has no such address",
            errno.EACCES: "ports below 1024 need a right that this process lacks, choose a higher one",
        }.get(failure.errno or 0 if failure else 0, "check the address")
        reason = _reason(failure) if failure else "the host has no address"
        raise ConnectError(f"cannot listen on {parsed.url}: {reason}; {remedy}") from failure


class TcpListener(Listener):
    """A listening socket. Any thread may accept or close."""

    def __init__(self, sock: socket.socket, asked: Address, rate: float | None) -> None:
        sock.setblocking(False)
        self._guard = GuardedSocket(sock)
        self._rate = rate
        bound = sock.getsockname()
        host = _host_text(bound)
        if host in _WILDCARDS:
            host = _outgoing_host(sock.family)
        self._address: Final = Address("tcp", host=host, port=bound[1], options=asked.options).url

    @property
    def address(self) -> str:
        """The URL to dial, with the port that the kernel bound and the options that were asked for."""
        return self._address

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._address}>"

    def accept(self, deadline: float) -> Connection:
        """The next connection; see :meth:`Listener.accept`."""
        self._guard.enter(f"the listener on {self._address}")
        try:
            return self._accept(deadline)
        finally:
            self._guard.leave()

    def _accept(self, deadline: float) -> Connection:
        poll = select.poll()
        poll.register(self._guard.sock, select.POLLIN)
        while True:
            ready = poll.poll(poll_timeout_ms(deadline))
            if self._guard.closed:
                raise ConnectionClosedError(f"the listener on {self._address} was closed while accepting")
            if not ready:
                if time.monotonic() < deadline:
                    continue
                raise TransferTimeoutError(f"nobody connected to {self._address} by the deadline")
            try:
                sock, sockaddr = self._guard.sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue  # the peer has gone again
            except OSError as error:
                if self._guard.closed:
                    continue
                raise TransportError(
                    f"cannot accept on {self._address}: {_reason(error)}; "
                    "if it is for too many open files, allow more (ulimit -n) or close connections"
                ) from error
            return _connection(sock, _url(sockaddr), self._rate)

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


def _parse(address: str) -> tuple[Address, float | None]:
    parsed = parse_url(address, options=_OPTIONS)
    if parsed.scheme != "tcp":
        raise ConfigError(f"address {address!r}: is not a tcp address")
    rate = parsed.options.get("rate")
    try:
        return parsed, parse_rate(rate) if rate is not None else None
    except ConfigError as error:
        raise ConfigError(f"address {address!r}: {error}") from error


def _resolve(parsed: Address, address: str, *, passive: bool = False) -> list[_AddrInfo]:
    flags = socket.AI_PASSIVE if passive else 0
    try:
        found = socket.getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as error:
        raise ConnectError(
            f"address {address!r}: host {parsed.host!r} is not known: {_reason(error)}; "
            "check its spelling, or write its numeric address"
        ) from error
    return [(family, sockaddr) for family, _, _, _, sockaddr in found]


def _connect_one(family: socket.AddressFamily, sockaddr: _SockAddr, deadline: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        _tune(sock)
        sock.settimeout(max(1e-3, deadline - time.monotonic()))
        sock.connect(sockaddr)
        if sock.getsockname() == sock.getpeername():
            # a free port of the range that outgoing connections use can be given to this very socket
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
    except BaseException:
        sock.close()
        raise
    return sock


def _bind(family: socket.AddressFamily, sockaddr: _SockAddr) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(sockaddr)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


def _connection(sock: socket.socket, peer_url: str, rate: float | None) -> Connection:
    try:
        _tune(sock)
        local = _url(sock.getsockname())
        return SocketConnection(sock, local_address=local, peer_address=peer_url, rate=rate)
    except BaseException:
        sock.close()
        raise


def _outgoing_host(family: int) -> str:
    """The address by which other machines reach this one: that of the interface that leads out."""
    known = socket.AddressFamily(family)
    with socket.socket(known, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ROUTED[known], 9))
            return _host_text(probe.getsockname())
        except OSError:
            return _LOOPBACK[known]


def _host_text(sockaddr: _SockAddr) -> str:
    host = str(sockaddr[0])
    scope = sockaddr[3] if len(sockaddr) > 3 else 0
    if scope and "%" not in host:
        try:
            return f"{host}%{socket.if_indextoname(scope)}"
        except OSError:
            return f"{host}%{scope}"
    return host


def _url(sockaddr: _SockAddr) -> str:
    return Address("tcp", host=_host_text(sockaddr), port=sockaddr[1]).url


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer by the deadline"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
