"""Eviction: what a policy is told, what it answers, and the one that evicts what was used least recently.

**Chains.** An entry with a stored child is an inner entry, one without is a tail. Tails go first; when the
last child of an entry is gone it is a tail itself. So a chain shrinks from its end and what is left of it is
always a usable prefix. Only when every tail is pinned are inner entries evicted, and of those the deepest
below the oldest first.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvferry.core.keys import BlockKey

if TYPE_CHECKING:
    from kvferry.core.chains import ChainIndex

__all__ = [
    "Entry",
    "EntryList",
    "EvictionPolicy",
    "LRUPolicy",
    "Leave",
    "evictions",
    "inner_victims",
    "tell_capacity",
]

E = TypeVar("E", bound="Entry")


class Entry:
    """One block as an index and a policy see it; tiers inherit and add where the bytes are.

    Compared by identity. A million of them must fit in memory: subclasses have ``__slots__`` too.

    Attributes:
        key: Its key.
        parent: Key of the block before it, ``None`` for the first of a chain (or if not known).
        index: The namespace it is stored in.
        children: Stored blocks whose parent it is; the index counts them.
        older: The policy's own: neighbour in a list.
        newer: The policy's own: neighbour in a list.
        mark: The policy's own: a small number.
    """

    __slots__ = ("children", "index", "key", "mark", "newer", "older", "parent")

    def __init__(self, index: ChainIndex[Any], key: BlockKey, parent: BlockKey | None) -> None:
        self.index = index
        self.key = key
        self.parent = parent
        self.children = 0
        self.mark = 0
        self.older: Entry | None = None
        self.newer: Entry | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that its eviction gives back."""
        raise NotImplementedError


class EvictionPolicy(Protocol):
    """Decides what goes first. Called under its tier's lock: does no I/O, never waits, raises nothing.

    Made with the capacity of its tier in bytes as only argument. Every entry is told of by ``inserted``
    and later by ``removed``, whoever decided that it goes. One that needs the capacity may also have
    ``resized(capacity_nbytes)``, called in the same way when there is another one from then on.
    """

    def inserted(self, entry: Entry) -> None:
        """``entry`` was stored. Blocks of one call come from the tail to the head of their chain."""
        ...

    def accessed(self, entries: Iterable[Entry]) -> None:
        """Stored entries were used; given from tail to head, so that the head counts as used last."""
        ...

    def released(self, entry: Entry) -> None:
        """A stored entry may be evicted again: its last pin or its last stored child is gone.

        Must be told of every entry for which ``pinned`` was true in :meth:`victims`, and of every one whose
        ``children`` went down to 0.
        """
        ...

    def removed(self, entry: Entry) -> None:
        """``entry`` is not stored any more."""
        ...

    def victims(self, nbytes: int, pinned: Callable[[Entry], bool]) -> Iterator[Entry]:
        """What to evict, first one first, until about ``nbytes`` bytes are given back or nothing is left.

        Lazy: before the next one is asked for, the last one is removed, or has become pinned. Between two
        steps nothing else happens to the policy but ``removed`` and ``released``.

        Args:
            nbytes: Bytes wanted.
            pinned: Whether an entry has to stay now.
        """
        ...


def tell_capacity(policy: EvictionPolicy, capacity_nbytes: int) -> None:
    """Tell a policy of another capacity, if it wants to know; under its tier's lock."""
    resized = getattr(policy, "resized", None)
    if resized is not None:
        resized(capacity_nbytes)


class Leave(enum.Enum):
    """Whether a block may be evicted."""

    NOW = "now"
    COPIED_FIRST = "copied first"
    """It is being copied to a slower tier: whoever says so has seen to that."""
    NOT_YET = "not yet"
    """It must be copied, but the queue has no place: nothing is evicted until some copy is made."""


def evictions(
    policy: EvictionPolicy,
    nbytes: int,
    pinned: Callable[[Entry], bool],
    may_leave: Callable[[E], Leave] | None,
    forget: Callable[[E], None],
) -> Generator[bool, None, None]:
    """Evict one entry, or begin to, before each step (``True``); ends when nothing is left to evict.

    Args:
        policy: Of a tier all of whose entries are of the kind that the others take.
        nbytes: As many as the tier has.
        pinned: Whether an entry has to stay.
        may_leave: Asked before one goes; all may if there is nobody to ask.
        forget: Takes one out of the index, and counts it.
    """
    victims: Iterator[Any] = policy.victims(nbytes, pinned)
    for victim in victims:
        answer = Leave.NOW if may_leave is None else may_leave(victim)
        if answer is Leave.NOT_YET:
            return
        if answer is Leave.NOW:
            forget(victim)
        yield True


class EntryList:
    """A doubly linked list through the entries themselves: every change is O(1) and allocates nothing."""

    __slots__ = ("_end",)

    def __init__(self) -> None:
        end = Entry.__new__(Entry)  # before the oldest and after the newest
        end.older = end.newer = end
        self._end = end

    def __iter__(self) -> Iterator[Entry]:
        """From the oldest to the newest; the list may not change meanwhile."""
        entry = self._end.newer
        while entry is not None and entry is not self._end:
            yield entry
            entry = entry.newer

    @property
    def oldest(self) -> Entry | None:
        """The entry at the old end."""
        found = self._end.newer
        return None if found is self._end else found

    def append(self, entry: Entry) -> None:
        """Enter at the new end an entry that is in no list."""
        end = self._end
        newest = end.older
        assert newest is not None
        entry.older, entry.newer = newest, end
        newest.newer = end.older = entry

    def prepend(self, entry: Entry) -> None:
        """Enter at the old end an entry that is in no list."""
        end = self._end
        oldest = end.newer
        assert oldest is not None
        entry.older, entry.newer = end, oldest
        oldest.older = end.newer = entry

    @staticmethod
    def unlink(entry: Entry) -> None:
        """Take ``entry`` out of whatever list it is in; of none, if a signal handler kept it out."""
        older, newer = entry.older, entry.newer
        if older is None or newer is None:
            return
        older.newer, newer.older = newer, older
        entry.older = entry.newer = None


_PASSED = 1  # mark of an entry that was passed over: an inner one, or pinned


class LRUPolicy:
    """Evicts what was used least recently. O(1) a call, amortized; needs no memory beside the entries.

    All entries are in one list by recency. One that cannot go when its turn comes is set aside, so that
    it is not met again and again; when it is released it is older than all that are left, and so is the
    next to go.

    Args:
        capacity_nbytes: Not used.
    """

    def __init__(self, capacity_nbytes: int = 0) -> None:
        del capacity_nbytes
        self._list = EntryList()
        self._passed = EntryList()

    def inserted(self, entry: Entry) -> None:
        """See :class:`EvictionPolicy`."""
        entry.mark = 0
        end = self._list._end  # append, written out: this is the hot path of every save
        newest = end.older
        assert newest is not None
        entry.older, entry.newer = newest, end
        newest.newer = end.older = entry

    def accessed(self, entries: Iterable[Entry]) -> None:
        """See :class:`EvictionPolicy`."""
        end = self._list._end
        newest = end.older
        assert newest is not None
        for entry in entries:  # unlink and append, written out: this is the hot path of every load
            if entry is newest:
                continue
            older, newer = entry.older, entry.newer
            if older is not None and newer is not None:  # else a signal handler kept it from being entered
                older.newer, newer.older = newer, older
            entry.mark = 0
            entry.older = newest
            newest.newer = entry
            entry.newer = end
            end.older = newest = entry

    def released(self, entry: Entry) -> None:
        """See :class:`EvictionPolicy`."""
        if entry.mark == _PASSED and entry.newer is not None:
            entry.mark = 0
            self._list.unlink(entry)
            self._list.prepend(entry)

    def removed(self, entry: Entry) -> None:
        """See :class:`EvictionPolicy`."""
        self._list.unlink(entry)

    def victims(self, nbytes: int, pinned: Callable[[Entry], bool]) -> Iterator[Entry]:
        """See :class:`EvictionPolicy`."""
        while nbytes > 0:
            entry = self._list.oldest
            if entry is None:
                break
            if entry.children or pinned(entry):
                self._list.unlink(entry)
                self._passed.append(entry)
                entry.mark = _PASSED
                continue
            nbytes -= entry.nbytes
            yield entry
        if nbytes > 0:
            yield from inner_victims(self._passed, nbytes, pinned)


def inner_victims(passed: Iterable[Entry], nbytes: int, pinned: Callable[[Entry], bool]) -> Iterator[Entry]:
    """Inner entries to evict when every tail is pinned: the deepest below the oldest first.

    Args:
        passed: All entries that were passed over, oldest first.
        nbytes: Bytes wanted.
        pinned: Whether an entry has to stay now.
    """
    free = [entry for entry in passed if not pinned(entry)]
    below: dict[tuple[object, BlockKey | None], list[Entry]] = {}
    for entry in free:
        below.setdefault((entry.index, entry.parent), []).append(entry)
    gone: set[Entry] = set()
    for top in free:
        while top not in gone and nbytes > 0:
            victim = top
            seen = {top}  # a foreign chain may be given in a ring
            while True:
                children = below.get((victim.index, victim.key), ())
                child = next((c for c in children if c not in gone and c not in seen), None)
                if child is None:
                    break
                seen.add(child)
                victim = child
            gone.add(victim)
            nbytes -= victim.nbytes
            yield victim
