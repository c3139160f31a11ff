"""A ``BlockStore`` in memory: one arena, many namespaces and block sizes, leases, eviction by chains."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

from kvferry.core.arena import Arena, ArenaLayout
from kvferry.core.block_table import DRAM
from kvferry.core.blockstore import Completion, Hit, Stats
from kvferry.core.chains import Block
from kvferry.core.clock import checked_deadline
from kvferry.core.condition import QuietCondition
from kvferry.core.errors import CapacityError, ConfigError, LeaseExpiredError, StoreError
from kvferry.core.eviction import EvictionPolicy, LRUPolicy
from kvferry.core.keys import BlockKey
from kvferry.core.leases import LeaseState, SlotLease, SlotReadLease
from kvferry.core.memory_namespace import MemoryNamespace
from kvferry.core.placement import ANYWHERE, Placement
from kvferry.core.pool import BlockPool, Fill
from kvferry.core.room import NOTHING_BELOW, Below, extended_chain, quota_shortage, room_shortage
from kvferry.core.segments import Slot
from kvferry.core.session_store import SessionStore
from kvferry.core.sessions import Session
from kvferry.core.spec import KeyScope, KVSpec
from kvferry.core.tenants import check_tenant
from kvferry.core.values import require_number, require_whole
from kvferry.core.write_leases import SlotWriteLease, WriteRecord

__all__ = ["DRAM", "MemoryNamespace", "MemoryStore", "SessionStore"]
_DEFAULT_SCOPE = KeyScope()


class MemoryStore:
    """Blocks in host memory of one tenant. Thread safe; has no threads of its own.

    Eviction spares the heads of chains, see :mod:`kvferry.core.eviction`. Leases and pins past their
    deadline are ended by whichever call comes next, so a store that nobody uses still shows nothing
    pinned in ``stats``.

    Args:
        capacity_nbytes: Hard bound of the arena; memory is taken as it is needed.
        tenant: Whose KV it holds; 1 to 120 bytes of UTF-8.
        lease_s: Seconds that a lease lasts.
        write_quota_nbytes: Most bytes that one session may have reserved and in quarantine together;
            the whole capacity if not given.
        session: Owner of the leases taken through the store itself; one of its own if not given.
        eviction: Makes the policy of what is evicted first, from the capacity in bytes.
        placement: Where the memory comes from.
        shared: Other processes of the tenant may map the memory writable; see :class:`Arena`.

    Attributes:
        allows_lossy: Whether a slower tier, peers aside, is configured to give what has lost something.

    Raises:
        ConfigError: If the capacity is above available memory, or a value cannot be used.
    """

    def __init__(
        self,
        capacity_nbytes: int,
        *,
        tenant: str = "default",
        lease_s: float = 30.0,
        write_quota_nbytes: int | None = None,
        session: Session | None = None,
        eviction: Callable[[int], EvictionPolicy] = LRUPolicy,
        placement: Placement = ANYWHERE,
        shared: bool = True,
    ) -> None:
        check_tenant(tenant)
        require_number("lease_s", lease_s, above=0)
        if write_quota_nbytes is not None:
            require_whole("write_quota_nbytes", write_quota_nbytes, least=1)
        if not callable(eviction):
            raise ConfigError(f"eviction is {eviction!r}, must make a policy from a capacity in bytes")
        self.tenant = tenant
        self.lease_s = lease_s
        self.arena = Arena(capacity_nbytes, tenant=tenant, placement=placement, shared=shared)
        self.write_quota_nbytes = write_quota_nbytes or self.arena.capacity_nbytes
        self._elsewhere = 0  # slower tiers that are other daemons, as bits
        self._lock = threading.Lock()
        self._cond = QuietCondition(self._lock)
        self._pool = BlockPool(self.arena, self, eviction(self.arena.capacity_nbytes))
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._closed = False
        self.allows_lossy = False
        self._lookups = 0
        self._lookup_blocks = 0
        self._hit_blocks = 0
        self.session = session or Session(f"{tenant}-store")
        self._watch(self.session)

    # ---- the BlockStore ----------------------------------------------------------------------

    def namespace(
        self, spec: KVSpec, scope: KeyScope = _DEFAULT_SCOPE, *, takes_lossy: bool = False
    ) -> MemoryNamespace:
        """The namespace of ``spec`` and ``scope``, with leases that belong to the store's own session."""
        return SessionStore(self, self.session).namespace(spec, scope, takes_lossy=takes_lossy)

    def for_session(self, session: Session) -> SessionStore:
        """The same blocks, with leases that belong to ``session``."""
        self._watch(session)
        return SessionStore(self, session)

    def poll(self) -> list[Completion]:
        """End what is past its deadline; nothing runs in the background, so nothing is reported."""
        with self._lock:
            if not self._closed:
                self._sweep(processes=True)
        return []

    def flush(self, *, deadline: float) -> bool:
        """There is no slower tier: always ``True``."""
        checked_deadline(deadline)
        return True

    def stats(self) -> Stats:
        """Counters and gauges; sizes in whole slots.

        ``pinned_nbytes`` is what can't be evicted: blocks under a read lease or pin, removed ones that
        are still read, and reserved slots; quarantined slots are counted apart. ``used_nbytes`` is all
        of these and the evictable blocks. Hits are counted by ``lookup``.
        """
        with self._lock:
            if self._closed:
                return Stats()
            self._sweep(processes=True)
            pool = self._pool
            return Stats(
                entries=pool.entries,
                used_nbytes=self.arena.used_nbytes,
                capacity_nbytes=self.arena.capacity_nbytes,
                pinned_nbytes=self._pinned_nbytes(),
                quarantined_nbytes=pool.quarantined_nbytes,
                leases=pool.active_leases,
                lookups=self._lookups,
                lookup_blocks=self._lookup_blocks,
                hit_blocks=self._hit_blocks,
                saved_blocks=pool.saved_blocks,
                evicted_blocks=pool.evicted_blocks,
                expired_leases=pool.expired_leases,
                per_tier={
                    DRAM: {
                        "entries": float(pool.entries),
                        "used_nbytes": float(self.arena.used_nbytes),
                        "capacity_nbytes": float(self.arena.capacity_nbytes),
                        "mapped_nbytes": float(self.arena.mapped_nbytes),
                    }
                },
            )

    def close(self) -> None:
        """End all leases, wake all waiters, free the memory (with its last view); twice does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._pool.close("the store was closed")
            self._cond.notify_all()

    # ---- for other processes of the tenant ------------------------------------------------------

    def layout(self) -> ArenaLayout:
        """The arena's segments, for an :class:`kvferry.core.arena.ArenaMap` elsewhere."""
        return self.arena.layout()

    def find_lease(self, lease_id: str, session: Session) -> SlotReadLease | SlotWriteLease | None:
        """The lease of that id if it holds blocks and belongs to ``session``."""
        with self._lock:
            lease = self._pool.find_lease(lease_id)
            return lease if lease is not None and lease.session is session else None

    # ---- the LeaseOwner: called by leases --------------------------------------------------------

    def slot_view(self, slot: Slot) -> memoryview:
        """The writable bytes of a slot."""
        return self.arena.view(slot)

    def first_stale(self, slots: Sequence[Slot]) -> Slot | None:
        """The first slot that was freed since, if any."""
        return self.arena.first_stale(slots)

    def end_read(self, lease: SlotReadLease) -> bool:
        """See :meth:`SlotReadLease.release`."""
        with self._lock:
            self._count_expired()
            if lease.state is LeaseState.ENDED:
                return False
            self._pool.close_read(lease, LeaseState.ENDED, "it was released")
            self._cond.notify_all()
            return True

    def renew(self, lease: SlotLease) -> None:
        """See :meth:`SlotLease.renew`."""
        with self._lock:
            lease.require_active()
            if lease.session.ended:
                raise LeaseExpiredError(f"{lease!r}: its session has ended")
            if lease.keys:
                lease.expires_at = max(lease.expires_at, time.monotonic() + self.lease_s)

    def commit_write(self, lease: WriteRecord) -> int:
        """See :meth:`SlotWriteLease.commit`; a commit that comes too late counts as an abort."""
        with self._lock:
            self._require_publishable(lease)
            fill = self._pool.fill(lease)
            stored = self._pool.commit(lease)
            if fill is not None:
                fill.mark(stored)
            self._cond.notify_all()
            self._stored(stored, 0.0 if fill is None else fill.deadline)
            return len(stored)

    def publish_write(self, lease: WriteRecord) -> tuple[int, SlotReadLease]:
        """See :meth:`SlotWriteLease.publish`; too late counts as an abort."""
        with self._lock:
            self._require_publishable(lease)
            fill = self._pool.fill(lease)
            stored, read = self._pool.publish(lease, time.monotonic() + self.lease_s)
            self._cond.notify_all()
            self._stored(stored, 0.0 if fill is None else fill.deadline)
            return len(stored), read

    def _require_publishable(self, lease: WriteRecord) -> None:
        self._count_expired()
        try:
            lease.require_active()
            if lease.session.ended:
                raise LeaseExpiredError(f"{lease!r}: its session has ended; nothing is published")
        except LeaseExpiredError:
            if lease.state is not LeaseState.ENDED:
                self._pool.abort(lease, "its commit came too late")
                self._cond.notify_all()
            raise
        if lease.writings:
            raise StoreError(f"{lease!r}: commit with {lease.writings} writing() open; close them first")

    def abort_write(self, lease: WriteRecord) -> None:
        """See :meth:`SlotWriteLease.abort`."""
        with self._lock:
            self._count_expired()
            if lease.state is not LeaseState.ENDED:
                self._pool.abort(lease, "it was aborted")
                self._cond.notify_all()

    def quarantine_write(self, lease: SlotWriteLease) -> None:
        """End a write lease into whose slots others still write: they wait for its abort or their end."""
        with self._lock:
            self._count_expired()
            lease.record.told = lease  # if it is dropped, others write all the same
            self._pool.expire_write(lease.record, "aborted while others write; its slots are in quarantine")
            self._cond.notify_all()

    def begin_writing(self, lease: WriteRecord) -> None:
        """See :meth:`SlotWriteLease.writing`."""
        with self._lock:
            lease.require_active()
            lease.writings += 1

    def end_writing(self, lease: WriteRecord) -> None:
        """See :meth:`SlotWriteLease.writing`."""
        with self._lock:
            self._pool.writing_ended(lease)
            self._cond.notify_all()

    # ---- called by namespaces --------------------------------------------------------------------

    def _lookup(self, namespace: MemoryNamespace, keys: Sequence[BlockKey]) -> Hit:
        with self._lock:
            self._require_open()
            stored = self._pool.found_by(namespace)
            hit = Hit(tuple([DRAM if key in stored else None for key in keys]))
            self._count_lookup(hit)
            return hit

    def _count_lookup(self, hit: Hit) -> None:
        self._lookups += 1
        self._lookup_blocks += len(hit.tiers)
        self._hit_blocks += len(hit.tiers) - hit.tiers.count(None)

    def _load(
        self, namespace: MemoryNamespace, keys: Sequence[BlockKey], deadline: float,  # noqa: ARG002
        before_fetch: Callable[[], object] | None = None,  # noqa: ARG002
    ) -> SlotReadLease:  # fmt: skip
        with self._lock:
            now = self._begin(namespace.session)
            blocks = self._pool.prefix(namespace, keys)
            self._pool.touch(blocks)
            return self._pool.open_read(namespace, blocks, now + self.lease_s)

    def _reserve(
        self, namespace: MemoryNamespace, keys: Sequence[BlockKey], parent: BlockKey | None, deadline: float
    ) -> SlotWriteLease:
        return self._reserve_each(namespace, dict(zip(keys, [parent, *keys], strict=False)), deadline)

    def _reserve_each(
        self,
        namespace: MemoryNamespace,
        parents: dict[BlockKey, BlockKey | None],
        deadline: float,
        facts: Mapping[BlockKey, tuple[int, bool]] | None = None,
    ) -> SlotWriteLease:
        asked = self._below(namespace, parents, deadline)
        with self._lock:
            missing, slots, now = self._take_slots(namespace, parents, asked, deadline)
            elsewhere = self._elsewhere if namespace.local_only else 0
            fill = Fill(
                namespace.namespace_id, tuple(missing.values()), deadline, elsewhere, facts or {},
                namespace.takes_lossy,
            )  # fmt: skip
            return self._pool.open_write(
                namespace.session, namespace.spec, fill, tuple(missing), slots, now + self.lease_s
            )

    def _take_slots(
        self,
        namespace: MemoryNamespace,
        parents: dict[BlockKey, BlockKey | None],
        asked: Below,
        deadline: float,
    ) -> tuple[dict[BlockKey, BlockKey | None], list[Slot], float]:
        """Those of ``parents`` that are not stored, a slot for each, and the time.

        Under the lock, which it gives up while it waits for room or asks slower tiers.
        """
        pool, ns = self._pool, namespace.namespace_id
        while True:
            now = self._begin(namespace.session, processes=True)
            stored, missing = pool.found_by(namespace), parents
            if asked.held or not isinstance(stored, dict) or not stored.keys().isdisjoint(parents):
                missing = {k: p for k, p in parents.items() if k not in stored and k not in asked.held}
            if asked.keys is not None and not asked.keys.issuperset(missing):
                asked = self._ask_again(namespace, missing, asked, deadline)  # maybe only below now
                continue
            shortage = quota_shortage(pool, namespace, len(missing), self.write_quota_nbytes)
            if shortage is None:
                slots = self._allocate(namespace, parents, len(missing))
                if slots is not None:
                    if len(missing) < len(parents):
                        present = [b for k in parents if (b := stored.get(k)) is not None]
                        pool.touch(present)
                        self._saved_again(present)
                    return missing, slots, now
                chain = self._only_here(extended_chain(pool, ns, parents), soon=True)
                shortage = room_shortage(pool, namespace, len(missing), chain)
            message, may_end = shortage
            if not may_end or now >= deadline:
                raise CapacityError(message)
            self._wait_for_room(now, deadline)

    def _ask_again(
        self, namespace: MemoryNamespace, missing: Collection[BlockKey], asked: Below, deadline: float
    ) -> Below:
        """Ask slower tiers for further keys, without the lock."""
        known = asked.keys or frozenset()
        try:
            self._lock.release()  # inside: whatever is raised from here on, the lock is taken again
            more = self._below(namespace, [k for k in missing if k not in known], deadline)
        finally:
            self._lock.acquire()
        return Below({*asked.held, *more.held}, known.union(missing))

    def _allocate(
        self, namespace: MemoryNamespace, parents: dict[BlockKey, BlockKey | None], count: int
    ) -> list[Slot] | None:
        """Slots, by evicting others, or else blocks of the same chain that are not lost by it."""
        if not count:  # what is stored needs no room, also above a lowered capacity
            return []
        if count * namespace.slot_nbytes <= self.arena.free_nbytes:  # without all that eviction takes
            slots = self.arena.allocate_many(count, namespace.block_nbytes)
            if slots is not None:
                return slots
        ns, size = namespace.namespace_id, (count, namespace.block_nbytes, namespace.slot_nbytes)
        slots = self._pool.allocate(*size, lambda: extended_chain(self._pool, ns, parents))
        if slots is None:
            chain = extended_chain(self._pool, ns, parents)
            kept = self._only_here(chain)
            if len(kept) < len(chain):
                slots = self._pool.allocate(*size, lambda: kept)
        return slots

    def _wait_for_room(self, now: float, deadline: float) -> None:
        change = self._pool.next_change(now)
        self._cond.wait(max(0.0, min(deadline, deadline if change is None else change) - now))

    def _prefetch(self, namespace: MemoryNamespace, keys: Sequence[BlockKey]) -> None:
        """There is no slower tier: nothing to do."""

    def _pin(self, namespace: MemoryNamespace, keys: Sequence[BlockKey], until: float) -> int:
        with self._lock:
            self._require_open()
            self._sweep()
            stored = self._pool.found_by(namespace)
            blocks = [b for k in dict.fromkeys(keys) if (b := stored.get(k)) is not None]
            for block in blocks:
                self._pool.pin(block, until)
            return len(blocks)

    def _unpin(self, namespace: MemoryNamespace, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            self._require_open()
            for key in keys:
                block = self._pool.get(namespace.namespace_id, key)
                if block is not None:
                    self._pool.unpin(block)
            self._cond.notify_all()

    def _remove(self, namespace: MemoryNamespace, keys: Sequence[BlockKey] | None) -> int:
        """Forget ``keys``, or with ``None`` all of the namespace."""
        with self._lock:
            self._require_open()
            return len(self._forget(namespace.namespace_id, keys))

    def _forget(self, ns: bytes, keys: Sequence[BlockKey] | None) -> list[BlockKey]:
        self._sweep()
        index = self._pool.indexes.get(ns)
        if index is None:
            return []
        chosen = dict.fromkeys(index.entries if keys is None else keys)
        blocks = [b for k in chosen if (b := index.entries.get(k)) is not None]
        for block in blocks:
            self._pool.forget(block)
        self._cond.notify_all()
        return [b.key for b in blocks]

    # ---- what a store over more tiers adds ----------------------------------------------------

    def _namespace(self, session: Session, spec: KVSpec, scope: KeyScope) -> MemoryNamespace:
        return MemoryNamespace(self, session, spec, scope)

    def _below(
        self,
        namespace: MemoryNamespace,  # noqa: ARG002
        keys: Collection[BlockKey],  # noqa: ARG002
        deadline: float,  # noqa: ARG002
    ) -> Below:
        """Which of ``keys`` slower tiers hold, so that they need not be saved; without the lock."""
        return NOTHING_BELOW

    def _only_here(self, blocks: set[Block], *, soon: bool = False) -> set[Block]:  # noqa: ARG002
        """Those that would be lost if they were evicted; with ``soon``, also after the copies under way."""
        return blocks

    def _saved_again(self, blocks: Sequence[Block]) -> None:
        """Blocks that memory holds are among those that somebody saves; under the lock."""

    def _stored(self, blocks: Sequence[Block], deadline: float) -> None:
        """New blocks were saved; under the lock, which it may give up while it waits until ``deadline``."""

    # ---- under the lock ----------------------------------------------------------------------

    def _begin(self, session: Session, *, processes: bool = False) -> float:
        self._require_open()
        if session.ended:
            raise StoreError(f"session {session.name} has ended; open another")
        return self._sweep(processes=processes)

    def _sweep(self, *, processes: bool = False) -> float:
        now = time.monotonic()
        if self._pool.sweep(now, processes=processes):
            self._cond.notify_all()
        return now

    def _count_expired(self) -> None:
        """A lease that is ended past its deadline counts as expired, though nobody looked before."""
        if not self._closed:
            self._sweep()

    def _pinned_nbytes(self) -> int:
        return self._pool.pinned_nbytes

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")

    def _watch(self, session: Session) -> None:
        with self._lock:
            if session in self._sessions:
                return
            self._sessions.add(session)
        method = weakref.WeakMethod(self._session_ended)

        def listener() -> None:
            ended = method()
            if ended is not None:
                ended()

        session.on_end(listener)

    def _session_ended(self) -> None:
        with self._lock:
            if not self._closed:
                self._sweep(processes=True)
                self._cond.notify_all()
