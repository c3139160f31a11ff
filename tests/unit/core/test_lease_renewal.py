"""What streams need of leases: renewal, and publishing without letting go."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvferry.core import DType, KVSpec, LayerSpec, TensorSpec, deadline_in
from kvferry.core.errors import LeaseExpiredError
from kvferry.core.memory import MemoryNamespace, MemoryStore

_LAYER = LayerSpec((TensorSpec("k", (4, 256), DType.UINT8),))
SPEC = KVSpec(model="m", revision="r", layers=(_LAYER, _LAYER), block_tokens=4)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore(16 << 12, lease_s=0.6)
    yield store
    store.close()


@pytest.fixture
def namespace(store: MemoryStore) -> MemoryNamespace:
    return store.namespace(SPEC)


def _outlive(expires_at: float, store: MemoryStore) -> None:
    """Until the first deadline is past, with the store looking at deadlines meanwhile."""
    limit = time.monotonic() + 60
    while time.monotonic() < expires_at + 0.02:
        assert time.monotonic() < limit
        store.poll()
        time.sleep(0.01)


def test_renewed_leases_outlive_their_first_deadline(store: MemoryStore, namespace: MemoryNamespace) -> None:
    keys = namespace.keys(range(8))
    namespace.save([(keys[0], bytes(SPEC.block_nbytes))], parent=None, deadline=deadline_in(20))
    read = namespace.load(keys[:1], deadline=deadline_in(20))
    write = namespace.reserve(keys[1:], parent=keys[0], deadline=deadline_in(20))
    firsts = read.expires_at, write.expires_at
    while time.monotonic() < max(firsts) + 0.05:  # renewed all the while, as a stream does
        read.renew()
        write.renew()
        store.poll()
        time.sleep(0.01)
    assert read.expires_at > firsts[0]
    assert write.expires_at > firsts[1]
    assert write.commit() == 1
    read.release()
    assert store.stats().leases == 0
    assert store.stats().expired_leases == 0


def test_a_renewed_lease_expires_in_the_end(store: MemoryStore, namespace: MemoryNamespace) -> None:
    write = namespace.reserve(namespace.keys(range(4)), parent=None, deadline=deadline_in(20))
    write.renew()
    _outlive(write.expires_at, store)
    with pytest.raises(LeaseExpiredError):
        write.commit()
    assert store.stats().expired_leases == 1


def test_an_expired_or_ended_lease_is_not_revived(store: MemoryStore, namespace: MemoryNamespace) -> None:
    write = namespace.reserve(namespace.keys(range(4)), parent=None, deadline=deadline_in(20))
    _outlive(write.expires_at, store)
    with pytest.raises(LeaseExpiredError):
        write.renew()
    write.abort()
    ended = namespace.reserve(namespace.keys(range(4)), parent=None, deadline=deadline_in(20))
    ended.commit()
    with pytest.raises(LeaseExpiredError, match="has ended"):
        ended.renew()


def test_publish_goes_on_holding_the_same_slots(store: MemoryStore, namespace: MemoryNamespace) -> None:
    keys = namespace.keys(range(8))
    write = namespace.reserve(keys, parent=None, deadline=deadline_in(20))
    views = [write.view(i) for i in range(2)]
    for i, view in enumerate(views):
        view[:] = bytes([i + 1]) * len(view)
    stored, read = write.publish()
    assert stored == 2
    assert namespace.lookup(keys).prefix == 2
    assert store.stats().pinned_nbytes == 2 * namespace.slot_nbytes
    views[0][0] = 77  # the same memory, not a copy
    assert read.view(0)[0] == 77
    with pytest.raises(LeaseExpiredError):
        write.commit()
    read.release()
    assert store.stats().pinned_nbytes == 0


def test_publish_keeps_the_copy_that_somebody_else_made_superfluous(
    store: MemoryStore, namespace: MemoryNamespace
) -> None:
    keys = namespace.keys(range(8))
    write = namespace.reserve(keys, parent=None, deadline=deadline_in(20))
    for i in range(2):
        write.view(i)[:] = bytes([i + 1]) * SPEC.block_nbytes
    view = write.view(0)
    namespace.save([(keys[0], bytes([1]) * SPEC.block_nbytes)], parent=None, deadline=deadline_in(20))
    stored, read = write.publish()
    assert stored == 1
    used = store.stats().used_nbytes
    assert used == 3 * namespace.slot_nbytes, "the superfluous copy is not used again while it is held"
    filler = namespace.keys(range(100, 100 + 4 * 12))
    namespace.save([(k, b"\xff" * SPEC.block_nbytes) for k in filler], parent=None, deadline=deadline_in(20))
    assert bytes(view) == bytes([1]) * SPEC.block_nbytes
    read.check()
    read.release()
    assert store.stats().pinned_nbytes == 0
    namespace.clear()
    assert store.stats().used_nbytes == 0


def test_publish_after_the_deadline_publishes_nothing(store: MemoryStore, namespace: MemoryNamespace) -> None:
    keys = namespace.keys(range(4))
    write = namespace.reserve(keys, parent=None, deadline=deadline_in(20))
    _outlive(write.expires_at, store)
    with pytest.raises(LeaseExpiredError):
        write.publish()
    assert namespace.lookup(keys).prefix == 0
    assert store.stats().used_nbytes == 0


def test_publish_of_nothing(store: MemoryStore, namespace: MemoryNamespace) -> None:
    stored, read = namespace.reserve([], parent=None, deadline=deadline_in(20)).publish()
    assert (stored, len(read)) == (0, 0)
    read.release()
