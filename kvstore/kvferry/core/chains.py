"""The index of a tier: entries by key, and the chains that they form. See :mod:`kvferry.core.eviction`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Generic, TypeAlias, TypeVar

from kvferry.core.eviction import Entry
from kvferry.core.keys import BlockKey
from kvferry.core.segments import Slot

__all__ = ["Block", "ChainIndex", "ExactBlocks", "StoredBlocks"]

E = TypeVar("E", bound=Entry)
_NOT_ASKED: Final = -1
_UNKNOWN: Final = -2


class ChainIndex(Generic[E]):
    """The stored entries of one namespace and the links of their chains. The tier's lock is held.

    Attributes:
        namespace_id: The 32 bytes of the namespace.
        entries: The entries by key; for reading only.
        slot_nbytes: Bytes that one of its blocks takes up, the same for all.
        lossy: How many of the entries have lost something; whoever adds and discards them counts.
    """

    __slots__ = ("__weakref__", "_orphans", "entries", "lossy", "namespace_id", "slot_nbytes")

    def __init__(self, namespace_id: bytes, slot_nbytes: int) -> None:
        self.namespace_id = namespace_id
        self.slot_nbytes = slot_nbytes
        self.entries: dict[BlockKey, E] = {}
        self.lossy = 0
        # Stored children of parents that are not stored, by the parent's key: it may come, or come back.
        self._orphans: dict[BlockKey, int] = {}

    def add(self, entry: E) -> None:
        """Enter an entry whose key is not stored."""
        self.entries[entry.key] = entry
        entry.children = self._orphans.pop(entry.key, 0) if self._orphans else 0
        if entry.parent is not None:
            self.attach(entry)

    def add_all(self, entries: Sequence[E]) -> None:
        """Enter entries whose keys differ and are not stored; as :meth:`add` of each in turn."""
        stored, orphans = self.entries, self._orphans
        stored.update([(entry.key, entry) for entry in entries])
        for entry in entries:
            entry.children = orphans.pop(entry.key, 0) if orphans else 0
        for entry in entries:  # attach, written out: this is the hot path of every save
            parent = entry.parent
            if parent is None:
                continue
            above = stored.get(parent)
            if above is None:
                orphans[parent] = orphans.get(parent, 0) + 1
            else:
                above.children += 1

    def discard(self, entry: E) -> E | None:
        """Forget a stored entry; returns its parent if that is a tail now.

        One that is not stored is passed over: an exception of a signal handler may have ended a call half
        way, and whoever goes on with it should not fail for ever.
        """
        if self.entries.get(entry.key) is not entry:
            return None
        del self.entries[entry.key]
        if entry.children:
            self._orphans[entry.key] = entry.children
        return None if entry.parent is None else self.detach(entry)

    def attach(self, entry: E) -> None:
        """Count a stored entry as a child of its parent; :meth:`add` does."""
        parent = entry.parent
        if parent is None:
            return
        above = self.entries.get(parent)
        if above is None:
            self._orphans[parent] = self._orphans.get(parent, 0) + 1
        else:
            above.children += 1

    def detach(self, entry: E) -> E | None:
        """Count it no more, while it is on its way out; returns its parent if that is a tail now."""
        parent = entry.parent
        if parent is None:
            return None
        above = self.entries.get(parent)
        if above is not None:
            above.children -= 1
            return None if above.children else above
        left = self._orphans.get(parent, 0) - 1
        if left > 0:
            self._orphans[parent] = left
        else:
            self._orphans.pop(parent, None)
        return None

    def chain(self, key: BlockKey | None) -> Iterator[E]:
        """The stored entry ``key`` and its stored ancestors, from the tail to the head."""
        seen: set[BlockKey] = set()  # a foreign chain may be given in a ring
        while key is not None and key not in seen:
            entry = self.entries.get(key)
            if entry is None:
                return
            seen.add(key)
            yield entry
            key = entry.parent


class Block(Entry):
    """A block in memory.

    Attributes:
        slot: Where its bytes lie.
        holds: Read leases, pins and copies under way that keep it in place.
        stored: Whether it is in the index; a removed block that is held lives on until the last hold.
        places: Which slower tiers are known to have a copy, as bits.
        lossy: Whether it is not what was computed, or was computed behind a block that is not: readers who
            take no loss do not find it. Set before the block is stored.
        position: Number in the chain if it was stored with one, or :meth:`find_position` found it.
    """

    __slots__ = ("holds", "lossy", "places", "position", "slot", "stored")

    index: ChainIndex[Block]

    def __init__(self, index: ChainIndex[Block], key: BlockKey, parent: BlockKey | None, slot: Slot) -> None:
        self.index = index  # all of Entry's too, written out: one is made for each block that is saved
        self.key = key
        self.parent = parent
        self.children = 0
        self.mark = 0
        self.older = None
        self.newer = None
        self.slot = slot
        self.holds = 0
        self.stored = False
        self.places = 0
        self.lossy = False
        self.position = _NOT_ASKED

    def find_position(self) -> int:
        """Its number in the chain, from 0; -1 if that is not known, since an ancestor is not in memory.

        Found once: what is asked for each block of a chain in turn takes one step each.
        """
        index, unknown = self.index, []
        at: Block | None = self
        while at is not None and at.position == _NOT_ASKED:
            at.position = _UNKNOWN  # for now: a foreign chain may be given in a ring
            unknown.append(at)
            if at.parent is None:
                at.position = 0
                unknown.pop()
                break
            at = index.entries.get(at.parent)
        if at is not None and at.position >= 0:
            for number, block in enumerate(reversed(unknown), at.position + 1):
                block.position = number
        return max(self.position, -1)

    @property
    def nbytes(self) -> int:
        """Bytes of its slot, in whole pages."""
        return self.index.slot_nbytes


class ExactBlocks:
    """The stored blocks of one namespace as those find them who take no loss. The store's lock is held."""

    __slots__ = ("_entries",)

    def __init__(self, entries: Mapping[BlockKey, Block]) -> None:
        self._entries = entries

    def get(self, key: BlockKey) -> Block | None:
        """The block of that key, if it has lost nothing."""
        block = self._entries.get(key)
        return None if block is None or block.lossy else block

    def __contains__(self, key: BlockKey) -> bool:
        return self.get(key) is not None


StoredBlocks: TypeAlias = "dict[BlockKey, Block] | ExactBlocks"
"""What one kind of reader finds in memory, by key."""
