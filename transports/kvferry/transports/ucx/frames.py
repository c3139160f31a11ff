"""What travels through the socket of a connection: small bytes, and notices.

Each direction is a stream whose bytes have positions. Small ones come in frames through the socket, large
ones as messages of UCX whose tag has the position of their first byte and their size. So the receiver, who
knows where it is, needs no announcement, and a message whose size it guessed right goes straight to its
place. A frame is a header of 16 bytes, little-endian, and ``nbytes`` bytes::

    u8 kind, u8 flags, u16 reserved, u32 nbytes, u64 position
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import Final

from kvferry.core.errors import ProtocolError

__all__ = [
    "BESIDE",
    "CANCEL",
    "CHUNK_NBYTES",
    "DATA",
    "DIGEST_NBYTES",
    "HEADER_NBYTES",
    "HELLO_TAG",
    "LENGTH",
    "MAX_ADDRESS_NBYTES",
    "MAX_BESIDE_NBYTES",
    "MAX_MESSAGE_NBYTES",
    "OPEN",
    "POSITION_MASK",
    "Header",
    "cut",
    "message_tag",
    "open_address",
    "pack_header",
    "parse_header",
    "seal_address",
]

DATA: Final = 1
"""Bytes of the stream."""
OPEN: Final = 2
"""The address of the sender's worker behind its digest: messages follow, the receiver answers over UCX."""
CANCEL: Final = 3
"""The sender gives up: what was read from its memory since its last call ended well is not to be trusted."""
BESIDE: Final = 1
"""Flag of a frame that was sent with messages, before these were received."""

HEADER_NBYTES: Final = 16
DIGEST_NBYTES: Final = 32
MAX_ADDRESS_NBYTES: Final = 1 << 14
"""The address of a worker with many devices has a few KiB."""
_MIN_ADDRESS_NBYTES: Final = 16
MAX_BESIDE_NBYTES: Final = 1 << 17
"""Bytes in all frames that are sent with messages, before these are received."""
HELLO_TAG: Final = 1 << 63
"""Tag of the message that answers :data:`OPEN`: a length (u32), and a sealed address."""
LENGTH: Final = struct.Struct("<I")
CHUNK_NBYTES: Final = 4 << 20
"""Longer parts are cut into messages of that size, which a receiver can buffer if it has to."""
POSITION_MASK: Final = (1 << 63) - (1 << 23)
"""The bits of a tag that have the position."""
MAX_MESSAGE_NBYTES: Final = CHUNK_NBYTES + (64 << 10)
"""A part is not cut up to that size: a short rest goes with the chunk before it."""
_LENGTH_BITS: Final = 23
_HEADER: Final = struct.Struct("<BBHIQ")


@dataclass(frozen=True, slots=True)
class Header:
    """The start of a frame."""

    kind: int
    flags: int
    nbytes: int
    position: int


def seal_address(key: bytes, address: bytes) -> bytes:
    """The address of a worker behind its digest, keyed with what both ends of this connection chose."""
    return _digest(key, address) + address


def open_address(key: bytes, sealed: bytes | bytearray | memoryview, name: str) -> bytes:
    """The address in ``sealed``: UCX takes the bytes for good, and ends the process where they are not.

    Raises:
        ProtocolError: If they are not what a peer sealed for this connection.
    """
    digest, address = bytes(sealed[:DIGEST_NBYTES]), bytes(sealed[DIGEST_NBYTES:])
    if not _MIN_ADDRESS_NBYTES <= len(address) <= MAX_ADDRESS_NBYTES:
        raise ProtocolError(
            f"{name}: the peer sent the address of a worker of {len(address)} bytes", remote=True
        )
    if not hmac.compare_digest(digest, _digest(key, address)):
        raise ProtocolError(
            f"{name}: the address of the peer's worker is damaged, or not meant for this connection",
            remote=True,
        )
    return address


def _digest(key: bytes, address: bytes) -> bytes:
    return hashlib.blake2b(address, digest_size=DIGEST_NBYTES, key=key, person=b"kvf-ucx-address").digest()


def message_tag(position: int, nbytes: int) -> int:
    """The tag of a message: the position modulo 1 TiB, and the size."""
    return (position << _LENGTH_BITS & POSITION_MASK) | nbytes


def cut(view: memoryview) -> list[memoryview]:
    """``view`` as messages; none of them small."""
    pieces = []
    while len(view) > MAX_MESSAGE_NBYTES:
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
    sealed = DIGEST_NBYTES + MAX_ADDRESS_NBYTES
    limit = {DATA: MAX_BESIDE_NBYTES if flags & BESIDE else 1 << 32, OPEN: sealed, CANCEL: 0}
    least = DIGEST_NBYTES + _MIN_ADDRESS_NBYTES if kind == OPEN else 0
    if not least <= nbytes <= limit.get(kind, -1):
        raise ProtocolError(f"{name}: the peer sent no frame but {bytes(data).hex()}", remote=True)
    return Header(kind, flags, nbytes, position)
