"""Blocks and leases over one arena: the part of a store in memory that runs under its lock.

Nothing here waits and nothing is thread safe: :class:`kvferry.core.memory.MemoryStore` holds its lock
around every call, and the arena's own lock is taken inside it.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass

from kvferry.core.arena import Arena
from kvferry.core.chains import Block, ChainIndex
from kvferry.core.errors import StoreError
from kvferry.core.eviction import Entry, EvictionPolicy
from kvferry.core.keys import BlockKey
from kvferry.core.leases import LeaseOwner, LeaseState, LeaseTable, SlotReadLease, SlotWriteLease
from kvferry.core.segments import Slot
from kvferry.core.sessions import Session
from kvferry.core.spec import KVSpec

__all__ = ["BlockPool", "Fill", "Leave"]


@dataclass(frozen=True, slots=True)
class Fill:
    """What a commit needs to know of a write lease.

    Attributes:
        namespace_id: Of its blocks.
        parents: Each block's parent.
        deadline: By when the save wanted to be done.
    """

    namespace_id: bytes
    parents: tuple[BlockKey | None, ...]
    deadline: float


class Leave(enum.Enum):
    """Whether a block may be evicted."""

    NOW = "now"
    COPIED_FIRST = "copied first"
    """It is being copied to a slower tier: whoever says so called :meth:`BlockPool.leave`."""
    NOT_YET = "not yet"
    """It must be copied, but the queue has no place: nothing is evicted until some copy is made."""


class BlockPool:
    """Index, leases, pins and quarantine over ``arena``; what goes first is the policy's to say.

    Attributes:
        held_nbytes: Stored blocks under a read lease or pin, or being copied.
        forgotten_nbytes: Removed blocks that somebody still holds.
        quarantined_nbytes: Slots of write leases that are over but may still be written.
        stored_nbytes: All stored blocks. All four count whole slots.
        leaving_nbytes: Stored blocks that go as soon as a copy of them is made; part of ``held_nbytes``.
        may_leave: Asked before a block is evicted; see :class:`Leave`.
    """

    def __init__(self, arena: Arena, owner: LeaseOwner, policy: EvictionPolicy) -> None:
        self.arena = arena
        self.indexes: dict[bytes, ChainIndex[Block]] = {}
        self.policy = policy
        self.reads: LeaseTable[SlotReadLease] = LeaseTable()
        self.writes: LeaseTable[SlotWriteLease] = LeaseTable()
        self.entries = 0
        self.held_nbytes = 0
        self.forgotten_nbytes = 0
        self.stored_nbytes = 0
        self.quarantined_nbytes = 0
        self.leaving_nbytes = 0
        self.saved_blocks = 0
        self.evicted_blocks = 0
        self.expired_leases = 0
        self.may_leave: Callable[[Block], Leave] | None = None
        self._leaving: Counter[Block] = Counter()
        self._owner = owner
        self._read_blocks: dict[str, tuple[Block, ...]] = {}
        self._fills: dict[str, Fill] = {}
        self._in_quarantine: set[str] = set()
        self._pins: list[tuple[float, int, Block]] = []
        self._pinned_until: dict[Block, float] = {}
        self._numbers = itertools.count()
        self._lease_prefix = uuid.uuid4().hex[:12]

    @property
    def active_leases(self) -> int:
        """Leases that hold something and are not over."""
        return len(self.reads) + len(self.writes) - len(self._in_quarantine)

    @property
    def reserved_nbytes(self) -> int:
        """Slots of active write leases."""
        return self.arena.used_nbytes - self.stored_nbytes - self.forgotten_nbytes - self.quarantined_nbytes

    # ---- blocks ------------------------------------------------------------------------------

    def get(self, namespace_id: bytes, key: BlockKey) -> Block | None:
        """The stored block of that key."""
        index = self.indexes.get(namespace_id)
        return None if index is None else index.entries.get(key)

    def prefix(self, namespace_id: bytes, keys: Iterable[BlockKey]) -> list[Block]:
        """The longest stored prefix of ``keys``."""
        index = self.indexes.get(namespace_id)
        found: list[Block] = []
        if index is None:
            return found
        get = index.entries.get
        for key in keys:
            block = get(key)
            if block is None:
                break
            found.append(block)
        return found

    def touch(self, head_to_tail: Sequence[Block]) -> None:
        """Count the blocks as used now."""
        self.policy.accessed(reversed(head_to_tail))

    def add(self, block: Block) -> None:
        """Store a block whose key is not stored, as used now; tails come before their parents."""
        block.index.add(block)
        block.stored = True
        self.entries += 1
        self.stored_nbytes += block.nbytes
        if block.holds:
            self.held_nbytes += block.nbytes
            self.forgotten_nbytes -= block.nbytes
        self.policy.inserted(block)

    def index(self, namespace_id: bytes, slot_nbytes: int) -> ChainIndex[Block]:
        """The index of a namespace, made if there is none."""
        found = self.indexes.get(namespace_id)
        if found is None:
            found = self.indexes[namespace_id] = ChainIndex(namespace_id, slot_nbytes)
        return found

    def forget(self, block: Block) -> None:
        """Take a stored block out of the index; its slot is used again when nobody holds it."""
        self.unpin(block)
        nbytes = block.nbytes
        index = block.index
        if block in self._leaving:
            index.attach(block)
        tail = index.discard(block)
        block.stored = False
        self.policy.removed(block)
        if tail is not None:
            self.policy.released(tail)
        if not index.entries:
            del self.indexes[index.namespace_id]
        self.entries -= 1
        self.stored_nbytes -= nbytes
        if block.holds:
            self.held_nbytes -= nbytes
            self.forgotten_nbytes += nbytes
        else:
            self.arena.free(block.slot)

    def hold(self, block: Block) -> None:
        """Keep a block's bytes in place until :meth:`drop`."""
        block.holds += 1
        if block.holds == 1 and block.stored:
            self.held_nbytes += block.nbytes
        elif block.holds == 1:
            self.forgotten_nbytes += block.nbytes

    def drop(self, block: Block) -> None:
        """End one :meth:`hold`."""
        if block.holds < 1:
            raise StoreError(f"block {block.key[:8].hex()}… of {block.slot} is dropped more than it was held")
        block.holds -= 1
        if block.holds:
            return
        if block.stored:
            self.held_nbytes -= block.nbytes
            self.policy.released(block)
        else:
            self.forgotten_nbytes -= block.nbytes
            self.arena.free(block.slot)

    # ---- pins --------------------------------------------------------------------------------

    def pin(self, block: Block, until: float) -> None:
        """Hold a stored block at least until ``until``."""
        before = self._pinned_until.get(block)
        if before is None:
            self.hold(block)
            heapq.heappush(self._pins, (until, next(self._numbers), block))
        self._pinned_until[block] = until if before is None else max(before, until)

    def unpin(self, block: Block) -> None:
        """End the pin of a block, if it has one."""
        if self._pinned_until and self._pinned_until.pop(block, None) is not None:
            self.drop(block)

    def _end_due_pins(self, now: float) -> None:
        while self._pins and self._pins[0][0] <= now:
            _, number, block = heapq.heappop(self._pins)
            until = self._pinned_until.get(block, 0.0)
            if until > now:  # pinned again since, for longer
                heapq.heappush(self._pins, (until, number, block))
            else:
                self.unpin(block)

    # ---- room --------------------------------------------------------------------------------

    def allocate(
        self, count: int, nbytes: int, slot_nbytes: int, protect: Callable[[], set[Block]]
    ) -> list[Slot] | None:
        """Slots for ``count`` blocks, or ``None`` with nothing taken.

        Evicts only if that can suffice. Blocks that are copied first give their room later, which the
        caller learns from :attr:`leaving_nbytes`.
        """
        needed = count * slot_nbytes
        slots = self._fill(count, nbytes) if needed <= self.arena.free_nbytes else None
        if slots is None:
            protected = protect()
            spared = sum(b.nbytes for b in protected if not b.holds)
            evictable = self.stored_nbytes - self.held_nbytes - spared + self.leaving_nbytes
            if needed <= self.arena.free_nbytes + evictable:
                slots = self._evict_for(count, nbytes, needed, protected)
        return slots

    def _fill(self, count: int, nbytes: int) -> list[Slot] | None:
        """All slots or none: those of a part could lie in the way of the others later."""
        slots: list[Slot] = []
        for _ in range(count):
            slot = self.arena.allocate(nbytes)
            if slot is None:
                for taken in slots:
                    self.arena.free(taken)
                return None
            slots.append(slot)
        return slots

    def _evict_for(self, count: int, nbytes: int, needed: int, protected: set[Block]) -> list[Slot] | None:
        def pinned(entry: Entry) -> bool:
            assert isinstance(entry, Block)
            return entry.holds > 0 or entry in protected

        slots = None
        steps = self.evictions(pinned)
        while slots is None:
            coming = self.leaving_nbytes
            if coming and needed <= self.arena.free_nbytes + coming:
                break  # enough is on its way out
            if not next(steps, False):
                break
            if needed <= self.arena.free_nbytes:
                slots = self._fill(count, nbytes)
        for block in protected:
            if block.stored:
                self.policy.released(block)
        return slots

    def evictions(self, pinned: Callable[[Entry], bool]) -> Generator[bool, None, None]:
        """Evict one block, or begin to, before each step (``True``); ends when nothing is left to evict."""
        for victim in self.policy.victims(self.arena.capacity_nbytes, pinned):
            assert isinstance(victim, Block)
            answer = Leave.NOW if self.may_leave is None else self.may_leave(victim)
            if answer is Leave.NOT_YET:
                return
            if answer is Leave.NOW:
                self.forget(victim)
                self.evicted_blocks += 1
            yield True

    def leave(self, block: Block) -> None:
        """Hold a stored block that goes when its copy is made; ends with :meth:`left` or :meth:`stay`.

        Its parent counts as a tail meanwhile, so that a chain goes as a whole.
        """
        self.hold(block)
        self.leaving_nbytes += block.nbytes
        self._leaving[block] += 1
        if self._leaving[block] == 1:
            tail = block.index.detach(block)
            if tail is not None:
                self.policy.released(tail)

    def stay(self, block: Block) -> None:
        """The copy takes too long: what :meth:`leave` held is an ordinary hold now."""
        self.leaving_nbytes -= block.nbytes
        self._leaving[block] -= 1
        if not self._leaving[block]:
            del self._leaving[block]
            if block.stored:
                block.index.attach(block)

    def left(self, block: Block) -> None:
        """The copy that :meth:`leave` waited for is over: evict, unless somebody holds the block now."""
        self.stay(block)
        self.drop(block)
        if block.stored and not block.holds:
            self.forget(block)
            self.evicted_blocks += 1

    # ---- leases ------------------------------------------------------------------------------

    def open_read(
        self, session: Session, spec: KVSpec, blocks: Sequence[Block], expires_at: float
    ) -> SlotReadLease:
        """Lease stored blocks for reading."""
        lease = SlotReadLease(
            self._owner,
            self._lease_id("r"),
            session,
            spec,
            tuple(b.key for b in blocks),
            tuple(b.slot for b in blocks),
            expires_at,
        )
        if blocks:
            for block in blocks:
                if block.holds and block.stored:
                    block.holds += 1
                else:
                    self.hold(block)
            self._read_blocks[lease.lease_id] = tuple(blocks)
            self.reads.add(lease)
        return lease

    def close_read(self, lease: SlotReadLease, state: LeaseState, reason: str) -> None:
        """End a read lease and its holds."""
        lease.state, lease.reason = state, reason
        if self.reads.discard(lease):
            for block in self._read_blocks.pop(lease.lease_id):
                self.drop(block)

    def open_write(
        self, session: Session, spec: KVSpec, fill: Fill, keys: Sequence[BlockKey], slots: Sequence[Slot],
        expires_at: float,
    ) -> SlotWriteLease:  # fmt: skip
        """Lease slots for filling."""
        lease = SlotWriteLease(
            self._owner, self._lease_id("w"), session, spec, tuple(keys), tuple(slots), expires_at
        )
        if slots:
            self._fills[lease.lease_id] = fill
            self.writes.add(lease)
        return lease

    def fill(self, lease: SlotWriteLease) -> Fill | None:
        """What was asked of an active write lease, if it holds anything."""
        return self._fills.get(lease.lease_id)

    def commit(self, lease: SlotWriteLease) -> list[Block]:
        """Publish an active write lease's blocks; returns those that are new."""
        blocks = self._publish(lease)
        for block in blocks:
            if not block.stored:
                self.arena.free(block.slot)
        return [block for block in blocks if block.stored]

    def publish(self, lease: SlotWriteLease, expires_at: float) -> tuple[list[Block], SlotReadLease]:
        """Publish an active write lease's blocks and hold them all; returns those that are new."""
        blocks = self._publish(lease)
        read = self.open_read(lease.session, lease.spec, blocks, expires_at)
        return [block for block in blocks if block.stored], read

    def _publish(self, lease: SlotWriteLease) -> list[Block]:
        """All blocks of the lease; ``stored`` says which are new."""
        self._end_write(lease, "committed")
        if not self.writes.discard(lease):
            return []
        fill = self._fills.pop(lease.lease_id)
        index = self.index(fill.namespace_id, lease.slots[0].slot_nbytes)
        blocks = [Block(index, *b) for b in zip(lease.keys, fill.parents, lease.slots, strict=True)]
        for block in reversed(blocks):  # somebody else may have been first: equal keys name equal bytes
            if block.key not in index.entries:
                self.add(block)
                self.saved_blocks += 1
        return blocks

    def abort(self, lease: SlotWriteLease, reason: str) -> None:
        """End a write lease by its holder's word: slots are free once no ``writing()`` is open."""
        if lease.state is LeaseState.ACTIVE and lease.writings:
            self._quarantine(lease)
        self._end_write(lease, reason)
        if not lease.writings:
            self._free_write(lease)

    def expire_write(self, lease: SlotWriteLease, reason: str) -> None:
        """End a write lease without its holder's word: quarantine, unless nobody can write any more."""
        if lease.state is LeaseState.ACTIVE:
            lease.state, lease.reason = LeaseState.EXPIRED, reason
            self._quarantine(lease)
        if not lease.writings and lease.session.writers_gone:
            self._free_write(lease)

    def writing_ended(self, lease: SlotWriteLease) -> None:
        """One ``writing()`` was closed.

        The last one frees the slots of a lease that its holder has ended, and of an expired one
        unless the session's own process may still be writing.
        """
        lease.writings -= 1
        over = lease.state is LeaseState.ENDED or (
            lease.state is LeaseState.EXPIRED and (lease.session.pid is None or lease.session.writers_gone)
        )
        if over and not lease.writings:
            self._free_write(lease)

    def _quarantine(self, lease: SlotWriteLease) -> None:
        self.quarantined_nbytes += lease.slot_nbytes
        self._in_quarantine.add(lease.lease_id)

    def _end_write(self, lease: SlotWriteLease, reason: str) -> None:
        lease.state, lease.reason = LeaseState.ENDED, reason

    def _free_write(self, lease: SlotWriteLease) -> None:
        if not self.writes.discard(lease):
            return
        del self._fills[lease.lease_id]
        if lease.lease_id in self._in_quarantine:
            self._in_quarantine.remove(lease.lease_id)
            self.quarantined_nbytes -= lease.slot_nbytes
        for slot in lease.slots:
            self.arena.free(slot)

    def _lease_id(self, kind: str) -> str:
        return f"{kind}-{self._lease_prefix}-{next(self._numbers)}"

    # ---- ends that nobody calls -----------------------------------------------------------------

    def sweep(self, now: float, *, processes: bool) -> bool:
        """End what is past its deadline at ``now``, and with ``processes`` what its session left behind.

        Returns:
            Whether anything ended.
        """
        before = (len(self.reads), len(self.writes), self.quarantined_nbytes, self.held_nbytes)
        for read in self.reads.due(now):
            self.expired_leases += 1
            self.close_read(read, LeaseState.EXPIRED, "its deadline has passed")
        for write in self.writes.due(now):
            if write.state is LeaseState.ACTIVE:
                self.expired_leases += 1
                self.expire_write(write, "its deadline has passed; its slots are in quarantine")
        self._end_due_pins(now)
        if processes:
            for session in [*self.reads.sessions(), *self.writes.sessions()]:
                if session.ended:
                    self._end_session(session)
        return before != (len(self.reads), len(self.writes), self.quarantined_nbytes, self.held_nbytes)

    def _end_session(self, session: Session) -> None:
        reason = f"its session {session.name} has ended"
        for read in self.reads.of(session):
            self.close_read(read, LeaseState.EXPIRED, reason)
        for write in self.writes.of(session):
            self.expire_write(write, reason)

    def next_change(self, now: float) -> float | None:
        """When a wait for room should look again by itself; ``None`` if only a call can change anything."""
        times = [t for t in (self.reads.next_deadline(), self.writes.next_deadline()) if t is not None]
        if self._pins:
            times.append(self._pins[0][0])
        if any(s.pid is not None for s in [*self.reads.sessions(), *self.writes.sessions()]):
            times.append(now + 0.05)  # no condition variable tells of another process's end
        return min(times, default=None)

    def close(self, reason: str) -> None:
        """End all leases and forget all blocks."""
        for read in self.reads:
            read.state, read.reason = LeaseState.ENDED, reason
        for write in self.writes:
            write.state, write.reason = LeaseState.ENDED, reason
        self.arena.close()
