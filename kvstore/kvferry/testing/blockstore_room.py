"""The part of the ``BlockStore`` suite about room: eviction, pins, removal, leases."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest

from kvferry.core.blockstore import BlockStore, Namespace
from kvferry.core.errors import CapacityError, ConfigError, LeaseExpiredError
from kvferry.core.keys import BlockKey
from kvferry.testing.blocks import block_bytes, save_blocks, wait_until
from kvferry.testing.blockstore_common import (
    BLOCKS,
    SHORT_S,
    SPEC,
    StoreFixtures,
    chain,
    gauges,
    load,
    no_room,
    reserve,
    save_surely,
)

__all__ = ["RoomSuite"]


class RoomSuite(StoreFixtures):
    """See :class:`kvferry.testing.blockstore.BlockStoreSuite`."""

    # ---- room and eviction -----------------------------------------------------------------------

    def test_the_least_recently_used_chain_goes_first_from_its_tail(self, ns: Namespace) -> None:
        """Every stored chain stays a prefix; one that was loaded meanwhile outlives an older one."""
        half = BLOCKS // 2
        first, second = chain(ns, 1, half), chain(ns, 2, half)
        save_blocks(ns, first)
        save_blocks(ns, second)
        load(ns, first).release()
        for evicted in range(1, half + 1):
            save_blocks(ns, chain(ns, 100 + evicted, 1))
            hit = self.kept(ns, second)
            assert hit.prefix == half - evicted
            assert hit.prefix == sum(tier is not None for tier in hit.tiers)
            assert self.kept(ns, first).prefix == half

    def test_a_shared_head_outlives_its_branches(self, ns: Namespace) -> None:
        """The head of a chain goes after every block that is built on it."""
        head = chain(ns, 1, 1)
        save_blocks(ns, head)
        tokens = [1] * SPEC.block_tokens
        tails = [ns.keys(tokens + [n] * SPEC.block_tokens)[1] for n in range(2, 2 + BLOCKS - 1)]
        for tail in tails:
            save_blocks(ns, [tail], parent=head[0])
        for number in range(BLOCKS - 1):
            assert self.kept(ns, head).prefix == 1
            save_blocks(ns, chain(ns, 100 + number, 1))
            left = [t for t in tails if self.kept(ns, [t]).prefix]
            assert left == tails[number + 1 :]

    def test_a_chain_is_not_evicted_for_its_own_extension(self, ns: Namespace) -> None:
        """A chain longer than the store keeps its head; the rest is refused at once.

        Over slower tiers all of it is stored, and memory keeps the head.
        """
        keys = chain(ns, 1, BLOCKS + 2)
        save_blocks(ns, keys[:BLOCKS])
        if self.memory_tier is not None:
            assert save_blocks(ns, keys[BLOCKS:], parent=keys[BLOCKS - 1], seconds=30) == 2
            assert ns.lookup(keys).prefix == BLOCKS + 2
            assert self.kept(ns, keys).prefix == BLOCKS - 2
            return
        started = time.monotonic()
        with pytest.raises(CapacityError):
            save_blocks(ns, keys[BLOCKS:], parent=keys[BLOCKS - 1], seconds=30)
        assert time.monotonic() - started < 10
        assert self.kept(ns, keys).prefix == BLOCKS

    def test_others_give_way_to_the_extension_of_the_oldest_chain(self, ns: Namespace) -> None:
        """The chain that grows is spared, though its tail was used least recently."""
        half = BLOCKS // 2
        growing, other = chain(ns, 1, half + 2), chain(ns, 2, half)
        save_blocks(ns, growing[:half])
        save_blocks(ns, other)
        save_blocks(ns, growing[half:], parent=growing[half - 1])
        assert self.kept(ns, growing).prefix == half + 2
        assert self.kept(ns, other).prefix == half - 2

    def test_leased_blocks_are_never_evicted(self, store: BlockStore, ns: Namespace) -> None:
        """The error names what was asked, what is free and what is pinned; nothing stays reserved."""
        keys = chain(ns, 1, BLOCKS - 2)
        save_blocks(ns, keys)
        lease = load(ns, keys)
        before = gauges(store)
        said = no_room(ns, chain(ns, 2, 3))
        for number in (3, 2, BLOCKS - 2):
            assert str(number * SPEC.block_nbytes) in said
        assert gauges(store) == before
        reserve(ns, chain(ns, 2, 2)).abort()
        lease.release()
        assert save_blocks(ns, chain(ns, 2, BLOCKS)) == BLOCKS
        with pytest.raises(CapacityError):
            reserve(ns, chain(ns, 3, BLOCKS + 1), seconds=30)
        assert ns.lookup(chain(ns, 2, BLOCKS)).prefix == BLOCKS

    def test_what_is_held_is_passed_over(self, ns: Namespace) -> None:
        """Eviction takes younger blocks when the oldest are leased or pinned."""
        third = BLOCKS // 3
        leased, pinned, young = (chain(ns, n, third) for n in (1, 2, 3))
        for keys in (leased, pinned, young):
            save_blocks(ns, keys)
        ns.pin(pinned, ttl=60)
        lease = load(ns, leased)
        load(ns, pinned).release()
        load(ns, young).release()
        room = BLOCKS - 2 * third
        assert save_blocks(ns, chain(ns, 4, room)) == room
        assert [self.kept(ns, keys).prefix for keys in (leased, pinned, young)] == [third, third, 0]
        for index, key in enumerate(leased):
            assert lease.view(index) == block_bytes(key, SPEC.block_nbytes)
        lease.release()
        assert save_blocks(ns, chain(ns, 5, third)) == third
        assert self.kept(ns, leased).prefix == 0, "released, it is the oldest again"

    def test_a_reservation_waits_for_a_lease_to_end(self, ns: Namespace) -> None:
        """It gets its room from a release in another thread, long before its deadline."""
        keys = chain(ns, 1, BLOCKS)
        save_blocks(ns, keys)
        lease = load(ns, keys)
        got: list[int] = []
        waiting = threading.Event()

        def save() -> None:
            waiting.set()
            got.append(save_blocks(ns, chain(ns, 2, BLOCKS), seconds=60))

        thread = threading.Thread(target=save, name="kvferry-test-save")
        thread.start()
        assert waiting.wait(60)
        started = time.monotonic()
        lease.release()
        thread.join(60)
        assert got == [BLOCKS]
        assert time.monotonic() - started < 15, "woken by the deadline of the lease, not by its release"

    def test_tails_that_are_held_give_way_to_inner_blocks(self, ns: Namespace) -> None:
        """Needed room is found below a leased tail; the leased block itself stays right."""
        keys = chain(ns, 1, BLOCKS)
        save_blocks(ns, keys)
        with load(ns, keys[-1:]) as lease:
            assert save_blocks(ns, chain(ns, 2, 2)) == 2
            hit = self.kept(ns, keys)
            assert hit.prefix == BLOCKS - 3
            assert lease.view(0) == block_bytes(keys[-1], SPEC.block_nbytes)

    # ---- pins, removal -----------------------------------------------------------------------------

    def test_a_pin_keeps_blocks_until_its_end(self, store: BlockStore, ns: Namespace) -> None:
        """Pinned blocks are not evicted; ``unpin`` and the ttl end that."""
        keys = chain(ns, 1, BLOCKS)
        save_blocks(ns, keys)
        assert ns.pin([*keys, BlockKey(bytes(32))], ttl=60) == BLOCKS
        assert store.stats().pinned_nbytes == BLOCKS * SPEC.block_nbytes
        with pytest.raises(CapacityError):
            reserve(ns, chain(ns, 2, 1), seconds=0)
        ns.unpin(keys)
        ns.unpin(keys)
        assert store.stats().pinned_nbytes == 0
        assert ns.pin(keys, ttl=0.05) == BLOCKS
        assert save_blocks(ns, chain(ns, 2, BLOCKS), seconds=30) == BLOCKS
        assert store.stats().pinned_nbytes == 0
        with pytest.raises(ConfigError):
            ns.pin(keys, ttl=0)

    def test_a_pin_can_be_made_longer(self, store: BlockStore, ns: Namespace) -> None:
        """The later end counts."""
        keys = chain(ns, 1, 1)
        save_blocks(ns, keys)
        ns.pin(keys, ttl=0.02)
        ns.pin(keys, ttl=60)
        ns.pin(keys, ttl=0.01)
        ends = time.monotonic() + 0.03
        wait_until(lambda: time.monotonic() > ends)
        assert store.stats().pinned_nbytes == SPEC.block_nbytes
        assert ns.remove(keys) == 1
        assert gauges(store) == (0, 0, 0, 0, 0)

    def test_removed_blocks_are_forgotten_at_once_and_reused_after_the_lease(
        self, store: BlockStore, ns: Namespace
    ) -> None:
        """``remove`` and ``clear`` under a read lease: the reader's bytes stay right."""
        keys = chain(ns, 1, 4)
        save_blocks(ns, keys)
        lease = load(ns, keys)
        assert ns.remove(keys[:1]) == 1
        assert ns.remove(keys[:1]) == 0
        assert ns.clear() == 3
        assert ns.lookup(keys).tiers == (None,) * 4
        assert store.stats().used_nbytes == 4 * SPEC.block_nbytes
        save_blocks(ns, chain(ns, 2, BLOCKS - 4))
        for index, key in enumerate(keys):
            assert lease.view(index) == block_bytes(key, SPEC.block_nbytes)
        lease.release()
        assert store.stats().used_nbytes == (BLOCKS - 4) * SPEC.block_nbytes

    # ---- leases ------------------------------------------------------------------------------------

    def test_double_release_raises_and_changes_nothing(self, store: BlockStore, ns: Namespace) -> None:
        """Two leases on one block: a double release of one does not free the other's."""
        keys = chain(ns, 1, 2)
        save_blocks(ns, keys)
        first, second = load(ns, keys), load(ns, keys)
        first.release()
        for _ in range(3):
            with pytest.raises(LeaseExpiredError):
                first.release()
        with pytest.raises(LeaseExpiredError):
            first.check()
        with pytest.raises(LeaseExpiredError):
            first.view(0)
        assert store.stats().pinned_nbytes == 2 * SPEC.block_nbytes
        second.release()
        assert store.stats().pinned_nbytes == 0

    def test_renewed_leases_outlive_their_first_deadline(self, ns: Namespace, store: BlockStore) -> None:
        """Both kinds; an ended one is not revived."""
        keys = chain(ns, 1, 1)
        save_blocks(ns, keys)
        read, write = load(ns, keys), reserve(ns, chain(ns, 2, 1))
        firsts = (read.expires_at, write.expires_at)
        started = time.monotonic()
        wait_until(lambda: time.monotonic() > started)
        read.renew()
        write.renew()
        assert read.expires_at > firsts[0]
        assert write.expires_at > firsts[1]
        read.release()
        write.abort()
        for renew in (read.renew, write.renew):
            with pytest.raises(LeaseExpiredError):
                renew()
        assert gauges(store)[2:] == (0, 0, 0)

    def test_a_late_reader_is_told(self, short_store: BlockStore) -> None:
        """Past its deadline a lease pins nothing, and check and release raise."""
        ns = short_store.namespace(SPEC)
        keys = chain(ns, 1, BLOCKS)
        save_surely(ns, keys)
        expired = short_store.stats().expired_leases  # of a save that was too slow
        lease = load(ns, keys)
        view = memoryview(b"")
        with suppress(LeaseExpiredError):  # a slow machine may be past it already
            view = lease.view(0)
        wait_until(lambda: time.monotonic() > lease.expires_at)
        with pytest.raises(LeaseExpiredError):
            lease.check()
        stats = short_store.stats()
        assert (stats.pinned_nbytes, stats.leases, stats.expired_leases) == (0, 0, expired + 1)
        save_surely(ns, chain(ns, 2, BLOCKS))
        assert ns.lookup(chain(ns, 2, BLOCKS)).prefix == BLOCKS
        bytes(view)  # what it says now is void, but reading it harms nobody
        with pytest.raises(LeaseExpiredError):
            lease.release()
        assert short_store.stats().pinned_nbytes == 0

    def test_a_reservation_waits_for_deadlines_too(self, short_store: BlockStore) -> None:
        """A holder that never releases delays others only until its deadline."""
        ns = short_store.namespace(SPEC)
        keys = chain(ns, 1, BLOCKS)
        save_surely(ns, keys)
        lease = load(ns, keys)
        save_surely(ns, chain(ns, 2, BLOCKS))
        assert ns.lookup(chain(ns, 2, BLOCKS)).prefix == BLOCKS
        assert time.monotonic() >= lease.expires_at

    def test_a_late_writer_publishes_nothing_and_keeps_its_slots(self, short_store: BlockStore) -> None:
        """An expired write lease goes to quarantine; only the abort gives the slots back."""
        ns = short_store.namespace(SPEC)
        lease = reserve(ns, chain(ns, 1, BLOCKS))
        wait_until(lambda: time.monotonic() > lease.expires_at)
        stats = short_store.stats()
        assert (stats.quarantined_nbytes, stats.pinned_nbytes) == (BLOCKS * SPEC.block_nbytes, 0)
        assert str(BLOCKS * SPEC.block_nbytes) in no_room(ns, chain(ns, 2, 1))
        with pytest.raises(LeaseExpiredError):
            lease.view(0)
        lease.abort()
        assert short_store.stats().quarantined_nbytes == 0
        late = reserve(ns, chain(ns, 3, 2))
        wait_until(lambda: time.monotonic() > late.expires_at)
        with pytest.raises(LeaseExpiredError):
            late.commit()
        assert gauges(short_store) == (0, 0, 0, 0, 0)

    def test_an_empty_lease_never_expires(self, short_store: BlockStore) -> None:
        """It holds nothing, so nothing can be wrong with it."""
        ns = short_store.namespace(SPEC)
        read, write = load(ns, chain(ns, 1, 1)), reserve(ns, [])
        ends = time.monotonic() + SHORT_S
        wait_until(lambda: time.monotonic() > ends)
        read.check()
        assert write.commit() == 0
        read.release()
        with pytest.raises(LeaseExpiredError):
            read.release()
