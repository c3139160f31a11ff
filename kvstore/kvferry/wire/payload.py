"""Payloads in pieces: moved and hashed a cacheful at a time."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.core.errors import CorruptBlockError
from kvferry.transports.hashed import PIECE_NBYTES
from kvferry.wire.protocol import MessageReceived

__all__ = ["PIECE_NBYTES", "damaged", "scratch_pieces"]

_SCRATCH_NBYTES = 256 << 10


def damaged(address: str, event: MessageReceived, found: int, sent: int) -> CorruptBlockError:
    """What is raised when a frame has another checksum than its sender computed; the connection ends."""
    return CorruptBlockError(
        f"{address}: {type(event.message).__name__} with its payload ({event.payload_nbytes} bytes, request "
        f"{event.request_id}) has xxh3_64 {found:016x}, sent was {sent:016x}; connection aborted"
    )


def scratch_pieces(nbytes: int) -> Iterator[list[memoryview]]:
    """Places for ``nbytes`` that nobody wants: the same bounded buffer over and over."""
    scratch = memoryview(bytearray(min(_SCRATCH_NBYTES, nbytes)))
    for start in range(0, nbytes, max(len(scratch), 1)):
        yield [scratch[: nbytes - start]]
