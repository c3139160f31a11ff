"""Payloads in pieces: moved and hashed a cacheful at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

from kvferry.core.errors import CorruptBlockError
from kvferry.wire.protocol import MessageReceived

__all__ = ["PIECE_NBYTES", "damaged", "hash_into", "pieces_of", "scratch_pieces"]

PIECE_NBYTES = 512 << 10
"""Payloads move and are hashed in pieces of this size, so that hashing reads from a warm cache."""
_SCRATCH_NBYTES = 256 << 10


def hash_into(digest: xxhash.xxh3_64, views: Sequence[memoryview]) -> None:
    """Add the bytes of ``views`` to ``digest``."""
    for view in views:
        digest.update(view)


def damaged(address: str, event: MessageReceived, found: int, sent: int) -> CorruptBlockError:
    """What is raised when a frame has another checksum than its sender computed; the connection ends."""
    return CorruptBlockError(
        f"{address}: {type(event.message).__name__} with its payload ({event.payload_nbytes} bytes, request "
        f"{event.request_id}) has xxh3_64 {found:016x}, sent was {sent:016x}; connection aborted"
    )


def pieces_of(views: Sequence[memoryview], size: int | None = None) -> Iterator[list[memoryview]]:
    """``views`` cut into lists of ``size`` bytes (:data:`PIECE_NBYTES`); the last may hold less."""
    room = size = size or PIECE_NBYTES
    piece: list[memoryview] = []
    for view in views:
        start = 0
        while start < len(view):
            part = view[start : start + room]
            piece.append(part)
            start += len(part)
            room -= len(part)
            if room == 0:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


def scratch_pieces(nbytes: int) -> Iterator[list[memoryview]]:
    """Places for ``nbytes`` that nobody wants: the same bounded buffer over and over."""
    scratch = memoryview(bytearray(min(_SCRATCH_NBYTES, nbytes)))
    for start in range(0, nbytes, max(len(scratch), 1)):
        yield [scratch[: nbytes - start]]
