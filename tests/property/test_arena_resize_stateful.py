"""An arena whose capacity goes up and down while slots are held and a client maps it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvferry.core.arena import Arena, ArenaMap
from kvferry.core.buffers import PAGE_NBYTES as PAGE
from kvferry.core.placement import ANYWHERE, Placement
from kvferry.core.segments import Slot

MOST = 64


@dataclass(frozen=True)
class _InFours(Placement):
    """As with 2 MiB pages: sizes in fours of pages, given back in fours."""

    @property
    def granule_nbytes(self) -> int:
        return 4 * PAGE


class Resized(RuleBasedStateMachine):
    """See the module."""

    @initialize(shared=st.booleans(), placement=st.sampled_from([ANYWHERE, _InFours()]))
    def start(self, shared: bool, placement: Placement) -> None:
        self.arena = Arena(MOST * PAGE, segment_nbytes=16 * PAGE, shared=shared, placement=placement)
        self.whole = shared and placement is ANYWHERE
        self.client = ArenaMap(self.arena.tenant, self.arena.epoch)
        self.held: dict[Slot, bytes] = {}
        self.freed: list[Slot] = []
        self.count = 0

    @rule(count=st.integers(1, 20), pages=st.integers(1, 5))
    def allocate(self, count: int, pages: int) -> None:
        if pages * PAGE > self.arena.capacity_nbytes:
            return
        for slot in self.arena.allocate_many(count, pages * PAGE) or ():
            self.count += 1
            self.held[slot] = self.count.to_bytes(8, "little")
            view = self.arena.view(slot)
            view[:8] = view[-8:] = self.held[slot]

    @rule(data=st.data(), share=st.sampled_from([1, 2, 4]))
    def free(self, data: st.DataObject, share: int) -> None:
        slots = list(self.held)
        first = data.draw(st.integers(0, share - 1))
        for slot in slots[first::share]:
            self.arena.free(slot)
            del self.held[slot]
            self.freed.append(slot)

    @rule(pages=st.sampled_from([4, 8, 20, 32, 48, MOST]))
    def resize(self, pages: int) -> None:
        self.arena.resize(pages * PAGE)

    @rule()
    def settle(self) -> None:
        self.arena.settle()

    @rule()
    def attach(self) -> None:
        known = self.client.segments
        pairs = zip(self.arena.layout().segments, self.arena.descriptors(), strict=True)
        for info, fds in list(pairs)[known:]:
            self.client.add(info, *fds)
        self.client.forget_retired()
        assert self.client.mapped_nbytes == self.arena.mapped_nbytes + self.arena.kept_nbytes
        for slot, text in self.held.items():
            view = self.client.view(slot)
            assert self.client.is_current(slot)
            assert (bytes(view[:8]), bytes(view[-8:])) == (text, text)

    @invariant()
    def sums(self) -> None:
        arena, used = self.arena, sum(slot.slot_nbytes for slot in self.held)
        assert arena.used_nbytes == used
        assert used <= arena.mapped_nbytes <= max(arena.capacity_nbytes, used)
        assert arena.mapped_nbytes + arena.kept_nbytes <= MOST * PAGE, (
            "what is kept is used before there is more"
        )
        if self.whole:
            assert arena.kept_nbytes == 0
        resident = sum(os.fstat(data).st_blocks * 512 for data, _ in arena.descriptors())
        assert resident == arena.mapped_nbytes + arena.kept_nbytes
        assert arena.first_stale(self.held) is None
        assert not any(arena.is_current(slot) for slot in self.freed[-20:])

    def teardown(self) -> None:
        if not hasattr(self, "arena"):
            return
        for slot in list(self.held):
            self.arena.free(slot)
        self.held.clear()
        self.arena.resize(16 * PAGE)
        self.sums()
        self.arena.resize(MOST * PAGE)
        assert self.arena.kept_nbytes == 0
        slots = self.arena.allocate_many(MOST, PAGE)
        assert slots is not None
        assert len(slots) == MOST, "all of it can be had again"
        self.arena.close()
        self.client.forget_retired()
        assert self.client.mapped_nbytes == 0


def test_sums_return_whatever_is_resized_while_slots_are_held() -> None:
    run_state_machine_as_test(
        Resized, settings=settings(max_examples=12, stateful_step_count=25, deadline=None)
    )


@pytest.mark.soak
def test_sums_return_over_a_long_time() -> None:
    run_state_machine_as_test(
        Resized, settings=settings(max_examples=1500, stateful_step_count=60, deadline=None)
    )
