"""The stored blocks of one arena: index, holds, pins, and room by eviction.

Nothing here waits and nothing is thread safe: the store's lock is held around every call, and the arena's
own lock is taken inside it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import TYPE_CHECKING

from kvferry.core.arena import Arena
from kvferry.core.block_events import BlockJournal
from kvferry.core.chains import Block, ChainIndex, ExactBlocks, StoredBlocks
from kvferry.core.errors import StoreError
from kvferry.core.eviction import Entry, EvictionPolicy, Leave, evictions
from kvferry.core.keys import BlockKey
from kvferry.core.segments import Slot

if TYPE_CHECKING:
    from kvferry.core.memory_namespace import MemoryNamespace

__all__ = ["DRAM", "BlockTable"]

DRAM = "dram"
"""What the memory tier is called."""


class BlockTable:
    """Blocks in ``arena`` by namespace and key; what goes first is the policy's to say.

    Attributes:
        held_nbytes: Stored blocks under a read lease or pin, or being copied.
        forgotten_nbytes: Removed blocks that somebody still holds.
        stored_nbytes: All stored blocks. All three count whole slots.
        leaving_nbytes: Stored blocks that go as soon as a copy of them is made; part of ``held_nbytes``.
        may_leave: Asked before a block is evicted; see :class:`Leave`.
        journal: Told of every block that comes or goes, where somebody listens.
    """

    def __init__(self, arena: Arena, policy: EvictionPolicy) -> None:
        self.arena = arena
        self.indexes: dict[bytes, ChainIndex[Block]] = {}
        self.policy = policy
        self.entries = 0
        self.held_nbytes = 0
        self.forgotten_nbytes = 0
        self.stored_nbytes = 0
        self.leaving_nbytes = 0
        self.saved_blocks = 0
        self.evicted_blocks = 0
        self.journal = BlockJournal(DRAM)
        self.may_leave: Callable[[Block], Leave] | None = None
        self._leaving: Counter[Block] = Counter()
        self._pins: list[tuple[float, int, Block]] = []
        self._pinned_until: dict[Block, float] = {}
        self._numbers = itertools.count()

    # ---- blocks ------------------------------------------------------------------------------

    def get(self, namespace_id: bytes, key: BlockKey) -> Block | None:
        """The stored block of that key."""
        index = self.indexes.get(namespace_id)
        return None if index is None else index.entries.get(key)

    def found_by(self, namespace: MemoryNamespace) -> StoredBlocks:
        """What a reader finds; one who takes no loss only what has lost nothing."""
        index = self.indexes.get(namespace.namespace_id)
        if index is None:
            return {}
        return index.entries if namespace.takes_lossy or not index.lossy else ExactBlocks(index.entries)

    def prefix(self, namespace: MemoryNamespace, keys: Iterable[BlockKey]) -> list[Block]:
        """The longest prefix of ``keys`` that a reader finds."""
        found: list[Block] = []
        get = self.found_by(namespace).get
        for key in keys:
            block = get(key)
            if block is None:
                break
            found.append(block)
        return found

    def touch(self, head_to_tail: Sequence[Block]) -> None:
        """Count the blocks as used now."""
        self.policy.accessed(reversed(head_to_tail))

    def add(self, block: Block) -> None:
        """Store a block whose key is not stored, as used now; tails come before their parents."""
        self.add_all(block.index, (block,))

    def add_all(self, index: ChainIndex[Block], blocks: Sequence[Block]) -> None:
        """Store blocks of one namespace, as :meth:`add` of each in turn; their keys differ."""
        for block in blocks:
            block.stored = True  # first: the slot of one in the index that says otherwise would be given away
            if block.lossy:
                index.lossy += 1
            if block.holds:
                self.held_nbytes += index.slot_nbytes
                self.forgotten_nbytes -= index.slot_nbytes
        index.add_all(blocks)
        self.entries += len(blocks)
        self.stored_nbytes += len(blocks) * index.slot_nbytes
        inserted = self.policy.inserted
        for block in blocks:
            inserted(block)
        if self.journal.feeds:
            for block in blocks:
                self.journal.note(True, index.namespace_id, block.key)

    def publish_all(
        self, namespace_id: bytes, slot_nbytes: int, keys: Iterable[BlockKey],
        parents: Iterable[BlockKey | None], slots: Sequence[Slot], lossy: Collection[int] = (),
    ) -> list[Block]:  # fmt: skip
        """Store blocks whose slots are filled, given from head to tail.

        Args:
            namespace_id: Whose.
            slot_nbytes: Of each.
            keys: Their keys, which differ.
            parents: The key before each.
            slots: Where each lies.
            lossy: The numbers of those that have lost something; the others take the place of stored ones
                that have.

        Returns:
            A block for each; ``stored`` says which are new. Of the others somebody was faster, and equal keys
            name equal bytes; their slots are the caller's.
        """
        index = self.indexes.get(namespace_id) or self.index(namespace_id, slot_nbytes)
        blocks = [Block(index, k, p, s) for k, p, s in zip(keys, parents, slots, strict=True)]
        for number in lossy:
            blocks[number].lossy = True
        stored = index.entries
        new = [block for block in reversed(blocks) if block.key not in stored]
        if index.lossy and len(new) < len(blocks):
            for block in reversed(blocks):
                before = stored.get(block.key)
                if before is not None and before.lossy and not block.lossy:
                    self.replace(before, block)
                    self.saved_blocks += 1
        self.add_all(index, new)
        self.saved_blocks += len(new)
        return blocks

    def replace(self, lossy: Block, exact: Block) -> None:
        """Store a block in the place of one of the same key that has lost something; a pin stays."""
        until = self._pinned_until.get(lossy)
        self.forget(lossy)
        self.indexes[exact.index.namespace_id] = exact.index  # it went if this was its only block
        self.add(exact)
        if until is not None:
            self.pin(exact, until)

    def index(self, namespace_id: bytes, slot_nbytes: int) -> ChainIndex[Block]:
        """The index of a namespace, made if there is none."""
        found = self.indexes.get(namespace_id)
        if found is None:
            found = self.indexes[namespace_id] = ChainIndex(namespace_id, slot_nbytes)
        return found

    def forget(self, block: Block) -> None:
        """Take a stored block out of the index; its slot is used again when nobody holds it."""
        if self._pinned_until:
            self.unpin(block)
        index = block.index
        nbytes = index.slot_nbytes
        if self._leaving and block in self._leaving:
            index.attach(block)
        tail = index.discard(block)
        block.stored = False
        index.lossy -= block.lossy
        if self.journal.feeds:
            self.journal.note(False, index.namespace_id, block.key)
        self.policy.removed(block)
        if tail is not None:
            self.policy.released(tail)
        if not index.entries:
            self.indexes.pop(index.namespace_id, None)
        self.entries -= 1
        self.stored_nbytes -= nbytes
        if block.holds:
            self.held_nbytes -= nbytes
            self.forgotten_nbytes += nbytes
        else:
            self.arena.free(block.slot)

    def hold(self, block: Block) -> None:
        """Keep a block's bytes in place until :meth:`drop`."""
        block.holds += 1
        if block.holds == 1 and block.stored:
            self.held_nbytes += block.nbytes
        elif block.holds == 1:
            self.forgotten_nbytes += block.nbytes

    def hold_all(self, blocks: Iterable[Block]) -> None:
        """:meth:`hold` each."""
        held = 0
        try:
            for block in blocks:
                if not block.stored:
                    self.hold(block)
                    continue
                if not block.holds:
                    held += block.index.slot_nbytes
                block.holds += 1
        finally:  # also when a signal's handler raises
            self.held_nbytes += held

    def drop_all(self, blocks: Iterable[Block]) -> None:
        """:meth:`drop` each."""
        released, held = self.policy.released, 0
        try:
            for block in blocks:
                if block.holds == 1 and block.stored:
                    block.holds = 0
                    held += block.index.slot_nbytes
                    released(block)
                else:
                    self.drop(block)
        finally:
            self.held_nbytes -= held

    def drop(self, block: Block) -> None:
        """End one :meth:`hold`."""
        if block.holds < 1:
            raise StoreError(f"block {block.key[:8].hex()}… of {block.slot} is dropped more than it was held")
        block.holds -= 1
        if block.holds:
            return
        if block.stored:
            self.held_nbytes -= block.nbytes
            self.policy.released(block)
        else:
            self.forgotten_nbytes -= block.nbytes
            self.arena.free(block.slot)

    # ---- pins --------------------------------------------------------------------------------

    def pin(self, block: Block, until: float) -> None:
        """Hold a stored block at least until ``until``."""
        before = self._pinned_until.get(block)
        if before is None:
            self.hold(block)
            heapq.heappush(self._pins, (until, next(self._numbers), block))
        self._pinned_until[block] = until if before is None else max(before, until)

    def unpin(self, block: Block) -> None:
        """End the pin of a block, if it has one."""
        if self._pinned_until and self._pinned_until.pop(block, None) is not None:
            self.drop(block)

    def _end_due_pins(self, now: float) -> None:
        while self._pins and self._pins[0][0] <= now:
            _, number, block = heapq.heappop(self._pins)
            until = self._pinned_until.get(block, 0.0)
            if until > now:  # pinned again since, for longer
                heapq.heappush(self._pins, (until, number, block))
            else:
                self.unpin(block)

    # ---- room --------------------------------------------------------------------------------

    def allocate(
        self, count: int, nbytes: int, slot_nbytes: int, protect: Callable[[], set[Block]]
    ) -> list[Slot] | None:
        """Slots for ``count`` blocks, or ``None`` with nothing taken.

        Evicts only if that can suffice. Blocks that are copied first give their room later, which the
        caller learns from :attr:`leaving_nbytes`.
        """
        needed = count * slot_nbytes
        slots = self.arena.allocate_many(count, nbytes) if needed <= self.arena.free_nbytes else None
        if slots is None:
            protected = protect()
            spared = sum(b.nbytes for b in protected if not b.holds)
            evictable = self.stored_nbytes - self.held_nbytes - spared + self.leaving_nbytes
            if needed <= self.arena.free_nbytes + evictable:
                slots = self._evict_for(count, nbytes, needed, protected)
        return slots

    def _evict_for(self, count: int, nbytes: int, needed: int, protected: set[Block]) -> list[Slot] | None:
        def pinned(entry: Entry) -> bool:
            assert isinstance(entry, Block)
            return entry.holds > 0 or entry in protected

        slots = None
        steps = self.evictions(pinned)
        while slots is None:
            coming = self.leaving_nbytes
            if coming and needed <= self.arena.free_nbytes + coming:
                break  # enough is on its way out
            if not next(steps, False):
                break
            if needed <= self.arena.free_nbytes:
                slots = self.arena.allocate_many(count, nbytes)
        for block in protected:
            if block.stored:
                self.policy.released(block)
        return slots

    def evictions(self, pinned: Callable[[Entry], bool]) -> Generator[bool, None, None]:
        """See :func:`~kvferry.core.eviction.evictions`."""
        return evictions(self.policy, self.arena.capacity_nbytes, pinned, self.may_leave, self._evict)

    def _evict(self, block: Block) -> None:
        self.forget(block)
        self.evicted_blocks += 1

    def leave(self, block: Block) -> None:
        """Hold a stored block that goes when its copy is made; ends with :meth:`left` or :meth:`stay`.

        Its parent counts as a tail meanwhile, so that a chain goes as a whole.
        """
        self.hold(block)
        self.leaving_nbytes += block.nbytes
        self._leaving[block] += 1
        if self._leaving[block] == 1:
            tail = block.index.detach(block)
            if tail is not None:
                self.policy.released(tail)

    def stay(self, block: Block) -> None:
        """The copy takes too long: what :meth:`leave` held is an ordinary hold now."""
        self.leaving_nbytes -= block.nbytes
        self._leaving[block] -= 1
        if not self._leaving[block]:
            del self._leaving[block]
            if block.stored:
                block.index.attach(block)

    def left(self, block: Block) -> None:
        """The copy that :meth:`leave` waited for is over: evict, unless somebody holds the block now."""
        self.stay(block)
        self.drop(block)
        if block.stored and not block.holds:
            self._evict(block)
