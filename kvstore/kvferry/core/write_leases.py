"""Leases for filling slots: what their holder has, and what the store keeps of them.

The holder has a handle, the store a record; so the store learns when nobody can end a lease any more, since
its handle was dropped, and when nobody can write into its slots, since no view of them is left either.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from kvferry.core.keys import BlockKey
from kvferry.core.leases import LeaseOwner, LeaseState, LeaseTicket, SlotLease, SlotReadLease, checked_indexes
from kvferry.core.segments import Slot
from kvferry.core.sessions import Session
from kvferry.core.spec import KVSpec

__all__ = ["HandleReference", "SlotWriteLease", "WriteRecord"]


class WriteRecord(SlotLease):
    """What the store keeps of a write lease until its slots are free.

    Attributes:
        handle: Refers to the holder's; ``None`` for a lease of no blocks.
        told: The handle itself once somebody may have learnt by it where the slots are, or how to find the
            lease: whoever that is may write, or end it, without the handle.
    """

    __slots__ = ("_lent", "handle", "told")
    kind = "write"

    def __init__(
        self,
        owner: LeaseOwner,
        lease_id: str,
        session: Session,
        spec: KVSpec,
        keys: tuple[BlockKey, ...],
        slots: tuple[Slot, ...],
        expires_at: float,
    ) -> None:
        super().__init__(owner, lease_id, session, spec, keys, slots, expires_at)
        self.handle: HandleReference | None = None
        self.told: SlotWriteLease | None = None
        self._lent: dict[int, weakref.ref[np.ndarray[tuple[int], np.dtype[np.uint8]]]] = {}

    def hand_out(self, dropped: deque[HandleReference]) -> SlotWriteLease:
        """Its handle; when that is dropped, the reference to it is appended to ``dropped``, in any thread."""
        handle = SlotWriteLease(self._owner, self)
        if self.slots:
            # nothing of Python's runs when it is called: an exception of a signal handler would be lost there
            self.handle = HandleReference(handle, dropped.append)
            self.handle.lease_id = self.lease_id
        return handle

    def view(self, index: int) -> memoryview:
        """See :meth:`SlotLease.view`; whoever has it, or a part of it, is known to."""
        lent = self._lent.get(index)
        array = None if lent is None else lent()
        if array is None:
            array = np.frombuffer(super().view(index), np.uint8)
            self._lent[index] = weakref.ref(array)
        else:
            self.require_active()
        return array.data

    @property
    def is_seen(self) -> bool:
        """Whether somebody has a view of a slot, or writes into one."""
        return self.writings > 0 or any(lent() is not None for lent in list(self._lent.values()))


class SlotWriteLease:
    """See :class:`kvferry.core.blockstore.WriteLease`. Thread safe.

    One that is dropped without :meth:`commit` or :meth:`abort` is aborted as soon as no view of its slots is
    left, unless its id, its slots or its ticket were asked for: then others may still write, and it is in
    quarantine after its deadline as any other. A lease of no blocks holds nothing, so it never expires.
    """

    __slots__ = ("__weakref__", "_owner", "record")
    kind = "write"

    def __init__(self, owner: LeaseOwner, record: WriteRecord) -> None:
        self._owner = owner
        self.record = record

    def __len__(self) -> int:
        return len(self.record)

    def __repr__(self) -> str:
        return repr(self.record)

    @property
    def lease_id(self) -> str:
        """Names the lease to its store."""
        self._tell()
        return self.record.lease_id

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Where the blocks lie, in the order of the keys."""
        self._tell()
        return self.record.slots

    @property
    def session(self) -> Session:
        """Whose it is."""
        return self.record.session

    @property
    def spec(self) -> KVSpec:
        """Of the blocks."""
        return self.record.spec

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        """Keys of the blocks."""
        return self.record.keys

    @property
    def expires_at(self) -> float:
        """The deadline, on the monotonic clock."""
        return self.record.expires_at

    @property
    def state(self) -> LeaseState:
        """Where in its life it is."""
        return self.record.state

    @property
    def reason(self) -> str:
        """Why it has ended."""
        return self.record.reason

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the slots, in whole pages."""
        return self.record.slot_nbytes

    @property
    def writings(self) -> int:
        """How many :meth:`writing` are open."""
        return self.record.writings

    @property
    def lossy(self) -> frozenset[int]:
        """Blocks that have lost something."""
        return self.record.lossy

    def _tell(self) -> None:
        record = self.record
        if record.slots and record.state is not LeaseState.ENDED:
            record.told = self  # the store lets go of it with the slots

    def ticket(self) -> LeaseTicket:
        """The lease as plain data."""
        self._tell()
        return self.record.ticket()

    def layer(self, index: int, layer: int) -> memoryview:
        """The layer slice ``layer`` of block ``index``."""
        return self.record.layer(index, layer)

    def view(self, index: int) -> memoryview:
        """The writable bytes of block ``index``.

        Raises:
            LeaseExpiredError: If the lease is past its deadline or has ended.
        """
        return self.record.view(index)

    def require_active(self) -> None:
        """Raise unless the lease is active and before its deadline.

        Raises:
            LeaseExpiredError: With the reason.
        """
        self.record.require_active()

    def renew(self) -> None:
        """Move the deadline to a whole lease length from now; tickets handed out keep the old one.

        Raises:
            LeaseExpiredError: If the lease is past its deadline or has ended.
        """
        self._owner.renew(self.record)

    def mark_lossy(self, indexes: Iterable[int]) -> None:
        """See :meth:`kvferry.core.blockstore.WriteLease.mark_lossy`."""
        self.record.lossy |= checked_indexes(indexes, len(self))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Held around a write by somebody else's hand into the slots.

        Raises:
            LeaseExpiredError: If the lease is past its deadline or has ended.
        """
        self._owner.begin_writing(self.record)
        try:
            yield
        finally:
            self._owner.end_writing(self.record)

    def commit(self) -> int:
        """Publish all blocks at once and end the lease.

        Returns:
            Blocks newly stored.

        Raises:
            LeaseExpiredError: If the lease is past its deadline or has ended; nothing is published.
            StoreError: If a ``writing()`` is still open; the lease stays as it is.
        """
        return self._owner.commit_write(self.record)

    def publish(self) -> tuple[int, SlotReadLease]:
        """Commit and go on holding the same slots for reading, without a gap in between.

        Returns:
            Blocks newly stored, and a read lease on all blocks of this lease, in the same slots.

        Raises:
            LeaseExpiredError: As :meth:`commit`.
            StoreError: As :meth:`commit`.
        """
        return self._owner.publish_write(self.record)

    def abort(self) -> None:
        """Publish nothing; also what an expired lease's slots wait for. No effect after the end."""
        self._owner.abort_write(self.record)

    def __enter__(self) -> SlotWriteLease:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.abort()


class HandleReference(weakref.ref[SlotWriteLease]):
    """To the handle of a write lease, with the id of the lease."""

    lease_id = ""  # as long as nobody has said otherwise: that of no lease
