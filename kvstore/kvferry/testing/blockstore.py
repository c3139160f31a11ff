"""Conformance suite of the ``BlockStore`` protocol; see :class:`BlockStoreSuite`."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest

from kvferry.core.blockstore import BlockStore, Namespace
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError, ConfigError, KVFerryError, LeaseExpiredError, StoreError
from kvferry.core.keys import BlockKey
from kvferry.core.spec import KeyScope
from kvferry.testing.blocks import block_bytes, save_blocks, wait_until
from kvferry.testing.blockstore_common import (
    BIG,
    BLOCKS,
    OTHER,
    SPEC,
    assert_stored,
    chain,
    fill_lease,
    gauges,
    load,
    reserve,
)
from kvferry.testing.blockstore_room import RoomSuite

__all__ = ["BlockStoreSuite"]


class BlockStoreSuite(RoomSuite):
    """Tests that every ``BlockStore`` passes. Inherit, and give :meth:`make_store`."""

    # ---- keys, lookups, loads ----------------------------------------------------------------

    def test_is_a_block_store(self, store: BlockStore) -> None:
        """The protocol's methods are there."""
        assert isinstance(store, BlockStore)

    def test_a_saved_block_is_loaded_with_its_bytes(self, ns: Namespace) -> None:
        """Save, lookup, load; views are page-aligned, read-only and split into layers."""
        keys = chain(ns, 1, 3)
        assert save_blocks(ns, keys) == 3
        assert all(ns.lookup(keys).tiers)
        with load(ns, keys) as lease:
            assert len(lease) == 3
            for index, key in enumerate(keys):
                view = lease.view(index)
                want = block_bytes(key, SPEC.block_nbytes)
                assert view.readonly
                assert view == want
                assert lease.layer(index, 1) == want[SPEC.layer_slice(1)]
            lease.check()

    def test_a_miss_is_a_value(self, ns: Namespace) -> None:
        """Nothing stored: an empty hit and an empty lease."""
        keys = chain(ns, 1, 3)
        hit = ns.lookup(keys)
        assert hit.tiers == (None, None, None)
        assert hit.prefix == 0
        with load(ns, keys) as lease:
            assert len(lease) == 0

    def test_requests_of_no_blocks_work(self, store: BlockStore, ns: Namespace) -> None:
        """Zero keys everywhere; nothing is held afterwards."""
        before = gauges(store)
        assert ns.keys([]) == []
        assert ns.keys([1] * (SPEC.block_tokens - 1)) == []
        assert ns.lookup([]).prefix == 0
        with load(ns, []) as lease:
            lease.check()
        with reserve(ns, []) as fill:
            assert fill.commit() == 0
        assert ns.save([], parent=None, deadline=deadline_in(20)) == 0
        assert ns.pin([], ttl=1) == ns.remove([]) == ns.clear() == 0
        ns.unpin([])
        ns.prefetch([])
        assert gauges(store) == before

    def test_a_load_ends_at_the_first_missing_block(self, ns: Namespace) -> None:
        """The longest stored prefix, not what lies behind a gap; lookup tells both."""
        keys = chain(ns, 1, 5)
        save_blocks(ns, keys)
        assert ns.remove([keys[2]]) == 1
        hit = ns.lookup(keys)
        assert hit.prefix == 2
        assert [t is not None for t in hit.tiers] == [True, True, False, True, True]
        with load(ns, keys) as lease:
            assert lease.keys == tuple(keys[:2])
        assert ns.save(
            [(keys[2], block_bytes(keys[2], SPEC.block_nbytes))], parent=keys[1], deadline=deadline_in(20)
        )
        assert_stored(ns, keys)

    def test_lookups_pin_nothing(self, store: BlockStore, ns: Namespace) -> None:
        """C032: 1,000 lookups never followed by a load, then the store is filled twice over."""
        keys = chain(ns, 1, BLOCKS)
        save_blocks(ns, keys)
        for _ in range(1000):
            ns.lookup(keys)
        assert store.stats().pinned_nbytes == 0
        for number in (2, 3):
            assert save_blocks(ns, chain(ns, number, BLOCKS)) == BLOCKS
        assert self.kept(ns, keys).prefix == 0
        assert store.stats().pinned_nbytes == 0

    def test_lookups_change_no_order_of_use(self, ns: Namespace) -> None:
        """A chain that was only looked up is still the oldest."""
        old, new = chain(ns, 1, BLOCKS // 2), chain(ns, 2, BLOCKS // 2)
        save_blocks(ns, old)
        save_blocks(ns, new)
        ns.lookup(old)
        save_blocks(ns, chain(ns, 3, 1))
        assert self.kept(ns, old).prefix == len(old) - 1
        assert self.kept(ns, new).prefix == len(new)

    def test_foreign_keys_are_taken_as_they_are(self, ns: Namespace) -> None:
        """An engine's own hashes name blocks."""
        keys = ns.foreign_keys(bytes([i]) * 32 for i in range(2))
        assert save_blocks(ns, keys) == 2
        assert_stored(ns, keys)
        with pytest.raises(ConfigError, match="31"):
            ns.foreign_keys([bytes(31)])

    def test_namespaces_are_apart(self, store: BlockStore, ns: Namespace) -> None:
        """Another spec, another salt: other keys, and the same key is another block there."""
        keys = chain(ns, 1, 2)
        save_blocks(ns, keys)
        for other in (store.namespace(OTHER), store.namespace(SPEC, KeyScope(salt=b"s"))):
            assert not set(chain(other, 1, 2)) & set(keys)
            assert other.lookup(keys).prefix == 0
            assert other.clear() == 0
        assert store.namespace(SPEC).lookup(keys).prefix == 2

    def test_block_sizes_live_together(self, store: BlockStore, ns: Namespace) -> None:
        """Small blocks give way to a big one and the other way round."""
        big = store.namespace(BIG)
        for round_ in range(4):
            small_keys = chain(ns, 10 + round_, BLOCKS)
            assert save_blocks(ns, small_keys) == BLOCKS
            assert_stored(ns, small_keys)
            big_keys = chain(big, 10 + round_, 2)
            assert save_blocks(big, big_keys) == 2
            assert_stored(big, big_keys)
        assert store.stats().used_nbytes <= store.stats().capacity_nbytes

    # ---- writes --------------------------------------------------------------------------------

    def test_a_commit_shows_all_blocks_at_once(self, ns: Namespace) -> None:
        """Nothing is visible before; all is after; the lease is over."""
        keys = chain(ns, 1, 4)
        lease = reserve(ns, keys)
        fill_lease(lease)
        assert ns.lookup(keys).tiers == (None,) * 4
        assert lease.commit() == 4
        assert_stored(ns, keys)
        with pytest.raises(LeaseExpiredError):
            lease.commit()
        lease.abort()
        assert_stored(ns, keys)

    def test_a_commit_is_atomic_to_readers(self, ns: Namespace) -> None:
        """A reader in another thread sees none or all of a chain."""
        seen: set[int] = set()
        stop = threading.Event()
        keys = chain(ns, 1, 4)

        def look() -> None:
            while not stop.is_set():
                seen.add(sum(tier is not None for tier in ns.lookup(keys).tiers))
                time.sleep(0.0001)

        reader = threading.Thread(target=look, name="kvferry-test-look")
        reader.start()
        try:
            for _ in range(100):
                save_blocks(ns, keys)
                ns.clear()
        finally:
            stop.set()
            reader.join(10)
        assert seen <= {0, 4}

    def test_an_aborted_lease_leaves_nothing(self, store: BlockStore, ns: Namespace) -> None:
        """By ``abort``, by an error inside ``with``, and by leaving ``with`` without a commit."""
        before = gauges(store)
        keys = chain(ns, 1, 3)
        lease = reserve(ns, keys)
        assert store.stats().pinned_nbytes == 3 * SPEC.block_nbytes
        lease.abort()
        lease.abort()
        with pytest.raises(LeaseExpiredError):
            lease.view(0)
        with pytest.raises(ZeroDivisionError), reserve(ns, keys):
            raise ZeroDivisionError
        with reserve(ns, keys):
            pass
        assert gauges(store) == before
        assert ns.lookup(keys).prefix == 0

    def test_stored_keys_are_skipped(self, ns: Namespace) -> None:
        """A reservation names only what is missing; a second save stores nothing."""
        keys = chain(ns, 1, 5)
        save_blocks(ns, keys[:2])
        with reserve(ns, keys) as lease:
            assert lease.keys == tuple(keys[2:])
            fill_lease(lease)
            assert lease.commit() == 3
        assert save_blocks(ns, keys) == 0
        assert save_blocks(ns, [keys[0], keys[0]]) == 0
        assert_stored(ns, keys)

    def test_the_first_of_two_fills_wins(self, store: BlockStore, ns: Namespace) -> None:
        """Two leases on one key; the second commit drops its block and frees its slot."""
        keys = chain(ns, 1, 2)
        first, second = reserve(ns, keys), reserve(ns, keys)
        fill_lease(first)
        fill_lease(second)
        assert second.commit() == 2
        assert first.commit() == 0
        assert_stored(ns, keys)
        assert store.stats().used_nbytes == 2 * SPEC.block_nbytes

    def test_a_block_of_the_wrong_length_is_refused(self, store: BlockStore, ns: Namespace) -> None:
        """The whole save is refused, also the right blocks before it."""
        keys = chain(ns, 1, 2)
        blocks = [(keys[0], bytes(SPEC.block_nbytes)), (keys[1], bytes(SPEC.block_nbytes - 1))]
        with pytest.raises(ConfigError, match=str(SPEC.block_nbytes - 1)):
            ns.save(blocks, parent=None, deadline=deadline_in(20))
        assert store.stats().used_nbytes == 0
        with pytest.raises(ConfigError):
            ns.reserve([BlockKey(b"short")], parent=None, deadline=deadline_in(20))

    def test_what_is_no_key_is_refused_by_every_verb(self, store: BlockStore, ns: Namespace) -> None:
        """A key of another type or length would be a silent miss for ever."""
        good = chain(ns, 1, 2)
        save_blocks(ns, good)
        data = bytes(SPEC.block_nbytes)
        soon = deadline_in(20)
        for bad in (b"x", b"", bytes(33), "k" * 32, None, 5, bytearray(32)):
            keys: list[Any] = [good[0], bad]
            calls: list[Callable[[], object]] = [
                partial(ns.lookup, keys),
                partial(ns.load, keys, deadline=soon),
                partial(ns.reserve, keys, parent=None, deadline=soon),
                partial(ns.save, [(key, data) for key in keys], parent=None, deadline=soon),
                partial(ns.prefetch, keys),
                partial(ns.pin, keys, ttl=1),
                partial(ns.unpin, keys),
                partial(ns.remove, keys),
            ]
            if bad is not None:
                calls.append(partial(ns.reserve, good, parent=cast("Any", bad), deadline=soon))
                calls.append(partial(ns.save, [(good[0], data)], parent=cast("Any", bad), deadline=soon))
            for call in calls:
                with pytest.raises(ConfigError, match="32 bytes"):
                    call()
        for verb in (ns.lookup, ns.prefetch, ns.unpin, ns.remove):
            with pytest.raises(ConfigError, match="list of keys"):
                verb(cast("Any", good[0]))  # one key where a list is taken
        assert_stored(ns, good)
        assert store.stats().pinned_nbytes == 0

    def test_publish_goes_on_holding_the_slots(self, store: BlockStore, ns: Namespace) -> None:
        """Blocks become visible and are leased at once, also the copy that came second."""
        keys = chain(ns, 1, 2)
        lease = reserve(ns, keys)
        fill_lease(lease)
        view = lease.view(0)
        save_blocks(ns, keys[:1])
        stored, held = lease.publish()
        assert (stored, held.keys) == (1, tuple(keys))
        assert ns.lookup(keys).prefix == 2
        save_blocks(ns, chain(ns, 2, BLOCKS - 3))
        assert view == block_bytes(keys[0], SPEC.block_nbytes)
        for index, key in enumerate(keys):
            assert held.view(index) == block_bytes(key, SPEC.block_nbytes)
        assert store.stats().pinned_nbytes == 2 * SPEC.block_nbytes
        held.release()
        assert store.stats().pinned_nbytes == 0
        with pytest.raises(LeaseExpiredError):
            lease.publish()

    def test_a_write_by_another_hand_keeps_the_slots(self, store: BlockStore, ns: Namespace) -> None:
        """``writing()``: an abort meanwhile only quarantines, a commit meanwhile is refused."""
        lease = reserve(ns, chain(ns, 1, 2))
        with lease.writing(), lease.writing():
            with pytest.raises(StoreError):
                lease.commit()
            lease.abort()
            stats = store.stats()
            assert (stats.quarantined_nbytes, stats.pinned_nbytes, stats.leases) == (
                2 * SPEC.block_nbytes,
                0,
                0,
            )
        assert gauges(store) == (0, 0, 0, 0, 0)
        with pytest.raises(LeaseExpiredError), lease.writing():
            pass

    # ---- the whole ---------------------------------------------------------------------------------

    def test_poll_and_flush(self, store: BlockStore, ns: Namespace) -> None:
        """Near-free when idle; ``flush`` comes back."""
        save_blocks(ns, chain(ns, 1, 2))
        assert store.flush(deadline=deadline_in(60))
        assert all(completion.ok for completion in store.poll())

    def test_close_ends_all(self, store: BlockStore, ns: Namespace) -> None:
        """Leases are over, calls are refused, a second close does nothing."""
        keys = chain(ns, 1, 2)
        save_blocks(ns, keys)
        read, write = load(ns, keys), reserve(ns, chain(ns, 2, 1))
        store.close()
        store.close()
        for call in (read.check, read.release, write.commit):
            with pytest.raises(LeaseExpiredError):
                call()
        write.abort()
        with pytest.raises(KVFerryError):
            ns.lookup(keys)

    def test_counters(self, store: BlockStore, ns: Namespace) -> None:
        """Lookups, hits, saved and evicted blocks are counted."""
        keys = chain(ns, 1, BLOCKS)
        save_blocks(ns, keys[:4])
        ns.lookup(keys)
        stats = store.stats()
        assert (stats.lookups, stats.lookup_blocks, stats.hit_blocks) == (1, BLOCKS, 4)
        save_blocks(ns, chain(ns, 2, BLOCKS))
        stats = store.stats()
        assert (stats.saved_blocks, stats.evicted_blocks, stats.entries) == (BLOCKS + 4, 4, BLOCKS)

    def test_many_threads(self, store: BlockStore) -> None:
        """Loads, saves, aborts and removals side by side: no wrong byte, and all is given back."""
        stop = time.monotonic() + 1.5
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                _work(store, random.Random(seed), stop)
            except BaseException as error:  # noqa: BLE001 - thread root: told to the test
                failures.append(error)

        threads = [threading.Thread(target=work, args=(n,), name=f"kvferry-test-{n}") for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures, failures

        def given_back() -> bool:  # a daemon that was late to answer twice is left alone for a moment
            for spec in (SPEC, BIG):
                store.namespace(spec).clear()
            return gauges(store) == (0, 0, 0, 0, 0)

        wait_until(given_back)
        assert save_blocks(store.namespace(SPEC), chain(store.namespace(SPEC), 9999, BLOCKS)) == BLOCKS


def _work(store: BlockStore, rng: random.Random, stop: float) -> None:
    while time.monotonic() < stop:
        namespace = store.namespace(rng.choice((SPEC, SPEC, BIG)))
        keys = chain(namespace, rng.randrange(6), rng.randrange(1, 4))
        verb = rng.randrange(10)
        if verb < 5:
            with load(namespace, keys) as lease:
                for index, key in enumerate(lease.keys):
                    assert lease.view(index) == block_bytes(key, namespace.spec.block_nbytes)
        elif verb < 8:
            try:
                save_blocks(namespace, keys, seconds=2)
            except CapacityError:
                continue
        elif verb < 9:
            try:
                reserve(namespace, keys, seconds=2).abort()
            except CapacityError:
                continue
        else:
            namespace.remove(keys[-1:])
