"""What stands behind the ``?`` of a ``unix`` address, and who is let in by it."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from typing import Final

from kvferry.core.address import Address, parse_url
from kvferry.core.errors import ConfigError
from kvferry.core.units import parse_rate
from kvferry.transports.spin import DEFAULT_SPIN_S, parse_spin

__all__ = ["UnixOptions", "parse_ids", "parse_unix", "peer_groups"]

_OPTIONS: Final = ("rate", "spin", "allow_uid", "allow_gid")
_MAX_ID: Final = 2**32 - 2
_SO_PEERGROUPS: Final = 59  # <asm-generic/socket.h>; not named by the socket module


@dataclass(frozen=True, slots=True)
class UnixOptions:
    """The options of an address.

    Attributes:
        rate: Bytes a second that each end sends at most; ``None`` for no limit.
        spin_s: How long to look for the next message before sleeping, while they come that fast.
        uids: Users that may be at the other end beside the own one and root.
        gids: The same for groups.
    """

    rate: float | None
    spin_s: float
    uids: frozenset[int]
    gids: frozenset[int]

    @property
    def open(self) -> bool:
        """Whether others than the own user are let in."""
        return bool(self.uids or self.gids)

    def admits(self, sock: socket.socket, uid: int, gid: int) -> bool:
        """Whether the process at the other end of ``sock`` may be there."""
        if uid in (0, os.geteuid()) or uid in self.uids:
            return True
        return bool(self.gids) and not self.gids.isdisjoint({gid, *peer_groups(sock)})

    @property
    def others(self) -> str:
        """Who else is let in, for messages."""
        named = [("uid", self.uids), ("gid", self.gids)]
        return "".join(f", {kind} {', '.join(map(str, sorted(ids)))}" for kind, ids in named if ids)


def parse_unix(address: str) -> tuple[Address, UnixOptions]:
    """An address and its options.

    Raises:
        ConfigError: If it is malformed, not of ``unix``, or an option is.
    """
    parsed = parse_url(address, options=_OPTIONS)
    if parsed.scheme != "unix":
        raise ConfigError(f"address {address!r}: is not a unix address")
    options = parsed.options
    try:
        rate = parse_rate(options["rate"]) if "rate" in options else None
        spin_s = parse_spin(options["spin"]) if "spin" in options else DEFAULT_SPIN_S
        uids, gids = (parse_ids(name, options.get(name)) for name in ("allow_uid", "allow_gid"))
    except ConfigError as error:
        raise ConfigError(f"address {address!r}: {error}") from error
    return parsed, UnixOptions(rate, spin_s, uids, gids)


def parse_ids(name: str, text: str | None) -> frozenset[int]:
    """The numbers of an option ``name``; none if it is not there.

    Raises:
        ConfigError: If they are no users or groups.
    """
    ids = text.split(",") if text is not None else []
    for one in ids:
        if not (one.isascii() and one.isdigit() and len(one) <= 10 and int(one) <= _MAX_ID):
            raise ConfigError(f"{name}={text}: write numbers with commas between, as in {name}=1000,1001")
    return frozenset(map(int, ids))


def peer_groups(sock: socket.socket) -> tuple[int, ...]:
    """The further groups of the peer; none where the kernel does not say, or has more than fit."""
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)
    except OSError:
        return ()
    return struct.unpack(f"{len(data) // 4}I", data[: len(data) // 4 * 4])
