"""What travels through the socket of a connection: small bytes, and notices.

Each direction is a stream whose bytes have positions. Small ones come in frames through the socket, large
ones as messages of UCX whose tag has the position of their first byte and their size. So the receiver, who
knows where it is, needs no announcement, and a message whose size it guessed right goes straight to its
place. A frame is a header of 16 bytes, little-endian, and ``nbytes`` bytes::

    u8 kind, u8 flags, u16 reserved, u32 nbytes, u64 position
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from kvferry.core.errors import ProtocolError

__all__ = [
    "BESIDE",
    "CANCEL",
    "CHUNK_NBYTES",
    "DATA",
    "HEADER_NBYTES",
    "HELLO_TAG",
    "LENGTH",
    "MAX_ADDRESS_NBYTES",
    "MAX_BESIDE_NBYTES",
    "OPEN",
    "POSITION_MASK",
    "Header",
    "cut",
    "message_tag",
    "pack_header",
    "parse_header",
]

DATA: Final = 1
"""Bytes of the stream."""
OPEN: Final = 2
"""The address of the sender's worker: messages follow, the receiver answers over UCX."""
CANCEL: Final = 3
"""The sender gives up: what was read from its memory since its last call ended well is not to be trusted."""
BESIDE: Final = 1
"""Flag of a frame that was sent with messages, before these were received."""

HEADER_NBYTES: Final = 16
MAX_ADDRESS_NBYTES: Final = 1 << 16
MAX_BESIDE_NBYTES: Final = 1 << 17
"""Bytes in all frames that are sent with messages, before these are received."""
HELLO_TAG: Final = 1 << 63
"""Tag of the message that answers :data:`OPEN`: a length (u32) and the address of the receiver's worker."""
LENGTH: Final = struct.Struct("<I")
CHUNK_NBYTES: Final = 4 << 20
"""Longer parts are cut into messages of that size, which a receiver can buffer if it has to."""
POSITION_MASK: Final = (1 << 63) - (1 << 23)
"""The bits of a tag that have the position."""
_LEAST_NBYTES: Final = 64 << 10  # a shorter rest goes with the chunk before it
_LENGTH_BITS: Final = 23
_HEADER: Final = struct.Struct("<BBHIQ")


@dataclass(frozen=True, slots=True)
class Header:
    """The start of a frame."""

    kind: int
    flags: int
    nbytes: int
    position: int


def message_tag(position: int, nbytes: int) -> int:
    """The tag of a message: the position modulo 1 TiB, and the size."""
    return (position << _LENGTH_BITS & POSITION_MASK) | nbytes


def cut(view: memoryview) -> list[memoryview]:
    """``view`` as messages; none of them small."""
    pieces = []
    while len(view) > CHUNK_NBYTES + _LEAST_NBYTES:
        pieces.append(view[:CHUNK_NBYTES])
        view = view[CHUNK_NBYTES:]
    pieces.append(view)
    return pieces


def pack_header(kind: int, nbytes: int = 0, position: int = 0, *, flags: int = 0) -> bytes:
    """The bytes of a header."""
    return _HEADER.pack(kind, flags, 0, nbytes, position)


def parse_header(data: bytes | bytearray | memoryview, name: str) -> Header:
    """Read a header; ``name`` is the connection's.

    Raises:
        ProtocolError: If the peer's bytes are none.
    """
    kind, flags, _, nbytes, position = _HEADER.unpack(data)
    limit = {DATA: MAX_BESIDE_NBYTES if flags & BESIDE else 1 << 32, OPEN: MAX_ADDRESS_NBYTES, CANCEL: 0}
    if nbytes > limit.get(kind, -1):
        raise ProtocolError(f"{name}: the peer sent no frame but {bytes(data).hex()}", remote=True)
    return Header(kind, flags, nbytes, position)
