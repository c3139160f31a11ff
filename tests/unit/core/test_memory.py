import errno
import os
import threading
import time

import pytest

from kvferry.core.blockstore import BlockStore, Namespace
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError, ConfigError, StoreError
from kvferry.core.keys import BlockKey
from kvferry.core.memory import MemoryStore
from kvferry.core.sessions import Session
from kvferry.core.spec import KVSpec
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, wait_until

SPEC = small_spec("memory")
N = SPEC.block_nbytes


def chain(ns: Namespace, number: int, blocks: int) -> list[BlockKey]:
    return ns.keys([number] * (blocks * SPEC.block_tokens))


def test_it_is_a_block_store_for_type_checkers() -> None:
    store: BlockStore = MemoryStore(N)
    view: BlockStore = MemoryStore(N).for_session(Session("x"))
    assert isinstance(store, BlockStore)
    assert isinstance(view, BlockStore)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="lease_s"):
        MemoryStore(N, lease_s=0)
    with pytest.raises(ConfigError, match="write_quota_nbytes"):
        MemoryStore(N, write_quota_nbytes=0)
    with pytest.raises(ConfigError, match="available"):
        MemoryStore(1 << 60)


@pytest.mark.parametrize("tenant", ["", "x" * 121, "ä" * 61, None, b"t"])
def test_a_tenant_id_that_no_tier_could_use_is_refused(tenant: str) -> None:
    with pytest.raises(ConfigError, match="a tenant id"):
        MemoryStore(1 << 20, tenant=tenant)


@pytest.mark.parametrize("tenant", ["t", "x" * 120, "ä" * 60, "a/b"])
def test_a_tenant_id_may_have_120_bytes(tenant: str) -> None:
    store = MemoryStore(1 << 20, tenant=tenant)
    assert store.tenant == tenant
    store.close()


def test_a_write_quota_bounds_reserved_and_quarantined_bytes() -> None:
    store = MemoryStore(8 * N, lease_s=0.05, write_quota_nbytes=4 * N)
    ns = store.namespace(SPEC)
    started = time.monotonic()
    with pytest.raises(CapacityError, match=f"quota is {4 * N} bytes"):
        ns.reserve(chain(ns, 1, 5), parent=None, deadline=deadline_in(30))
    assert time.monotonic() - started < 40, "what can never be is refused at once"
    lease = ns.reserve(chain(ns, 1, 3), parent=None, deadline=deadline_in(20))
    wait_until(lambda: store.stats().quarantined_nbytes == 3 * N)
    store.lease_s = 60.0  # the leases from here on hold, however slow the machine is
    with pytest.raises(CapacityError, match=f"has {3 * N} bytes reserved or in quarantine"):
        ns.reserve(chain(ns, 2, 2), parent=None, deadline=deadline_in(0.05))
    other = store.for_session(Session("other")).namespace(SPEC)
    assert save_blocks(other, chain(other, 2, 2)) == 2
    got: list[int] = []
    thread = threading.Thread(
        target=lambda: got.append(save_blocks(ns, chain(ns, 3, 4), seconds=60)), name="kvferry-test"
    )
    thread.start()
    lease.abort()
    thread.join(30)
    assert got == [4]


def test_what_the_chain_itself_holds_is_not_waited_for() -> None:
    store = MemoryStore(4 * N)
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 6)
    save_blocks(ns, keys[:4])
    started = time.monotonic()
    with ns.load(keys, deadline=deadline_in(20)), pytest.raises(CapacityError, match="chain that is being"):
        save_blocks(ns, keys[4:], parent=keys[3], seconds=60)
    assert time.monotonic() - started < 40


def test_blocks_that_a_save_finds_stored_count_as_used() -> None:
    store = MemoryStore(4 * N)
    ns = store.namespace(SPEC)
    old, new = chain(ns, 1, 2), chain(ns, 2, 2)
    save_blocks(ns, old)
    save_blocks(ns, new)
    assert save_blocks(ns, old) == 0
    save_blocks(ns, chain(ns, 3, 2))
    assert (ns.lookup(old).prefix, ns.lookup(new).prefix) == (2, 0)


def test_a_block_that_comes_after_its_child_is_its_head_again() -> None:
    store = MemoryStore(4 * N)
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 3)
    save_blocks(ns, keys[1:], parent=keys[0])
    save_blocks(ns, keys[:1])
    save_blocks(ns, chain(ns, 2, 2))
    assert ns.lookup(keys).prefix == 2
    ns.remove(keys[:1])
    save_blocks(ns, chain(ns, 3, 1))
    save_blocks(ns, keys[:1])
    assert ns.lookup(keys[:1]).prefix == 1


def test_a_ring_of_foreign_parents_is_still_evicted() -> None:
    store = MemoryStore(4 * N)
    ns = store.namespace(SPEC)
    a, b, c = ns.foreign_keys([b"a" * 32, b"b" * 32, b"c" * 32])
    for key, parent in ((a, b), (b, c), (c, a)):
        save_blocks(ns, [key], parent=parent)
    own = ns.foreign_keys([b"o" * 32])
    save_blocks(ns, own, parent=own[0])
    assert save_blocks(ns, chain(ns, 1, 4)) == 4
    assert ns.lookup([a, b, c, *own]).tiers == (None,) * 4


def test_pinned_tails_leave_the_least_recently_used_inner_block_to_evict() -> None:
    store = MemoryStore(6 * N)
    ns = store.namespace(SPEC)
    old, new = chain(ns, 1, 3), chain(ns, 2, 3)
    save_blocks(ns, old)
    save_blocks(ns, new)
    ns.pin([old[-1], new[-1]], ttl=60)
    save_blocks(ns, chain(ns, 3, 1))
    assert [t is not None for t in ns.lookup(old).tiers] == [True, False, True]
    assert ns.lookup(new).prefix == 3


def test_a_spec_without_bytes_and_a_block_of_part_of_a_page() -> None:
    empty = KVSpec(model="empty", revision="", layers=(), block_tokens=4)
    store = MemoryStore(4 * N)
    ns = store.namespace(empty)
    keys = ns.keys(range(8))
    assert ns.save([(k, b"") for k in keys], parent=None, deadline=deadline_in(20)) == 2
    with ns.load(keys, deadline=deadline_in(20)) as lease:
        assert lease.view(1).nbytes == 0
    assert store.stats().used_nbytes == 2 * 4096


def test_fragments_give_way_to_a_big_block() -> None:
    store = MemoryStore(8 * N)
    ns, big = store.namespace(SPEC), store.namespace(small_spec("big", pages=8))
    for number in range(8):
        save_blocks(ns, chain(ns, number, 1))
    ns.remove([chain(ns, n, 1)[0] for n in range(0, 8, 2)])  # half is free, in holes of one block
    keys = big.keys([1] * SPEC.block_tokens)
    assert save_blocks(big, keys) == 1
    held = [ns.load(chain(ns, n, 1), deadline=deadline_in(20)) for n in range(8)]
    assert store.stats().entries >= 1
    for lease in held:
        lease.release()


def test_room_that_is_free_but_in_pieces_is_not_enough() -> None:
    store = MemoryStore(8 * N)
    ns, big = store.namespace(SPEC), store.namespace(small_spec("big", pages=8))
    for number in range(8):
        save_blocks(ns, chain(ns, number, 1))
    leases = [ns.load(chain(ns, n, 1), deadline=deadline_in(20)) for n in range(1, 8, 2)]
    before = store.stats().pinned_nbytes
    with pytest.raises(CapacityError):
        save_blocks(big, big.keys([1] * 8), seconds=0.01)
    assert store.stats().pinned_nbytes == before == 4 * N
    for lease in leases:
        lease.check()
        assert lease.view(0) == block_bytes(lease.keys[0], N)
        lease.release()
    assert save_blocks(big, big.keys([1] * 8)) == 2


def test_everything_is_refused_after_close() -> None:
    store = MemoryStore(4 * N)
    ns = store.namespace(SPEC)
    store.close()
    keys = chain(ns, 1, 1)
    for call in (
        lambda: ns.lookup(keys),
        lambda: ns.load(keys, deadline=0),
        lambda: ns.reserve(keys, parent=None, deadline=0),
        lambda: ns.pin(keys, ttl=1),
        lambda: ns.unpin(keys),
        lambda: ns.remove(keys),
        ns.clear,
    ):
        with pytest.raises(StoreError, match="closed"):
            call()
    assert store.stats().capacity_nbytes == 0
    assert store.poll() == []


def test_close_wakes_who_waits() -> None:
    store = MemoryStore(N)
    ns = store.namespace(SPEC)
    lease = ns.reserve(chain(ns, 1, 1), parent=None, deadline=deadline_in(20))
    caught: list[Exception] = []

    def wait() -> None:
        try:
            ns.reserve(chain(ns, 2, 1), parent=None, deadline=deadline_in(60))
        except StoreError as error:
            caught.append(error)

    thread = threading.Thread(target=wait, name="kvferry-test")
    thread.start()
    store.close()
    thread.join(30)
    assert "closed" in str(caught[0])
    lease.abort()


def test_two_stores_share_nothing() -> None:
    one, two = MemoryStore(2 * N, tenant="a"), MemoryStore(2 * N, tenant="b")
    keys = chain(one.namespace(SPEC), 1, 1)
    save_blocks(one.namespace(SPEC), keys)
    assert two.namespace(SPEC).lookup(keys).prefix == 0
    assert [s.tenant for s in one.layout().segments] == ["a"]
    assert one.layout().epoch != two.layout().epoch
    assert one.stats().per_tier["dram"]["entries"] == 1


def test_memory_that_the_system_does_not_give_is_the_cause_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a limit of file sizes: the arena is free, and no segment of it can be made."""

    def refuse(fd: int, offset: int, nbytes: int) -> None:
        del fd, offset, nbytes
        raise OSError(errno.EFBIG, "File too large")

    store = MemoryStore(8 * N)
    ns = store.namespace(SPEC)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(CapacityError) as caught:
            save_blocks(ns, chain(ns, 1, 2), seconds=5)
    message = str(caught.value)
    assert f"memory has 0 of {8 * N} bytes, 0 of them free" in message
    assert f"a segment of {8 * N} bytes cannot be had: [Errno 27] File too large" in message
    assert "ulimit -f" in message
    assert f"{8 * N} of {8 * N} bytes free" not in message
    assert save_blocks(ns, chain(ns, 1, 2)) == 2
    store.arena.allocate_many(6, N)
    with pytest.raises(CapacityError, match="bytes free") as caught:
        save_blocks(ns, chain(ns, 2, 8), seconds=0.1)
    assert "segment" not in str(caught.value)
    store.close()
