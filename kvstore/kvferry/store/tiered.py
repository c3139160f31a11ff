"""A ``BlockStore`` over tiers: memory first, then any list of slower ones."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from kvferry.core.block_events import BlockFeed
from kvferry.core.blockstore import Completion, Hit, Stats
from kvferry.core.chains import Block
from kvferry.core.clock import checked_deadline
from kvferry.core.errors import ConfigError, KVFerryError, StoreError
from kvferry.core.eviction import EvictionPolicy, LRUPolicy, tell_capacity
from kvferry.core.keys import BlockKey
from kvferry.core.leases import SlotReadLease
from kvferry.core.memory import DRAM, MemoryStore
from kvferry.core.memory_namespace import MemoryNamespace
from kvferry.core.room import NOTHING_BELOW, Below
from kvferry.core.sessions import Session
from kvferry.core.spec import KeyScope, KVSpec
from kvferry.store.background import Workers
from kvferry.store.down import WayDown
from kvferry.store.fetch import Fetcher
from kvferry.store.level import Level, LevelOptions, end_levels, with_options
from kvferry.store.options import StoreOptions
from kvferry.store.room import RoomKeeper, evict_some
from kvferry.store.spaces import Spaces
from kvferry.store.tier import Tier, TierNamespace
from kvferry.store.writer import TierWriter

__all__ = ["StoreOptions", "TieredStore"]

_LOG = logging.getLogger(__name__)
_REMOVE_BATCH = 1024
_CLOSE_LAST_S = 1.0
_DEFAULTS = StoreOptions()


class TieredStore(MemoryStore):
    """Blocks of one tenant in memory and in slower tiers. Thread safe.

    A block is saved into memory and copied down by each tier's write policy; a load gives views of
    memory, into which blocks from slower tiers are read first. A tier that fails shortens the prefix and
    never fails a call. ``stats`` counts memory; ``per_tier`` has the other tiers.

    Args:
        capacity_nbytes: Hard bound of the memory tier.
        tiers: Slower tiers, fastest first, each alone or with how it is used. They belong to the store,
            which closes them.
        tenant: Whose KV it holds.
        lease_s: Seconds that a lease lasts.
        write_quota_nbytes: See :class:`MemoryStore`.
        session: See :class:`MemoryStore`.
        eviction: Makes the eviction policy of the memory tier.
        options: See :class:`StoreOptions`.

    Raises:
        ConfigError: If a value cannot be used; the tiers are closed then.
    """

    def __init__(
        self,
        capacity_nbytes: int,
        tiers: Sequence[Tier | tuple[Tier, LevelOptions]] = (),
        *,
        tenant: str = "default",
        lease_s: float = 30.0,
        write_quota_nbytes: int | None = None,
        session: Session | None = None,
        eviction: Callable[[int], EvictionPolicy] = LRUPolicy,
        options: StoreOptions = _DEFAULTS,
    ) -> None:
        self._fetcher = Fetcher(self)
        self._closing = False
        pairs = with_options(tiers)
        try:
            if not isinstance(options, StoreOptions):
                raise ConfigError(f"options is {options!r}, must be StoreOptions")
            names = [DRAM, *(tier.name for tier, _ in pairs)]
            if len(set(names)) < len(names):
                raise ConfigError(f"tiers need different names, got {names}")
            super().__init__(
                capacity_nbytes, tenant=tenant, lease_s=lease_s, write_quota_nbytes=write_quota_nbytes,
                session=session, eviction=eviction, placement=options.placement, shared=options.shared,
            )  # fmt: skip
            self.levels = [Level(tier, number, given) for number, (tier, given) in enumerate(pairs)]
        except BaseException:
            for tier, _ in pairs:
                tier.close()
            raise
        self.allows_lossy = any(t.takes_lossy and not t.to_daemons for t, _ in pairs)
        self._elsewhere = sum(level.bit for level in self.levels if level.tier.to_daemons)
        self.options = options
        self._spaces = Spaces(tenant, self.levels, self._pool, self._lock)
        self._workers: Workers | None = None
        self._numbers = itertools.count()
        self._prefetching = 0
        self._prefetch_dropped = 0
        self._lost_told = 0
        self._hits_at = dict.fromkeys([DRAM, *(level.name for level in self.levels)], 0)
        self._start()

    def _start(self) -> None:
        notify = self._cond.notify_all
        self._down = WayDown(self.levels, self._pool, self._lock, self._cond, self._spaces.by_id)
        self._room = None
        if self.options.watermarks is not None:
            self._room = RoomKeeper(self._pool, self._lock, notify, self.options.watermarks)
            self._room.start()
        self._down.start()

    # ---- the BlockStore ----------------------------------------------------------------------

    def poll(self) -> list[Completion]:
        """What ended in the background since the last call: prefetches."""
        super().poll()
        return self.session.take_completions()

    def flush(self, *, deadline: float) -> bool:
        """Wait until everything committed has reached its slower tiers and is durable there.

        Blocks that are written only when they are evicted are written now.

        Returns:
            ``False`` at the deadline, or if blocks were lost to a slower tier since the last call: dropped
            at a full queue, refused for want of room, or because the tier failed.
        """
        deadline = checked_deadline(deadline)
        with self._lock:
            self._require_open()
            if not self._down.drain(deadline):
                return False
            lost = self._down.lost_blocks
            whole, self._lost_told = lost == self._lost_told, lost
        for level in self.levels:
            whole = level.flush(deadline) and whole
        return whole

    def stats(self) -> Stats:
        """Counters and gauges: the whole store's are those of memory, see :class:`MemoryStore`.

        ``pinned_nbytes`` includes blocks that are being copied to a slower tier.
        """
        found = super().stats()
        if not found.per_tier:
            return found
        per_tier = {name: dict(values) for name, values in found.per_tier.items()}
        for level, writer in zip(self.levels, self._down.writers, strict=True):
            per_tier[level.name] = {
                "queued_nbytes": float(writer.queued_nbytes),
                "lost_blocks": float(writer.lost_blocks),
                "hit_blocks": float(self._hits_at[level.name]),
                **level.figures(),
            }
        per_tier[DRAM]["hit_blocks"] = float(self._hits_at[DRAM])
        per_tier[DRAM]["prefetches_dropped"] = float(self._prefetch_dropped)
        return replace(found, per_tier=per_tier)

    def close(self) -> None:
        """Write what is on its way down, within ``close_s``; end all leases, threads and tiers.

        A tier that hangs is left behind, at most a second after that.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._cond.notify_all()
            deadline = time.monotonic() + self.options.close_s
            if not self._down.drain(deadline):
                _LOG.warning(
                    "closed with %d bytes not written to slower tiers after %g s",
                    self._down.queued_nbytes, self.options.close_s,
                )  # fmt: skip
            self._down.stop()
        last = max(deadline, time.monotonic() + _CLOSE_LAST_S)
        end_levels(self.levels, deadline, last)
        if self._room is not None:
            self._room.close(last)
        if self._workers is not None and not self._workers.close(last):
            _LOG.warning("a prefetch hangs in a tier; its thread is left")
        self._down.join(last)
        super().close()

    # ---- for operators -------------------------------------------------------------------------

    def spaces(self) -> list[TierNamespace]:
        """The namespaces that are in use, or were not long ago; see :class:`Spaces`."""
        return list(self._spaces.by_id.values())

    def problems(self) -> dict[str, dict[str, str]]:
        """What does not work now of each slower tier, and why; see :meth:`Level.problems`."""
        return {level.name: level.problems() for level in self.levels}

    def found_spaces(self) -> list[TierNamespace]:
        """Those that only slower tiers know of; reads a header of each from before. See :class:`Spaces`."""
        return self._spaces.found()

    def own_namespace(self, space: TierNamespace) -> MemoryNamespace:
        """One of :meth:`spaces` or :meth:`found_spaces`, for :meth:`~MemoryNamespace.pin` and ``clear``."""
        namespace = super()._namespace(self.session, space.spec, space.scope)
        namespace.namespace_id = space.namespace_id  # of one that was found, the salt is not known
        self._spaces.adopt(namespace)
        namespace.local_only = self._spaces.is_adopted(namespace)
        namespace.takes_lossy = True
        return namespace

    def keys_of(self, space: TierNamespace) -> list[BlockKey]:
        """Keys of the blocks in memory and in slower tiers that can tell without asking anybody."""
        with self._lock:
            index = self._pool.indexes.get(space.namespace_id)
            keys = dict.fromkeys(index.entries if index is not None else ())
        for level in self.levels:
            if level.tier.indexed:
                keys.update(dict.fromkeys(level.keys(space) or ()))
        return list(keys)

    def listen(self, feed: BlockFeed, tiers: Collection[str] = ()) -> dict[str, dict[bytes, list[BlockKey]]]:
        """Tell ``feed`` of all blocks that come into ``tiers`` (all, if not given) or go, until it is over.

        Returns:
            For each tier that can tell what it held at the moment from which on it does, by namespace.
        """
        present: dict[str, dict[bytes, list[BlockKey]]] = {}
        with self._lock:
            self._require_open()
            if not tiers or DRAM in tiers:
                self._pool.journal.attach(feed)
                present[DRAM] = {ns: list(index.entries) for ns, index in self._pool.indexes.items()}
        for level in self.levels:
            found = level.listen(self.tenant, feed) if not tiers or level.name in tiers else None
            if found is not None:
                present[level.name] = found
        return present

    def evict(self, nbytes: int) -> tuple[int, int]:
        """Evict from memory what would go first, until ``nbytes`` are free or on their way to slower tiers.

        Returns:
            Blocks and bytes; fewer where the rest is held.
        """
        return evict_some(self._pool, self._lock, self._cond.notify_all, nbytes)

    def resize(self, capacity_nbytes: int, write_quota_nbytes: int | None, levels: Mapping[int, int]) -> bool:
        """Other capacities of memory and of slower tiers, by their number, from now on.

        What is above is evicted at once; what is held, by :meth:`settle` when it is free.

        Returns:
            Whether memory that is not used any more was given back to the system; see :meth:`Arena.resize`.

        Raises:
            ConfigError: If memory would be smaller than the smallest piece of it; nothing is changed.
        """
        self.arena.resize(capacity_nbytes)
        with self._lock:
            self.write_quota_nbytes = write_quota_nbytes or self.arena.capacity_nbytes
            tell_capacity(self._pool.policy, self.arena.capacity_nbytes)
            self._cond.notify_all()  # what waited for room may have it now
        for number, nbytes in levels.items():
            self.levels[number].resize(nbytes)
        self.settle()
        return not self.arena.kept_nbytes

    def settle(self) -> None:
        """Evict what is above the capacity of memory after :meth:`resize`; call it now and then."""
        if (above := self.arena.used_nbytes - self._pool.leaving_nbytes - self.arena.capacity_nbytes) > 0:
            self.evict(above)
        self.arena.settle()

    # ---- called by namespaces --------------------------------------------------------------------

    def _namespace(self, session: Session, spec: KVSpec, scope: KeyScope) -> MemoryNamespace:
        namespace = super()._namespace(session, spec, scope)
        self._spaces.open(namespace)
        return namespace

    def _space(self, namespace: MemoryNamespace) -> TierNamespace:
        return self._spaces.by_id[namespace.namespace_id]

    def _lookup(self, namespace: MemoryNamespace, keys: Sequence[BlockKey]) -> Hit:
        if not self.levels:
            return super()._lookup(namespace, keys)
        with self._lock:
            self._require_open()
            stored = self._pool.found_by(namespace)
            tiers = [DRAM if key in stored else None for key in keys]
        if None in tiers:
            names = self._locate_missing(
                namespace,
                [k for k, t in zip(keys, tiers, strict=True) if t is None],
                self._lookup_deadline(),
            )
            if names:
                tiers = [
                    t or (names[k].name if k in names else None) for k, t in zip(keys, tiers, strict=True)
                ]
        hit = Hit(tuple(tiers))
        with self._lock:
            self._count_lookup(hit)
        return hit

    def _count_lookup(self, hit: Hit) -> None:
        super()._count_lookup(hit)
        for name in self._hits_at:
            self._hits_at[name] += hit.tiers.count(name)

    def _lookup_deadline(self) -> float:
        """Of a lookup in all tiers together, where the caller gave none."""
        return time.monotonic() + max((level.options.lookup_timeout_s for level in self.levels), default=0.0)

    def _not_in_memory(self, namespace: MemoryNamespace, keys: Collection[BlockKey]) -> list[BlockKey]:
        with self._lock:
            stored = self._pool.found_by(namespace)
            return [key for key in keys if key not in stored]

    def _locate_missing(
        self, namespace: MemoryNamespace, missing: Sequence[BlockKey], deadline: float
    ) -> dict[BlockKey, Level]:
        """The fastest slower tier of each key that is not in memory; without the lock."""
        space, found = self._space(namespace), dict[BlockKey, Level]()
        for level in self.levels:
            if not missing:
                break
            if namespace.local_only and level.tier.to_daemons:
                continue
            held = level.contains(space, missing, deadline, takes_lossy=namespace.takes_lossy)
            found.update((key, level) for key, is_held in zip(missing, held, strict=True) if is_held)
            missing = [key for key, is_held in zip(missing, held, strict=True) if not is_held]
        return found

    def _below(self, namespace: MemoryNamespace, keys: Collection[BlockKey], deadline: float) -> Below:
        if not self.levels:
            return NOTHING_BELOW
        missing = self._not_in_memory(namespace, keys)
        return Below(self._locate_missing(namespace, missing, deadline), frozenset(missing))

    def _load(
        self, namespace: MemoryNamespace, keys: Sequence[BlockKey], deadline: float,
        before_fetch: Callable[[], object] | None = None,
    ) -> SlotReadLease:  # fmt: skip
        with self._lock:
            now = self._begin(namespace.session)
            blocks = self._pool.prefix(namespace, keys)
            self._down.used(blocks)
            if len(blocks) == len(keys) or not self.levels:
                self._pool.touch(blocks)
                return self._pool.open_read(namespace, blocks, now + self.lease_s)
        if before_fetch is not None:
            before_fetch()
        return self._fetcher.load(namespace, keys, deadline)

    def _prefetch(self, namespace: MemoryNamespace, keys: Sequence[BlockKey]) -> None:
        self._bring_up(namespace, keys, None)

    def _bring_up(
        self, namespace: MemoryNamespace, keys: Sequence[BlockKey], pin_until: float | None
    ) -> None:
        """Read blocks into memory in the background; pin them there if so wished."""
        if not keys or not self.levels:
            return
        with self._lock:
            self._require_open()
            if self._prefetching >= self.options.prefetch_jobs:
                self._prefetch_dropped += 1
                return
            self._prefetching += 1
            if self._workers is None:
                self._workers = Workers("kvferry-prefetch", 2)
            self._workers.submit(partial(self._prefetch_job, namespace, list(keys), pin_until))

    def _prefetch_job(
        self, namespace: MemoryNamespace, keys: list[BlockKey], pin_until: float | None
    ) -> None:
        started = time.monotonic()
        count = 0
        try:
            deadline = started + self.options.prefetch_timeout_s
            lease = self._fetcher.load(namespace, keys, deadline, stay=True)
            count = len(lease)
            if pin_until is not None:
                super()._pin(namespace, lease.keys, pin_until)
            lease.release()
        except KVFerryError as error:  # closed, or the session has ended
            _LOG.debug("prefetch of %d blocks ended: %s", len(keys), error)
        except Exception:  # noqa: BLE001 - root of a job: it must not end unseen
            _LOG.exception("prefetch of %d blocks failed", len(keys))
        finally:
            with self._lock:
                self._prefetching -= 1
            nbytes, seconds = count * namespace.spec.block_nbytes, time.monotonic() - started
            failed = tuple(range(count, len(keys)))
            job = f"prefetch-{next(self._numbers)}"
            done = Completion(job, "prefetch", not failed, nbytes, seconds, failed)
            namespace.session.completions.append(done)

    def _pin(self, namespace: MemoryNamespace, keys: Sequence[BlockKey], until: float) -> int:
        keys = list(dict.fromkeys(keys))
        count = super()._pin(namespace, keys, until)
        if count == len(keys) or not self.levels:
            return count
        missing = self._not_in_memory(namespace, keys)
        where = self._locate_missing(namespace, missing, self._lookup_deadline())
        unkept: list[BlockKey] = []
        for level in self.levels:
            mine = [key for key in keys if where.get(key) is level]
            if mine:
                kept = level.pin(self._space(namespace), mine, until)
                unkept.extend(key for key, ok in zip(mine, kept, strict=True) if not ok)
        self._bring_up(namespace, unkept, until)  # a tier that cannot keep them: memory does
        # again: some may have come up before the tiers were asked
        return super()._pin(namespace, [key for key in keys if key not in where], until) + len(where)

    def _unpin(self, namespace: MemoryNamespace, keys: Sequence[BlockKey]) -> None:
        super()._unpin(namespace, keys)
        for level in self.levels:
            level.unpin(self._space(namespace), keys)

    def _remove(self, namespace: MemoryNamespace, keys: Sequence[BlockKey] | None) -> int:
        ns = namespace.namespace_id
        keys = None if keys is None else list(dict.fromkeys(keys))
        with self._lock:
            self._require_open()
            before = {level: level.hidden.removes(ns) for level in self.levels}  # by others, who count them
            for level in self.levels:
                level.hidden.mask(ns, keys)  # a load that begins now must not bring up what is left
            self._down.cancel(ns, keys)
            self._fetcher.cancel(ns, keys)
            gone = set(self._forget(ns, keys))
        until = time.monotonic() + self.options.remove_s
        try:
            for writer in self._down.writers:
                if namespace.local_only and writer.level.tier.to_daemons:
                    continue
                found = self._remove_from(writer, namespace, keys, until)
                gone.update(itertools.filterfalse(before[writer.level], found))
        finally:
            for level in self.levels:
                level.hidden.unmask(ns, keys)
        return len(gone)

    def _remove_from(
        self, writer: TierWriter, namespace: MemoryNamespace, keys: Sequence[BlockKey] | None, until: float
    ) -> list[BlockKey]:
        """Remove from one tier; what is not begun by ``until`` is left to its writer, and hidden."""
        space, level = self._space(namespace), writer.level
        if keys is None:
            level.forget(space)
        chosen = level.entries(space) if keys is None else keys
        gone: list[BlockKey] = []
        for start in range(0, len(chosen), _REMOVE_BATCH):
            if time.monotonic() >= until:
                with self._lock:
                    writer.remove_later(space, chosen[start:])
                break
            batch = chosen[start : start + _REMOVE_BATCH]
            try:
                held = level.remove(space, batch, until)
            finally:
                with self._lock:
                    writer.removed(space, batch)
            gone.extend(key for key, was_held in zip(batch, held, strict=True) if was_held)
        return gone

    # ---- under the lock --------------------------------------------------------------------------

    @property
    def _copying(self) -> bool:
        return not self._down.idle

    def _stored(self, blocks: Sequence[Block], deadline: float) -> None:
        if self._room is not None:
            self._room.look()
        self._down.stored(blocks, deadline)

    def _saved_again(self, blocks: Sequence[Block]) -> None:
        self._down.used(blocks)

    def _came_up(self, blocks: Sequence[Block]) -> None:
        self._down.came_up(blocks)

    def _only_here(self, blocks: set[Block], *, soon: bool = False) -> set[Block]:
        return self._down.only_here(blocks, soon=soon)

    def _require_open(self) -> None:
        if self._closing or self._closed:
            raise StoreError("the store is closed")

    def _sweep(self, *, processes: bool = False) -> float:
        self._fetcher.sweep()
        return super()._sweep(processes=processes)

    def _wait_for_room(self, now: float, deadline: float) -> None:
        recheck_s = self._fetcher.recheck_s
        super()._wait_for_room(now, deadline if recheck_s is None else min(deadline, now + recheck_s))
