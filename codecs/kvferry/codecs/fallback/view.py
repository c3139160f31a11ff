"""One tensor of several layer slices as arrays, and the headers of sections."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.core.buffers import ByteArray
from kvferry.core.errors import CorruptBlockError

__all__ = [
    "DAMAGED",
    "RAW",
    "SECTION_NBYTES",
    "Elements",
    "TensorView",
    "header",
    "load_raw",
    "parse_header",
    "store_raw",
]

Elements: TypeAlias = "npt.NDArray[np.uint16]"
"""Elements of all slices, ``[count, rows, cols]``, contiguous."""
SECTION_NBYTES: Final = 8
RAW: Final = 0
DAMAGED: Final = "encoded slices cannot be decoded: a section is damaged"
_HEADER: Final = struct.Struct("<BBHI")


def header(mode: int, parameter: int = 0, small: int = 0, number: int = 0) -> bytes:
    """The eight bytes at the start of a section."""
    return _HEADER.pack(mode, parameter, small, number)


def parse_header(src: ByteArray) -> tuple[int, int, int, int]:
    """Mode, parameter, small and large number of a section.

    Raises:
        CorruptBlockError: If ``src`` is shorter than a header.
    """
    if len(src) < SECTION_NBYTES:
        raise CorruptBlockError(DAMAGED)
    mode, parameter, small, number = _HEADER.unpack_from(src.data)
    return mode, parameter, small, number


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor, or bytes that are kept, of several slices in a buffer.

    Attributes:
        data: The buffer as ``[count, bytes of a slice]``.
        offset: Where it lies in a slice.
        nbytes: In one slice.
        rows: Tokens of a slice.
        cols: Elements of a row.
        last: Elements of the last axis, a divisor of ``cols``.
        dtype: 0 for bfloat16, 1 for float16.
    """

    data: ByteArray
    offset: int
    nbytes: int
    rows: int
    cols: int
    last: int
    dtype: int

    @property
    def count(self) -> int:
        """Slices."""
        return len(self.data)

    @property
    def bytes(self) -> ByteArray:
        """The bytes, ``[count, nbytes]``, a view."""
        return self.data[:, self.offset : self.offset + self.nbytes]

    def load(self) -> Elements:
        """The elements of all slices together, copied."""
        elements: Elements = np.ascontiguousarray(self.bytes).view("<u2")
        return elements.reshape(self.count, self.rows, self.cols)

    def store(self, elements: Elements) -> None:
        """Put ``elements`` in place; other bytes of the slices are not touched."""
        self.bytes[:] = np.ascontiguousarray(elements, "<u2").view(np.uint8).reshape(self.count, self.nbytes)


def store_raw(view: TensorView, dst: ByteArray) -> int:
    """Write a section that holds the bytes as they are; its size."""
    end = SECTION_NBYTES + view.count * view.nbytes
    dst[:SECTION_NBYTES] = np.frombuffer(header(RAW), np.uint8)
    dst[SECTION_NBYTES:end].reshape(view.count, view.nbytes)[:] = view.bytes
    return end


def load_raw(view: TensorView, src: ByteArray) -> int:
    """Read such a section; its size.

    Raises:
        CorruptBlockError: If ``src`` is too short or another section.
    """
    end = SECTION_NBYTES + view.count * view.nbytes
    if parse_header(src)[0] != RAW or len(src) < end:
        raise CorruptBlockError(DAMAGED)
    view.bytes[:] = src[SECTION_NBYTES:end].reshape(view.count, view.nbytes)
    return end
