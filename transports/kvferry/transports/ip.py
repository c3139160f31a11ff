"""Sockets of the Internet protocols, dialled and bound: what ``tcp`` and ``tls`` share."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from typing import Final, TypeAlias

from kvferry.core.address import Address
from kvferry.core.clock import deadline_in, is_past, time_left
from kvferry.core.errors import ConfigError, ConnectError
from kvferry.core.names import SockAddr, resolve
from kvferry.core.open_files import OUT_OF_FILES

__all__ = [
    "LISTEN_S",
    "SockAddr",
    "addresses_of",
    "avoid_bbr_on_loopback",
    "bind",
    "dial",
    "dialable_address",
    "reason_of",
    "tune",
    "url_of",
]

_AddrInfo: TypeAlias = "tuple[socket.AddressFamily, SockAddr]"
_BACKLOG: Final = 1024
LISTEN_S: Final = 10.0  # for the look-up of a name to listen on
# Documentation addresses: connecting a datagram socket sends nothing, it only asks the routing table.
_ROUTED: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
_LOOPBACK: Final = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
_WILDCARDS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - recognised here, never a default
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


def dial(parsed: Address, deadline: float) -> socket.socket:
    """A connected, tuned socket, made by trying each address that the host's name has until the deadline.

    Raises:
        ConnectError: If none answered in time, with the reason for each address.
        ConfigError: If the port is 0.
    """
    if parsed.port == 0:
        raise ConfigError(f"address {parsed.url!r}: port 0 cannot be dialled, only listened on")
    reasons: list[str] = []
    for family, sockaddr in addresses_of(parsed, deadline):
        if is_past(deadline):
            reasons.append("the deadline passed")
            break
        try:
            return _connect_one(family, sockaddr, deadline)
        except OSError as error:
            if error.errno in OUT_OF_FILES:  # whatever the address
                raise ConnectError(f"cannot connect to {parsed.url}: {reason_of(error)}") from error
            reasons.append(f"{_host_text(sockaddr)}: {reason_of(error)}")
    raise ConnectError(
        f"cannot connect to {parsed.url}: {'; '.join(reasons)}. Check that it is running and reachable"
    )


def bind(parsed: Address) -> socket.socket:
    """A socket that listens on the first address of the host that can be bound.

    Raises:
        ConnectError: If none can; with the reason and the remedy.
    """
    failure: OSError | None = None
    for family, sockaddr in addresses_of(parsed, deadline_in(LISTEN_S), passive=True):
        try:
            return _bind_one(family, sockaddr)
        except OSError as error:
            failure = failure or error
    remedy = {
        errno.EADDRINUSE: "stop what listens there, or choose another port (0 takes a free one)",
        errno.EADDRNOTAVAIL: "this machine has no such address",
        errno.EACCES: "ports below 1024 need a right that this process lacks, choose a higher one",
    }.get(failure.errno or 0 if failure else 0, "check the address")
    reason = reason_of(failure) if failure else "the host has no address"
    if failure is None or failure.errno not in OUT_OF_FILES:
        reason = f"{reason}; {remedy}"
    raise ConnectError(f"cannot listen on {parsed.url}: {reason}") from failure


def dialable_address(sock: socket.socket, asked: Address) -> str:
    """The URL by which a bound socket can be dialled: its own port, no wildcard, the options asked for."""
    bound = sock.getsockname()
    host = _host_text(bound)
    if host in _WILDCARDS:
        host = _outgoing_host(sock.family)
    return Address(asked.scheme, host=host, port=bound[1], options=asked.options).url


def url_of(scheme: str, sockaddr: SockAddr) -> str:
    """``sockaddr`` as a URL."""
    return Address(scheme, host=_host_text(sockaddr), port=sockaddr[1]).url


def tune(sock: socket.socket) -> None:
    """No delay for small messages, and a dead peer noticed within a minute.

    The sizes of the buffers are left to the kernel, whose own tuning measured better than fixed ones. For a
    connected socket :func:`avoid_bbr_on_loopback` holds.
    """
    avoid_bbr_on_loopback(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


def avoid_bbr_on_loopback(sock: socket.socket) -> None:
    """Take another congestion control where the kernel's default is BBR and the peer is on this machine.

    BBR models a path by its bandwidth and round-trip time. On loopback that is some microseconds, of which it
    makes a window of 1 MB: connections then stay in one of two states, one a third slower. Nothing is
    congested there. Between machines, and where another one is the default, the kernel's choice stays.
    """
    if not hasattr(socket, "TCP_CONGESTION"):
        return
    with suppress(OSError):  # not connected yet, or ended, which the next call reports
        if sock.getsockname()[0] != sock.getpeername()[0]:
            return
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # every kernel has it


def reason_of(error: Exception) -> str:
    """What a message says of a system's error."""
    if isinstance(error, TimeoutError):
        return "no answer by the deadline"
    if isinstance(error, OSError) and error.errno in OUT_OF_FILES:
        return f"{error.strerror}: allow more (ulimit -n), or close connections"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def addresses_of(parsed: Address, deadline: float, *, passive: bool = False) -> list[_AddrInfo]:
    """The addresses of the host, in the order in which they are to be tried.

    Raises:
        ConnectError: If it is not known, or could not be looked up by the deadline.
    """
    try:
        return resolve(parsed.host, parsed.port or 0, deadline, passive=passive)
    except TimeoutError as error:
        raise ConnectError(
            f"address {parsed.url!r}: host {parsed.host!r} could not be looked up: {error}, "
            "or write its numeric address"
        ) from error
    except (OSError, UnicodeError) as error:
        raise ConnectError(
            f"address {parsed.url!r}: host {parsed.host!r} is not known: {reason_of(error)}; "
            "check its spelling, or write its numeric address"
        ) from error


def _connect_one(family: socket.AddressFamily, sockaddr: SockAddr, deadline: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(1e-3, time_left(deadline)))
        sock.connect(sockaddr)
        if sock.getsockname() == sock.getpeername():
            # a free port of the range that outgoing connections use can be given to this very socket
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
        tune(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_one(family: socket.AddressFamily, sockaddr: SockAddr) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(sockaddr)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _outgoing_host(family: int) -> str:
    """The address by which other machines reach this one: that of the interface that leads out."""
    known = socket.AddressFamily(family)
    with socket.socket(known, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ROUTED[known], 9))
            return _host_text(probe.getsockname())
        except OSError:
            return _LOOPBACK[known]


def _host_text(sockaddr: SockAddr) -> str:
    host = str(sockaddr[0])
    scope = sockaddr[3] if len(sockaddr) > 3 else 0
    if scope and "%" not in host:
        try:
            return f"{host}%{socket.if_indextoname(scope)}"
        except OSError:
            return f"{host}%{scope}"
    return host
