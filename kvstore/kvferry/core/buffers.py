"""Buffers of the data plane: page-aligned, owned by the caller, copied without the GIL."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

__all__ = [
    "PAGE_NBYTES",
    "Buf",
    "ByteArray",
    "address_of",
    "addresses_of",
    "as_bytes_view",
    "as_places",
    "copy_into",
    "page_aligned",
    "total_nbytes",
    "write_into",
]

PAGE_NBYTES = mmap.PAGESIZE
# numpy declares the buffer protocol for type checkers only from Python 3.12 on.
Buf: TypeAlias = "Buffer | npt.NDArray[Any]"
ByteArray: TypeAlias = "npt.NDArray[np.uint8]"
_ROWS_FROM_NBYTES = 1 << 20
_ROW_NBYTES = 512 << 10
_MOST_ROWS = 64


def page_aligned(nbytes: int) -> memoryview:
    """A new writable, populated, page-aligned buffer of exactly ``nbytes``.

    Populated at once, since page faults on first use cost half the bandwidth. Freed with its last view.

    Raises:
        ValueError: If ``nbytes`` is negative.
    """
    if nbytes < 0:
        raise ValueError(f"a buffer of {nbytes} bytes")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0x8000)
    return memoryview(mmap.mmap(-1, max(nbytes, 1), flags=flags))[:nbytes]


def as_bytes_view(buf: Buf) -> memoryview:
    """``buf`` as a flat view of bytes, without a copy.

    Raises:
        TypeError: If it is no buffer, is not contiguous, or holds Python objects.
    """
    try:
        view = buf.data if isinstance(buf, np.ndarray) else memoryview(buf)
    except TypeError as error:
        hint = "; one buffer goes in a list as several do, [data]" if isinstance(buf, int) else ""
        raise TypeError(
            f"{type(buf).__name__} is no buffer; bytes, memoryview and numpy arrays are{hint}"
        ) from error
    if view.ndim == 1 and view.format == "B" and view.c_contiguous:
        return view
    if not view.c_contiguous:
        raise TypeError(
            f"memory of shape {view.shape} and strides {view.strides} is not contiguous: copy it first, "
            "as numpy.ascontiguousarray does"
        )
    if view.format == "O":
        raise TypeError(f"an array of {view.shape} Python objects has addresses, not bytes: give it a dtype")
    if view.nbytes == 0:
        return memoryview(b"")
    return view.cast("B")


def as_places(views: Sequence[memoryview]) -> Sequence[memoryview]:
    """``views`` as flat views of bytes to be filled: themselves where they are that already.

    Whoever fills them counts by ``len``, which is items or rows of a view that is not flat bytes.

    Raises:
        TypeError: If one cannot be written, or is nothing that :func:`as_bytes_view` takes.
    """
    for view in views:
        if (
            type(view) is not memoryview
            or view.ndim != 1
            or view.format != "B"
            or view.readonly
            or not view.c_contiguous
        ):
            return [_as_place(one) for one in views]
    return views


def _as_place(buf: Buf) -> memoryview:
    view = as_bytes_view(buf)
    if view.readonly and len(view):
        raise TypeError(f"{type(buf).__name__} of {len(view)} bytes is read-only: receive into a bytearray")
    return view


def address_of(view: memoryview) -> int:
    """Of its first byte; 0 if it has none."""
    if not len(view):
        return 0
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(
        ctypes.c_char.from_buffer(view)
    )  # three times as fast, but not for read-only views


def addresses_of(views: Sequence[memoryview]) -> list[int]:
    """Of the first byte of each; 0 of one that has none. Fastest where all are writable and have some."""
    try:
        return list(map(ctypes.addressof, map(ctypes.c_char.from_buffer, views)))
    except (TypeError, ValueError):  # one is read-only, or empty
        return list(map(address_of, views))


def total_nbytes(parts: Iterable[memoryview]) -> int:
    """Bytes of several flat views together."""
    return sum(map(len, parts))


def copy_into(dst: memoryview, src: Buf) -> None:
    """Copy ``src`` into ``dst`` with the GIL released; sizes must be equal.

    Raises:
        ValueError: If the sizes differ or ``dst`` is read-only.
    """
    source = as_bytes_view(src)
    if len(source) != len(dst):
        raise ValueError(f"copy of {len(source)} bytes into {len(dst)}")
    write_into(np.frombuffer(dst, np.uint8), 0, source)


def write_into(dst: ByteArray, offset: int, source: memoryview) -> None:
    """Copy flat bytes into ``dst`` from ``offset`` on, where they must fit; the GIL is released once."""
    nbytes = len(source)
    if nbytes < _ROWS_FROM_NBYTES:
        dst[offset : offset + nbytes] = source  # as np.copyto, with a microsecond less around it
    else:
        shape, strides = _rows(nbytes)
        rows = np.ndarray(shape, np.uint8, source, 0, strides)
        np.ndarray(shape, np.uint8, dst, offset, strides)[...] = rows


@lru_cache(maxsize=256)
def _rows(nbytes: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shape and strides of flat bytes as rows that numpy copies with one call of memcpy each.

    glibc copies up to the size of a core's cache by string moves, which need not read what they overwrite,
    and more than that by loops, which do: in rows the same bytes take 0.94 of the time. The rows overlap by
    a few cache lines (1 % of the bytes at most), since numpy would join rows that just meet.
    """
    count = min(_MOST_ROWS, -(-nbytes // _ROW_NBYTES))
    step = (nbytes - 1) // count // 64 * 64
    return (count, nbytes - (count - 1) * step), (step, 1)
