from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.core.blockstore import Completion, Hit
from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.core.memory import DRAM
from kvferry.store.groups import restorable
from kvferry.store.level import Level, LevelOptions
from kvferry.store.policies import NeverPromote, OnEvict, SecondHitPromote
from kvferry.store.tiered import TieredStore
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, wait_until
from kvferry.testing.fake_tier import FakeTier, Fault
from kvferry.testing.store_calls import chain, loaded, settle

SPEC = small_spec("tiered")
N = SPEC.block_nbytes
MakeStore = Callable[..., TieredStore]


def below(store: TieredStore, tier: FakeTier, number: int = 1, blocks: int = 8) -> list[BlockKey]:
    """A chain that is only in the slower tiers."""
    ns = store.namespace(SPEC)
    keys = chain(ns, number, blocks)
    save_blocks(ns, keys)
    assert settle(store)
    ns_id = store.namespace(SPEC).namespace_id
    with store._cond:
        store._forget(ns_id, keys)
    assert set(ns.lookup(keys).tiers) == {tier.name}
    return keys


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.LOST, Fault.CORRUPT, Fault.LATE])
def test_c001_failing_blocks_shorten_the_prefix_exactly(make_store: MakeStore, fault: Fault) -> None:
    tier = FakeTier()
    store = make_store(16, tier)
    ns = store.namespace(SPEC)
    keys = below(store, tier)
    tier.fault = lambda verb, key: fault if key in (keys[3], keys[6]) and verb == "read" else None
    assert ns.lookup(keys).prefix == 8
    assert loaded(ns, keys) == 3
    assert ns.lookup(keys).tiers[:3] == (DRAM,) * 3
    tier.fault = lambda _verb, _key: None
    gone = fault in (Fault.LOST, Fault.CORRUPT)
    assert loaded(ns, keys) == (3 if gone else 8)
    if gone:  # computed again, and saved
        assert save_blocks(ns, keys) == 2
        assert loaded(ns, keys) == 8
    tier.late.set()
    assert settle(store)
    assert store.stats().pinned_nbytes == store.stats().quarantined_nbytes == 0


def test_a_buffer_that_a_late_read_may_write_is_not_used_again(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(4, tier)
    ns = store.namespace(SPEC)
    keys = below(store, tier, blocks=4)
    tier.fault = lambda verb, _key: Fault.LATE if verb == "read" else None
    assert loaded(ns, keys) == 0
    assert store.stats().quarantined_nbytes == 4 * N
    got: list[int] = []
    thread = threading.Thread(
        target=lambda: got.append(save_blocks(ns, chain(ns, 2, 4), seconds=30)), name="kvferry-test"
    )
    thread.start()
    tier.late.set()
    thread.join(30)
    assert got == [4]
    assert store.stats().quarantined_nbytes == 0


def test_c009_parts_that_are_gone_in_one_group_shorten_all(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(32, tier)
    kv, sidecar = store.namespace(SPEC), store.namespace(small_spec("sidecar"))
    tokens = list(range(10 * SPEC.block_tokens))
    kv_keys, side_keys = kv.keys(tokens), sidecar.keys(tokens)
    save_blocks(kv, kv_keys)
    save_blocks(sidecar, side_keys)
    assert settle(store)
    with store._cond:
        store._forget(sidecar.namespace_id, None)
    seen = {kv.spec: kv.lookup(kv_keys), sidecar.spec: sidecar.lookup(side_keys)}
    assert restorable(seen)[-1] == 40
    sidecar.remove([side_keys[6]])
    with (
        kv.load(kv_keys, deadline=deadline_in(20)) as a,
        sidecar.load(side_keys, deadline=deadline_in(20)) as b,
    ):
        assert (len(a), len(b)) == (10, 6)
        held = {kv.spec: Hit(("x",) * len(a)), sidecar.spec: Hit(("x",) * len(b))}
        assert restorable(held)[-1] == 6 * SPEC.block_tokens


def test_a_block_that_one_tier_cannot_give_comes_from_the_next(make_store: MakeStore) -> None:
    near, far = FakeTier("near"), FakeTier("far")
    store = make_store(16, near, far)
    ns = store.namespace(SPEC)
    keys = below(store, near)
    near.fault = lambda verb, key: Fault.FAIL if verb == "read" and key == keys[2] else None
    assert loaded(ns, keys) == 8
    assert store.stats().per_tier["far"]["read_hit"] == 1
    near.fault = lambda verb, key: Fault.RAISE if verb == "read" else None
    with store._cond:
        store._forget(ns.namespace_id, None)
    assert loaded(ns, keys) == 8
    assert store.stats().per_tier["near"]["faults"] == 1


def test_both_tiers_are_read_side_by_side(make_store: MakeStore) -> None:
    near, far = FakeTier("near"), FakeTier("far")
    store = make_store(16, near, far)
    ns = store.namespace(SPEC)
    keys = below(store, near)
    for key in keys[4:]:
        near.remove(store._space(ns), [key], deadline=deadline_in(20))
    assert ns.lookup(keys).tiers == ("near",) * 4 + ("far",) * 4
    far.gate.clear()
    near.fault = lambda _verb, _key: far.gate.set()  # far waits for near's first block
    assert loaded(ns, keys, seconds=30) == 8


def test_promotion_decides_what_stays(make_store: MakeStore) -> None:
    tier = FakeTier()
    never = make_store(16, (tier, LevelOptions(promotion=NeverPromote())))
    keys = below(never, tier, blocks=4)
    ns = never.namespace(SPEC)
    for _ in range(3):
        assert loaded(ns, keys) == 4
        assert ns.lookup(keys).tiers == ("fake",) * 4
        assert never.stats().used_nbytes == 0
    lease = ns.load(keys, deadline=deadline_in(20))
    assert never.stats().pinned_nbytes == never.stats().used_nbytes == 4 * N
    lease.release()
    second = FakeTier("second")
    store = make_store(16, (second, LevelOptions(promotion=SecondHitPromote())))
    keys = below(store, second, blocks=4)
    ns = store.namespace(SPEC)
    assert loaded(ns, keys) == 4
    assert ns.lookup(keys).tiers == ("second",) * 4
    assert loaded(ns, keys) == 4
    assert ns.lookup(keys).tiers == (DRAM,) * 4


def test_a_chain_longer_than_memory_is_loaded_as_far_as_it_fits(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(4, (tier, LevelOptions(write=OnEvict())))
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 8)
    save_blocks(ns, keys[:4])
    settle(store)
    with store._cond:
        store._forget(ns.namespace_id, None)
    save_blocks(ns, keys[4:], parent=keys[3])
    settle(store)
    assert ns.lookup(keys).prefix == 8
    assert loaded(ns, keys) == 4
    assert loaded(ns, keys[2:]) == 4
    assert store.stats().used_nbytes <= 4 * N


def test_c046_a_load_without_room_ends_in_time_and_does_not_spin(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(1, tier)
    ns = store.namespace(SPEC)
    keys = below(store, tier, 1, 1) + below(store, tier, 2, 1)
    lease = ns.load(keys[:1], deadline=deadline_in(20))
    assert len(lease) == 1
    started, cpu = time.monotonic(), time.process_time()
    assert loaded(ns, keys[1:], seconds=1.0) == 0
    assert 0.9 < time.monotonic() - started < 30
    assert time.process_time() - cpu < 0.5
    lease.release()
    assert loaded(ns, keys[1:]) == 1


def test_a_load_waits_for_room(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(2, tier)
    ns = store.namespace(SPEC)
    first, second = below(store, tier, 1, 2), below(store, tier, 2, 2)
    lease = ns.load(first, deadline=deadline_in(20))
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(loaded(ns, second, 60)), name="kvferry-test")
    thread.start()
    lease.release()
    thread.join(30)
    assert got == [2]


def test_loads_of_one_block_read_it_once(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(8, tier)
    ns = store.namespace(SPEC)
    keys = below(store, tier, blocks=2)
    tier.gate.clear()
    got: list[int] = []
    threads = [
        threading.Thread(target=lambda: got.append(loaded(ns, keys, 60)), name="kvferry-test")
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: tier.calls["read"] == 1)
    tier.gate.set()
    for thread in threads:
        thread.join(30)
    assert got == [2] * 4
    assert tier.calls["read"] == 1


def test_a_block_removed_while_it_is_read_does_not_stay(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(8, tier)
    ns = store.namespace(SPEC)
    keys = below(store, tier, blocks=2)
    tier.gate.clear()
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(loaded(ns, keys, 60)), name="kvferry-test")
    thread.start()
    wait_until(lambda: tier.calls["read"] == 1)
    assert ns.clear() == 2
    tier.gate.set()
    thread.join(30)
    assert got[0] in (0, 2)
    assert ns.lookup(keys).prefix == 0
    assert store.stats().used_nbytes == 0


def test_prefetch_brings_up_in_the_background_and_poll_tells(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(16, (tier, LevelOptions(promotion=NeverPromote())))
    ns = store.namespace(SPEC)
    keys = below(store, tier, blocks=4)
    ns.prefetch([*keys, BlockKey(bytes(32))])
    wait_until(lambda: ns.lookup(keys).tiers == (DRAM,) * 4)
    found: list[Completion] = []

    def told() -> bool:
        found.extend(store.poll())
        return bool(found)

    wait_until(told)
    assert [(c.kind, c.ok, c.nbytes, c.failed) for c in found] == [("prefetch", False, 4 * N, (4,))]
    wait_until(lambda: store.stats().pinned_nbytes == 0)


def test_prefetches_are_bounded(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(16, tier, prefetch_jobs=2)
    ns = store.namespace(SPEC)
    keys = below(store, tier, blocks=4)
    tier.gate.clear()
    for key in keys:
        ns.prefetch([key])
    assert store.stats().per_tier[DRAM]["prefetches_dropped"] == 2
    tier.gate.set()
    wait_until(lambda: sum(t == DRAM for t in ns.lookup(keys).tiers) == 2)


def test_pins_hold_in_the_tier_that_has_the_block(make_store: MakeStore) -> None:
    tier = FakeTier(capacity_nbytes=4 * N)
    store = make_store(8, tier)
    ns = store.namespace(SPEC)
    keys = below(store, tier, blocks=4)
    assert ns.pin([*keys[:2], BlockKey(bytes(32))], ttl=60) == 2
    save_blocks(ns, chain(ns, 2, 8))
    settle(store)
    assert ns.lookup(keys).tiers[:2] == ("fake",) * 2
    ns.unpin(keys)
    save_blocks(ns, chain(ns, 3, 8))
    settle(store)
    assert ns.lookup(keys).prefix == 0


def test_pins_come_up_where_the_tier_cannot_hold_them(make_store: MakeStore) -> None:
    tier = FakeTier(can_pin=False)
    store = make_store(8, tier)
    ns = store.namespace(SPEC)
    keys = below(store, tier, blocks=4)
    assert ns.pin(keys, ttl=60) == 4
    wait_until(lambda: store.stats().pinned_nbytes == 4 * N and store._prefetching == 0)
    save_blocks(ns, chain(ns, 2, 4))
    assert ns.lookup(keys).tiers == (DRAM,) * 4


def test_c053_a_new_store_finds_what_the_tier_holds(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(32, tier)
    keys = chain(store.namespace(SPEC), 1, 20)
    save_blocks(store.namespace(SPEC), keys)
    store.close()
    again = make_store(32, tier.reopen())
    assert again.namespace(SPEC).lookup(keys).prefix == 20
    assert save_blocks(again.namespace(SPEC), keys) == 0, "present: nothing to save"
    assert loaded(again.namespace(SPEC), keys) == 20


def test_c040_leases_of_two_stores_are_all_given_back(make_store: MakeStore) -> None:
    tiers = FakeTier("one"), FakeTier("two")
    stores = [make_store(8, tier) for tier in tiers]
    spaces = [store.namespace(SPEC) for store in stores]
    keys = chain(spaces[0], 1, 8)
    for ns, blocks in zip(spaces, (5, 3), strict=True):
        save_blocks(ns, keys[:blocks])
    leases = [ns.load(keys, deadline=deadline_in(20)) for ns in spaces]
    assert min(map(len, leases)) == 3
    for lease in leases:
        for index in range(3):
            assert lease.view(index) == block_bytes(keys[index], N)
        lease.release()
    for store in stores:
        assert settle(store)
        assert (store.stats().leases, store.stats().pinned_nbytes) == (0, 0)


def test_lookups_of_all_tiers_count_and_change_nothing(make_store: MakeStore) -> None:
    tier = FakeTier(capacity_nbytes=4 * N)
    store = make_store(8, tier)
    ns = store.namespace(SPEC)
    keys = below(store, tier, blocks=4)
    before = store.stats()
    for _ in range(1000):
        assert ns.lookup(keys).prefix == 4
    after = store.stats()
    assert (after.lookups - before.lookups, after.hit_blocks - before.hit_blocks) == (1000, 4000)
    assert after.pinned_nbytes == 0
    assert tier.calls["read"] == 0


def test_a_block_that_leaves_memory_during_a_load_is_read_from_its_tier(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in memory when the tiers were asked, and is only below when the load is planned."""
    store = make_store(4, FakeTier())
    ns = store.namespace(SPEC)
    head, tail = chain(ns, 1, 2)
    save_blocks(ns, [head, tail])
    settle(store)
    save_blocks(ns, chain(ns, 2, 3))
    settle(store)
    assert ns.lookup([head, tail]).tiers == (DRAM, "fake")
    locate = store._locate_missing

    def located(*args: Any) -> dict[BlockKey, Level]:
        found = locate(*args)
        monkeypatch.undo()
        save_blocks(ns, chain(ns, 3, 4))
        settle(store)
        assert ns.lookup([head]).tiers == ("fake",)
        return found

    monkeypatch.setattr(store, "_locate_missing", located)
    assert loaded(ns, [head, tail]) == 2
