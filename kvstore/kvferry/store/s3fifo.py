"""S3-FIFO: eviction with three first-in-first-out queues.

After Yang, Zhang, Qiu, Yue, Vinayak: *FIFO queues are all you need for cache eviction* (SOSP '23),
algorithm 1; written from the paper. A small queue (a tenth of the capacity) filters blocks that are used
once: what was used more than once while it was there moves to the main queue, the rest is evicted and its key
remembered in a ghost queue. A block whose key is remembered enters the main queue at once. The main queue
gives a block that was used since another round.

Added here: blocks are in bytes, not in objects; tails go before heads. An inner entry, or a pinned one, whose
turn comes is set aside and comes back at the old end of its queue when it is released.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from kvferry.core.eviction import Entry, EntryList, inner_victims

__all__ = ["S3FIFOPolicy"]

_SMALL_SHARE = 10  # the small queue has 1/10 of the capacity
_MAX_FREQ = 3
_FREQ = 3  # bits of an entry's mark: how often it was used, which queue is its own, whether it is set aside
_MAIN = 4
_PASSED = 8


class S3FIFOPolicy:
    """See the module. O(1) a call, amortized; beside the entries it keeps about 100 bytes a ghost.

    Args:
        capacity_nbytes: Of the tier.
    """

    def __init__(self, capacity_nbytes: int) -> None:
        self._small_nbytes = capacity_nbytes // _SMALL_SHARE
        self._small = EntryList()
        self._main = EntryList()
        self._passed = EntryList()
        self._nbytes = [0, 0]  # of small and main, with what is set aside
        self._entries = 0
        self._ghosts: deque[int] = deque()
        self._ghost_counts: dict[int, int] = {}

    def resized(self, capacity_nbytes: int) -> None:
        """The small queue has its share of another capacity from now on; evictions bring it there."""
        self._small_nbytes = capacity_nbytes // _SMALL_SHARE

    def inserted(self, entry: Entry) -> None:
        """See :class:`~kvferry.core.eviction.EvictionPolicy`."""
        entry.mark = _MAIN if _ghost(entry) in self._ghost_counts else 0
        self._entries += 1
        self._count(entry, 1)
        self._queue(entry).append(entry)

    def accessed(self, entries: Iterable[Entry]) -> None:
        """See :class:`~kvferry.core.eviction.EvictionPolicy`."""
        for entry in entries:
            if entry.mark & _FREQ < _MAX_FREQ:
                entry.mark += 1

    def released(self, entry: Entry) -> None:
        """See :class:`~kvferry.core.eviction.EvictionPolicy`."""
        if entry.mark & _PASSED and entry.newer is not None:
            entry.mark -= _PASSED
            self._passed.unlink(entry)
            self._queue(entry).prepend(entry)

    def removed(self, entry: Entry) -> None:
        """See :class:`~kvferry.core.eviction.EvictionPolicy`."""
        self._entries -= 1
        self._count(entry, -1)
        EntryList.unlink(entry)

    def victims(self, nbytes: int, pinned: Callable[[Entry], bool]) -> Iterator[Entry]:
        """See :class:`~kvferry.core.eviction.EvictionPolicy`."""
        while nbytes > 0:
            entry = self._next(pinned)
            if entry is None:
                break
            nbytes -= entry.nbytes
            yield entry
        if nbytes > 0:
            yield from inner_victims(self._passed, nbytes, pinned)

    def _next(self, pinned: Callable[[Entry], bool]) -> Entry | None:
        while True:
            small, main = self._small.oldest, self._main.oldest
            if small is not None and (self._nbytes[0] >= self._small_nbytes or main is None):
                found = self._from_small(small, pinned)
            elif main is not None:
                found = self._from_main(main, pinned)
            else:
                return None
            if found is not None:
                return found

    def _from_small(self, entry: Entry, pinned: Callable[[Entry], bool]) -> Entry | None:
        if entry.mark & _FREQ > 1:
            self._small.unlink(entry)
            self._count(entry, -1)
            entry.mark = _MAIN
            self._count(entry, 1)
            self._main.append(entry)
            return None
        if self._set_aside(entry, pinned):
            return None
        self._remember(entry)
        return entry

    def _from_main(self, entry: Entry, pinned: Callable[[Entry], bool]) -> Entry | None:
        if entry.mark & _FREQ:
            entry.mark -= 1
            self._main.unlink(entry)
            self._main.append(entry)
            return None
        return None if self._set_aside(entry, pinned) else entry

    def _set_aside(self, entry: Entry, pinned: Callable[[Entry], bool]) -> bool:
        if not (entry.children or pinned(entry)):
            return False
        EntryList.unlink(entry)
        entry.mark |= _PASSED
        self._passed.append(entry)
        return True

    def _remember(self, entry: Entry) -> None:
        ghost = _ghost(entry)
        self._ghosts.append(ghost)
        self._ghost_counts[ghost] = self._ghost_counts.get(ghost, 0) + 1
        while len(self._ghosts) > self._entries:  # about as many as the main queue can have
            old = self._ghosts.popleft()
            left = self._ghost_counts[old] - 1
            if left:
                self._ghost_counts[old] = left
            else:
                del self._ghost_counts[old]

    def _queue(self, entry: Entry) -> EntryList:
        return self._main if entry.mark & _MAIN else self._small

    def _count(self, entry: Entry, sign: int) -> None:
        main = 1 if entry.mark & _MAIN else 0
        self._nbytes[main] += sign * entry.nbytes


def _ghost(entry: Entry) -> int:
    """Eight bytes of the key: a mistake in 2**64 only misplaces a block."""
    return int.from_bytes(entry.key[:8], "little")
