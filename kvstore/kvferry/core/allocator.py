"""Page runs of one segment: best fit, lowest address first, neighbours joined when freed."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort

from kvferry.core.errors import StoreError

__all__ = ["PageAllocator"]

# A free run is kept in order as one number, its length before its start: quicker to compare than a pair.
_START_BITS = 40
_START = (1 << _START_BITS) - 1


class PageAllocator:
    """Hands out runs of pages of mixed lengths; keeps numbers only, never touches memory.

    The smallest free run that is long enough is used, of those the one with the lowest address, and
    a freed run is joined with its free neighbours at once: free space is always described by the
    fewest possible runs, and a run is split only when no better fit exists. A slot wastes less than
    one page. Searching is O(log n) in the number of free runs; the one list insertion moves eight
    bytes a run. Not thread safe: the arena's lock is held.
    """

    __slots__ = ("_by_size", "_free", "_stops", "_used", "free_pages", "pages")

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.free_pages = pages
        self._free: dict[int, int] = {0: pages} if pages else {}  # start -> length
        self._stops: dict[int, int] = {pages: 0} if pages else {}  # stop -> start
        self._by_size: list[int] = [pages << _START_BITS] if pages else []
        self._used = array("I", bytes(4 * pages))  # length of the run handed out at each page, else 0

    @property
    def largest_run(self) -> int:
        """Pages of the longest free run."""
        return self._by_size[-1] >> _START_BITS if self._by_size else 0

    def runs(self) -> list[tuple[int, int]]:
        """Free runs as (start, pages), by address."""
        return sorted(self._free.items())

    def length(self, start: int) -> int | None:
        """Pages of the run handed out at ``start``, ``None`` if there is none."""
        return self._used[start] or None if 0 <= start < self.pages else None

    def allocate(self, pages: int) -> int | None:
        """First page of a run of ``pages`` pages, or ``None`` if no free run is long enough.

        Raises:
            ValueError: If ``pages`` is less than 1.
        """
        starts = self.allocate_many(1, pages)
        return starts[0] if starts else None

    def allocate_many(self, count: int, pages: int) -> list[int]:
        """First pages of up to ``count`` runs of ``pages`` pages, side by side; none if no free run has one.

        They are the runs that as many single calls would give, up to the end of the first free run: what is
        left of the best fit fits better than any other.

        Raises:
            ValueError: If ``pages`` is less than 1.
        """
        if pages < 1:
            raise ValueError(f"a run of {pages} pages")
        by_size = self._by_size
        at = bisect_left(by_size, pages << _START_BITS)
        if at == len(by_size):
            return []
        run = by_size.pop(at)
        length, start = run >> _START_BITS, run & _START
        stop = start + length
        taken = min(count, length // pages) * pages
        del self._free[start]
        if length > taken:
            rest = start + taken
            self._free[rest] = length - taken
            self._stops[stop] = rest
            insort(by_size, (length - taken) << _START_BITS | rest, 0, at)
        else:
            del self._stops[stop]
        self.free_pages -= taken
        if taken == pages:
            self._used[start] = pages
            return [start]
        starts = list(range(start, start + taken, pages))
        for first in starts:
            self._used[first] = pages
        return starts

    def free(self, start: int) -> int:
        """Take a run back; returns its pages.

        Raises:
            StoreError: If no run was handed out at ``start``; nothing changes.
        """
        pages = self.length(start)
        if pages is None:
            raise StoreError(f"page {start} starts no slot in use; it was freed already or never handed out")
        self._used[start] = 0
        self.free_pages += pages
        length = pages
        stop = start + length
        after = self._free.get(stop)
        if after is not None:
            self._remove(stop, after)
            length += after
        before = self._stops.get(start)
        if before is not None:
            self._remove(before, start - before)
            length += start - before
            start = before
        self._insert(start, length)
        return pages

    def split(self, start: int, pages: int) -> int:
        """Make two runs, to be freed apart, of one in use, the first of ``pages`` pages; where the second is.

        Raises:
            StoreError: If no run was handed out at ``start``, or none that is longer.
        """
        length = self.length(start)
        if length is None or not 0 < pages < length:
            raise StoreError(f"{pages} pages of the run at page {start}, which has {length or 0}")
        self._used[start], self._used[start + pages] = pages, length - pages
        return start + pages

    def _insert(self, start: int, length: int) -> None:
        self._free[start] = length
        self._stops[start + length] = start
        insort(self._by_size, length << _START_BITS | start)

    def _remove(self, start: int, length: int) -> None:
        del self._free[start], self._stops[start + length]
        del self._by_size[bisect_left(self._by_size, length << _START_BITS | start)]
