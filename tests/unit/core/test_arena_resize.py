"""An arena whose capacity changes while it is in use: memory goes back to the system, for good."""

from __future__ import annotations

import os

import pytest

from kvferry.core.arena import Arena, ArenaMap
from kvferry.core.buffers import PAGE_NBYTES as PAGE
from kvferry.core.errors import CapacityError
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
