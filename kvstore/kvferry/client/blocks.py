"""Where the blocks of a client's lease are."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from kvferry.core.arena import ArenaMap, Slot
from kvferry.core.buffers import PAGE_NBYTES
from kvferry.core.staging import StagingPiece

__all__ = ["MappedBlocks", "OwnBlocks", "StagedBlocks"]


class MappedBlocks:
    """Blocks in the mapped memory of the daemon.

    Args:
        arena: The map that holds all of the slots.
        slots: As they came: segment, offset and generation of each, as little-endian u64.
        block_nbytes: Bytes of each.
    """

    __slots__ = ("_arena", "_block_nbytes", "_words")

    def __init__(self, arena: ArenaMap, slots: bytes, block_nbytes: int) -> None:
        self._arena = arena
        self._words: Sequence[int] = np.frombuffer(slots, "<u8").tolist()
        self._block_nbytes = block_nbytes

    def view(self, index: int) -> memoryview:
        """The bytes of one."""
        segment, offset, generation = self._words[3 * index : 3 * index + 3]
        return self._arena.view(Slot(segment, offset, self._block_nbytes, generation))

    def stale(self) -> int | None:
        """The first whose slot was freed since."""
        return self._arena.first_stale_words(self._words)


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

    def stale(self) -> int | None:
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
