"""The blocks of one stream at the receiver: those stored before, and reserved slots for the others."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

from kvferry.core.blockstore import Lease, Namespace, ReadLease, WriteLease
from kvferry.core.errors import LeaseExpiredError, StoreError
from kvferry.core.keys import BlockKey
from kvferry.core.segments import Slot
from kvferry.core.write_leases import SlotWriteLease

__all__ = ["BlockSlots"]

_TRIES = 4


class BlockSlots:
    """Leases on all full blocks of a stream, numbered along the chain. Thread safe.

    Args:
        namespace: Where the blocks are stored.
        keys: Keys of the full blocks, in order.
    """

    def __init__(self, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
        self._namespace = namespace
        self._keys = list(keys)
        self._lock = threading.Lock()
        self._reads: list[ReadLease] = []
        self._write: WriteLease | None = None
        self._held: dict[int, tuple[ReadLease, int]] = {}
        self._reserved: dict[int, int] = {}  # block: index in the write lease
        self._writable: dict[int, memoryview] = {}  # block: its slot, while it is being received
        self._given_up = False
        self.renew_at = math.inf

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def missing(self) -> frozenset[int]:
        """Blocks that have to be received."""
        return frozenset(self._reserved)

    # ---- taking ---------------------------------------------------------------------------------

    def take(self, deadline: float) -> None:
        """Lease what is stored and reserve slots for the rest.

        Raises:
            CapacityError: If there is no room by the deadline. What is held is for :meth:`give_up`.
            StoreError: If blocks come and go faster than they can be leased.
        """
        for _ in range(_TRIES):
            self._lease_stored(deadline)
            first = next((b for b in range(len(self._keys)) if b not in self._held), None)
            if first is None or self._reserve(first, deadline):
                self._schedule_renewal()
                return
        raise StoreError(
            f"{len(self._keys) - len(self._held)} of {len(self._keys)} blocks were stored and evicted again "
            f"{_TRIES} times while the stream was opened; the store is too small for what runs at once"
        )

    def _lease_stored(self, deadline: float) -> None:
        """Lease every stored block that is not held yet, run by run: stored blocks may have gaps."""
        tiers = self._namespace.lookup(self._keys).tiers
        block = 0
        while block < len(tiers):
            stop = block
            while stop < len(tiers) and tiers[stop] is not None and stop not in self._held:
                stop += 1
            if stop > block:
                self._add_read(block, self._namespace.load(self._keys[block:stop], deadline=deadline))
            block = stop + 1

    def _add_read(self, first: int, lease: ReadLease) -> None:
        with self._lock:
            if self._given_up or not len(lease):
                lease.release()
                self._require_held()
                return
            self._reads.append(lease)
            self._held.update({first + i: (lease, i) for i in range(len(lease))})

    def _reserve(self, first: int, deadline: float) -> bool:
        """Reserve what is not stored from ``first`` on; ``False`` if meanwhile somebody stored some."""
        parent = self._keys[first - 1] if first else None
        lease = self._namespace.reserve(self._keys[first:], parent=parent, deadline=deadline)
        with self._lock:
            if self._given_up:
                lease.abort()
                self._require_held()
            index_of = {key: i for i, key in enumerate(lease.keys)}
            reserved = {b: index_of[k] for b, k in enumerate(self._keys) if k in index_of}
            if any(b not in self._held and b not in reserved for b in range(len(self._keys))):
                lease.abort()
                return False
            self._write, self._reserved = lease, reserved
            self._writable = {block: lease.view(index) for block, index in reserved.items()}
            return True

    def _require_held(self) -> None:
        if self._given_up:
            raise LeaseExpiredError("the blocks of the stream were given up; it was closed or has failed")

    def addresses(self) -> dict[int, Slot]:
        """Where the slots of the missing blocks lie, if this store's slots have an address."""
        with self._lock:
            if self._given_up or not isinstance(self._write, SlotWriteLease):
                return {}
            return {block: self._write.slots[index] for block, index in self._reserved.items()}

    # ---- while receiving ------------------------------------------------------------------------

    def writing(self) -> AbstractContextManager[None]:
        """Held around receiving: slots that are given up meanwhile are not used again before its end."""
        return contextlib.nullcontext() if self._write is None else self._write.writing()

    def writable(self, block: int, layer: int) -> memoryview:
        """The layer slice of a missing block, to be filled within :meth:`writing`."""
        slot = self._writable.get(block)
        if slot is None:
            raise LeaseExpiredError(f"the slot of block {block} was given up meanwhile")
        return slot[self._namespace.spec.layer_slice(layer)]

    def mark_lossy(self, blocks: Iterable[int]) -> None:
        """Missing blocks that a lossy codec brought: the store keeps them from what takes no loss."""
        with self._lock:
            if self._write is not None:
                self._write.mark_lossy(self._reserved[block] for block in blocks if block in self._reserved)

    def readable(self, block: int, layer: int) -> memoryview:
        """The layer slice of a block, whether it was stored before or was received."""
        with self._lock:
            self._require_held()
            if self._write is None or block not in self._reserved:
                lease, index = self._held[block]
                return lease.layer(index, layer).toreadonly()
            return self._write.layer(self._reserved[block], layer).toreadonly()

    def renew(self) -> None:
        """Move the deadlines of all leases, if a third of their time is over; else near-free.

        A stream over a slow link may take longer than a lease lasts.

        Raises:
            LeaseExpiredError: If one has run out already.
        """
        if time.monotonic() < self.renew_at:
            return
        with self._lock:
            self._require_held()
            for lease in self._leases():
                lease.renew()
        self._schedule_renewal()

    def _leases(self) -> list[Lease]:
        return [*self._reads, *([self._write] if self._write is not None else [])]

    def _schedule_renewal(self) -> None:
        now = time.monotonic()
        expires_at = min((lease.expires_at for lease in self._leases()), default=math.inf)
        self.renew_at = now + max(0.0, expires_at - now) / 3

    # ---- ending ---------------------------------------------------------------------------------

    def publish(self) -> int:
        """Publish all received blocks at once and go on holding them, now for reading.

        Returns:
            Blocks newly stored.

        Raises:
            LeaseExpiredError: If a lease has run out; nothing is published.
        """
        with self._lock:
            self._require_held()
            for lease in self._reads:
                lease.check()
            if self._write is None:
                return 0
            stored, held = self._write.publish()
            self._write = None
            self._writable.clear()
            self._reads.append(held)
            self._held.update({block: (held, index) for block, index in self._reserved.items()})
            return stored

    def release(self) -> None:
        """Check all leases, then give everything back.

        Raises:
            LeaseExpiredError: If one had run out, so that what was read last may be wrong.
        """
        with self._lock:
            if self._given_up:
                return
        try:
            for lease in self._reads:
                lease.check()
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Publish nothing and give everything back at once; idempotent, from any thread."""
        with self._lock:
            if self._given_up:
                return
            self._given_up = True
            if self._write is not None:
                self._write.abort()
            for lease in self._reads:
                with contextlib.suppress(LeaseExpiredError):
                    lease.release()
            self._reads.clear()
            self._held.clear()
            self._writable.clear()
