"""The index of a store in memory: blocks by key, their chains, and which one goes first.

**Order of eviction.** A block with a stored child is an inner block, one without is a tail. The tail
used least recently goes first; its parent becomes a tail then. So a chain shrinks from its end and
what is left of it is always a usable prefix. Within one call the head counts as used last. Blocks that
are held (leased or pinned) are never evicted. Only when every tail is held are inner blocks evicted,
the least recently used first and below it the deepest that is not held: its held descendants stay
readable for those who hold them, but are no prefix any more. The chain that is being extended
(``protected``) is never evicted to make room for its own extension.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator

from kvferry.core.keys import BlockKey
from kvferry.core.segments import Slot

__all__ = ["Block", "BlockIndex", "ChainLRU"]


class Block:
    """A stored block. Compared by identity; the store's lock is held.

    Attributes:
        holds: Read leases and pins that keep it in place.
        stored: Whether it is in the index; a removed block that is held lives on until the last hold.
        pinned_until: End of its pin, 0 without one.
        used_at: When it was last used, in calls.
    """

    __slots__ = ("holds", "index", "key", "parent", "pinned_until", "slot", "stored", "used_at")

    def __init__(self, index: BlockIndex, key: BlockKey, parent: BlockKey | None, slot: Slot) -> None:
        self.index = index
        self.key = key
        self.parent = parent
        self.slot = slot
        self.holds = 0
        self.stored = False
        self.pinned_until = 0.0
        self.used_at = 0


class BlockIndex:
    """The stored blocks of one namespace and the links of their chains."""

    __slots__ = ("_children", "blocks", "namespace_id")

    def __init__(self, namespace_id: bytes) -> None:
        self.namespace_id = namespace_id
        self.blocks: dict[BlockKey, Block] = {}
        # By the parent's key, whether or not the parent is stored: it may come, or come back, later.
        self._children: dict[BlockKey, dict[BlockKey, Block]] = {}

    def add(self, block: Block) -> None:
        """Enter a block whose key is not stored."""
        self.blocks[block.key] = block
        block.stored = True
        if block.parent is not None:
            self._children.setdefault(block.parent, {})[block.key] = block

    def discard(self, block: Block) -> Block | None:
        """Forget a stored block; returns its parent if that is a tail now."""
        del self.blocks[block.key]
        block.stored = False
        if block.parent is None:
            return None
        siblings = self._children[block.parent]
        del siblings[block.key]
        if siblings:
            return None
        del self._children[block.parent]
        return self.blocks.get(block.parent)

    def children(self, block: Block) -> Collection[Block]:
        """Stored children of ``block``."""
        found = self._children.get(block.key)
        return found.values() if found else ()

    def chain(self, key: BlockKey | None) -> Iterator[Block]:
        """The stored block ``key`` and its stored ancestors, from the tail to the head."""
        seen: set[BlockKey] = set()  # a foreign chain may be given in a ring
        while key is not None and key not in seen:
            block = self.blocks.get(key)
            if block is None:
                return
            seen.add(key)
            yield block
            key = block.parent


class ChainLRU:
    """Decides what goes first; see the module. O(log n) a call. The store's lock is held."""

    def __init__(self) -> None:
        self._clock = 0
        self._tails: list[tuple[int, int, Block]] = []  # lazily pruned: an entry counts if it is current
        self._blocks = 0
        self._pushes = 0

    def inserted(self, block: Block) -> None:
        """``block`` was stored."""
        self._blocks += 1
        self.accessed((block,))

    def removed(self, tail: Block | None) -> None:
        """A block was forgotten, which made ``tail`` (if any) a tail."""
        self._blocks -= 1
        if tail is not None:
            self._offer(tail)

    def accessed(self, chain: Iterable[Block]) -> None:
        """The blocks were used; given from tail to head, so that the head counts as used last."""
        for block in chain:
            self._clock += 1
            block.used_at = self._clock
            self._offer(block)

    def unheld(self, block: Block) -> None:
        """The last hold of a stored block is gone."""
        self._offer(block)

    def victim(self, protected: Collection[Block]) -> Block | None:
        """The tail to evict next, ``None`` if every tail is held or protected."""
        kept: list[tuple[int, int, Block]] = []
        found = None
        while self._tails:
            entry = heapq.heappop(self._tails)
            block = entry[2]
            if not self._is_current(entry):
                continue
            if block in protected:
                kept.append(entry)
                continue
            found = block
            break
        for entry in kept:
            heapq.heappush(self._tails, entry)
        return found

    @staticmethod
    def inner_victims(indexes: Iterable[BlockIndex], protected: Collection[Block]) -> Iterator[Block]:
        """Inner blocks to evict when every tail is held; each is evicted before the next is asked for."""
        free = [b for i in indexes for b in i.blocks.values() if not b.holds and b not in protected]
        for block in sorted(free, key=lambda b: b.used_at):
            while block.stored:
                seen = {block}
                victim = block
                while True:
                    below = victim.index.children(victim)
                    free_below = (c for c in below if not (c.holds or c in protected or c in seen))
                    child = next(free_below, None)
                    if child is None:
                        break
                    seen.add(child)
                    victim = child
                yield victim

    def _offer(self, block: Block) -> None:
        if not block.stored or block.holds or block.index.children(block):
            return
        self._pushes += 1  # decides between entries of the same block, which cannot be compared
        heapq.heappush(self._tails, (block.used_at, self._pushes, block))
        if len(self._tails) > 4 * self._blocks + 64:
            self._tails = list({e[2]: e for e in self._tails if self._is_current(e)}.values())
            heapq.heapify(self._tails)

    @staticmethod
    def _is_current(entry: tuple[int, int, Block]) -> bool:
        block = entry[2]
        return (
            block.stored and not block.holds and block.used_at == entry[0] and not block.index.children(block)
        )
