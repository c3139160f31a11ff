"""Chains longer than memory, over slower tiers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError
from kvferry.core.memory import DRAM
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.level import LevelOptions
from kvferry.store.policies import LRUPolicy, OnEvict, S3FIFOPolicy, SecondHitAdmit, WriteBack, WriteThrough
from kvferry.store.tier import Tier
from kvferry.store.tiered import TieredStore
from kvferry.testing.blocks import save_blocks, small_spec, wait_until
from kvferry.testing.fake_tier import FakeTier, Fault
from kvferry.testing.store_calls import chain, loaded, settle

SPEC = small_spec("tiered")
N = SPEC.block_nbytes
MakeStore = Callable[..., TieredStore]
LONG = 40


@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("write", [WriteThrough, WriteBack, OnEvict])
def test_a_chain_of_ten_times_the_memory_is_saved_batch_by_batch(
    make_store: MakeStore, write: type[WriteThrough | WriteBack | OnEvict], batch: int
) -> None:
    store = make_store(4, (FakeTier(), LevelOptions(write=write())))
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, LONG)
    for start in range(0, LONG, batch):
        parent = keys[start - 1] if start else None
        assert save_blocks(ns, keys[start : start + batch], parent=parent, seconds=30) == len(
            keys[start : start + batch]
        )
    assert ns.lookup(keys).prefix == LONG
    assert settle(store)
    assert loaded(ns, keys) == 4, "what memory holds, heads first"
    for start in range(0, LONG, 4):
        assert loaded(ns, keys[start : start + 4]) == 4


def test_over_real_files_too(make_store: MakeStore, tmp_path: Path) -> None:
    tier: Tier = DiskTier("disk", DiskOptions((str(tmp_path / "disk"),), 64 << 20))
    store = make_store(3, tier)
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, LONG)
    for number, key in enumerate(keys):
        save_blocks(ns, [key], parent=keys[number - 1] if number else None, seconds=30)
    assert settle(store)
    assert ns.lookup(keys).prefix == LONG
    found = {entry.key: entry.parent for entry in tier.scan()}
    assert [found[key] for key in keys] == [None, *keys[:-1]]


def test_others_go_first_and_then_its_own_tail(make_store: MakeStore) -> None:
    store = make_store(4, FakeTier())
    ns = store.namespace(SPEC)
    other, keys = chain(ns, 1, 1), chain(ns, 2, 5)
    for number, key in enumerate([*other, *keys]):
        save_blocks(ns, [key], parent=keys[number - 2] if number > 1 else None)
        settle(store)
        if number == 4:
            assert ns.lookup(other).tiers == ("fake",)
            assert ns.lookup(keys[:4]).tiers == (DRAM,) * 4
    assert ns.lookup(keys).tiers == (DRAM, DRAM, DRAM, "fake", DRAM)


def test_a_save_waits_for_the_copies_of_its_own_chain(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(2, tier)
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 3)
    tier.gate.clear()
    save_blocks(ns, keys[:2])
    with pytest.raises(CapacityError):
        save_blocks(ns, keys[2:], parent=keys[1], seconds=0.1)
    tier.gate.set()
    assert save_blocks(ns, keys[2:], parent=keys[1], seconds=30) == 1
    assert ns.lookup(keys).prefix == 3


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.REFUSE])
def test_a_chain_that_no_tier_took_is_not_evicted_for_its_own_extension(
    make_store: MakeStore, fault: Fault
) -> None:
    tier = FakeTier()
    store = make_store(2, tier)
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 3)
    tier.fault = lambda verb, _key: fault if verb == "write" else None
    save_blocks(ns, keys[:2])
    settle(store)
    started = time.monotonic()
    with pytest.raises(CapacityError, match="nowhere else"):
        save_blocks(ns, keys[2:], parent=keys[1], seconds=30)
    assert time.monotonic() - started < 40, "nothing to wait for"
    assert loaded(ns, keys) == 2


def test_nor_one_that_a_tier_may_not_take(make_store: MakeStore) -> None:
    store = make_store(2, (FakeTier(), LevelOptions(write=OnEvict(), admission=SecondHitAdmit())))
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 3)
    save_blocks(ns, keys[:2])
    with pytest.raises(CapacityError):
        save_blocks(ns, keys[2:], parent=keys[1], seconds=60)
    assert loaded(ns, keys) == 2


def test_a_chain_that_a_reader_holds_is_waited_for(make_store: MakeStore) -> None:
    store = make_store(2, FakeTier())
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 3)
    save_blocks(ns, keys[:2])
    settle(store)
    lease = ns.load(keys[:2], deadline=deadline_in(20))
    with pytest.raises(CapacityError):
        save_blocks(ns, keys[2:], parent=keys[1], seconds=0.05)
    lease.release()
    assert save_blocks(ns, keys[2:], parent=keys[1]) == 1


def test_more_blocks_in_one_call_than_memory_has_is_refused_at_once(make_store: MakeStore) -> None:
    store = make_store(4, FakeTier())
    ns = store.namespace(SPEC)
    started = time.monotonic()
    with pytest.raises(CapacityError, match="save fewer blocks at once"):
        save_blocks(ns, chain(ns, 1, 5), seconds=30)
    assert time.monotonic() - started < 40


runs = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=25)


@settings(max_examples=60)
@given(
    runs=runs,
    write=st.sampled_from((WriteThrough, OnEvict)),
    eviction=st.sampled_from((LRUPolicy, S3FIFOPolicy)),
)
def test_chains_that_grow_in_turns_are_never_broken(
    runs: list[tuple[int, int]],
    write: type[WriteThrough | OnEvict],
    eviction: type[LRUPolicy | S3FIFOPolicy],
) -> None:
    store = TieredStore(4 * N, [(FakeTier(), LevelOptions(write=write()))], eviction=eviction)
    ns = store.namespace(SPEC)
    length = [0, 0, 0]
    try:
        for number, count in runs:
            keys = chain(ns, number, length[number] + count)
            new = keys[length[number] :]
            parent = keys[length[number] - 1] if length[number] else None
            assert save_blocks(ns, new, parent=parent, seconds=30) == count
            length[number] += count
            for other in range(3):
                assert ns.lookup(chain(ns, other, length[other])).prefix == length[other]
        wait_until(lambda: settle(store))
        for number in range(3):
            keys = chain(ns, number, length[number])
            assert loaded(ns, keys) == min(4, len(keys))
        stats = store.stats()
        assert (stats.pinned_nbytes, stats.leases) == (0, 0)
    finally:
        store.close()
