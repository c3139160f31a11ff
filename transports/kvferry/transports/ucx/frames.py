"""What travels through the socket of a connection: small bytes as they are, large ones announced.

A frame is a header of 16 bytes, little-endian::

    u8 kind, u8 reserved, u16 entries, u32 inline_nbytes, u64 first_tag

followed by ``entries`` lengths (u64) and ``inline_nbytes`` bytes. The top bit of a length marks bytes that
are inline; the others come as messages of UCX with the tags ``first_tag``, ``first_tag + 1``, … in their
order. A frame without entries is all inline.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvferry.core.errors import ProtocolError

__all__ = [
    "CANCEL",
    "DATA",
    "HEADER_NBYTES",
    "MAX_ADDRESS_NBYTES",
    "MAX_ENTRIES",
    "MAX_MIXED_NBYTES",
    "OPEN",
    "Header",
    "Piece",
    "pack_entries",
    "pack_header",
    "parse_entries",
    "parse_header",
]

DATA: Final = 1
"""Bytes of the stream."""
OPEN: Final = 2
"""The address of the sender's worker: large messages follow, the receiver answers over UCX."""
CANCEL: Final = 3
"""The sender gives up the frame before, whose large messages are not to be trusted."""

HEADER_NBYTES: Final = 16
MAX_ENTRIES: Final = 1024
MAX_MIXED_NBYTES: Final = 1 << 17
"""Inline bytes of a frame that has entries."""
MAX_ADDRESS_NBYTES: Final = 1 << 16
_HEADER: Final = struct.Struct("<BBHIQ")
_INLINE: Final = 1 << 63
_MAX_MESSAGE_NBYTES: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed part of a frame."""

    kind: int
    entries: int
    inline_nbytes: int
    first_tag: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of a frame, in the order of the stream.

    Attributes:
        nbytes: How many bytes it has.
        inline: Whether they are in the frame.
    """

    nbytes: int
    inline: bool


def pack_header(kind: int, *, entries: int = 0, inline_nbytes: int = 0, first_tag: int = 0) -> bytes:
    """The bytes of a header."""
    return _HEADER.pack(kind, 0, entries, inline_nbytes, first_tag)


def parse_header(data: bytes | bytearray | memoryview, name: str) -> Header:
    """Read a header; ``name`` is the connection's.

    Raises:
        ProtocolError: If the peer's bytes are none.
    """
    kind, _, entries, inline_nbytes, first_tag = _HEADER.unpack(data)
    mixed = kind == DATA and entries > 0
    limit = MAX_ADDRESS_NBYTES if kind == OPEN else MAX_MIXED_NBYTES if mixed else 1 << 32
    if kind not in (DATA, OPEN, CANCEL) or entries > MAX_ENTRIES or inline_nbytes > limit:
        raise ProtocolError(f"{name}: the peer sent no frame but {bytes(data).hex()}", remote=True)
    return Header(kind, entries, inline_nbytes, first_tag)


def pack_entries(pieces: Sequence[Piece]) -> bytes:
    """The lengths of a frame."""
    return struct.pack(f"<{len(pieces)}Q", *(p.nbytes | _INLINE if p.inline else p.nbytes for p in pieces))


def parse_entries(header: Header, data: memoryview, name: str) -> list[Piece]:
    """Read the lengths of a frame.

    Raises:
        ProtocolError: If they do not fit the header.
    """
    pieces = [
        Piece(value & ~_INLINE, bool(value & _INLINE))
        for value in struct.unpack_from(f"<{header.entries}Q", data)
    ]
    inline = sum(piece.nbytes for piece in pieces if piece.inline)
    if inline != header.inline_nbytes or any(not 0 < p.nbytes <= _MAX_MESSAGE_NBYTES for p in pieces):
        raise ProtocolError(
            f"{name}: the peer sent a frame of {header.entries} lengths with {inline} bytes inline, and "
            f"announced {header.inline_nbytes}",
            remote=True,
        )
    return pieces
