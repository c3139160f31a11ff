"""More namespaces than a store should know for ever: a salt a user, an adapter a customer."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.memory import DRAM
from kvferry.core.memory_namespace import MemoryNamespace
from kvferry.core.spec import KeyScope
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.tier import TierNamespace
from kvferry.store.tiered import TieredStore
from kvferry.testing.blocks import save_blocks, small_spec
from kvferry.testing.fake_tier import FakeTier
from kvferry.testing.store_calls import chain, loaded, settle

SPEC = small_spec("many")
N = SPEC.block_nbytes
MakeStore = Callable[..., TieredStore]


def disk(folder: Path) -> DiskTier:
    return DiskTier("disk", DiskOptions((str(folder),), 16 << 20, direct="off", sync="none"))


def scope(number: int) -> KeyScope:
    return KeyScope(salt=b"user %d" % number)


def see(store: TieredStore, numbers: range) -> None:
    for number in numbers:
        ns = store.namespace(SPEC, scope(number))
        assert ns.lookup(chain(ns, 1, 1)).prefix == 0


def known(store: TieredStore) -> set[bytes]:
    return {space.namespace_id for space in store.spaces()}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.store.spaces._MOST_IDLE", 4)


def test_thousands_that_are_idle_take_no_more_memory_than_one_thousand(
    make_store: MakeStore, tmp_path: Path
) -> None:
    """Each took 3.5 KiB for ever: 10 MiB of these."""
    tier = disk(tmp_path)
    store = make_store(8, tier)
    see(store, range(2000))
    tracemalloc.start()
    try:
        see(store, range(2000, 5000))
        gc.collect()
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 3 << 20  # those that are known now are all among them
    assert len(store.spaces()) <= 1024
    assert len(tier._told) == 1024
    assert len(tier._state.index.namespaces()) == 1024


@pytest.mark.usefixtures("few")
def test_one_that_was_forgotten_finds_its_blocks_on_disk(make_store: MakeStore, tmp_path: Path) -> None:
    tier = disk(tmp_path)
    tier._told._most = 4
    store = make_store(4, tier)
    ns = store.namespace(SPEC, scope(-1))
    keys, name = chain(ns, 1, 2), ns.namespace_id
    save_blocks(ns, keys)
    settle(store)
    del ns
    for number in range(20):  # these push it out of memory
        other = store.namespace(SPEC, scope(number))
        save_blocks(other, chain(other, 1, 2))
        settle(store)
    assert name not in known(store)
    assert len(known(store)) <= 6
    ns = store.namespace(SPEC, scope(-1))
    assert ns.lookup(keys).tiers == ("disk", "disk")
    assert loaded(ns, keys) == 2
    assert ns.remove(keys) == 2
    assert ns.lookup(keys).prefix == 0


@pytest.mark.usefixtures("few")
def test_one_that_is_open_or_has_blocks_in_memory_stays_known(make_store: MakeStore, tmp_path: Path) -> None:
    tier = disk(tmp_path)
    tier._told._most = 2
    store = make_store(8, tier)
    is_open, filled = store.namespace(SPEC, scope(-1)), store.namespace(SPEC, scope(-2))
    names, (key,) = {is_open.namespace_id, filled.namespace_id}, chain(filled, 1, 1)
    save_blocks(filled, [key])
    settle(store)
    del filled
    see(store, range(30))
    assert names <= known(store)
    assert len(known(store)) <= 8
    assert save_blocks(is_open, chain(is_open, 1, 1)) == 1
    settle(store)
    assert tier.usage().entries == 2
    assert store.namespace(SPEC, scope(-2)).lookup([key]).tiers == (DRAM,)


@pytest.mark.usefixtures("few")
def test_what_was_reserved_is_written_though_nobody_has_its_namespace_open(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(8, tier)
    ns = store.namespace(SPEC, scope(-1))
    keys = chain(ns, 1, 1)
    lease = ns.reserve(keys, parent=None, deadline=deadline_in(20))
    del ns
    see(store, range(30))
    assert lease.commit() == 1
    settle(store)
    assert tier.held() == set(keys)


@pytest.mark.usefixtures("few")
def test_an_operator_clears_those_too_that_were_forgotten(make_store: MakeStore, tmp_path: Path) -> None:
    tier = disk(tmp_path)
    tier._told._most = 4
    store = make_store(2, tier)
    for number in range(20):
        ns = store.namespace(SPEC, scope(number))
        save_blocks(ns, chain(ns, 1, 1))
        settle(store)
    assert len(known(store)) < 10
    found = store.spaces() + store.found_spaces()
    assert len({space.namespace_id for space in found}) == len(found) == 20
    assert sum(store.own_namespace(space).clear() for space in found) == 20
    assert tier.usage().entries == 0
    assert not store.found_spaces()


@pytest.mark.usefixtures("few")
def test_they_come_and_go_in_threads(make_store: MakeStore, tmp_path: Path) -> None:
    tier = disk(tmp_path)
    tier._told._most = 2
    store = make_store(64, tier)

    def use(thread: int) -> list[int]:
        found = []
        for turn in range(60):
            ns: MemoryNamespace = store.namespace(SPEC, scope((turn * (thread + 1)) % 11))
            keys = chain(ns, 1, 2)
            save_blocks(ns, keys)
            found.append(loaded(ns, keys))
            if turn % 20 == thread:
                ns.clear()
                save_blocks(ns, keys)
        return found

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(use, range(4)))
    assert all(found <= 2 for result in results for found in result)
    settle(store)
    assert store.levels[0].counts["faults"] == 0
    for number in range(11):
        ns = store.namespace(SPEC, scope(number))
        assert loaded(ns, chain(ns, 1, 2)) == 2


def test_an_index_without_blocks_goes_and_one_with_some_stays(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    tier._told._most = 1
    index = tier._state.index
    spaces = [TierNamespace.of("default", SPEC, scope(n)) for n in range(3)]
    with_block = index.namespace("default", spaces[0].namespace_id)
    store = TieredStore(4 * N, [tier])
    ns = store.namespace(SPEC, scope(0))
    save_blocks(ns, chain(ns, 1, 1))
    settle(store)
    for space in spaces[1:]:
        tier.open(space)
    assert tier._held(spaces[0]) is with_block
    ns.clear()
    del with_block
    tier._state.templates._kept.clear()
    tier.open(spaces[1])
    assert [home.namespace_id for home in index.namespaces()] == [spaces[1].namespace_id]
    store.close()
