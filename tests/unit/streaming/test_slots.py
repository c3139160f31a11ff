"""Taking the blocks of a stream while others store and evict them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import pytest

from kvferry.core import BlockKey, Hit, KeyScope, KVSpec, deadline_in
from kvferry.core.clock import is_past
from kvferry.core.errors import LeaseExpiredError, StoreError
from kvferry.core.leases import SlotReadLease
from kvferry.core.memory import MemoryStore
from kvferry.core.memory_namespace import MemoryNamespace
from kvferry.core.write_leases import SlotWriteLease
from kvferry.streaming.slots import BlockSlots
from kvferry.testing.prompt_kv import PromptKV

Race: TypeAlias = Callable[[str], object]


class RacingNamespace(MemoryNamespace):
    """Calls ``race`` before each step, as another thread might come in between."""

    def __init__(self, store: MemoryStore, spec: KVSpec, race: Race) -> None:
        super().__init__(store, store.session, spec, KeyScope())
        self._race = race

    def lookup(self, keys: Sequence[BlockKey]) -> Hit:
        self._race("lookup")
        return super().lookup(keys)

    def load(
        self,
        keys: Sequence[BlockKey],
        *,
        deadline: float,
        before_fetch: Callable[[], object] | None = None,
    ) -> SlotReadLease:
        self._race("load")
        return super().load(keys, deadline=deadline, before_fetch=before_fetch)

    def reserve(
        self, keys: Sequence[BlockKey], *, parent: BlockKey | None, deadline: float
    ) -> SlotWriteLease:
        self._race("reserve")
        return super().reserve(keys, parent=parent, deadline=deadline)


@pytest.fixture
def kv(spec: KVSpec) -> PromptKV:
    return PromptKV(spec, 16 * 4)


def _save(namespace: MemoryNamespace, kv: PromptKV, *blocks: int) -> None:
    for b in blocks:
        data = [(kv.keys[b], kv.block_bytes(b))]
        namespace.save(data, parent=kv.keys[b - 1] if b else None, deadline=deadline_in(20))


def _until_expired(store: MemoryStore) -> None:
    limit = deadline_in(20)
    while store.stats().leases:
        assert not is_past(limit)
        time.sleep(0.01)


def _slots(store: MemoryStore, kv: PromptKV, race: Race) -> BlockSlots:
    return BlockSlots(RacingNamespace(store, kv.spec, race), kv.keys)


def test_a_block_stored_before_the_reservation_is_held_instead(store: MemoryStore, kv: PromptKV) -> None:
    plain = store.namespace(kv.spec)
    slots = _slots(store, kv, lambda step: _save(plain, kv, 1) if step == "reserve" else None)
    slots.take(deadline_in(20))
    assert slots.missing == {0, 2, 3}
    assert slots.readable(1, 2).tobytes() == kv.layer_bytes(2, 1)
    slots.give_up()
    assert store.stats().leases == 0


def test_a_block_evicted_before_the_lease_is_missing(store: MemoryStore, kv: PromptKV) -> None:
    plain = store.namespace(kv.spec)
    _save(plain, kv, 0, 1, 2)
    slots = _slots(store, kv, lambda step: plain.remove([kv.keys[1]]) if step == "load" else None)
    slots.take(deadline_in(20))
    assert 1 in slots.missing
    assert 0 not in slots.missing
    slots.give_up()
    assert store.stats().leases == 0


def test_blocks_that_come_and_go_all_the_time_are_an_error(store: MemoryStore, kv: PromptKV) -> None:
    plain = store.namespace(kv.spec)

    def race(step: str) -> None:
        if step == "load":
            plain.clear()
        else:
            _save(plain, kv, 0)

    slots = _slots(store, kv, race)
    with pytest.raises(StoreError, match="the store is too small"):
        slots.take(deadline_in(20))
    slots.give_up()
    assert store.stats().leases == 0


@pytest.mark.parametrize("at", ["load", "reserve"])
def test_given_up_while_taking(store: MemoryStore, kv: PromptKV, at: str) -> None:
    plain = store.namespace(kv.spec)
    _save(plain, kv, 0)
    slots: BlockSlots | None = None

    def race(step: str) -> None:
        if step == at:
            assert slots is not None
            slots.give_up()

    slots = _slots(store, kv, race)
    with pytest.raises(LeaseExpiredError, match="given up"):
        slots.take(deadline_in(20))
    stats = store.stats()
    assert (stats.leases, stats.pinned_nbytes) == (0, 0)


def test_a_block_removed_after_it_was_leased_is_received_again(store: MemoryStore, kv: PromptKV) -> None:
    plain = store.namespace(kv.spec)
    _save(plain, kv, 0, 1)
    slots = _slots(store, kv, lambda step: plain.remove(kv.keys[:2]) if step == "reserve" else None)
    slots.take(deadline_in(20))
    assert slots.missing == {2, 3}, "what is leased stays, also when it was removed"
    assert slots.readable(0, 0).tobytes() == kv.layer_bytes(0, 0)
    slots.give_up()


def test_publish_with_an_expired_read_lease_publishes_nothing(spec: KVSpec, kv: PromptKV) -> None:
    """Also while the lease of the reserved slots still holds: a prompt with a hole is of no use."""
    store = MemoryStore(1 << 20)
    plain = store.namespace(spec)
    _save(plain, kv, 0)

    def set_lease(step: str) -> None:
        store.lease_s = 0.1 if step == "load" else 1000.0

    slots = _slots(store, kv, set_lease)
    slots.take(deadline_in(20))
    limit = deadline_in(20)
    while store.stats().expired_leases == 0:
        assert not is_past(limit)
        time.sleep(0.01)
    assert store.stats().leases == 1
    with pytest.raises(LeaseExpiredError):
        slots.publish()
    assert plain.lookup(kv.keys).prefix == 1
    slots.give_up()
    assert store.stats().leases == 0
    store.close()


def test_an_expired_lease_is_not_renewed(spec: KVSpec, kv: PromptKV) -> None:
    store = MemoryStore(1 << 20, lease_s=0.2)
    slots = BlockSlots(store.namespace(spec), kv.keys)
    slots.take(deadline_in(20))
    _until_expired(store)
    with pytest.raises(LeaseExpiredError):
        slots.renew()
    slots.give_up()
    store.close()


def test_slots_given_up_while_they_are_received_into_are_not_used_again(
    store: MemoryStore, kv: PromptKV
) -> None:
    slots = BlockSlots(store.namespace(kv.spec), kv.keys)
    slots.take(deadline_in(20))
    with slots.writing():
        slots.give_up()
        stats = store.stats()
        assert (stats.leases, stats.quarantined_nbytes) == (0, stats.used_nbytes)
        assert stats.used_nbytes > 0
    stats = store.stats()
    assert (stats.quarantined_nbytes, stats.used_nbytes) == (0, 0)


def test_a_release_too_late_says_so_and_gives_back(spec: KVSpec, kv: PromptKV) -> None:
    store = MemoryStore(1 << 20)
    slots = BlockSlots(store.namespace(spec), kv.keys)
    slots.take(deadline_in(20))
    store.lease_s = 0.1
    assert slots.publish() == 4
    _until_expired(store)
    with pytest.raises(LeaseExpiredError):
        slots.release()
    slots.release()
    assert store.stats().pinned_nbytes == 0
    store.close()
