"""Blocks to and from memory that is named by addresses alone."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.core.buffers import address_of, addresses_of
from kvferry.core.errors import ConfigError
from kvferry.core.paged_copy import pages_kernel

__all__ = ["Segments", "checked_segments", "copy_blocks", "copy_segments"]

Segments: TypeAlias = Sequence[tuple[int, int]]
"""Address and bytes of each piece of a block, in the order in which they are stored."""

_PART_WORDS: Final = 13  # of struct kvc_part (pages.h): address, page_nbytes, offset, run, and three loops
_STREAM_FROM_NBYTES: Final = 1 << 20
_NEVER: Final = ctypes.c_int32(0)
_ADDRESS_END: Final = 1 << 64


def checked_segments(segments: Iterable[Segments], block_nbytes: int) -> list[list[tuple[int, int]]]:
    """What a caller gave, as whole numbers that make sense.

    Raises:
        ConfigError: If an address is 0 or none, or the pieces of a block are together not as long as one.
    """
    found: list[list[tuple[int, int]]] = []
    for index, pieces in enumerate(segments):
        checked = [(int(address), int(nbytes)) for address, nbytes in pieces]
        for address, nbytes in checked:
            if nbytes < 0 or not 0 < address <= _ADDRESS_END - max(nbytes, 1):
                raise ConfigError(f"segments of block {index}: {nbytes} bytes at address {address:#x}")
        total = sum(nbytes for _, nbytes in checked)
        if total != block_nbytes:
            raise ConfigError(
                f"the {len(checked)} segments of block {index} have {total} bytes, a block of this spec has "
                f"{block_nbytes}"
            )
        found.append(checked)
    return found


def copy_segments(blocks: Sequence[memoryview], segments: Sequence[Segments], *, to_segments: bool) -> None:
    """Copy blocks to memory by address, or from there, all in one call with the GIL released.

    Args:
        blocks: Each as it is stored.
        segments: As :func:`checked_segments` gives them, one list a block. They must be there, and not lie
            over each other or over the blocks: nothing can see to that here.
        to_segments: Whether the blocks are read; else they are written.
    """
    rows: list[tuple[int, int, int, int]] = []
    for view, pieces in zip(blocks, segments, strict=True):
        block = address_of(view)
        for address, nbytes in pieces:
            rows.append((address, 0, block, nbytes))
            block += nbytes
    if rows:
        _copy(np.array(rows, np.uint64), to_segments=to_segments)


def copy_blocks(addresses: Sequence[int], sources: Sequence[memoryview], nbytes: int) -> None:
    """Copy blocks to memory by address, all in one call with the GIL released.

    Args:
        addresses: Where each goes. The memory must be there, and the caller's to write.
        sources: The blocks, as flat views of bytes.
        nbytes: Bytes of each.

    Raises:
        ValueError: If there are not as many addresses, or a block is of another size; nothing is copied.
    """
    if len(addresses) != len(sources) or set(map(len, sources)) - {nbytes}:
        raise ValueError(f"{len(sources)} blocks to {len(addresses)} places of {nbytes} bytes each")
    if not nbytes or not sources:
        return
    rows = np.zeros((len(sources), 4), np.uint64)
    rows[:, 0] = addresses_of(sources)
    rows[:, 2] = addresses
    rows[:, 3] = nbytes
    _copy(rows, to_segments=False)


def _copy(rows: npt.NDArray[np.uint64], *, to_segments: bool) -> None:
    """Rows of: address, 0, address in a block, bytes."""
    kernel = pages_kernel()
    if kernel is None:
        for address, _, block, nbytes in rows.tolist():
            target, source = (address, block) if to_segments else (block, address)
            ctypes.memmove(target, source, nbytes)
        return
    parts = np.zeros((len(rows), _PART_WORDS), np.uint64)
    parts[:, :4] = rows
    parts[:, 4:7] = 1  # once around each of the three loops
    page = np.zeros(1, np.uint64)  # page 0, and a slot at 0: the parts say where things lie by themselves
    stream = int(parts[:, 3].sum()) >= _STREAM_FROM_NBYTES
    kernel(
        *(parts.ctypes.data, len(rows), page.ctypes.data, page.ctypes.data, 1),
        *(int(to_segments), int(stream), ctypes.addressof(_NEVER)),
    )
