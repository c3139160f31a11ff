"""The way up: blocks that slower tiers hold are read into memory for a lease, and stay there by policy."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvferry.core.chains import Block, ChainIndex
from kvferry.core.clock import time_left
from kvferry.core.errors import StoreError
from kvferry.core.keys import BlockKey
from kvferry.core.leases import SlotReadLease
from kvferry.core.memory_namespace import MemoryNamespace
from kvferry.core.segments import Slot
from kvferry.store.hands import UNKNOWN, drop_frames, lend, over_when
from kvferry.store.level import Level
from kvferry.store.tier import UNKNOWN_PARENT, BlockRead, ReadOutcome, ReadResult, TierNamespace

if TYPE_CHECKING:
    from kvferry.store.tiered import TieredStore

__all__ = ["Fetcher"]

_LOG = logging.getLogger(__name__)
_RECHECK_S = 0.05
_GRACE_S = 5.0
_NOT_BEGUN = ReadResult(ReadOutcome.FAILED, "not begun")
_LOSSY = ReadResult(ReadOutcome.MISS, "it has lost something, and the reader takes no loss")
_BEGUN = ReadResult(ReadOutcome.FAILED, "its read did not end", in_flight=UNKNOWN)


class _Item:
    """One block to read: into which slot, from which tier, and what came of it."""

    __slots__ = ("cancelled", "key", "level", "parent", "promote", "reference", "result", "slot")

    def __init__(self, key: BlockKey, level: Level, slot: Slot, *, promote: bool) -> None:
        self.key = key
        self.level = level
        self.slot = slot
        self.promote = promote
        self.parent: BlockKey | None = UNKNOWN_PARENT
        self.cancelled = False  # removed meanwhile: it does not stay
        self.result = _NOT_BEGUN
        self.reference: Callable[[], object] | None = None  # to the buffer, as it was lent to the tier


class _Plan(NamedTuple):
    """What one load gives if every read succeeds.

    Attributes:
        namespace: Whose blocks.
        order: The keys, in the order asked.
        memory: Those in memory; held.
        items: Those to be read.
    """

    namespace: MemoryNamespace
    order: list[BlockKey]
    memory: dict[BlockKey, Block]
    items: list[_Item]


class Fetcher:
    """Reads for one store. Thread safe; methods that say so are called under the store's lock."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._fetching: dict[tuple[bytes, BlockKey], _Item] = {}  # those that are to stay
        self._limbo: list[tuple[Callable[[], bool], Slot]] = []

    def load(
        self, namespace: MemoryNamespace, keys: Sequence[BlockKey], deadline: float, *, stay: bool = False
    ) -> SlotReadLease:
        """Lease the longest prefix that can be had from any tier; ``stay`` keeps all in memory.

        Waits for room, or for another load that reads the same block, while it holds nothing itself; past
        the deadline the prefix is as long as it is.
        """
        plan = self._plan(namespace, keys, deadline, stay)
        try:
            if plan.items:
                self._read(plan, deadline)
        except BaseException as error:  # not of a tier: a signal handler raised it in this thread
            drop_frames(error)  # whoever keeps it should not keep the buffers
            self._give_up(plan)
            raise
        return self._finish(plan)

    # ---- under the store's lock --------------------------------------------------------------------

    def cancel(self, namespace_id: bytes, keys: Iterable[BlockKey] | None) -> None:
        """The keys, or all of the namespace, were removed: what is being read does not stay."""
        if keys is None:
            keys = [key for ns, key in self._fetching if ns == namespace_id]
        for key in keys:
            item = self._fetching.get((namespace_id, key))
            if item is not None:
                item.cancelled = True

    def sweep(self) -> None:
        """Give back the slots that a late tier has let go of."""
        if not self._limbo:
            return
        pool = self._store._pool
        left = []
        for over, slot in self._limbo:
            if over():
                pool.quarantined_nbytes -= slot.slot_nbytes
                pool.arena.free(slot)
                self._store._cond.notify_all()
            else:
                left.append((over, slot))
        self._limbo = left

    @property
    def recheck_s(self) -> float | None:
        """How long a wait for room may last before it looks again; ``None`` if no event is missed."""
        return _RECHECK_S if self._limbo else None

    # ---- plan ----------------------------------------------------------------------------------------

    def _plan(
        self, namespace: MemoryNamespace, keys: Sequence[BlockKey], deadline: float, stay: bool
    ) -> _Plan:
        store = self._store
        hopeful_until = time.monotonic() + store.options.room_wait_s
        where, asked = dict[BlockKey, Level](), set[BlockKey]()
        while True:
            missing = [key for key in store._not_in_memory(namespace, keys) if key not in asked]
            where.update(store._locate_missing(namespace, missing, deadline))
            asked.update(missing)
            with store._lock:
                now = store._begin(namespace.session, processes=True)
                if self._has_left(namespace, keys, asked):
                    continue
                until = min(deadline, hopeful_until)
                plan = self._try_plan(namespace, keys, where, patient=now < deadline, hopeful=now < until)
                if plan is not None:
                    free = stay or namespace.local_only  # they may be of any chains
                    above = {} if free else _parents(plan.order)
                    for item in plan.items:
                        item.parent = above.get(item.key, UNKNOWN_PARENT)
                        policy = item.level.options.promotion
                        item.promote = stay or policy.promote(namespace.namespace_id, item.key)
                        if item.promote:
                            self._fetching[namespace.namespace_id, item.key] = item
                    return plan
                store._wait_for_room(now, deadline if now >= until else until)
                where, asked = {}, set()

    def _has_left(
        self, namespace: MemoryNamespace, keys: Sequence[BlockKey], asked: Collection[BlockKey]
    ) -> bool:
        """Whether some key was in memory when the tiers were asked, and is not any more."""
        stored = self._store._pool.found_by(namespace)
        return any(key not in stored and key not in asked for key in keys)

    def _try_plan(
        self, namespace: MemoryNamespace, keys: Sequence[BlockKey], where: dict[BlockKey, Level], *,
        patient: bool, hopeful: bool,
    ) -> _Plan | None:  # fmt: skip
        """What can be given now; ``None`` if it is worth to wait for more.

        It is when there is nothing else (``patient``), or when copies are under way, which end by
        themselves, and little time has passed (``hopeful``).
        """
        store, pool, ns = self._store, self._store._pool, namespace.namespace_id
        stored = pool.found_by(namespace)
        memory: dict[BlockKey, Block] = {}
        wanted: dict[BlockKey, Level] = {}
        order: list[BlockKey] = []
        for key in keys:
            block = stored.get(key)
            if block is not None:
                memory[key] = block
            elif (ns, key) in self._fetching:
                if patient:
                    return None
                break
            elif key in where:
                wanted[key] = where[key]
            else:
                break
            order.append(key)
        asked = len(order)
        order = self._that_fits(namespace, order, memory)
        wanted = {key: wanted[key] for key in order if key in wanted}
        memory = {key: memory[key] for key in order if key in memory}
        slots = self._slots(namespace, len(wanted), set(memory.values()), patient=patient)
        if slots is None:
            return None
        if len(slots) < len(wanted):
            order = order[: order.index(list(wanted)[len(slots)])]
            memory = {key: memory[key] for key in order if key in memory}
        wait = patient and not order and self._room_may_come()
        if len(order) < asked and (wait or (hopeful and store._copying)):
            for slot in slots:
                pool.arena.free(slot)
            return None
        for block in memory.values():
            pool.hold(block)
        items = [_Item(k, wanted[k], s, promote=False) for k, s in zip(wanted, slots, strict=False)]
        return _Plan(namespace, order, memory, items)

    def _that_fits(
        self, namespace: MemoryNamespace, order: list[BlockKey], memory: dict[BlockKey, Block]
    ) -> list[BlockKey]:
        """The longest prefix that memory can hold beside what others hold: heads before tails."""
        pool = self._store._pool
        room = pool.arena.free_nbytes + pool.stored_nbytes - pool.held_nbytes + pool.leaving_nbytes
        seen: set[BlockKey] = set()
        for number, key in enumerate(order):
            block = memory.get(key)
            if key not in seen and (block is None or not block.holds):
                room -= namespace.slot_nbytes
            if room < 0:
                return order[:number]
            seen.add(key)
        return order

    def _slots(
        self, namespace: MemoryNamespace, count: int, protected: set[Block], *, patient: bool
    ) -> list[Slot] | None:
        """Up to ``count`` slots; ``None`` if more are on their way and there is time to wait."""
        pool, nbytes = self._store._pool, namespace.slot_nbytes
        count = min(count, pool.arena.capacity_nbytes // nbytes)
        while count > 0:
            found = pool.allocate(count, namespace.spec.block_nbytes, nbytes, lambda: protected)
            if found is not None:
                return found
            if pool.leaving_nbytes and patient:
                return None
            spared = sum(block.nbytes for block in protected if not block.holds)
            room = pool.arena.free_nbytes + pool.stored_nbytes - pool.held_nbytes - spared
            count = min(count - 1, max(room, 0) // nbytes)
        return []

    def _room_may_come(self) -> bool:
        pool = self._store._pool
        return self._store._pinned_nbytes() + pool.quarantined_nbytes > 0

    # ---- read ----------------------------------------------------------------------------------------

    def _read(self, plan: _Plan, deadline: float) -> None:
        """Read all items; one that its tier does not give is asked of the tiers below."""
        store = self._store
        space = store._space(plan.namespace)
        left = list(plan.items)
        while left:
            by_level: dict[int, list[_Item]] = {}
            for item in left:
                by_level.setdefault(item.level.number, []).append(item)
            takes_lossy = plan.namespace.takes_lossy
            reads = [_reader(store, space, items, deadline, takes_lossy) for items in by_level.values()]
            _in_parallel(reads, deadline)
            left = [item for item in left if self._try_below(plan.namespace, space, item, deadline)]

    def _try_below(
        self, namespace: MemoryNamespace, space: TierNamespace, item: _Item, deadline: float
    ) -> bool:
        result = item.result
        if result.outcome is ReadOutcome.HIT or time.monotonic() >= deadline:
            return False
        if over_when(result.in_flight, item.reference) is not None:
            return False  # the slot is not this load's alone
        for level in self._store.levels[item.level.number + 1 :]:
            if namespace.local_only and level.tier.to_daemons:
                continue
            if level.contains(space, [item.key], deadline, takes_lossy=namespace.takes_lossy)[0]:
                item.level = level
                return True
        return False

    # ---- finish --------------------------------------------------------------------------------------

    def _give_up(self, plan: _Plan) -> None:
        """The load ended by an exception: keep what was read, lease nothing."""
        store = self._store
        with store._lock:
            self._end_fetching(plan)
            if store._closed:
                return
            read = self._keep(plan)
            for block in {**plan.memory, **read}.values():
                store._pool.drop(block)
            store._cond.notify_all()

    def _end_fetching(self, plan: _Plan) -> None:
        for item in plan.items:
            name = (plan.namespace.namespace_id, item.key)
            if self._fetching.get(name) is item:
                del self._fetching[name]

    def _finish(self, plan: _Plan) -> SlotReadLease:
        store, namespace = self._store, plan.namespace
        with store._lock:
            self._end_fetching(plan)
            if store._closed:
                raise StoreError("the store was closed during the load")
            read = self._keep(plan)
            given: list[Block] = []
            for key in plan.order:
                block = plan.memory.get(key) or read.get(key)
                if block is None:
                    break
                given.append(block)
            store._pool.touch([b for b in given if b.stored and b.key in plan.memory])  # others are new
            expires_at = time.monotonic() + store.lease_s
            lease = store._pool.open_read(namespace, given, expires_at)
            for block in {**plan.memory, **read}.values():
                store._pool.drop(block)  # what is neither leased nor stored is free again by this
            store._cond.notify_all()
            store._sweep(processes=True)  # if the session has ended meanwhile, so has the lease
        return lease

    def _keep(self, plan: _Plan) -> dict[BlockKey, Block]:
        """The blocks that were read, each with one hold; slots without one go back."""
        pool, namespace = self._store._pool, plan.namespace
        ns = namespace.namespace_id
        read: dict[BlockKey, Block] = {}
        stay: list[Block] = []
        for item in reversed(plan.items):  # tails first, so that heads count as used last
            result = item.result  # once: after an exception its thread may still be under way
            if result.outcome is not ReadOutcome.HIT:
                self._give_back(item, result)
                continue
            index = pool.indexes.get(ns) or ChainIndex(ns, namespace.slot_nbytes)
            there = index.entries.get(item.key)
            if there is not None and (result.lossy or not there.lossy):  # equal keys name equal bytes
                block = there  # saved meanwhile
                pool.arena.free(item.slot)
            else:
                parent = result.parent
                block = Block(index, item.key, None if parent == UNKNOWN_PARENT else parent, item.slot)
                block.places = item.level.bit
                block.position = result.position
                block.lossy = result.lossy
                if item.promote and not item.cancelled:
                    block.index = pool.index(ns, namespace.slot_nbytes)
                    if there is None:
                        pool.add(block)
                    else:
                        pool.replace(there, block)
                    stay.append(block)
                    item.level.count("promoted", 1)
            pool.hold(block)
            read[item.key] = block
        self._store._came_up(stay)
        return read

    def _give_back(self, item: _Item, result: ReadResult) -> None:
        pool = self._store._pool
        over = over_when(result.in_flight, item.reference)
        if over is None:
            pool.arena.free(item.slot)
        else:
            pool.quarantined_nbytes += item.slot.slot_nbytes
            self._limbo.append((over, item.slot))


def _parents(order: Sequence[BlockKey]) -> dict[BlockKey, BlockKey]:
    """The key before each where it is named first; none for the first, which may be any of its chain."""
    above = dict(reversed([(key, parent) for parent, key in itertools.pairwise(order)]))
    if order:
        above.pop(order[0], None)
    return above


def _reader(
    store: TieredStore, space: TierNamespace, items: list[_Item], deadline: float, takes_lossy: bool
) -> Callable[[], None]:
    def read() -> None:
        reads = []
        for item in items:
            view, item.reference = lend(store.arena.view(item.slot))
            item.result = _BEGUN  # from here on the slot is only free again when the read is known to be over
            reads.append(BlockRead(item.key, view, item.parent, takes_lossy))
            del view
        results = items[0].level.read(space, reads, deadline=deadline)
        for item, result in zip(items, results, strict=True):
            item.result = _LOSSY if result.lossy and not takes_lossy else result

    return read


def _in_parallel(calls: list[Callable[[], None]], deadline: float) -> None:
    """One call here, the others each in a thread of its own, which ends with this call."""
    threads = [
        threading.Thread(target=_contained, args=(call,), name="kvferry-fetch", daemon=True)
        for call in calls[1:]
    ]
    for thread in threads:
        thread.start()
    calls[0]()
    for thread in threads:  # a tier returns by the deadline that it was given; one that does not is left
        thread.join(time_left(deadline) + _GRACE_S)


def _contained(call: Callable[[], None]) -> None:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - root of a thread: its items stay as not ended
        _LOG.error("a read in a thread of its own ended by %s: %s", type(error).__name__, str(error))
        drop_frames(error)
