"""Whose a TCP socket of this machine is, asked of the kernel by netlink.

The list in ``/proc/net`` has all sockets, also thousands that only wait for their end; this is one question.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from typing import Final, TypeAlias

__all__ = ["End", "owner_of"]

_IpAddress: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"
End: TypeAlias = "tuple[_IpAddress, int]"
"""Address and port."""

_NETLINK_SOCK_DIAG: Final = 4
_BY_FAMILY: Final = 20  # SOCK_DIAG_BY_FAMILY
_REQUEST: Final = 1
_ERROR: Final = 2
_LISTENING: Final = 10
_ANY_STATE: Final = 0xFFFFFFFF
_NO_COOKIE: Final = (1 << 64) - 1
# linux/netlink.h: nlmsghdr; linux/inet_diag.h: inet_diag_req_v2 up to its id, inet_diag_sockid in two parts,
# and inet_diag_msg before and behind its id
_HEADER: Final = struct.Struct("=IHHII")
_ASKED: Final = struct.Struct("=BBBBI")
_PORTS: Final = struct.Struct("!HH16s16s")
_REST: Final = struct.Struct("=IQ")
_STATE: Final = struct.Struct("=BBBB")
_OWNER: Final = struct.Struct("=IIIII")
_ID_NBYTES: Final = _PORTS.size + _REST.size


def owner_of(local: End, remote: End) -> int | None:
    """The user whose socket has these ends; ``None`` if there is none, or it is nobody's.

    One that its process has closed, or has not accepted yet, is nobody's.

    Raises:
        OSError: If the kernel does not answer such questions, or no socket can be opened to ask.
    """
    family = socket.AF_INET if local[0].version == 4 else socket.AF_INET6
    wanted = _PORTS.pack(local[1], remote[1], local[0].packed, remote[0].packed) + _REST.pack(0, _NO_COOKIE)
    question = _ASKED.pack(family, socket.IPPROTO_TCP, 0, 0, _ANY_STATE) + wanted
    head = _HEADER.pack(_HEADER.size + len(question), _BY_FAMILY, _REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as asking:
        asking.settimeout(1.0)  # the answer is there when the question was sent
        asking.sendto(head + question, (0, 0))
        answer = asking.recv(8192)
    _, kind, *_ = _HEADER.unpack_from(answer)
    if kind == _ERROR:
        (code,) = struct.unpack_from("=i", answer, _HEADER.size)
        raise OSError(-code, os.strerror(-code))
    if kind != _BY_FAMILY or len(answer) < _HEADER.size + _STATE.size + _ID_NBYTES + _OWNER.size:
        raise OSError(errno.EPROTO, "the kernel's answer is not understood")
    _, state, _, _ = _STATE.unpack_from(answer, _HEADER.size)
    *_, uid, inode = _OWNER.unpack_from(answer, _HEADER.size + _STATE.size + _ID_NBYTES)
    # where no connection has these ends, it tells of the socket that listens
    return int(uid) if inode and state != _LISTENING else None
