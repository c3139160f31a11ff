from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvferry.core.blockstore import Namespace
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError, ConfigError
from kvferry.core.keys import BlockKey
from kvferry.core.memory import DRAM
from kvferry.store.level import Level, LevelOptions
from kvferry.store.tier import TierEntry
from kvferry.store.tiered import StoreOptions, TieredStore
from kvferry.testing.blocks import save_blocks, small_spec, wait_until
from kvferry.testing.fake_tier import FakeTier, Fault
from kvferry.testing.store_calls import chain, loaded, settle

SPEC = small_spec("tiered")
N = SPEC.block_nbytes
MakeStore = Callable[..., TieredStore]


def in_tier(store: TieredStore, ns: Namespace, keys: list[BlockKey], name: str = "fake") -> list[bool]:
    """Whether the tier itself holds each key, also what the store would not show."""
    level = next(level for level in store.levels if level.name == name)
    space = store._namespace(store.session, ns.spec, ns.scope)
    return level.tier.contains(store._space(space), keys, deadline=deadline_in(20))


def test_c049_a_failing_write_leaves_the_other_tiers_going(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    near, far = FakeTier("near"), FakeTier("far")
    store = make_store(4, (near, LevelOptions(pause_s=60)), far)
    ns = store.namespace(SPEC)
    near.fault = lambda verb, _key: Fault.FAIL if verb == "write" else None
    with caplog.at_level(logging.INFO, "kvferry.store"):
        for number in range(8):
            assert save_blocks(ns, chain(ns, number, 1)) == 1
            settle(store)
    assert near.calls["write"] == 3, "the breaker keeps it from being asked"
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert store.stats().per_tier["near"]["healthy"] == 0
    assert near.usage().entries == 0
    for number in range(8):
        assert loaded(ns, chain(ns, number, 1)) == 1


def test_the_breaker_tries_again_and_closes(make_store: MakeStore, caplog: pytest.LogCaptureFixture) -> None:
    tier = FakeTier()
    store = make_store(4, (tier, LevelOptions(errors=2, pause_s=0.05)))
    ns = store.namespace(SPEC)
    tier.fault = lambda verb, _key: Fault.FAIL if verb == "write" else None
    with caplog.at_level(logging.INFO, "kvferry.store"):
        for number in range(3):
            save_blocks(ns, chain(ns, number, 2))
            settle(store)
        tier.fault = lambda _verb, _key: None
        numbers = iter(range(10, 10000))

        def works() -> bool:
            save_blocks(ns, chain(ns, next(numbers), 1))
            settle(store)
            return store.stats().per_tier["fake"]["healthy"] == 1

        wait_until(works)
    assert [(r.levelname, r.message.endswith("writes work again")) for r in caplog.records] == [
        ("WARNING", False),
        ("INFO", True),
    ]
    figures = store.stats().per_tier["fake"]
    assert (figures["write_breaker_opened"], figures["read_breaker_opened"]) == (1, 0)


def test_a_tier_that_has_turned_read_only_goes_on_giving_what_it_has(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    tier = FakeTier()
    store = make_store(4, (tier, LevelOptions(pause_s=60)))
    ns = store.namespace(SPEC)
    first = chain(ns, 0, 4)
    save_blocks(ns, first)
    settle(store)
    tier.fault = lambda verb, _key: Fault.FAIL if verb == "write" else None
    with caplog.at_level(logging.INFO, "kvferry.store"):
        for number in range(1, 8):
            save_blocks(ns, chain(ns, number, 1))
            settle(store)
        for _ in range(5):
            assert loaded(ns, first) == 4, "reads go on"
            for number in range(1, 8):  # and memory is full of others again
                save_blocks(ns, chain(ns, number, 1))
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "no writes" in caplog.records[0].message
    figures = store.stats().per_tier["fake"]
    assert (figures["healthy"], figures["reads_work"], figures["writes_work"]) == (0, 1, 0)


def test_a_tier_whose_reads_fail_goes_on_taking_blocks(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(2, (tier, LevelOptions(pause_s=60)))
    ns = store.namespace(SPEC)
    tier.fault = lambda verb, _key: Fault.FAIL if verb == "read" else None
    for number in range(6):
        save_blocks(ns, chain(ns, number, 1))
        settle(store)
    assert [loaded(ns, chain(ns, number, 1)) for number in range(4)] == [0] * 4
    save_blocks(ns, chain(ns, 6, 1))
    settle(store)
    figures = store.stats().per_tier["fake"]
    assert (figures["healthy"], figures["reads_work"], figures["writes_work"]) == (0, 0, 1)
    assert (figures["entries"], figures["write_skipped"], figures["write_dropped"]) == (7, 0, 0)


def test_c050_reads_that_fail_are_told_once_and_the_next_key_is_served(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    tier = FakeTier()
    store = make_store(4, (tier, LevelOptions(errors=4, pause_s=60)))
    ns = store.namespace(SPEC)
    keys = [chain(ns, number, 1)[0] for number in range(8)]
    for key in keys:
        save_blocks(ns, [key])
        settle(store)
    tier.fault = lambda verb, key: Fault.FAIL if verb == "read" and key in keys[:4] else None
    with caplog.at_level(logging.INFO, "kvferry.store"):
        assert [loaded(ns, [key]) for key in keys[:3]] == [0, 0, 0]
        assert loaded(ns, keys[4:5]) == 1, "evicted for the reads that failed: from the tier"
        assert loaded(ns, keys[3:4]) == 0
    assert not caplog.records, "three errors, then a success"
    with caplog.at_level(logging.INFO, "kvferry.store"):
        assert [loaded(ns, [key]) for key in keys[:4]] == [0] * 4
    assert len(caplog.records) == 1
    assert ns.lookup(keys[:4]).tiers == (None,) * 4, "not shown while the tier is not asked"
    assert set(ns.lookup(keys[6:]).tiers) == {DRAM}
    assert loaded(ns, keys[6:]) == 2, "memory goes on"


def test_a_source_that_a_late_write_may_read_stays(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(2, tier)
    ns = store.namespace(SPEC)
    tier.fault = lambda verb, _key: Fault.LATE if verb == "write" else None
    save_blocks(ns, chain(ns, 1, 2))
    with pytest.raises(CapacityError):
        save_blocks(ns, chain(ns, 2, 1), seconds=0.2)
    tier.fault = lambda _verb, _key: None
    tier.late.set()
    assert save_blocks(ns, chain(ns, 2, 2), seconds=30) == 2
    settle(store)


def test_a_late_write_of_a_block_that_was_removed_and_saved_again_is_not_undone(
    make_store: MakeStore,
) -> None:
    tier = FakeTier()
    store = make_store(4, tier)
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 1)
    tier.fault = lambda verb, _key: Fault.LATE if verb == "write" else None
    save_blocks(ns, keys)
    wait_until(lambda: store.stats().per_tier["fake"].get("write_failed") == 1)
    ns.remove(keys)
    tier.fault = lambda _verb, _key: None
    assert save_blocks(ns, keys) == 1
    wait_until(lambda: in_tier(store, ns, keys) == [True])
    tier.late.set()
    settle(store)
    assert in_tier(store, ns, keys) == [True]
    assert ns.remove(keys) == 1
    assert in_tier(store, ns, keys) == [False]


def test_a_tier_that_raises_everywhere_fails_no_call(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    tier = FakeTier()
    store = make_store(4, (tier, LevelOptions(pause_s=60)))
    ns = store.namespace(SPEC)
    tier.fault = lambda _verb, _key: Fault.RAISE
    for number in range(6):
        keys = chain(ns, number, 1)
        assert save_blocks(ns, keys) == 1
        assert loaded(ns, keys) == 1
        assert ns.lookup([*keys, BlockKey(bytes(32))]).prefix == 1
        settle(store)
    assert ns.remove(chain(ns, 5, 1)) == 1
    assert ns.clear() == 3
    assert [r.levelname for r in caplog.records].count("ERROR") == 1


def test_options_that_cannot_be_used_are_refused() -> None:
    for call in (
        lambda: StoreOptions(watermarks=(0.9, 0.5)),
        lambda: StoreOptions(prefetch_jobs=0),
        lambda: StoreOptions(room_wait_s=-1),
        lambda: LevelOptions(queue_nbytes=0),
        lambda: LevelOptions(read_timeout_s=0),
        lambda: TieredStore(N, [FakeTier("a"), FakeTier("a")]),
        lambda: TieredStore(N, [FakeTier(DRAM)]),
        lambda: TieredStore(N, [(FakeTier(), LevelOptions(errors=0))]),
        lambda: TieredStore(1 << 60, [FakeTier()]),
    ):
        with pytest.raises(ConfigError):
            call()


@pytest.mark.parametrize("everything", [False, True])
def test_a_load_during_a_removal_does_not_bring_the_block_back(
    make_store: MakeStore, everything: bool
) -> None:
    near, far = FakeTier("near"), FakeTier("far")
    store = make_store(4, near, far)
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 2)
    save_blocks(ns, keys)
    save_blocks(ns, chain(ns, 2, 2))
    settle(store)
    save_blocks(ns, chain(ns, 3, 4))
    got: list[int] = []

    def fault(verb: str, _key: BlockKey) -> None:
        if verb == "remove":
            got.append(loaded(ns, keys, 1.0))

    near.fault = far.fault = fault
    assert ns.lookup(keys).prefix == 2
    assert (ns.clear() if everything else ns.remove(keys)) >= 2
    assert set(got) == {0}
    assert ns.lookup(keys).tiers == (None, None)


def test_a_read_of_what_could_not_be_removed_is_a_miss_though_it_was_located_before(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = FakeTier()
    store = make_store(4, tier)
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 1)
    save_blocks(ns, keys)
    settle(store)
    save_blocks(ns, chain(ns, 2, 4))
    settle(store)
    locate = store._locate_missing

    def located(*args: Any) -> dict[BlockKey, Level]:
        found = locate(*args)
        monkeypatch.undo()
        tier.fault = lambda verb, _key: Fault.RAISE if verb == "remove" else None
        ns.remove(keys)
        return found

    monkeypatch.setattr(store, "_locate_missing", located)
    assert loaded(ns, keys) == 0
    assert ns.lookup(keys).tiers == (None,)


def test_a_block_that_comes_up_while_it_is_pinned_is_pinned(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(4, FakeTier())
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 2)
    save_blocks(ns, keys)
    settle(store)
    save_blocks(ns, chain(ns, 2, 4))
    settle(store)
    missing = store._not_in_memory

    def late(*args: Any) -> list[BlockKey]:
        monkeypatch.undo()
        assert loaded(ns, keys[:1]) == 1
        return missing(*args)

    monkeypatch.setattr(store, "_not_in_memory", late)
    assert ns.pin(keys, ttl=600) == 2
    assert store.stats().pinned_nbytes >= ns.block_nbytes


def test_a_removal_that_succeeds_at_last_ends_the_hiding(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(4, tier)
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 1)
    save_blocks(ns, keys)
    settle(store)
    tier.fault = lambda verb, _key: Fault.RAISE if verb == "remove" else None
    ns.remove(keys)
    tier.fault = lambda _verb, _key: None
    assert ns.remove(keys) == 1
    assert not store.levels[0].hidden._undead
    assert not store.levels[0].hidden._masked


def test_a_namespace_that_a_tier_could_not_clear_does_not_come_back(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = FakeTier()
    store = make_store(4, tier)
    ns, other = store.namespace(SPEC), store.namespace(small_spec("other"))
    old, new = chain(ns, 1, 2), chain(ns, 2, 1)
    save_blocks(ns, old)
    save_blocks(other, chain(other, 1, 1))
    settle(store)

    def scan() -> Iterator[TierEntry]:
        raise OSError("the device does not answer")

    monkeypatch.setattr(tier, "scan", scan)
    ns.clear()
    monkeypatch.undo()
    assert ns.lookup(old).tiers == (None, None)
    assert save_blocks(ns, [*new, old[0]]) == 2
    settle(store)
    save_blocks(other, chain(other, 2, 4))
    assert ns.lookup([*new, *old]).tiers == ("fake", "fake", None)
    assert other.lookup(chain(other, 1, 1)).tiers == ("fake",)
    assert loaded(ns, [*new, *old]) == 2
    assert ns.clear() == 3
    assert not store.levels[0].hidden._unnamed
