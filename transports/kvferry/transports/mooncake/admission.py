"""Who reaches the ports of Mooncake's engine: they listen on all interfaces, whatever the library is told.

Its listening sockets get a filter that the kernel runs for each packet: those of other hosts than the trusted
ones are dropped before a connection comes about. No privilege is needed for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

__all__ = ["Network", "admit_only", "listening", "program"]

Network: TypeAlias = "ipaddress.IPv4Network | ipaddress.IPv6Network"

_SO_ATTACH_FILTER: Final = 26
_INSTRUCTION: Final = struct.Struct("=HBBI")  # struct sock_filter: code, jump if true, if false, constant
_PROGRAM: Final = struct.Struct("@HP")  # struct sock_fprog
_MOST_INSTRUCTIONS: Final = 4096  # BPF_MAXINSNS
# linux/filter.h: load a byte or word of the packet, and, shift right, jump, jump if equal, return
_LOAD_BYTE, _LOAD_WORD, _AND, _SHIFT, _JUMP, _IF_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x74, 0x05, 0x15, 0x06
_NETWORK_HEADER: Final = (1 << 32) - 0x100000  # SKF_NET_OFF
_SOURCE_AT: Final = {4: 12, 6: 8}
_WHOLE: Final = 0xFFFFFFFF
_EVERYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104 - looked for, not bound


def program(networks: Iterable[Network]) -> bytes:
    """The filter that lets through what comes from ``networks``.

    Raises:
        ValueError: If they are too many for one.
    """
    parts: dict[int, list[bytes]] = {4: [], 6: []}
    for network in networks:
        parts[network.version] += _check(network)
    code = [
        _INSTRUCTION.pack(_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        _INSTRUCTION.pack(_SHIFT, 0, 0, 4),
        _INSTRUCTION.pack(_IF_EQUAL, 1, 0, 4),
        _INSTRUCTION.pack(_JUMP, 0, 0, len(parts[4]) + 1),
        *parts[4],
        _INSTRUCTION.pack(_RETURN, 0, 0, 0),
        *parts[6],
        _INSTRUCTION.pack(_RETURN, 0, 0, 0),
    ]
    if len(code) > _MOST_INSTRUCTIONS:
        raise ValueError(f"{len(code)} instructions, the kernel takes {_MOST_INSTRUCTIONS}")
    return b"".join(code)


def _check(network: Network) -> list[bytes]:
    """Let a packet through whose source is in ``network``, else go on behind."""
    address, mask = network.network_address.packed, network.netmask.packed
    words = [
        (
            _NETWORK_HEADER + _SOURCE_AT[network.version] + at,
            *struct.unpack_from(">II", mask[at : at + 4] + address[at : at + 4]),
        )
        for at in range(0, len(mask), 4)
    ]
    compared = [word for word in words if word[1]]
    code = []
    for number, (at, bits, wanted) in enumerate(compared):
        behind = 3 * (len(compared) - number - 1) + 1
        code += [
            _INSTRUCTION.pack(_LOAD_WORD, 0, 0, at),
            _INSTRUCTION.pack(_AND, 0, 0, bits),
            _INSTRUCTION.pack(_IF_EQUAL, 0, behind, wanted),
        ]
    return [*code, _INSTRUCTION.pack(_RETURN, 0, 0, _WHOLE)]


def listening() -> dict[int, int]:
    """Sockets of this process that listen on all interfaces: inode to port."""
    found = {}
    for inode, sock in _sockets():
        with contextlib.suppress(OSError):
            host, port = sock.getsockname()[:2]
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and host in _EVERYWHERE:
                found[inode] = port
    return found


def admit_only(networks: Iterable[Network], ports: Iterable[int]) -> None:
    """Drop what comes to ``ports`` of this process from other networks; again for others.

    Connections that were made meanwhile are included.

    Raises:
        OSError: If the kernel does not take the filter.
        ValueError: If it would be too long.
    """
    code = program(networks)
    place = ctypes.create_string_buffer(code, len(code))
    request = _PROGRAM.pack(len(code) // _INSTRUCTION.size, ctypes.addressof(place))
    wanted = set(ports)
    for _, sock in _sockets():
        try:
            mine = sock.getsockname()[1] in wanted
        except OSError:
            continue  # it ended meanwhile
        if mine:
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, request)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """The internet sockets of this process, with their inodes; each a copy that is closed behind."""
    for path in Path("/proc/self/fd").iterdir():
        try:
            found = os.fstat(int(path.name))
            if not stat.S_ISSOCK(found.st_mode):
                continue
            sock = socket.socket(fileno=os.dup(int(path.name)))
        except OSError:
            continue  # closed meanwhile
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield found.st_ino, sock
