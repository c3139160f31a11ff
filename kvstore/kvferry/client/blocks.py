"""Where the blocks of a client's lease are."""

from __future__ import annotations

import struct
from typing import TypeAlias

from kvferry.core.buffers import PAGE_NBYTES, address_of
from kvferry.core.segments import MappedSlots
from kvferry.core.staging import StagingPiece

__all__ = ["Blocks", "OwnBlocks", "StagedBlocks"]


class OwnBlocks:
    """Blocks in memory of this process, one behind the other, each on a page."""

    __slots__ = ("_block_nbytes", "_memory", "_step")

    def __init__(self, memory: memoryview, block_nbytes: int) -> None:
        self._memory = memory
        self._block_nbytes = block_nbytes
        self._step = self.step(block_nbytes)

    @staticmethod
    def step(block_nbytes: int) -> int:
        """Bytes from one block to the next."""
        return -(-block_nbytes // PAGE_NBYTES) * PAGE_NBYTES

    def view(self, index: int) -> memoryview:
        """The bytes of one."""
        start = index * self._step
        return self._memory[start : start + self._block_nbytes]

    def views(self, count: int) -> list[memoryview]:
        """The first ``count``, as few views as there can be."""
        if self._step == self._block_nbytes:
            return [self._memory[: count * self._step]]
        return [self.view(index) for index in range(count)]

    def read_only(self) -> OwnBlocks:
        """The same ones, with views that are read-only."""
        return OwnBlocks(self._memory.toreadonly(), self._block_nbytes)

    def first_stale(self) -> int | None:
        """None: nobody else has this memory."""
        return None


class StagedBlocks(OwnBlocks):
    """Blocks in staging memory, one behind the other, each on a page."""

    __slots__ = ("_offset",)

    def __init__(self, piece: StagingPiece, block_nbytes: int) -> None:
        super().__init__(piece.view, block_nbytes)
        self._offset = piece.offset

    def offsets(self, count: int) -> bytes:
        """Where the first ``count`` begin, as ``commit_blocks`` says it."""
        return struct.pack(f"<{count}Q", *(self._offset + index * self._step for index in range(count)))

    def addresses(self) -> list[int]:
        """Of the first byte of each."""
        first = address_of(self._memory)
        return list(range(first, first + len(self._memory), self._step))


Blocks: TypeAlias = MappedSlots | OwnBlocks
"""Those of a lease: in the mapped memory of the daemon, or in memory of this process."""
