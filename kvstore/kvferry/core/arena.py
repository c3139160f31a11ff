"""The arena: host memory of one tenant from which blocks of mixed sizes are handed out."""

from __future__ import annotations

import errno
import logging
import os
import resource
import threading
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvferry.core.allocator import PageAllocator
from kvferry.core.arena_map import ArenaLayout, ArenaMap
from kvferry.core.buffers import PAGE_NBYTES
from kvferry.core.errors import CapacityError, ConfigError, StoreError
from kvferry.core.placement import ANYWHERE, Placement
from kvferry.core.segments import (
    MappedSegment,
    MappedSlots,
    RetiredPage,
    RetiredSegment,
    Segment,
    SegmentInfo,
    Slot,
    pages_of,
)
from kvferry.core.streaming_copy import stream_into
from kvferry.core.values import require_whole

__all__ = [
    "Arena",
    "ArenaLayout",
    "ArenaMap",
    "MappedSegment",
    "MappedSlots",
    "Segment",
    "SegmentInfo",
    "Slot",
    "available_memory",
    "require_memory",
]

_LOG = logging.getLogger(__name__)
_MEMINFO = Path("/proc/meminfo")
_MIN_SEGMENT_NBYTES = 64 << 20
_MAX_SEGMENT_NBYTES = 4 << 30  # populating more would hold the store's lock for seconds
_REMEDIES = {
    errno.EFBIG: "; raise this process's limit of file sizes (ulimit -f)",
    errno.EMFILE: "; raise this process's limit of open files (ulimit -n, LimitNOFILE=)",
}
_SLOTS_A_SEGMENT = 16  # at least, so that the unusable rest of a segment is below 1/16 of it


def available_memory() -> int:
    """Bytes that the kernel can give without swapping (``MemAvailable``).

    Raises:
        StoreError: If the kernel does not say.
    """
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise StoreError(f"{_MEMINFO} has no MemAvailable")


def require_memory(capacity_nbytes: int, placement: Placement = ANYWHERE) -> None:
    """See whether an arena of that size can be had now.

    Raises:
        ConfigError: If it is above the memory that is available, or the placement cannot be had.
    """
    placement.check(capacity_nbytes)
    available = available_memory()
    if capacity_nbytes > available and not placement.hugepages:
        raise ConfigError(
            f"an arena of {capacity_nbytes} bytes was asked, {available} bytes of memory are available; "
            "lower the capacity (store.dram_capacity)"
        )


def _require_file_size(segment_nbytes: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < segment_nbytes:
        raise ConfigError(
            f"this process may make files of {limit} bytes, and a segment of its memory, which is one, takes "
            f"{segment_nbytes}{_REMEDIES[errno.EFBIG]}, or lower the capacity (store.dram_capacity)"
        )


class Arena:
    """A list of segments of one tenant, grown on demand up to a hard capacity. Thread safe.

    Slots are page-aligned runs of pages; the generation of a slot's first page is raised when the
    slot is freed, before any of its pages can be handed out again.

    Args:
        capacity_nbytes: Bytes of all segments together, rounded down to pages.
        tenant: Whose KV it holds.
        segment_nbytes: Smallest segment; segments grow with the arena.
        shared: See :class:`Segment`.
        placement: Where the memory comes from; the capacity is rounded down to its granule.

    Attributes:
        refusal: Why the last segment that was wanted could not be had; empty if it could.

    Raises:
        ConfigError: If the capacity is below a page or above the memory that is available now, or the
            placement cannot be had.
    """

    def __init__(
        self,
        capacity_nbytes: int,
        *,
        tenant: str = "default",
        segment_nbytes: int = _MIN_SEGMENT_NBYTES,
        shared: bool = True,
        placement: Placement = ANYWHERE,
    ) -> None:
        require_whole("capacity_nbytes", capacity_nbytes)
        if capacity_nbytes < PAGE_NBYTES:
            raise ConfigError(
                f"an arena of {capacity_nbytes} bytes; at least one page ({PAGE_NBYTES}) is needed"
            )
        require_whole("segment_nbytes", segment_nbytes, least=1)
        require_memory(capacity_nbytes, placement)
        if shared:
            _require_file_size(min(capacity_nbytes, segment_nbytes))
        self.tenant = tenant
        self.placement = placement
        self._granule = placement.granule_nbytes
        self.capacity_nbytes = capacity_nbytes // self._granule * self._granule
        self.epoch = uuid.uuid4().hex
        self._shared = shared
        self._segment_nbytes = -(-segment_nbytes // self._granule) * self._granule
        self._lock = threading.Lock()
        self._segments: list[Segment | RetiredSegment] = []
        self._allocators: list[PageAllocator] = []
        self._parked: list[set[int]] = []  # of each segment: first pages of runs that are kept from use
        self._withdrawn_pages: list[int] = []  # the same with what is gone
        self._parked_pages = 0
        self._parked_later = False  # since they were put together
        self._freed_pages = 0  # likewise
        self._retired: RetiredPage | None = None
        self._mapped_nbytes = 0
        self._used_pages = 0
        self._refused_growth = False
        self.refusal = ""
        self._closed = False

    @property
    def used_nbytes(self) -> int:
        """Bytes of the slots in use, in whole pages."""
        return self._used_pages * PAGE_NBYTES

    @property
    def free_nbytes(self) -> int:
        """Bytes up to the capacity that no slot uses, mapped or not; not necessarily one run."""
        return self.capacity_nbytes - self.used_nbytes

    @property
    def mapped_nbytes(self) -> int:
        """Bytes of all segments made so far, without what :meth:`resize` took: populated, so in use."""
        return self._mapped_nbytes

    @property
    def kept_nbytes(self) -> int:
        """Bytes that :meth:`resize` took out of use and could not give back: for when it grows again."""
        return self._parked_pages * PAGE_NBYTES

    def resize(self, capacity_nbytes: int) -> bool:
        """Another capacity from now on. What is above it goes as slots are freed: evict, to have that soon.

        Pages that are withdrawn are given back to the system, and are never handed out again: a device or
        network card that has pinned them would go on with those that it knows. Growth takes new segments.
        What cannot be given back is kept for when it grows again: in an arena that only its owner writes the
        seals forbid it, and 2 MiB pages go whole. A segment of which nothing is left in use is closed: its
        memory goes when clients have let go of it, too.

        Returns:
            Whether all that was withdrawn so far went, or will with the clients' maps.

        Raises:
            ConfigError: If the capacity is below the smallest piece that the placement has.
        """
        require_whole("capacity_nbytes", capacity_nbytes)
        if capacity_nbytes < self._granule:
            raise ConfigError(
                f"an arena of {capacity_nbytes} bytes; at least one page ({self._granule}) is needed"
            )
        with self._lock:
            if self._closed:
                return True
            self.capacity_nbytes = capacity_nbytes // self._granule * self._granule
            self._refused_growth = False
            self._withdraw_anew()
            return not self._parked_pages

    def settle(self) -> None:
        """Give back what could not be at once, if slots beside it are free now; near-free if nothing is."""
        with self._lock:
            if self._closed or not self._parked_pages:
                return
            if self._parked_later or self._freed_pages >= self._parked_pages:
                self._withdraw_anew()

    def _withdraw_anew(self) -> None:
        """Under the lock: withdraw with neighbours joined, and as far behind as possible."""
        for number, parked in enumerate(self._parked):
            while parked:  # in such an order that an interruption may lose a run, but frees none twice
                start = parked.pop()
                pages = self._allocators[number].length(start) or 0
                self._parked_pages -= pages
                self._withdrawn_pages[number] -= pages
                self._mapped_nbytes += pages * PAGE_NBYTES
                self._allocators[number].free(start)
        self._freed_pages = 0
        self._withdraw()
        for number in range(len(self._segments)):
            self._retire_unused(number)
        self._parked_later = False

    def _withdraw(self) -> None:
        """Under the lock: take free pages above the capacity out of use, from the last segment on."""
        for number in reversed(range(len(self._segments))):
            allocator = self._allocators[number]
            while (over := self._mapped_nbytes - self.capacity_nbytes) > 0 and allocator.largest_run:
                self._withdraw_run(number, over // PAGE_NBYTES)
                self._retire_unused(number)

    def _withdraw_run(self, number: int, most: int) -> None:
        """At most so many pages; only whole granules can be given back, so those if there are any."""
        allocator, step = self._allocators[number], self._granule // PAGE_NBYTES
        pages = allocator.largest_run if step > 1 else min(allocator.largest_run, most)
        start = allocator.allocate(pages)
        assert start is not None
        first, stop = -(-start // step) * step, start + pages
        taken = min(stop // step * step - first, most // step * step)
        is_whole = taken > 0
        if not is_whole:
            first, taken = start, min(pages, most)
        if first > start:
            allocator.split(start, first - start)
            allocator.free(start)
        if first + taken < stop:
            allocator.free(allocator.split(first, taken))
        segment = self._segments[number]
        if not is_whole or not segment.give_back(first * PAGE_NBYTES, taken * PAGE_NBYTES):
            self._parked[number].add(first)
            self._parked_pages += taken
            self._parked_later = True
        self._withdrawn_pages[number] += taken
        self._mapped_nbytes -= taken * PAGE_NBYTES

    def _retire_unused(self, number: int) -> None:
        """Under the lock: close a segment all of which is withdrawn."""
        segment, pages = self._segments[number], self._allocators[number].pages
        if not pages or self._withdrawn_pages[number] < pages:
            return
        try:
            self._retired = self._retired or RetiredPage()
        except OSError as error:  # tried again by the next change
            _LOG.debug("segment %d of tenant %s is not closed: %s", number, self.tenant, error)
            return
        self._segments[number] = RetiredSegment(number, self.tenant, self._retired)
        self._allocators[number] = PageAllocator(0)
        self._parked_pages -= self._withdrawn_pages[number] - segment.gone_nbytes // PAGE_NBYTES
        self._parked[number].clear()
        self._withdrawn_pages[number] = 0
        segment.close()

    def allocate(self, nbytes: int) -> Slot | None:
        """A slot of ``nbytes`` bytes, or ``None`` if no free run is long enough and the arena can't grow.

        Raises:
            CapacityError: If it could never fit.
            StoreError: If the arena is closed.
        """
        slots = self.allocate_many(1, nbytes)
        return slots[0] if slots else None

    def allocate_many(self, count: int, nbytes: int) -> list[Slot] | None:
        """As many slots of ``nbytes`` bytes each, or ``None`` with nothing taken if there is no room for all.

        Raises:
            CapacityError: If one of them could never fit.
            StoreError: If the arena is closed.
        """
        if nbytes < 0:
            raise ValueError(f"a slot of {nbytes} bytes")
        pages = pages_of(nbytes)
        if count and pages * PAGE_NBYTES > self.capacity_nbytes:
            raise CapacityError(
                f"a block of {nbytes} bytes never fits an arena of {self.capacity_nbytes} bytes; "
                "raise the capacity (store.dram_capacity)"
            )
        slots: list[Slot] = []
        number = 0
        with self._lock:
            if self._closed:
                raise StoreError("the arena is closed")
            while len(slots) < count:
                if number == len(self._segments) and not self._grow(pages):
                    for slot in slots:  # nobody saw them: their generations stay
                        self._put_back(slot)
                    return None
                starts = self._allocators[number].allocate_many(count - len(slots), pages)
                if starts:
                    generations = self._segments[number].generations
                    slots += [Slot(number, p * PAGE_NBYTES, nbytes, generations[p]) for p in starts]
                    self._used_pages += pages * len(starts)
                else:
                    number += 1
        return slots

    def write(self, slots: Sequence[Slot], sources: Iterable[memoryview]) -> None:
        """Copy the bytes of one block into each slot, with the GIL released and no lock held.

        Args:
            slots: Slots that are the caller's to write.
            sources: As many flat views of bytes, each as long as its slot says.

        Raises:
            StoreError: If the arena is closed.
            ValueError: If sizes differ; what came before is copied.
        """
        segments = self._segments
        for slot, source in zip(slots, sources, strict=True):
            array = segments[slot.segment].array
            if array is None:
                raise StoreError("the arena is closed")
            if len(source) != slot.nbytes:
                raise ValueError(f"copy of {len(source)} bytes into {slot}")
            stream_into(array, slot.offset, source)

    def free(self, slot: Slot) -> None:
        """Take a slot back; its generation is raised first.

        Raises:
            StoreError: If the slot is not in use under this generation; nothing changes.
        """
        with self._lock:
            if self._closed:
                return
            segment, allocator = self._find(slot)
            if segment.generation(slot.offset) != slot.generation:
                raise StoreError(f"{slot} is not in use; it was freed already")
            pages = allocator.free(slot.offset // PAGE_NBYTES)  # refuses what is not in use
            segment.raise_generation(slot.offset)
            self._used_pages -= pages
            self._freed_pages += pages
            if self._mapped_nbytes > self.capacity_nbytes:
                self._withdraw()

    def view(self, slot: Slot) -> memoryview:
        """The writable bytes of ``slot``; they stay mapped as long as a view lives, also after ``close``."""
        return self._find(slot)[0].view(slot)  # no lock: the segment of a slot in use stays

    def is_current(self, slot: Slot) -> bool:
        """Whether ``slot`` is still in use under its generation."""
        return not self._closed and self._find(slot)[0].generation(slot.offset) == slot.generation

    def first_stale(self, slots: Iterable[Slot]) -> Slot | None:
        """The first of ``slots`` that was freed since, ``None`` if all are still in use."""
        segments = self._segments
        for slot in slots:  # written out: a lease of many blocks is checked at its release
            if self._closed or segments[slot.segment].generation(slot.offset) != slot.generation:
                return slot
        return None

    def layout(self) -> ArenaLayout:
        """The present segments, in the order of :meth:`descriptors`."""
        with self._lock:
            return ArenaLayout(self.tenant, self.epoch, tuple(s.info for s in self._segments))

    def descriptors(self) -> list[tuple[int, int]]:
        """(data, generations) descriptors of the present segments, to be passed on; they stay the arena's."""
        with self._lock:
            return [(s.data_fd, s.generations_fd) for s in self._segments]

    @property
    def shared(self) -> bool:
        """Whether others may map the data writable; see :class:`Segment`."""
        return self._shared

    @property
    def segment_count(self) -> int:
        """How many segments there are now."""
        return len(self._segments)

    def export(self, first: int = 0, most: int | None = None) -> tuple[ArenaLayout, list[int]]:
        """Segments to be passed on: at most ``most`` from number ``first`` on, as the caller's own copies.

        Returns:
            Their layout, and two descriptors a segment (data, generations), which the caller closes.

        Raises:
            StoreError: If the arena is closed, or this process may open no more files.
        """
        fds: list[int] = []
        with self._lock:
            if self._closed:
                raise StoreError("the arena is closed")
            segments = self._segments[first : None if most is None else first + most]
            try:
                for segment in segments:
                    fds += [os.dup(segment.data_fd)]
                    fds += [os.dup(segment.generations_fd)]
            except OSError as error:
                for fd in fds:
                    os.close(fd)
                raise StoreError(
                    f"the descriptors of {len(segments)} segments cannot be copied: {error.strerror}; "
                    "allow more open files (ulimit -n)"
                ) from error
            return ArenaLayout(self.tenant, self.epoch, tuple(s.info for s in segments)), fds

    def close(self) -> None:
        """Close all segments; the memory goes with the last view. A second call does nothing."""
        with self._lock:
            self._closed = True
            for segment in self._segments:
                segment.close()
            if self._retired is not None:
                self._retired.close()

    def _put_back(self, slot: Slot) -> None:
        self._used_pages -= self._allocators[slot.segment].free(slot.offset // PAGE_NBYTES)

    def _find(self, slot: Slot) -> tuple[Segment | RetiredSegment, PageAllocator]:
        if not 0 <= slot.segment < len(self._segments):
            raise StoreError(f"{slot}: the arena has {len(self._segments)} segments")
        return self._segments[slot.segment], self._allocators[slot.segment]

    def _grow(self, pages: int) -> bool:
        room = (self.capacity_nbytes - self._mapped_nbytes) // self._granule * self._granule
        needed = pages * PAGE_NBYTES
        if needed > room:
            return False
        wanted = max(self._segment_nbytes, needed * _SLOTS_A_SEGMENT, self._mapped_nbytes // 8)
        wanted = -(-max(min(wanted, _MAX_SEGMENT_NBYTES), needed) // self._granule) * self._granule
        nbytes = room if room - wanted < self._segment_nbytes else wanted
        try:
            available = available_memory()
            if nbytes > available and not self.placement.hugepages:
                raise MemoryError(f"{available} bytes of memory are available")
            segment = Segment(
                len(self._segments), nbytes, self.tenant, shared=self._shared, placement=self.placement
            )
        except (MemoryError, OSError) as error:
            self._refuse(nbytes, error)
            return False
        self.refusal = ""
        self._segments.append(segment)
        self._allocators.append(PageAllocator(nbytes // PAGE_NBYTES))
        self._parked.append(set())
        self._withdrawn_pages.append(0)
        self._mapped_nbytes += nbytes
        return True

    def _refuse(self, nbytes: int, error: BaseException) -> None:
        """The host ran short since the start: go on with what is mapped; said once."""
        number = error.errno if isinstance(error, OSError) else None
        remedy = _REMEDIES.get(number or 0, "")
        self.refusal = f"a segment of {nbytes} bytes cannot be had: {error}{remedy}"
        if not self._refused_growth:
            self._refused_growth = True
            _LOG.warning(
                "arena of tenant %s stays at %d of %d bytes: no segment of %d bytes: %s%s",
                self.tenant, self._mapped_nbytes, self.capacity_nbytes, nbytes, error, remedy,
            )  # fmt: skip
