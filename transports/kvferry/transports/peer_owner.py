"""Who is at the other end of a TCP connection within this machine: the kernel knows the owners of sockets."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvferry.core.errors import ConfigError
from kvferry.core.open_files import OUT_OF_FILES
from kvferry.transports.sock_diag import End, owner_of
from kvferry.transports.unix_options import parse_ids

__all__ = ["AllowedUsers", "is_local", "owner_of_peer", "parse_allowed"]

_IpAddress: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"

_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOOKS: Final = 3  # the kernel's list is read in pieces, so one look can miss a line
_UID_FIELD: Final = 7
_INODE_FIELD: Final = 9
_MAPPED: Final = ipaddress.IPv6Address("::ffff:0:0")


@dataclass(frozen=True, slots=True)
class AllowedUsers:
    """Who may be at the other end beside the own user and root.

    Attributes:
        uids: Further users.
        anybody: Whether it does not matter who it is.
    """

    uids: frozenset[int] = frozenset()
    anybody: bool = False

    @property
    def open(self) -> bool:
        """Whether others than the own user and root are let in."""
        return bool(self.uids) or self.anybody

    def problem_with_peer(self, sock: socket.socket) -> str:
        """Why the other end of ``sock`` may not be there; empty if it may, or is on another machine.

        Raises:
            OSError: If no file can be opened to look.
        """
        if self.anybody or not is_local(sock):
            return ""
        uid = owner_of_peer(sock)
        if uid is None:
            return (
                "the user at the other end of a loopback connection cannot be found, as in a container; "
                "allow_uid=any at both ends takes everybody on this machine"
            )
        if uid in (0, os.geteuid()) or uid in self.uids:
            return ""
        return (
            f"uid {uid} is at the other end of a loopback connection, this process has uid {os.geteuid()}; "
            f"if that is meant, add allow_uid={uid} to the address"
        )


def parse_allowed(text: str | None) -> AllowedUsers:
    """The value of an option ``allow_uid``: numbers with commas between, or ``any``.

    Raises:
        ConfigError: If it is neither.
    """
    if text == "any":
        return AllowedUsers(anybody=True)
    try:
        return AllowedUsers(parse_ids("allow_uid", text))
    except ConfigError as error:
        raise ConfigError(f"{error}, or allow_uid=any") from error


def is_local(sock: socket.socket) -> bool:
    """Whether a connection goes over loopback; also if its peer is gone."""
    ends: list[tuple[Any, ...]] = [sock.getsockname()]
    with contextlib.suppress(OSError):  # it is gone again: the own end tells
        ends.append(sock.getpeername())
    return any(_address(end).is_loopback for end in ends)


def owner_of_peer(sock: socket.socket) -> int | None:
    """The user whose process holds the other end of ``sock``; ``None`` if that cannot be found.

    An end that its process has closed, or has not accepted yet, is nobody's: the kernel lists it with uid 0.

    Raises:
        OSError: If no file can be opened to look.
    """
    try:
        own, peer = sock.getsockname(), sock.getpeername()
    except OSError:
        return None
    ends = (_address(peer), peer[1]), (_address(own), own[1])
    try:
        return owner_of(*ends)
    except OSError as error:
        if error.errno in OUT_OF_FILES:
            raise
        return _listed_owner(*ends)


def _listed_owner(local: End, remote: End) -> int | None:
    """As :func:`owner_of`, where the kernel answers no such question: in its list of all sockets."""
    wanted = {f" {_hex(*local, mapped)} {_hex(*remote, mapped)} ".encode() for mapped in (False, True)}
    for _ in range(_LOOKS):
        for table in _TABLES:
            try:
                data = table.read_bytes()
            except OSError as error:
                if error.errno in OUT_OF_FILES:
                    raise
                continue
            for needle in wanted:
                at = data.find(needle)
                if at >= 0:
                    return _owner(data[data.rfind(b"\n", 0, at) + 1 : data.find(b"\n", at)])
    return None


def _owner(line: bytes) -> int | None:
    fields = line.split()
    if len(fields) <= _INODE_FIELD or fields[_INODE_FIELD] == b"0":
        return None
    return int(fields[_UID_FIELD])


def _address(sockaddr: tuple[Any, ...]) -> _IpAddress:
    found = ipaddress.ip_address(str(sockaddr[0]).partition("%")[0])
    return (found.ipv4_mapped or found) if isinstance(found, ipaddress.IPv6Address) else found


def _hex(address: _IpAddress, port: int, mapped: bool) -> str:
    """As the kernel writes it: words of 32 bits in the order of this machine."""
    if mapped and isinstance(address, ipaddress.IPv4Address):
        address = ipaddress.IPv6Address(int(_MAPPED) | int(address))
    packed = address.packed
    words = (int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed), 4))
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
