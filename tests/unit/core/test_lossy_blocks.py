"""Blocks that have lost something, in memory: who finds them, what takes their place, what is behind them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.core.memory import MemoryStore
from kvferry.core.memory_namespace import MemoryNamespace
from kvferry.testing.blockstore_common import SPEC

EXACT, LOSSY = b"\x01" * SPEC.block_nbytes, b"\x02" * SPEC.block_nbytes


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    found = MemoryStore(64 * SPEC.block_nbytes)
    yield found
    found.close()


@pytest.fixture
def exact(store: MemoryStore) -> MemoryNamespace:
    return store.namespace(SPEC)


@pytest.fixture
def any_loss(store: MemoryStore) -> MemoryNamespace:
    return store.namespace(SPEC, takes_lossy=True)


def chain(namespace: MemoryNamespace, blocks: int) -> list[BlockKey]:
    return namespace.keys([7] * blocks * SPEC.block_tokens)


def fill(
    namespace: MemoryNamespace,
    keys: list[BlockKey],
    data: bytes,
    *,
    lossy: bool,
    parent: BlockKey | None = None,
    publish: bool = False,
) -> int:
    with namespace.reserve(keys, parent=parent, deadline=deadline_in(20)) as lease:
        for index in range(len(lease)):
            lease.view(index)[:] = data
        if lossy:
            lease.mark_lossy(range(len(lease)))
        if not publish:
            return lease.commit()
        stored, held = lease.publish()
        assert bytes(held.view(0)) == data
        held.release()
        return stored


def held(namespace: MemoryNamespace, keys: list[BlockKey]) -> list[bytes]:
    with namespace.load(keys, deadline=deadline_in(20)) as lease:
        return [bytes(lease.view(index)[:1]) for index in range(len(lease))]


def test_readers_find_only_what_they_take(exact: MemoryNamespace, any_loss: MemoryNamespace) -> None:
    keys = chain(exact, 4)
    assert fill(exact, keys[:2], EXACT, lossy=False) == 2
    assert fill(exact, keys[2:3], LOSSY, lossy=True, parent=keys[1]) == 1
    assert fill(exact, keys[3:], EXACT, lossy=False, parent=keys[2]) == 1
    assert [tier is None for tier in exact.lookup(keys).tiers] == [False, False, True, False]
    assert held(exact, keys) == [b"\x01"] * 2
    assert exact.pin(keys, ttl=5) == 3
    assert any_loss.lookup(keys).prefix == any_loss.pin(keys, ttl=5) == 4
    with any_loss.load(keys, deadline=deadline_in(20)) as lease:
        assert lease.lossy == {2}
    with exact.load(keys, deadline=deadline_in(20)) as lease:
        assert lease.lossy == frozenset()
    assert exact.remove(keys) == 4  # whoever removes, removes all
    assert any_loss.lookup(keys).prefix == 0


@pytest.mark.parametrize("how", ["save", "commit", "publish"])
def test_an_exact_save_takes_the_place_of_a_lossy_block(
    store: MemoryStore, exact: MemoryNamespace, any_loss: MemoryNamespace, how: str
) -> None:
    keys = chain(exact, 2)
    fill(exact, keys, LOSSY, lossy=True)
    with any_loss.load(keys, deadline=deadline_in(20)) as reading:
        if how == "save":
            assert exact.save([(key, EXACT) for key in keys], parent=None, deadline=deadline_in(20)) == 2
        else:
            assert fill(exact, keys, EXACT, lossy=False, publish=how == "publish") == 2
        assert bytes(reading.view(1)) == LOSSY  # what is being read stays in place
    assert held(exact, keys) == held(any_loss, keys) == [b"\x01"] * 2
    stats = store.stats()
    assert (stats.entries, stats.pinned_nbytes, stats.leases) == (2, 0, 0)
    assert stats.used_nbytes == 2 * exact.slot_nbytes  # nothing is left of the others


def test_a_pin_stays_when_an_exact_block_takes_its_place(
    store: MemoryStore, exact: MemoryNamespace, any_loss: MemoryNamespace
) -> None:
    keys = chain(exact, 1)
    fill(exact, keys, LOSSY, lossy=True)
    assert any_loss.pin(keys, ttl=60) == 1
    fill(exact, keys, EXACT, lossy=False)
    assert store.stats().pinned_nbytes > 0
    exact.unpin(keys)
    assert store.stats().pinned_nbytes == 0


def test_a_lossy_block_takes_the_place_of_none(exact: MemoryNamespace, any_loss: MemoryNamespace) -> None:
    keys = chain(exact, 1)
    with exact.reserve(keys, parent=None, deadline=deadline_in(20)) as late:
        late.view(0)[:] = LOSSY
        late.mark_lossy([0])
        fill(exact, keys, EXACT, lossy=False)
        assert late.commit() == 0
    assert held(any_loss, keys) == [b"\x01"]
    assert len(any_loss.reserve(keys, parent=None, deadline=deadline_in(20))) == 0


@pytest.mark.parametrize("how", ["save", "reserve"])
def test_what_is_computed_behind_a_lossy_block_is_lossy(
    exact: MemoryNamespace, any_loss: MemoryNamespace, how: str
) -> None:
    keys = chain(exact, 4)
    fill(exact, keys[:2], LOSSY, lossy=True)
    if how == "save":
        any_loss.save([(key, EXACT) for key in keys[2:]], parent=keys[1], deadline=deadline_in(20))
    else:
        fill(any_loss, keys[2:], EXACT, lossy=False, parent=keys[1])
    assert exact.lookup(keys).tiers == (None,) * 4
    with any_loss.load(keys, deadline=deadline_in(20)) as lease:
        assert lease.lossy == {0, 1, 2, 3}


def test_behind_a_marked_block_of_the_same_lease_all_is_lossy(
    exact: MemoryNamespace, any_loss: MemoryNamespace
) -> None:
    keys = chain(exact, 4)
    with any_loss.reserve(keys, parent=None, deadline=deadline_in(20)) as lease:
        lease.mark_lossy([1])
        _, read = lease.publish()
        assert read.lossy == {1, 2, 3}
        read.release()
    assert exact.lookup(keys).prefix == 1


def test_who_takes_no_loss_saves_exact_blocks_behind_any(exact: MemoryNamespace) -> None:
    """It never got what it does not take: what it computed, it computed from the tokens."""
    keys = chain(exact, 2)
    fill(exact, keys[:1], LOSSY, lossy=True)
    fill(exact, keys[1:], EXACT, lossy=False, parent=keys[0])
    assert [tier is None for tier in exact.lookup(keys).tiers] == [True, False]
