"""Payloads in pieces: moved and hashed a cacheful at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from xxhash import xxh3_64_intdigest

from kvferry.core.errors import CorruptBlockError
from kvferry.transports.hashed import PIECE_NBYTES
from kvferry.wire.messages import Message
from kvferry.wire.protocol import TRAILER_NBYTES

__all__ = ["PIECE_NBYTES", "SMALL_NBYTES", "Frame", "damaged", "scratch_pieces", "sealed"]

SMALL_NBYTES = 8 << 10
"""Up to here a payload costs less to copy once than to be moved by itself."""

_SCRATCH_NBYTES = 256 << 10


class Frame(Protocol):
    """A frame whose payload is due."""

    @property
    def message(self) -> Message:
        """Its message."""
        ...

    @property
    def payload_nbytes(self) -> int:
        """Bytes of its payload."""
        ...

    @property
    def request_id(self) -> int:
        """Echoed in the answer."""
        ...

    @property
    def has_trailer(self) -> bool:
        """Whether a checksum follows the payload."""
        ...


def damaged(address: str, frame: Frame, found: int, sent: int) -> CorruptBlockError:
    """What is raised when a frame has another checksum than its sender computed; the connection ends."""
    return CorruptBlockError(
        f"{address}: {type(frame.message).__name__} with its payload ({frame.payload_nbytes} bytes, request "
        f"{frame.request_id}) has xxh3_64 {found:016x}, sent was {sent:016x}; connection aborted"
    )


def sealed(head: bytes, views: Sequence[memoryview]) -> bytes:
    """A small frame in one piece, with its trailer."""
    data = b"".join((head, *views))
    return data + xxh3_64_intdigest(data).to_bytes(TRAILER_NBYTES, "little")


def scratch_pieces(nbytes: int) -> Iterator[list[memoryview]]:
    """Places for ``nbytes`` that nobody wants: the same bounded buffer over and over."""
    scratch = memoryview(bytearray(min(_SCRATCH_NBYTES, nbytes)))
    for start in range(0, nbytes, max(len(scratch), 1)):
        yield [scratch[: nbytes - start]]
