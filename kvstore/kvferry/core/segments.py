"""Segments: sealed memfds that hold blocks, with the shared table of their generations.

The owner makes a :class:`Segment`; another process that was passed its two descriptors builds a
:class:`MappedSegment` and needs none of the owner's code to run for a check of generations.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import eq

import numpy as np

from kvferry.core.buffers import PAGE_NBYTES, ByteArray, address_of
from kvferry.core.errors import ProtocolError, StoreError
from kvferry.core.placement import ANYWHERE, Placement

__all__ = [
    "MappedSegment",
    "MappedSlots",
    "RetiredPage",
    "RetiredSegment",
    "Segment",
    "SegmentInfo",
    "Slot",
    "is_mapped_segment",
    "is_segment",
    "pages_of",
]

F_SEAL_FUTURE_WRITE = 0x10  # <linux/fcntl.h>; not named by the fcntl module
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_POPULATE = getattr(mmap, "MAP_POPULATE", 0x8000)
_WORD_NBYTES = 8
_STAT_BLOCK_NBYTES = 512  # of st_blocks
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


def pages_of(nbytes: int) -> int:
    """Pages that ``nbytes`` bytes take; at least one, so that every slot has an address."""
    return -(-nbytes // PAGE_NBYTES) or 1


@dataclass(slots=True, unsafe_hash=True)  # never changed; frozen would take four times as long to make
class Slot:
    """Address of the bytes of one block: plain numbers, valid in every process that maps the segment.

    Attributes:
        segment: Number of the segment in its arena.
        offset: Bytes from the start of the segment; a multiple of the page size.
        nbytes: Bytes of the block; the slot itself ends on the next page border.
        generation: Value of the generation of the first page while the slot is this one.
    """

    segment: int
    offset: int
    nbytes: int
    generation: int

    @property
    def slot_nbytes(self) -> int:
        """Bytes taken from the segment: ``nbytes`` rounded up to pages."""
        return pages_of(self.nbytes) * PAGE_NBYTES


def joined(slots: Iterable[Slot]) -> list[Slot]:
    """The same bytes in as few pieces as there can be: slots that lie side by side are one."""
    found: list[Slot] = []
    last, end = None, -1
    for slot in slots:
        if last is not None and slot.offset == end and slot.segment == last.segment:
            end += slot.nbytes
            found[-1] = Slot(last.segment, last.offset, end - last.offset, last.generation)
        else:
            found.append(slot)
            last, end = slot, slot.offset + slot.nbytes
    return found


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What another process must know of a segment beside its two descriptors."""

    segment: int
    nbytes: int
    tenant: str


def _table_nbytes(nbytes: int) -> int:
    return (nbytes // PAGE_NBYTES + 1) * _WORD_NBYTES


def _memfd(name: str, nbytes: int, placement: Placement = ANYWHERE) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | placement.memfd_flags)
    try:
        if placement.numa_node is not None:  # the node is a property of the file from then on
            os.ftruncate(fd, nbytes)
            with mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=_READ_WRITE) as mapping:
                placement.bind(mapping, nbytes)
        # Takes the pages now: an out-of-memory is an OSError here, not a SIGBUS at the first touch.
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # of the segments that this process owns
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # of those that others own


def is_segment(owner: object) -> bool:
    """Whether ``owner``, the object behind a view, is the memory of a segment made by this process."""
    return isinstance(owner, mmap.mmap) and owner in _maps


def is_mapped_segment(owner: object) -> bool:
    """The same of a segment that another process made, and this one has mapped."""
    return isinstance(owner, mmap.mmap) and owner in _mapped


class _Views:
    """Bounds-checked views of mapped bytes and generations; shared by owner and client.

    The table has a word for each page, its generation, and one more behind them: see :attr:`gone_nbytes`.

    Attributes:
        info: What it is.
        generations: The present generation of each page, as u64.
    """

    __slots__ = ("_data", "_gone", "generations", "info")

    def __init__(self, info: SegmentInfo, data: memoryview | None, table: memoryview) -> None:
        self.info = info
        self._data = data
        pages = info.nbytes // PAGE_NBYTES
        self.generations, self._gone = table[:pages], table[pages : pages + 1]

    @property
    def gone_nbytes(self) -> int:
        """Bytes that its owner gave back, or does not use any more; all of them: it is retired."""
        return min(self._gone[0], self.info.nbytes) if self._gone else 0

    @property
    def is_retired(self) -> bool:
        """Whether nothing in it will be used again: who has it mapped keeps memory that could be free."""
        return self.gone_nbytes == self.info.nbytes

    def view(self, slot: Slot) -> memoryview:
        """The bytes of ``slot``; whoever takes them checks the generation after the last read.

        Raises:
            StoreError: If the segment is closed or the slot does not lie inside it.
        """
        if self._data is None:
            raise StoreError(f"segment {self.info.segment} is closed")
        if not 0 <= slot.offset <= slot.offset + slot.nbytes <= self.info.nbytes or slot.offset % PAGE_NBYTES:
            raise StoreError(
                f"{slot} is not on a page inside segment {self.info.segment} of {self.info.nbytes} bytes"
            )
        return self._data[slot.offset : slot.offset + slot.nbytes]

    def generation(self, offset: int) -> int:
        """Present generation of the page at byte ``offset``.

        Raises:
            StoreError: If ``offset`` does not lie inside the segment.
        """
        if not 0 <= offset < self.info.nbytes:
            raise StoreError(
                f"offset {offset} is outside segment {self.info.segment} of {self.info.nbytes} bytes"
            )
        return self.generations[offset // PAGE_NBYTES]


class Segment(_Views):
    """Host memory of exactly one tenant, as its owner has it. Not thread safe: the arena's lock is held.

    The memfd is sealed against shrinking and growing and populated at once. The generations (one u64
    a page) lie in a second memfd, sealed so that only this mapping can write them: a client that
    opens its descriptor again through ``/proc`` cannot map it writable either.

    Args:
        segment: Its number in the arena.
        nbytes: Size; a multiple of the page size.
        tenant: Whose KV it holds.
        shared: Others may map the data writable; with ``False`` it is sealed like the generations.
        placement: Where its data comes from; ``nbytes`` is a multiple of its granule.

    Attributes:
        array: All its bytes, for the owner to copy into; ``None`` once it is closed.

    Raises:
        OSError: If the kernel has no memory or no descriptor left.
    """

    __slots__ = ("_pid", "array", "data_fd", "generations_fd")

    def __init__(
        self, segment: int, nbytes: int, tenant: str, *, shared: bool = True, placement: Placement = ANYWHERE
    ) -> None:
        table_nbytes = pages_of(_table_nbytes(nbytes)) * PAGE_NBYTES
        self.data_fd = _memfd("kvferry-segment", nbytes, placement)
        self.generations_fd = -1
        try:
            self.generations_fd = _memfd("kvferry-generations", table_nbytes)
            flags = mmap.MAP_SHARED | _POPULATE
            data = mmap.mmap(self.data_fd, nbytes, flags=flags, prot=_READ_WRITE)
            table = mmap.mmap(self.generations_fd, table_nbytes, flags=flags, prot=_READ_WRITE)
            last = _FIXED_SIZE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.data_fd, fcntl.F_ADD_SEALS, last if shared else last | F_SEAL_FUTURE_WRITE)
            fcntl.fcntl(self.generations_fd, fcntl.F_ADD_SEALS, last | F_SEAL_FUTURE_WRITE)
        except OSError:
            self._close_descriptors()
            raise
        super().__init__(SegmentInfo(segment, nbytes, tenant), memoryview(data), memoryview(table).cast("Q"))
        self.array: ByteArray | None = np.frombuffer(data, np.uint8)
        self._pid = os.getpid()
        _maps.add(data)

    def raise_generation(self, offset: int) -> None:
        """Count the page at ``offset`` up, so that whoever still reads there finds out.

        One aligned store of eight bytes; it is ordered before the next user's first write by the
        release and taking of the store's lock in between.
        """
        self.generations[offset // PAGE_NBYTES] += 1

    def give_back(self, offset: int, nbytes: int) -> bool:
        """Give pages back to the system, which nobody will use again; whether it took them.

        They read as zeros from then on, and count in :attr:`gone_nbytes`. Seals against others' writes
        forbid it.
        """
        owner = None if self._data is None else self._data.obj
        if not isinstance(owner, mmap.mmap):
            return True  # closed: all of it goes
        try:
            owner.madvise(mmap.MADV_REMOVE, offset, nbytes)
        except OSError:
            return False
        self._gone[0] += nbytes
        return True

    def close(self) -> None:
        """Close the descriptors; the memory goes with the last view. A second call does nothing.

        Others who have it mapped see that it is retired, unless a fork of its owner closes it.
        """
        if os.getpid() == self._pid:
            self._gone[0] = self.info.nbytes
        self._data = self.array = None
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for fd in (self.data_fd, self.generations_fd):
            if fd >= 0:
                os.close(fd)
        self.data_fd = self.generations_fd = -1


class RetiredSegment(_Views):
    """What stays of segments that are closed while their arena lives on: their numbers are not used again.

    It has no memory. Who maps the arena anew, and must be given something for that number, gets a page that
    is retired.

    Args:
        segment: Its number.
        tenant: Whose it was.
        place: Of all retired segments of an arena.
    """

    __slots__ = ("array", "data_fd", "generations_fd")

    def __init__(self, segment: int, tenant: str, place: RetiredPage) -> None:
        super().__init__(SegmentInfo(segment, PAGE_NBYTES, tenant), None, place.table)
        self.array: ByteArray | None = None
        self.data_fd, self.generations_fd = place.data_fd, place.generations_fd

    def view(self, slot: Slot) -> memoryview:
        """There is nothing.

        Raises:
            StoreError: Always.
        """
        raise StoreError(f"{slot}: segment {self.info.segment} was given back")

    def generation(self, offset: int) -> int:
        """That of no slot."""
        del offset
        return -1

    def raise_generation(self, offset: int) -> None:
        """Nothing in it is in use."""
        raise StoreError(f"offset {offset}: segment {self.info.segment} was given back")

    def give_back(self, offset: int, nbytes: int) -> bool:
        """All of it is."""
        del offset, nbytes
        return True

    def close(self) -> None:
        """There is nothing to close."""


class RetiredPage:
    """A segment of one page that nobody uses; its data takes no memory.

    Raises:
        OSError: If the kernel has no descriptor left.
    """

    def __init__(self) -> None:
        self.data_fd = os.memfd_create("kvferry-retired", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.generations_fd = -1
        try:
            os.ftruncate(self.data_fd, PAGE_NBYTES)
            self.generations_fd = _memfd("kvferry-generations", PAGE_NBYTES)
            self.table = memoryview(mmap.mmap(self.generations_fd, PAGE_NBYTES, prot=_READ_WRITE)).cast("Q")
            last = _FIXED_SIZE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.data_fd, fcntl.F_ADD_SEALS, last)
            fcntl.fcntl(self.generations_fd, fcntl.F_ADD_SEALS, last | F_SEAL_FUTURE_WRITE)
        except OSError:
            self.close()
            raise
        self.table[1] = PAGE_NBYTES

    def close(self) -> None:
        """Close the descriptors; a second call does nothing."""
        for fd in (self.data_fd, self.generations_fd):
            if fd >= 0:
                os.close(fd)
        self.data_fd = self.generations_fd = -1


class MappedSegment(_Views):
    """A segment as another process has it, built from the descriptors that it was passed.

    Args:
        info: What the owner says of the segment.
        data_fd: Descriptor of the data; stays the caller's and may be closed afterwards.
        generations_fd: Descriptor of the generations; likewise.
        writable: Map the data writable (a client with write right, ``shared`` mode).

    Raises:
        ProtocolError: If a descriptor is not sealed or not as large as ``info`` says: reading it
            could kill this process.
        PermissionError: If ``writable`` is asked of a segment that only its owner writes.
    """

    __slots__ = ("writable",)

    def __init__(
        self, info: SegmentInfo, data_fd: int, generations_fd: int, *, writable: bool = False
    ) -> None:
        table_nbytes = info.nbytes // PAGE_NBYTES * _WORD_NBYTES
        for name, fd, nbytes in (
            ("data", data_fd, info.nbytes),
            ("generations", generations_fd, table_nbytes),
        ):
            self._verify(info, name, fd, nbytes)
        prot = _READ_WRITE if writable else mmap.PROT_READ
        flags = mmap.MAP_SHARED | _POPULATE
        full = os.fstat(data_fd).st_blocks * _STAT_BLOCK_NBYTES >= info.nbytes
        # pages that its owner gave back to the system would be taken again
        data = mmap.mmap(data_fd, info.nbytes, flags=flags if full else mmap.MAP_SHARED, prot=prot)
        if os.fstat(generations_fd).st_size >= _table_nbytes(
            info.nbytes
        ):  # else its owner is of an old release
            table_nbytes = _table_nbytes(info.nbytes)
        table = mmap.mmap(generations_fd, table_nbytes, flags=flags, prot=mmap.PROT_READ)
        super().__init__(info, memoryview(data), memoryview(table).cast("Q"))
        self.writable = writable
        _mapped.add(data)

    @classmethod
    def told_gone(cls, info: SegmentInfo, generations_fd: int) -> int:
        """The :attr:`gone_nbytes` of a segment that is not mapped; one of which all is gone need not be.

        Raises:
            ProtocolError: If the descriptor is not what ``info`` says.
        """
        cls._verify(info, "generations", generations_fd, info.nbytes // PAGE_NBYTES * _WORD_NBYTES)
        word = os.pread(generations_fd, _WORD_NBYTES, _table_nbytes(info.nbytes) - _WORD_NBYTES)
        return min(int.from_bytes(word, sys.byteorder), info.nbytes)  # 0 if its owner is of an old release

    @staticmethod
    def _verify(info: SegmentInfo, name: str, fd: int, nbytes: int) -> None:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ProtocolError(f"segment {info.segment}: the {name} descriptor is no memfd") from error
        if seals & _FIXED_SIZE != _FIXED_SIZE:
            raise ProtocolError(f"segment {info.segment}: the {name} memfd is not sealed against shrinking")
        size = os.fstat(fd).st_size
        if size < nbytes or nbytes < 1:
            raise ProtocolError(f"segment {info.segment}: the {name} memfd has {size} bytes, not {nbytes}")

    def close(self) -> None:
        """Forget the mapping; the memory goes with the last view. A second call does nothing."""
        self._data = None


class MappedSlots:
    """Slots of one size in mapped segments; views are made as they are asked for.

    Args:
        segments: The mapped segments by number.
        words: Segment, offset and generation of each, one behind the other.
        nbytes: Bytes of the block in each.

    Raises:
        StoreError: If one lies in no segment that is mapped.
    """

    __slots__ = ("_data", "_generations", "_nbytes", "_numbers", "_offsets", "_tables")

    def __init__(self, segments: Mapping[int, MappedSegment], words: Sequence[int], nbytes: int) -> None:
        self._nbytes = nbytes
        self._numbers, self._offsets, self._generations = words[::3], words[1::3], words[2::3]
        self._data: dict[int, memoryview] = {}
        self._tables: dict[int, memoryview] = {}
        for number in set(self._numbers):
            segment = segments.get(number)
            if segment is None or segment._data is None:
                raise StoreError(f"segment {number} is not mapped here; ask the owner for its descriptors")
            self._data[number], self._tables[number] = segment._data, segment.generations

    def read_only(self) -> MappedSlots:
        """The same ones, with views that are read-only."""
        other = MappedSlots.__new__(MappedSlots)  # copy.copy takes as long as a tenth of a load
        other._nbytes, other._numbers = self._nbytes, self._numbers
        other._offsets, other._generations, other._tables = self._offsets, self._generations, self._tables
        other._data = {number: data.toreadonly() for number, data in self._data.items()}
        return other

    def view(self, index: int) -> memoryview:
        """The bytes of one; tentative until :meth:`first_stale` was asked after the last read.

        Raises:
            StoreError: If it does not lie inside its segment.
        """
        offset, nbytes = self._offsets[index], self._nbytes
        view = self._data[self._numbers[index]][offset : offset + nbytes]
        if len(view) != nbytes:
            raise self._outside(index)
        return view

    def first_stale(self) -> int | None:
        """The first that was freed since it was handed out, if any.

        Raises:
            StoreError: If one does not lie inside its segment.
        """
        tables, places = self._tables, zip(self._numbers, self._offsets, strict=True)
        try:
            present = [tables[number][offset // PAGE_NBYTES] for number, offset in places]
        except IndexError:
            raise self._outside(self._offsets.index(max(self._offsets))) from None
        if present == self._generations:
            return None
        return list(map(eq, present, self._generations)).index(False)

    def addresses(self) -> list[int]:
        """Of the first byte of each, to be written.

        Raises:
            StoreError: If one does not lie inside its segment, or that is mapped read-only.
        """
        first, room = {}, {}
        for number, data in self._data.items():
            if data.readonly:
                raise StoreError(f"segment {number} is mapped read-only")
            first[number], room[number] = address_of(data), len(data) - self._nbytes
        if max(self._offsets) > min(room.values()):  # else all of them lie inside
            for index, (number, offset) in enumerate(zip(self._numbers, self._offsets, strict=True)):
                if offset > room[number]:
                    raise self._outside(index)
        return [first[number] + offset for number, offset in zip(self._numbers, self._offsets, strict=True)]

    def _outside(self, index: int) -> StoreError:
        number, offset = self._numbers[index], self._offsets[index]
        return StoreError(
            f"a slot of {self._nbytes} bytes at {offset} is not inside segment {number} of "
            f"{len(self._data[number])} bytes"
        )
