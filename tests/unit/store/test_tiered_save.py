from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.core.blockstore import Namespace
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError, LeaseExpiredError, StoreError
from kvferry.core.keys import BlockKey
from kvferry.core.memory import DRAM
from kvferry.core.room import Below
from kvferry.core.sessions import Session
from kvferry.store.level import LevelOptions
from kvferry.store.policies import OnEvict, SecondHitAdmit, WriteBack, WriteThrough
from kvferry.store.tiered import TieredStore
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, wait_until
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


@pytest.mark.parametrize("policy", [WriteThrough, WriteBack])
def test_saved_blocks_go_down_in_the_background(make_store: MakeStore, policy: type[WriteThrough]) -> None:
    tier = FakeTier()
    store = make_store(8, (tier, LevelOptions(write=policy())))
    ns = store.namespace(SPEC)
    tier.gate.clear()
    keys = chain(ns, 1, 4)
    assert save_blocks(ns, keys) == 4
    assert loaded(ns, keys) == 4, "served from memory while it is written"
    assert not store.flush(deadline=deadline_in(0.05)), "not there yet"
    tier.gate.set()
    assert settle(store)
    assert in_tier(store, ns, keys) == [True] * 4
    assert store.stats().pinned_nbytes == 0


def test_on_evict_writes_when_room_is_needed_and_on_flush(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(4, (tier, LevelOptions(write=OnEvict())))
    ns = store.namespace(SPEC)
    first, second = chain(ns, 1, 4), chain(ns, 2, 2)
    save_blocks(ns, first)
    assert tier.calls["write"] == 0
    save_blocks(ns, second)
    assert in_tier(store, ns, first) == [False, False, True, True], "the tail goes first"
    assert ns.lookup(first).tiers == (DRAM, DRAM, "fake", "fake")
    assert settle(store)
    assert in_tier(store, ns, first + second) == [True] * 6
    assert loaded(ns, first) == 4
    writes = tier.calls["write"]
    assert loaded(ns, second) == 2
    assert loaded(ns, first) == 4
    assert tier.calls["write"] == writes, "what has a copy is evicted without another one"


def test_c037_a_slot_is_not_handed_out_before_its_copy_is_made(make_store: MakeStore) -> None:
    tier = FakeTier()
    tier.on_write = lambda _key: time.sleep(0.01)  # a slow device; the bytes are read after it
    store = make_store(4, (tier, LevelOptions(write=OnEvict())))
    ns = store.namespace(SPEC)
    saved: list[list[BlockKey]] = [[], [], []]

    def press(number: int) -> None:
        for count in range(20):
            keys = chain(ns, 1000 * number + count, 2)
            save_blocks(ns, keys, seconds=60)
            saved[number].extend(keys)

    threads = [threading.Thread(target=press, args=(n,), name="kvferry-test") for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert settle(store)
    keys = [key for mine in saved for key in mine]
    assert len(keys) == 120
    for key in keys:
        assert loaded(ns, [key]) == 1


def test_on_evict_waits_for_the_copy_until_the_deadline(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(2, (tier, LevelOptions(write=OnEvict())))
    ns = store.namespace(SPEC)
    first = chain(ns, 1, 2)
    save_blocks(ns, first)
    tier.gate.clear()
    with pytest.raises(CapacityError):
        save_blocks(ns, chain(ns, 2, 2), seconds=0.1)
    assert loaded(ns, first) == 2, "still in memory"
    tier.gate.set()
    assert save_blocks(ns, chain(ns, 3, 2)) == 2
    assert settle(store)
    assert loaded(ns, first) == 2


def test_a_full_queue_makes_write_through_wait_and_then_drop(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(16, (tier, LevelOptions(write=WriteThrough(), queue_nbytes=2 * N)))
    ns = store.namespace(SPEC)
    tier.gate.clear()
    save_blocks(ns, chain(ns, 1, 2))
    started = time.monotonic()
    assert save_blocks(ns, chain(ns, 2, 3), seconds=0.2) == 3
    assert 0.15 < time.monotonic() - started < 30
    per_tier = store.stats().per_tier["fake"]
    assert (per_tier["write_dropped"], per_tier["write_dropped_nbytes"]) == (3, 3 * N)
    assert per_tier["queued_nbytes"] <= 2 * N
    got: list[int] = []
    thread = threading.Thread(
        target=lambda: got.append(save_blocks(ns, chain(ns, 3, 3), seconds=60)), name="kvferry-test"
    )
    thread.start()
    tier.gate.set()
    thread.join(30)
    assert got == [3]
    assert not settle(store), "three blocks were lost to the tier"
    assert settle(store), "told once"
    assert in_tier(store, ns, chain(ns, 3, 3)) == [True] * 3
    assert in_tier(store, ns, chain(ns, 2, 3)) == [False] * 3


def test_a_full_queue_makes_write_back_drop_at_once(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(16, (tier, LevelOptions(write=WriteBack(), queue_nbytes=2 * N)))
    ns = store.namespace(SPEC)
    tier.gate.clear()
    started = time.monotonic()
    save_blocks(ns, chain(ns, 1, 6), seconds=60)
    assert time.monotonic() - started < 30
    assert store.stats().per_tier["fake"]["write_dropped"] == 4
    assert loaded(ns, chain(ns, 1, 6)) == 6
    tier.gate.set()
    settle(store)
    assert in_tier(store, ns, chain(ns, 1, 6)) == [True] * 2 + [False] * 4


def test_blocks_queued_for_writing_are_not_evicted(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(4, tier)
    ns = store.namespace(SPEC)
    tier.gate.clear()
    save_blocks(ns, chain(ns, 1, 4))
    with pytest.raises(CapacityError):
        save_blocks(ns, chain(ns, 2, 1), seconds=0.1)
    tier.gate.set()
    assert save_blocks(ns, chain(ns, 2, 4)) == 4
    assert settle(store)
    assert loaded(ns, chain(ns, 1, 4)) == 4


def test_second_hit_admits_what_is_used_again(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(8, (tier, LevelOptions(admission=SecondHitAdmit())))
    ns = store.namespace(SPEC)
    once, twice = chain(ns, 1, 2), chain(ns, 2, 2)
    save_blocks(ns, once)
    save_blocks(ns, twice)
    assert settle(store)
    assert tier.usage().entries == 0
    assert loaded(ns, twice) == 2
    assert settle(store)
    assert in_tier(store, ns, once + twice) == [False, False, True, True]


@pytest.mark.parametrize("write", [WriteThrough, WriteBack, OnEvict])
def test_second_hit_admits_what_is_saved_again(
    make_store: MakeStore, write: type[WriteThrough | WriteBack | OnEvict]
) -> None:
    tier = FakeTier()
    store = make_store(8, (tier, LevelOptions(write=write(), admission=SecondHitAdmit())))
    ns = store.namespace(SPEC)
    once, twice = chain(ns, 1, 2), chain(ns, 2, 2)
    save_blocks(ns, once)
    save_blocks(ns, twice)
    assert save_blocks(ns, twice) == 0
    if write is OnEvict:
        save_blocks(ns, chain(ns, 3, 8))
    assert settle(store)
    held = in_tier(store, ns, once + twice)
    assert held == [False, False, True, True]


@pytest.mark.parametrize("again", [False, True])
def test_a_removed_block_does_not_come_back_from_the_queue(make_store: MakeStore, again: bool) -> None:
    tier = FakeTier()
    store = make_store(8, tier)
    ns = store.namespace(SPEC)
    under_way, waiting = chain(ns, 1, 2), chain(ns, 2, 2)
    tier.gate.clear()
    save_blocks(ns, under_way)
    wait_until(lambda: tier.calls["write"] == 1)
    save_blocks(ns, waiting)
    assert ns.remove(under_way) == 2
    assert ns.clear() == 2
    assert ns.lookup(under_way + waiting).tiers == (None,) * 4
    if again:
        assert save_blocks(ns, under_way) == 2
    tier.gate.set()
    assert settle(store)
    assert ns.lookup(under_way + waiting).tiers == ((DRAM, DRAM, None, None) if again else (None,) * 4)
    assert in_tier(store, ns, under_way + waiting) == [again, again, False, False]
    assert store.stats().used_nbytes == (2 * N if again else 0)


def test_a_block_is_not_seen_between_its_write_and_its_late_removal(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(8, tier)
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 1)
    seen: list[object] = []

    def fault(verb: str, key: BlockKey) -> None:
        if verb == "write":
            ns.remove(keys)
        if verb == "remove":
            seen.append(ns.lookup(keys).tiers[0])

    tier.fault = fault
    save_blocks(ns, keys)
    settle(store)
    assert seen
    assert not any(seen)
    assert in_tier(store, ns, keys) == [False]


def test_remove_and_clear_reach_every_tier(make_store: MakeStore) -> None:
    near, far = FakeTier("near"), FakeTier("far")
    store = make_store(4, near, far)
    ns, other = store.namespace(SPEC), store.namespace(small_spec("other"))
    for number in range(4):
        save_blocks(ns, chain(ns, number, 2))
        save_blocks(other, chain(other, number, 1))
        settle(store)
    assert ns.remove(chain(ns, 0, 2) + chain(ns, 99, 1)) == 2
    assert ns.lookup(chain(ns, 0, 2)).prefix == 0
    assert ns.clear() == 6
    assert ns.clear() == 0
    assert [near.usage().entries, far.usage().entries] == [4, 4], "the other namespace is untouched"
    assert other.clear() == 4


def test_what_a_tier_cannot_remove_is_never_shown_again(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(4, tier)
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 2)
    save_blocks(ns, keys)
    settle(store)
    tier.fault = lambda verb, _key: Fault.RAISE if verb == "remove" else None
    assert ns.remove(keys) == 2
    assert ns.lookup(keys).tiers == (None, None)
    tier.fault = lambda _verb, _key: None
    assert ns.lookup(keys).tiers == (None, None)
    assert save_blocks(ns, keys) == 2
    settle(store)


def test_c056_a_reader_sees_a_miss_or_all_bytes(make_store: MakeStore) -> None:
    tier = FakeTier()
    tier.on_write = lambda _key: time.sleep(0.002)
    store = make_store(2, (tier, LevelOptions(write=OnEvict())))
    ns = store.namespace(SPEC)
    stop = threading.Event()
    seen: set[int] = set()
    failures: list[BaseException] = []

    def poll() -> None:
        try:
            while not stop.is_set():
                for number in range(20):
                    seen.add(loaded(ns, chain(ns, number, 1), 0.01))
        except BaseException as error:  # noqa: BLE001 - told to the test
            failures.append(error)

    thread = threading.Thread(target=poll, name="kvferry-test")
    thread.start()
    for number in range(20):
        save_blocks(ns, chain(ns, number, 1), seconds=30)
    wait_until(lambda: bool(seen) or bool(failures))
    stop.set()
    thread.join(30)
    assert not failures, failures
    assert seen <= {0, 1}


def test_c041_holds_never_go_below_zero(make_store: MakeStore) -> None:
    near, far = FakeTier("near", 6 * N), FakeTier("far")
    store = make_store(4, (near, LevelOptions(write=OnEvict())), (far, LevelOptions(write=WriteBack())))
    ns = store.namespace(SPEC)
    for number in range(250):
        keys = chain(ns, number % 17, 2)
        save_blocks(ns, keys)
        with ns.load(keys, deadline=deadline_in(20)) as lease:
            assert len(lease) == 2
        for _ in range(2):
            with pytest.raises(LeaseExpiredError):
                lease.release()
    settle(store)
    stats = store.stats()
    assert (stats.pinned_nbytes, stats.leases) == (0, 0)
    assert not store._pool._leaving
    assert store._pool.leaving_nbytes == 0


def test_a_block_that_leaves_memory_during_a_save_is_not_saved_again(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in memory when the tiers were asked, and is only below when the slots are taken."""
    tier = FakeTier()
    store = make_store(4, tier)
    ns = store.namespace(SPEC)
    head, tail = chain(ns, 1, 2)
    save_blocks(ns, [head])
    settle(store)
    asked = store._below

    def below(*args: Any) -> Below:
        found = asked(*args)
        monkeypatch.undo()
        save_blocks(ns, chain(ns, 2, 4))
        settle(store)
        assert ns.lookup([head]).tiers == ("fake",)
        return found

    monkeypatch.setattr(store, "_below", below)
    assert save_blocks(ns, [head, tail]) == 1
    assert ns.lookup([head, tail]).tiers == ("fake", DRAM)


def test_a_block_removed_while_a_save_waits_does_not_reach_the_other_tiers(make_store: MakeStore) -> None:
    near, far = FakeTier("near"), FakeTier("far")
    store = make_store(8, (near, LevelOptions(queue_nbytes=N)), far)
    ns = store.namespace(SPEC)
    first, second = chain(ns, 1, 2)
    near.gate.clear()
    thread = threading.Thread(
        target=lambda: save_blocks(ns, [first, second], seconds=30), name="kvferry-test"
    )
    thread.start()
    wait_until(lambda: near.calls["write"] == 1)
    ns.remove([first])
    near.gate.set()
    thread.join(30)
    assert settle(store)
    assert ns.lookup([first, second]).tiers == (None, DRAM)
    assert in_tier(store, ns, [first, second], "near") == [False, True]
    assert in_tier(store, ns, [first, second], "far") == [False, True]
    assert store.stats().pinned_nbytes == 0


def test_watermarks_make_room_in_the_background(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(10, (tier, LevelOptions(write=OnEvict())), watermarks=(0.3, 0.8))
    ns = store.namespace(SPEC)
    for number in range(4):
        save_blocks(ns, chain(ns, number, 2))
    assert store.stats().used_nbytes == 8 * N
    save_blocks(ns, chain(ns, 9, 1))
    wait_until(lambda: store.stats().used_nbytes <= 3 * N)
    for number in range(4):
        assert loaded(ns, chain(ns, number, 2)) == 2
    held = ns.load(chain(ns, 3, 2), deadline=deadline_in(20))
    held.check()
    held.release()


def test_close_writes_what_is_on_its_way(make_store: MakeStore) -> None:
    for policy in (WriteThrough(), OnEvict()):
        tier = FakeTier()
        store = make_store(8, (tier, LevelOptions(write=policy)))
        keys = chain(store.namespace(SPEC), 1, 8)
        save_blocks(store.namespace(SPEC), keys)
        store.close()
        store.close()
        assert len(list(tier.scan())) == 8


def test_close_is_bounded_and_says_what_is_left(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    tier = FakeTier()
    store = make_store(8, tier, close_s=0.1)
    ns = store.namespace(SPEC)
    tier.gate.clear()
    save_blocks(ns, chain(ns, 1, 2))
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 30
    assert str(2 * N) in caplog.text
    before = {t.name for t in threading.enumerate()}
    assert not any(name.startswith(("kvferry-write", "kvferry-room")) for name in before)
    with pytest.raises(StoreError, match="closed"):
        ns.lookup(chain(ns, 1, 1))
    assert store.stats().capacity_nbytes == 0


def test_close_wakes_who_waits(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(2, (tier, LevelOptions(queue_nbytes=N)), close_s=0.1)
    ns = store.namespace(SPEC)
    held = ns.reserve(chain(ns, 1, 2), parent=None, deadline=deadline_in(20))
    caught: list[Exception] = []

    def wait() -> None:
        try:
            save_blocks(ns, chain(ns, 2, 1), seconds=60)
        except StoreError as error:
            caught.append(error)

    thread = threading.Thread(target=wait, name="kvferry-test")
    thread.start()
    store.close()
    thread.join(30)
    assert "closed" in str(caught[0])
    held.abort()


def test_sessions_share_blocks_of_all_tiers(make_store: MakeStore) -> None:
    tier = FakeTier()
    store = make_store(4, tier)
    view = store.for_session(Session("engine"))
    save_blocks(view.namespace(SPEC), chain(view.namespace(SPEC), 1, 4))
    settle(store)
    save_blocks(store.namespace(SPEC), chain(store.namespace(SPEC), 2, 4))
    lease = view.namespace(SPEC).load(chain(store.namespace(SPEC), 1, 4), deadline=deadline_in(20))
    assert lease.view(3) == block_bytes(lease.keys[3], N)
    view.close()
    with pytest.raises(LeaseExpiredError):
        lease.check()
    assert settle(store)
    assert store.stats().pinned_nbytes == 0
