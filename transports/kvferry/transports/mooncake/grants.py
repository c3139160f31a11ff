"""Grants: what the owner of a window sends to who may use it."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from kvferry.core.errors import ProtocolError, TransportError
from kvferry.transports.region import Access, RegionPart

__all__ = ["MAX_GRANT_NBYTES", "MAX_SESSION_NBYTES", "Move", "WindowGrant"]

MAX_GRANT_NBYTES: Final = 1024
MAX_SESSION_NBYTES: Final = 512
_MAGIC: Final = b"KVMC"
_VERSION: Final = 1
_ID_NBYTES: Final = 16
_HEAD: Final = struct.Struct(f"<4sBBHQQ{_ID_NBYTES}s")  # magic, version, for writing, session's length, …
_SUM: Final = struct.Struct("<Q")
_TOP: Final = 1 << 64


@dataclass(frozen=True, slots=True)
class Move:
    """One contiguous piece of a transfer: ``nbytes`` between an address here and one at the peer."""

    local: int
    remote: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WindowGrant:
    """A parsed grant.

    Attributes:
        session: Where the owner's engine is reached, ``host:port``.
        address: Where the window starts in the owner's address space.
        nbytes: Its size.
        access: What may be done.
        window: A random number, for messages: two windows never have the same.
    """

    session: str
    address: int
    nbytes: int
    access: Access
    window: bytes

    @classmethod
    def new(cls, session: str, address: int, nbytes: int, access: Access) -> WindowGrant:
        """A grant for a window that was just opened."""
        return cls(session, address, nbytes, access, os.urandom(_ID_NBYTES))

    @property
    def host(self) -> str:
        """The owner's host."""
        return self.session.rpartition(":")[0]

    def pack(self) -> bytes:
        """The bytes that are sent.

        Raises:
            TransportError: If the session's name is too long.
        """
        name = self.session.encode()
        if len(name) > MAX_SESSION_NBYTES:
            raise TransportError(
                f"session {name[:40]!r}… has {len(name)} bytes, at most {MAX_SESSION_NBYTES}"
            )
        for_writing = self.access == "write"
        head = _HEAD.pack(_MAGIC, _VERSION, for_writing, len(name), self.address, self.nbytes, self.window)
        return head + name + _SUM.pack(xxhash.xxh3_64_intdigest(head + name))

    @classmethod
    def parse(cls, grant: bytes) -> WindowGrant:
        """The grant that a peer sent.

        Raises:
            ProtocolError: If it is none of this transport and version, or was damaged.
        """
        if not _HEAD.size + _SUM.size <= len(grant) <= MAX_GRANT_NBYTES or not grant.startswith(_MAGIC):
            raise ProtocolError(
                f"{len(grant)} bytes that are no grant of the mooncake transport", remote=True
            )
        body = grant[: -_SUM.size]
        if _SUM.pack(xxhash.xxh3_64_intdigest(body)) != grant[-_SUM.size :]:
            raise ProtocolError("the grant was damaged: its checksum does not match", remote=True)
        _, version, for_writing, length, address, nbytes, window = _HEAD.unpack_from(body)
        if version != _VERSION:
            raise ProtocolError(
                f"a grant of version {version}, known is {_VERSION}; run the same kvferry on both",
                remote=True,
            )
        name = body[_HEAD.size :]
        if for_writing > 1 or len(name) != length or not name.isascii() or address + nbytes > _TOP:
            raise ProtocolError("the grant's fields make no sense", remote=True)
        return cls(name.decode(), address, nbytes, "write" if for_writing else "read", window)

    def __str__(self) -> str:
        return f"window {self.window.hex()[:8]} of {self.session}"

    def require(self, access: Access) -> None:
        """Check what the grant is for.

        Raises:
            ProtocolError: If it is for the other access.
        """
        if self.access != access:
            raise ProtocolError(f"the grant of {self} is to {self.access}, not to {access}", remote=True)

    def moves(self, parts: Sequence[RegionPart], addresses: Sequence[int]) -> list[Move]:
        """What the library is to move; empty parts are left out, parts that continue each other are joined.

        Args:
            parts: The parts.
            addresses: Where the local memory of each lies.

        Raises:
            TransportError: If a part does not lie inside the window; nothing is moved then.
        """
        found: list[Move] = []
        for index, (part, local) in enumerate(zip(parts, addresses, strict=True)):
            nbytes = part.local.nbytes
            if part.offset < 0 or part.offset + nbytes > self.nbytes:
                raise TransportError(
                    f"part {index}: {nbytes} bytes at offset {part.offset} are not inside {self}, "
                    f"which has {self.nbytes} bytes"
                )
            remote, last = self.address + part.offset, found[-1] if found else None
            if last and last.local + last.nbytes == local and last.remote + last.nbytes == remote:
                found[-1] = Move(last.local, last.remote, last.nbytes + nbytes)
            elif nbytes:
                found.append(Move(local, remote, nbytes))
        return found
