"""An arena whose capacity changes while it is in use: memory goes back to the system, for good."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from kvferry.core.allocator import PageAllocator
from kvferry.core.arena import Arena, ArenaMap
from kvferry.core.buffers import PAGE_NBYTES as PAGE
from kvferry.core.errors import CapacityError, ConfigError, StoreError
from kvferry.core.placement import Placement
from kvferry.core.segments import Slot


def resident_pages(arena: Arena) -> int:
    """Of the data of all segments, as the kernel counts it."""
    return sum(os.fstat(data).st_blocks * 512 for data, _ in arena.descriptors()) // PAGE


def slots_of(arena: Arena, count: int, pages: int = 1) -> list[Slot]:
    slots = arena.allocate_many(count, pages * PAGE)
    assert slots is not None
    return slots


def test_what_is_free_goes_at_once_and_the_rest_as_it_is_freed() -> None:
    arena = Arena(100 * PAGE, segment_nbytes=40 * PAGE)
    slots = slots_of(arena, 100)
    for number, slot in enumerate(slots):
        arena.view(slot)[:2] = bytes([number, 255])
    for slot in slots[:30]:
        arena.free(slot)
    assert arena.resize(50 * PAGE)
    assert (arena.mapped_nbytes, resident_pages(arena)) == (70 * PAGE, 70)
    assert arena.allocate(PAGE) is None, "above the capacity nothing is handed out"
    for slot in slots[30:50]:
        arena.free(slot)
        assert arena.allocate(PAGE) is None
    assert (arena.mapped_nbytes, resident_pages(arena), arena.free_nbytes) == (50 * PAGE, 50, 0)
    assert [arena.view(slot)[0] for slot in slots[50:]] == list(range(50, 100)), "what is held stays"
    arena.free(slots[50])
    again = slots_of(arena, 1)[0]
    assert (again.segment, again.offset) == (slots[50].segment, slots[50].offset)
    with pytest.raises(CapacityError, match="never fits"):
        arena.allocate(51 * PAGE)


def test_growth_takes_new_memory_and_none_of_what_went() -> None:
    arena = Arena(64 * PAGE, segment_nbytes=32 * PAGE)
    slots = slots_of(arena, 64)
    for slot in slots:
        arena.free(slot)
    arena.resize(16 * PAGE)
    kept = {(slot.segment, slot.offset) for slot in slots_of(arena, 16)}
    arena.resize(48 * PAGE)
    grown = {(slot.segment, slot.offset) for slot in slots_of(arena, 32)}
    assert not grown & kept
    assert all(segment >= 2 for segment, _ in grown), "no page that a device may have pinned comes back"
    assert (arena.mapped_nbytes, arena.used_nbytes, resident_pages(arena)) == (48 * PAGE, 48 * PAGE, 48)
    assert arena.allocate(PAGE) is None


def test_one_that_only_its_owner_writes_says_that_nothing_went_back() -> None:
    arena = Arena(32 * PAGE, segment_nbytes=32 * PAGE, shared=False)
    for slot in slots_of(arena, 32):
        arena.free(slot)
    assert not arena.resize(8 * PAGE)
    assert (arena.mapped_nbytes, resident_pages(arena)) == (8 * PAGE, 32)
    assert len(slots_of(arena, 8)) == 8
    assert arena.allocate(PAGE) is None


def test_who_maps_what_was_given_back_does_not_take_it_again() -> None:
    arena = Arena(512 * PAGE)
    for slot in slots_of(arena, 512):
        arena.free(slot)
    assert arena.resize(16 * PAGE)
    before = resident_pages(arena)
    mapped = ArenaMap.from_fds(arena.layout(), arena.descriptors(), writable=True)
    assert resident_pages(arena) == before <= 32
    mapped.close()
    arena.close()


def free_all(arena: Arena, slots: list[Slot]) -> None:
    for slot in slots:
        arena.free(slot)


def test_what_could_not_go_back_is_used_again_however_often() -> None:
    arena = Arena(64 * PAGE, segment_nbytes=64 * PAGE, shared=False)
    held = slots_of(arena, 1)
    for turn in range(20):
        free_all(arena, slots_of(arena, 63))
        assert not arena.resize(16 * PAGE)
        assert arena.mapped_nbytes == 16 * PAGE
        filled = slots_of(arena, 15)
        assert arena.allocate(PAGE) is None
        arena.resize(64 * PAGE)
        filled += slots_of(arena, 48)
        assert (arena.segment_count, resident_pages(arena), arena.free_nbytes) == (1, 64, 0)
        free_all(arena, [*filled, held.pop(0)] if turn % 2 else filled)  # holds in other places, too
        if not held:
            held = slots_of(arena, 1)


def test_a_segment_of_which_nothing_is_left_is_closed_also_where_only_its_owner_writes() -> None:
    arena = Arena(64 * PAGE, segment_nbytes=32 * PAGE, shared=False)
    slots = slots_of(arena, 64)
    mapped = ArenaMap.from_fds(arena.layout(), arena.descriptors())
    free_all(arena, slots)
    assert arena.resize(32 * PAGE)
    assert resident_pages(arena) == 32, "but for what the client maps, the memory of the second is gone"
    assert mapped.mapped_nbytes == 32 * PAGE
    assert mapped.forget_retired() == 32 * PAGE
    assert mapped.forget_retired() == 0
    stale = slots[-1]
    assert not arena.is_current(stale)
    assert arena.first_stale(slots[-1:]) == stale
    with pytest.raises(StoreError, match="given back"):
        arena.view(stale)
    with pytest.raises(StoreError):
        arena.free(stale)
    arena.resize(64 * PAGE)
    assert {slot.segment for slot in slots_of(arena, 64)} == {0, 2}, "numbers are not used again"


@pytest.mark.parametrize("shared", [True, False])
def test_after_any_number_of_turns_a_client_maps_what_there_is(shared: bool) -> None:
    arena = Arena(64 * PAGE, segment_nbytes=16 * PAGE, shared=shared)
    mapped = ArenaMap(arena.tenant, arena.epoch)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(50):
        slots = slots_of(arena, 64)
        for info, fds in list(zip(arena.layout().segments, arena.descriptors(), strict=True))[
            mapped.segments :
        ]:
            mapped.add(info, *fds)
        mapped.forget_retired()
        assert mapped.mapped_nbytes == arena.mapped_nbytes == 64 * PAGE
        free_all(arena, slots)
        arena.resize(16 * PAGE)
        mapped.forget_retired()
        assert mapped.mapped_nbytes == arena.mapped_nbytes == resident_pages(arena) * PAGE == 16 * PAGE
        arena.resize(64 * PAGE)
    late = ArenaMap.from_fds(arena.layout(), arena.descriptors())
    assert (late.mapped_nbytes, late.segments) == (mapped.mapped_nbytes, arena.segment_count)
    assert len(os.listdir("/proc/self/fd")) <= before + 30  # noqa: PTH208
    arena.close()
    assert mapped.forget_retired() + late.forget_retired() > 0
    assert mapped.mapped_nbytes == late.mapped_nbytes == 0, "of an arena that is closed nothing is kept"


@pytest.mark.parametrize("before", [True, False])
def test_an_interruption_frees_nothing_twice_and_closes_nothing_in_use(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(32 * PAGE, segment_nbytes=16 * PAGE, shared=False)
    slots = slots_of(arena, 32)
    free_all(arena, slots[::2])
    assert not arena.resize(16 * PAGE)  # every other page is kept, none of them beside another
    free = PageAllocator.free

    def interrupted(allocator: PageAllocator, start: int) -> int:
        pages = 0 if before else free(allocator, start)
        monkeypatch.setattr(PageAllocator, "free", free)
        raise KeyboardInterrupt(pages)

    monkeypatch.setattr(PageAllocator, "free", interrupted)
    with pytest.raises(KeyboardInterrupt):
        arena.resize(32 * PAGE)
    arena.resize(32 * PAGE)
    held = slots[1::2] + slots_of(arena, 15)  # one page may be lost
    assert len({(slot.segment, slot.offset) for slot in held}) == 31
    for capacity in (16 * PAGE, 32 * PAGE):
        arena.resize(capacity)
        arena.settle()
        assert arena.allocate(PAGE) is None or capacity > 16 * PAGE
        assert arena.first_stale(held) is None
        assert [len(arena.view(slot)) for slot in held] == [PAGE] * 31
    arena.close()


@dataclass(frozen=True)
class _InFours(Placement):
    """As with 2 MiB pages, which need a pool: sizes in fours of pages, given back in fours."""

    @property
    def granule_nbytes(self) -> int:
        return 4 * PAGE


def test_large_pages_go_whole_once_all_in_them_is_free() -> None:
    arena = Arena(32 * PAGE, segment_nbytes=16 * PAGE, placement=_InFours())
    slots = slots_of(arena, 32)
    assert not arena.resize(17 * PAGE) or arena.mapped_nbytes > arena.capacity_nbytes
    assert arena.capacity_nbytes == 16 * PAGE
    for slot in slots[::2]:  # nowhere four beside each other
        arena.free(slot)
    arena.settle()
    assert (arena.mapped_nbytes, resident_pages(arena)) == (16 * PAGE, 32)
    free_all(arena, slots[17:32:2])
    free_all(arena, slots_of(arena, 8))  # as many as are kept have been freed: that is looked at anew
    arena.settle()
    assert (arena.mapped_nbytes, resident_pages(arena)) == (16 * PAGE, 16), "the second segment went"
    assert arena.resize(32 * PAGE)
    assert len(slots_of(arena, 24)) == 24
    assert (arena.mapped_nbytes, resident_pages(arena), arena.free_nbytes) == (32 * PAGE, 32, 0)
    with pytest.raises(ConfigError, match="at least one page"):
        arena.resize(3 * PAGE)
    assert arena.capacity_nbytes == 32 * PAGE
