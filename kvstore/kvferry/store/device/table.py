"""Pages of a device by number: who holds them, which blocks they keep, and what goes first.

Nothing here waits or calls a device, but for asking events whether they are done; nothing is thread safe: the
owner's lock is held around every call.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Sequence
from weakref import WeakValueDictionary

from kvferry.core.chains import ChainIndex
from kvferry.core.errors import DeviceError, StoreError
from kvferry.core.eviction import Entry, EvictionPolicy, Leave, evictions
from kvferry.core.keys import BlockKey
from kvferry.device.base import Event
from kvferry.store.tier import TierNamespace

__all__ = ["PageTable", "PoolBlock", "is_held", "pending"]

_PRUNE_FROM = 4  # events of one page: more than that are asked which of them are done


class PoolBlock(Entry):
    """A block on a device.

    Attributes:
        pages: Where it lies.
        holds: Who reads it, or copies it, or relies on it to stay.
        stored: Whether it is in the index; one that was removed lives on until its last hold.
        leaving: It goes as soon as a copy of it is made, unless somebody holds it then.
        saved: The store below has it.
        written: Recorded behind the kernels that write it; ``None`` if they are known to be done.
    """

    __slots__ = ("holds", "leaving", "pages", "saved", "stored", "written")

    index: ChainIndex[PoolBlock]

    def __init__(
        self, index: ChainIndex[PoolBlock], key: BlockKey, parent: BlockKey | None, pages: tuple[int, ...]
    ) -> None:
        super().__init__(index, key, parent)
        self.pages = pages
        self.holds = 0
        self.stored = self.leaving = self.saved = False
        self.written: Event | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its pages."""
        return len(self.pages) * self.index.slot_nbytes


class PageTable:
    """See the module.

    Args:
        num_pages: Pages, numbered from 0.
        page_nbytes: Bytes of a page in all layers.
        policy: What goes first.

    Attributes:
        idle_pages: Pages of stored blocks that nobody holds and that are not on their way out.
        leaving_pages: Pages of those that are.
        entries: Stored blocks.
        evicted_blocks: Blocks that had to give their pages to others.
    """

    def __init__(self, num_pages: int, page_nbytes: int, policy: EvictionPolicy) -> None:
        self.num_pages, self.page_nbytes, self.policy = num_pages, page_nbytes, policy
        # each as long as it has blocks, or one is on its way into it
        self.indexes: WeakValueDictionary[TierNamespace, ChainIndex[PoolBlock]] = WeakValueDictionary()
        self.idle_pages = self.leaving_pages = self.entries = self.evicted_blocks = 0
        self._free = list(range(num_pages))  # sorted: runs of neighbours are found, and lead to views
        self._block: dict[int, PoolBlock | None] = {}  # of each page that is not free; ``None``: of no block
        self._uses: dict[int, tuple[Event, ...]] = {}  # last readers and writers of a page, if on a device

    # ---- pages --------------------------------------------------------------------------------------

    @property
    def free_pages(self) -> int:
        """Pages that are nobody's."""
        return len(self._free)

    @property
    def held_pages(self) -> int:
        """Pages that are taken, but not by idle blocks."""
        return self.num_pages - len(self._free) - self.idle_pages

    def take(
        self, count: int, after: int | None = None, *, neighbours: bool = True
    ) -> tuple[list[int], list[Event]]:
        """So many free pages, of which there are enough, in ascending order.

        Args:
            count: How many.
            after: Prefer those that follow this page.
            neighbours: Look for a run of neighbours.

        Returns:
            The pages, and what their next writer waits for on the device: their last users.
        """
        start = self._find_run(count, after) if neighbours else len(self._free) - count
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        events: list[Event] = []
        for page in taken:
            self._block[page] = None
            events.extend(self._uses.pop(page, ()))
        return taken, pending(dict.fromkeys(events))

    def _find_run(self, count: int, after: int | None) -> int:
        """Index in the free list where so many neighbours start; the head if there is no such run."""
        free, last = self._free, len(self._free) - count
        if count == 0:
            return 0
        if after is not None:
            start = bisect_left(free, after + 1)
            if start <= last and free[start] == after + 1 and free[start + count - 1] == after + count:
                return start
        for start in range(last + 1):
            if free[start + count - 1] - free[start] == count - 1:
                return start
        return 0

    def block_of(self, page: int) -> PoolBlock | None:
        """The block that a taken page keeps.

        Raises:
            KeyError: If the page is free or stranded, or does not exist.
        """
        return self._block[page]

    def used(self, pages: Iterable[int], event: Event | None) -> None:
        """Whoever writes into the pages next waits for ``event`` on the device."""
        if event is None:
            return
        for page in pages:
            known = self._uses.get(page, ())
            if len(known) >= _PRUNE_FROM:
                known = tuple(pending(known))
            self._uses[page] = (*known, event)

    def strand(self, pages: Iterable[int]) -> None:
        """Taken pages are nobody's to give back or to publish until :meth:`unstrand`."""
        for page in pages:
            del self._block[page]

    def unstrand(self, pages: Iterable[int]) -> None:
        """They are as they were taken."""
        for page in pages:
            self._block[page] = None

    def give_back(self, pages: Sequence[int]) -> None:
        """Pages are nobody's any more."""
        for page in pages:
            del self._block[page]
        if len(pages) > len(self._free) // 8:
            self._free = sorted([*self._free, *pages])
        else:
            for page in pages:
                self._free.insert(bisect_left(self._free, page), page)

    # ---- blocks -------------------------------------------------------------------------------------

    def index(self, name: TierNamespace, namespace_id: bytes) -> ChainIndex[PoolBlock]:
        """The index of a namespace, made if there is none; it goes with the last block of it."""
        found = self.indexes.get(name)
        if found is None:
            found = self.indexes[name] = ChainIndex(namespace_id, self.page_nbytes)
        return found

    def store(self, block: PoolBlock) -> None:
        """Enter a block whose key is not stored, in pages that keep no block yet."""
        block.stored = True
        block.index.add(block)
        for page in block.pages:
            self._block[page] = block
        self.entries += 1
        self.policy.inserted(block)
        self._count(block, 1)

    def touch(self, head_to_tail: Sequence[PoolBlock]) -> None:
        """Count blocks as used now."""
        self.policy.accessed(reversed(head_to_tail))

    def hold(self, block: PoolBlock) -> None:
        """Keep its bytes in place until :meth:`drop`."""
        self._count(block, -1)
        block.holds += 1
        self._count(block, 1)

    def drop(self, block: PoolBlock) -> None:
        """End one :meth:`hold`; the last one of a removed block frees its pages.

        Raises:
            StoreError: If nobody holds it.
        """
        if block.holds < 1:
            raise StoreError(f"block {block.key[:8].hex()}… is dropped more often than it was held")
        self._count(block, -1)
        block.holds -= 1
        self._count(block, 1)
        if not block.holds and block.stored:
            self.policy.released(block)
        self._free_unused(block)

    def forget(self, block: PoolBlock) -> None:
        """Take a stored block out of the index; its pages are free when nobody holds or copies it."""
        if block.leaving:
            block.index.attach(block)
        self._count(block, -1)
        tail = block.index.discard(block)
        block.stored = False
        self.entries -= 1
        self.policy.removed(block)
        if tail is not None:
            self.policy.released(tail)
        self._free_unused(block)

    def _free_unused(self, block: PoolBlock) -> None:
        if not (block.stored or block.holds or block.leaving):
            self.give_back(block.pages)

    def _count(self, block: PoolBlock, sign: int) -> None:
        if block.stored and not block.holds:
            if block.leaving:
                self.leaving_pages += sign * len(block.pages)
            else:
                self.idle_pages += sign * len(block.pages)

    # ---- room ---------------------------------------------------------------------------------------

    def evictions(
        self, pinned: Callable[[Entry], bool], may_leave: Callable[[PoolBlock], Leave] | None = None
    ) -> Generator[bool, None, None]:
        """See :func:`~kvferry.core.eviction.evictions`; a block that is copied first is :meth:`leave`'s."""
        return evictions(self.policy, self.num_pages * self.page_nbytes, pinned, may_leave, self._evict)

    def _evict(self, block: PoolBlock) -> None:
        self.forget(block)
        self.evicted_blocks += 1

    def leave(self, block: PoolBlock) -> None:
        """A stored block goes when its copy is made; its parent counts as a tail meanwhile."""
        self._count(block, -1)
        block.leaving = True
        self._count(block, 1)
        tail = block.index.detach(block)
        if tail is not None:
            self.policy.released(tail)

    def left(self, block: PoolBlock) -> None:
        """The copy that :meth:`leave` waited for is over: evict, unless somebody holds the block now."""
        if not block.stored:  # removed meanwhile
            block.leaving = False
            self._free_unused(block)
            return
        self._count(block, -1)
        block.leaving = False
        self._count(block, 1)
        block.index.attach(block)
        if not block.holds:
            self._evict(block)


def is_held(entry: Entry) -> bool:
    """Whether a block may not be evicted now."""
    assert isinstance(entry, PoolBlock)
    return entry.holds > 0 or entry.leaving


def pending(events: Iterable[Event]) -> list[Event]:
    """Those that a device has not come to yet."""
    found = []
    for event in events:
        try:
            done = event.query()
        except (RuntimeError, DeviceError):  # the device is dead: copies will say so
            done = False
        if not done:
            found.append(event)
    return found
