"""Blocks and leases over one arena: the part of a store in memory that runs under its lock.

Nothing here waits and nothing is thread safe: :class:`kvferry.core.memory.MemoryStore` holds its lock
around every call, and the arena's own lock is taken inside it.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvferry.core.arena import Arena
from kvferry.core.block_table import BlockTable
from kvferry.core.chains import Block
from kvferry.core.eviction import EvictionPolicy
from kvferry.core.keys import BlockKey
from kvferry.core.leases import LeaseOwner, LeaseState, LeaseTable, SlotReadLease
from kvferry.core.segments import Slot
from kvferry.core.sessions import Session
from kvferry.core.spec import KVSpec
from kvferry.core.write_leases import HandleReference, SlotWriteLease, WriteRecord

if TYPE_CHECKING:
    from kvferry.core.memory_namespace import MemoryNamespace

__all__ = ["BlockPool", "Fill"]

_NOT_TOLD: Final = (-1, False)


@dataclass(frozen=True, slots=True)
class Fill:
    """What a commit needs to know of a write lease.

    Attributes:
        namespace_id: Of its blocks.
        parents: Each block's parent.
        deadline: By when the save wanted to be done.
        places: Slower tiers that need no copy of its blocks, as bits.
        facts: Position (-1: not known) and whether something was lost, of blocks of which that was told.
        takes_lossy: Its holder may have computed them behind blocks that have lost something.
    """

    namespace_id: bytes
    parents: tuple[BlockKey | None, ...]
    deadline: float
    places: int = 0
    facts: Mapping[BlockKey, tuple[int, bool]] = field(default_factory=dict)
    takes_lossy: bool = False

    def mark(self, blocks: Iterable[Block]) -> None:
        """Note on blocks that were published what was told of them."""
        if not self.places and not self.facts:
            return
        for block in blocks:
            block.places |= self.places
            position, _ = self.facts.get(block.key, _NOT_TOLD)
            if position >= 0:
                block.position = position


class BlockPool(BlockTable):
    """The blocks of ``arena`` with leases on them, and slots that are being filled or in quarantine.

    Attributes:
        quarantined_nbytes: Whole slots of write leases that are over but may still be written.
    """

    def __init__(self, arena: Arena, owner: LeaseOwner, policy: EvictionPolicy) -> None:
        super().__init__(arena, policy)
        self.reads: LeaseTable[SlotReadLease] = LeaseTable()
        self.writes: LeaseTable[WriteRecord] = LeaseTable()
        self.quarantined_nbytes = 0
        self.expired_leases = 0
        self._owner = owner
        self._read_blocks: dict[str, tuple[Block, ...]] = {}
        self._fills: dict[str, Fill] = {}
        self._in_quarantine: set[str] = set()
        self._dropped: deque[HandleReference] = deque()  # handles that are gone; any thread appends
        self._unheld: list[WriteRecord] = []  # those of which a view was left
        self._lease_prefix = uuid.uuid4().hex[:12]

    @property
    def active_leases(self) -> int:
        """Leases that hold something and are not over."""
        return len(self.reads) + len(self.writes) - len(self._in_quarantine)

    @property
    def reserved_nbytes(self) -> int:
        """Slots of active write leases, and of saves that are being copied."""
        return self.arena.used_nbytes - self.stored_nbytes - self.forgotten_nbytes - self.quarantined_nbytes

    @property
    def pinned_nbytes(self) -> int:
        """What can't be evicted, beside what is in quarantine."""
        return self.held_nbytes + self.forgotten_nbytes + self.reserved_nbytes

    def namespaces(self) -> set[bytes]:
        """Ids of those of which it has blocks, or slots that are being filled."""
        return {*self.indexes, *[fill.namespace_id for fill in self._fills.values()]}

    # ---- leases ------------------------------------------------------------------------------

    def open_read(
        self, namespace: MemoryNamespace, blocks: Sequence[Block], expires_at: float
    ) -> SlotReadLease:
        """Lease stored blocks for reading; to a reader who takes them, it says which have lost something."""
        lease = self._open_read(namespace.session, namespace.spec, blocks, expires_at)
        if namespace.takes_lossy:
            lease.lossy = _lossy(blocks)
        return lease

    def _open_read(
        self, session: Session, spec: KVSpec, blocks: Sequence[Block], expires_at: float
    ) -> SlotReadLease:
        lease = SlotReadLease(
            self._owner,
            self._lease_id("r"),
            session,
            spec,
            tuple([b.key for b in blocks]),
            tuple([b.slot for b in blocks]),
            expires_at,
        )
        if blocks:
            self.hold_all(blocks)
            self._read_blocks[lease.lease_id] = tuple(blocks)
            self.reads.add(lease)
        return lease

    def leased(self, lease: SlotReadLease) -> tuple[Block, ...]:
        """The blocks of a read lease that is not over."""
        return self._read_blocks.get(lease.lease_id, ())

    def close_read(self, lease: SlotReadLease, state: LeaseState, reason: str) -> None:
        """End a read lease and its holds."""
        lease.state, lease.reason = state, reason
        if self.reads.discard(lease):
            self.drop_all(self._read_blocks.pop(lease.lease_id))

    def open_write(
        self, session: Session, spec: KVSpec, fill: Fill, keys: Sequence[BlockKey], slots: Sequence[Slot],
        expires_at: float,
    ) -> SlotWriteLease:  # fmt: skip
        """Lease slots for filling."""
        lease = WriteRecord(
            self._owner, self._lease_id("w"), session, spec, tuple(keys), tuple(slots), expires_at
        )
        handle = lease.hand_out(self._dropped)  # first: from here on its end is noticed
        if slots:
            self._fills[lease.lease_id] = fill
            self.writes.add(lease)
        return handle

    def find_lease(self, lease_id: str) -> SlotReadLease | SlotWriteLease | None:
        """The lease of that id if it holds anything, and a write lease's handle was not dropped."""
        write = self.writes.get(lease_id)
        handle = None if write is None else write.handle
        return self.reads.get(lease_id) if handle is None else handle()

    def fill(self, lease: WriteRecord) -> Fill | None:
        """What was asked of an active write lease, if it holds anything."""
        return self._fills.get(lease.lease_id)

    def commit(self, lease: WriteRecord) -> list[Block]:
        """Publish an active write lease's blocks; returns those that are new."""
        return self._new(self._publish(lease))

    def publish(self, lease: WriteRecord, expires_at: float) -> tuple[list[Block], SlotReadLease]:
        """Publish an active write lease's blocks and hold them all; returns those that are new."""
        blocks = self._publish(lease)
        read = self._open_read(lease.session, lease.spec, blocks, expires_at)
        read.lossy = _lossy(blocks)
        return [block for block in blocks if block.stored], read

    def _publish(self, lease: WriteRecord) -> list[Block]:
        """All blocks of the lease; ``stored`` says which are new."""
        self._end_write(lease, "committed")
        if not self.writes.discard(lease):
            return []
        lease.told = None
        fill = self._fills.pop(lease.lease_id)
        slot_nbytes = lease.slots[0].slot_nbytes
        lossy = lease.lossy
        if fill.facts:
            lossy |= {n for n, key in enumerate(lease.keys) if fill.facts.get(key, _NOT_TOLD)[1]}
        elif fill.takes_lossy:
            lossy |= self.behind_lossy(fill.namespace_id, lease.keys, fill.parents, lossy)
        return self.publish_all(fill.namespace_id, slot_nbytes, lease.keys, fill.parents, lease.slots, lossy)

    def behind_lossy(
        self,
        namespace_id: bytes,
        keys: Iterable[BlockKey],
        parents: Iterable[BlockKey | None],
        known: Collection[int] = (),
    ) -> set[int]:
        """Numbers of blocks, given from head to tail, that lie in their chain behind one that lost something.

        Whoever takes lossy blocks computes on from them: what he saves behind one is no better.
        """
        index = self.indexes.get(namespace_id)
        if not known and (index is None or not index.lossy):
            return set()
        stored = {} if index is None else index.entries
        found, tainted = set[int](), set[BlockKey]()
        for number, (key, parent) in enumerate(zip(keys, parents, strict=True)):
            above = None if parent is None else stored.get(parent)
            if number in known or parent in tainted or (above is not None and above.lossy):
                tainted.add(key)
                found.add(number)
        return found

    def _new(self, blocks: list[Block]) -> list[Block]:
        """Those that are stored; slots of the others go back."""
        stored = [block for block in blocks if block.stored]
        if len(stored) < len(blocks):
            for block in blocks:
                if not block.stored:
                    self.arena.free(block.slot)
        return stored

    def abort(self, lease: WriteRecord, reason: str) -> None:
        """End a write lease by its holder's word: slots are free once no ``writing()`` is open."""
        if lease.state is LeaseState.ACTIVE and lease.writings:
            self._quarantine(lease)
        self._end_write(lease, reason)
        if not lease.writings:
            self._free_write(lease)

    def expire_write(self, lease: WriteRecord, reason: str) -> None:
        """End a write lease without its holder's word: quarantine, unless nobody can write any more."""
        if lease.state is LeaseState.ACTIVE:
            lease.state, lease.reason = LeaseState.EXPIRED, reason
            self._quarantine(lease)
        if not lease.writings and lease.session.writers_gone:
            self._free_write(lease)

    def writing_ended(self, lease: WriteRecord) -> None:
        """One ``writing()`` was closed.

        The last one frees the slots of a lease that its holder has ended, and of an expired one
        unless the session's own process may still be writing.
        """
        lease.writings -= 1
        over = lease.state is LeaseState.ENDED or (
            lease.state is LeaseState.EXPIRED and (not lease.session.watches or lease.session.writers_gone)
        )
        if over and not lease.writings:
            self._free_write(lease)

    def _quarantine(self, lease: WriteRecord) -> None:
        self.quarantined_nbytes += lease.slot_nbytes
        self._in_quarantine.add(lease.lease_id)

    def _end_write(self, lease: WriteRecord, reason: str) -> None:
        lease.state, lease.reason = LeaseState.ENDED, reason

    def _free_write(self, lease: WriteRecord) -> None:
        if not self.writes.discard(lease):
            return
        lease.told = None
        del self._fills[lease.lease_id]
        if lease.lease_id in self._in_quarantine:
            self._in_quarantine.remove(lease.lease_id)
            self.quarantined_nbytes -= lease.slot_nbytes
        for slot in lease.slots:
            self.arena.free(slot)

    def _lease_id(self, kind: str) -> str:
        return f"{kind}-{self._lease_prefix}-{next(self._numbers)}"

    def publish_new(
        self,
        namespace_id: bytes,
        slot_nbytes: int,
        parents: Mapping[BlockKey, BlockKey | None],
        slots: Sequence[Slot],
        *,
        takes_lossy: bool,
    ) -> list[Block]:
        """Publish what was saved without a lease: keys with their parents, from head to tail.

        Returns:
            What is new; the other slots are free again.
        """
        before = self.saved_blocks
        lossy = self.behind_lossy(namespace_id, parents, parents.values()) if takes_lossy else ()
        blocks = self.publish_all(namespace_id, slot_nbytes, parents, parents.values(), slots, lossy)
        return blocks if self.saved_blocks - before == len(blocks) else self._new(blocks)

    # ---- ends that nobody calls -----------------------------------------------------------------

    def sweep(self, now: float, *, processes: bool) -> bool:
        """End what is past its deadline at ``now``, and with ``processes`` what its session left behind.

        Returns:
            Whether anything ended.
        """
        if not (self._read_blocks or self._fills or self._pins):
            return False
        if not (
            processes or self._pins or self._dropped or self._unheld
            or self.reads.is_due(now) or self.writes.is_due(now)
        ):  # fmt: skip
            return False
        before = (len(self.reads), len(self.writes), self.quarantined_nbytes, self.held_nbytes)
        for read in self.reads.due(now):
            self.expired_leases += 1
            self.close_read(read, LeaseState.EXPIRED, "its deadline has passed")
        for write in self.writes.due(now):
            if write.state is LeaseState.ACTIVE:
                self.expired_leases += 1
                self.expire_write(write, "its deadline has passed; its slots are in quarantine")
        self._end_due_pins(now)
        if self._dropped or self._unheld:
            self._end_dropped()
        if processes:
            for session in [*self.reads.sessions(), *self.writes.sessions()]:
                if session.ended:
                    self._end_session(session)
        return before != (len(self.reads), len(self.writes), self.quarantined_nbytes, self.held_nbytes)

    def _end_dropped(self) -> None:
        """Abort write leases that nobody can end any more, once nobody can write into their slots either."""
        while self._dropped:
            lease = self.writes.get(self._dropped.popleft().lease_id)
            if lease is not None:
                self._unheld.append(lease)
        for lease in [lease for lease in self._unheld if not lease.is_seen]:
            self._unheld.remove(lease)
            self.abort(lease, "it was dropped, and is aborted")

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
        if any(s.watches for s in [*self.reads.sessions(), *self.writes.sessions()]):
            times.append(now + 0.05)  # no condition variable tells of another process's end
        elif len(self.writes):
            times.append(now + 0.05)  # nor of a lease that is dropped, or of the last view of it
        return min(times, default=None)

    def close(self, reason: str) -> None:
        """End all leases and forget all blocks."""
        for read in self.reads:
            read.state, read.reason = LeaseState.ENDED, reason
        for write in self.writes:
            write.state, write.reason, write.told = LeaseState.ENDED, reason, None
        self.arena.close()


def _lossy(blocks: Sequence[Block]) -> frozenset[int]:
    return frozenset([number for number, block in enumerate(blocks) if block.lossy])
