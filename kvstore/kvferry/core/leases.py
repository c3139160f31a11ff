"""Leases: a session's right to read, or to fill, named slots until a deadline.

Deadlines are ``time.monotonic()`` values, which all processes of a host share; so a process that was
handed a :class:`LeaseTicket` judges a deadline as the owner does. Nothing ends a lease in the
background: whoever needs the room, or asks for figures, ends those that are past their deadline.
"""

from __future__ import annotations

import enum
import heapq
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kvferry.core.arena import ArenaMap
from kvferry.core.errors import LeaseExpiredError
from kvferry.core.keys import BlockKey
from kvferry.core.segments import Slot, joined
from kvferry.core.sessions import Session
from kvferry.core.spec import KVSpec

__all__ = [
    "LeaseOwner",
    "LeaseState",
    "LeaseTable",
    "LeaseTicket",
    "MappedReadLease",
    "Session",
    "SlotLease",
    "SlotReadLease",
    "checked_indexes",
]

if TYPE_CHECKING:
    from kvferry.core.write_leases import WriteRecord

_LeaseT = TypeVar("_LeaseT", bound="SlotLease")
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class LeaseTicket:
    """A lease as plain data, for another process of its session; msgspec encodes it, it can be pickled.

    Attributes:
        lease_id: Names the lease to its store.
        session: Name of the session.
        kind: ``read`` or ``write``.
        keys: Keys of the blocks, 32 bytes each.
        slots: Where they lie, in the same order.
        expires_at: Deadline on the monotonic clock of the host.
    """

    lease_id: str
    session: str
    kind: str
    keys: tuple[bytes, ...]
    slots: tuple[Slot, ...]
    expires_at: float


class LeaseState(enum.Enum):
    """Life of a lease: active, then expired (by deadline or session) or ended (by its holder)."""

    ACTIVE = "active"
    EXPIRED = "expired"
    ENDED = "ended"


class LeaseOwner(Protocol):
    """The store behind a lease. Its calls take the store's lock."""

    def slot_view(self, slot: Slot) -> memoryview:
        """The writable bytes of a slot."""
        ...

    def first_stale(self, slots: Sequence[Slot]) -> Slot | None:
        """The first slot that was freed since, if any."""
        ...

    def renew(self, lease: SlotLease) -> None:
        """Move the deadline."""
        ...

    def end_read(self, lease: SlotReadLease) -> bool:
        """Give the blocks back; ``False`` if its holder had ended the lease before."""
        ...

    def commit_write(self, lease: WriteRecord) -> int:
        """Publish all."""
        ...

    def publish_write(self, lease: WriteRecord) -> tuple[int, SlotReadLease]:
        """Publish all and hold them for reading."""
        ...

    def abort_write(self, lease: WriteRecord) -> None:
        """Publish none."""
        ...

    def begin_writing(self, lease: WriteRecord) -> None:
        """Count a write by somebody else's hand."""
        ...

    def end_writing(self, lease: WriteRecord) -> None:
        """It is over."""
        ...


class SlotLease:
    """What both kinds share. Thread safe; ``state``, ``reason`` and ``writings`` are the store's to change.

    A lease of no blocks holds nothing, so it never expires.
    """

    __slots__ = (
        "_owner", "expires_at", "keys", "lease_id", "lossy", "reason", "session", "slots", "spec", "state",
        "writings",
    )  # fmt: skip
    kind = ""

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
        self._owner = owner
        self.lease_id = lease_id
        self.session = session
        self.spec = spec
        self.keys = keys
        self.slots = slots
        self.expires_at = expires_at if keys else _NEVER
        self.state = LeaseState.ACTIVE
        self.reason = ""
        self.writings = 0
        self.lossy: frozenset[int] = frozenset()  # blocks that have lost something

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"<{self.kind} lease {self.lease_id} of {self.session.name}: {len(self)}, {self.state.value}>"

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the slots, in whole pages."""
        return len(self.slots) * self.slots[0].slot_nbytes if self.slots else 0  # all of one spec

    def ticket(self) -> LeaseTicket:
        """The lease as plain data."""
        return LeaseTicket(
            self.lease_id, self.session.name, self.kind, tuple(self.keys), self.slots, self.expires_at
        )

    def layer(self, index: int, layer: int) -> memoryview:
        """The layer slice ``layer`` of block ``index``."""
        return self.view(index)[self.spec.layer_slice(layer)]

    def view(self, index: int) -> memoryview:
        """The bytes of block ``index``.

        Raises:
            LeaseExpiredError: If the lease is past its deadline or has ended.
        """
        self.require_active()
        return self._owner.slot_view(self.slots[index])

    def renew(self) -> None:
        """Move the deadline to a whole lease length from now; tickets handed out keep the old one.

        Raises:
            LeaseExpiredError: If the lease is past its deadline or has ended.
        """
        self._owner.renew(self)

    def require_active(self) -> None:
        """Raise unless the lease is active and before its deadline.

        Raises:
            LeaseExpiredError: With the reason.
        """
        state = self.state  # read once: another thread may end the lease meanwhile
        if state is not LeaseState.ACTIVE:
            raise LeaseExpiredError(f"{self.kind} lease {self.lease_id} has ended: {self.reason}")
        late = time.monotonic() - self.expires_at
        if late >= 0:
            raise LeaseExpiredError(
                f"{self.kind} lease {self.lease_id} of session {self.session.name} is {late:.3f} s past its "
                "deadline; ask again"
            )


class SlotReadLease(SlotLease):
    """See :class:`kvferry.core.blockstore.ReadLease`."""

    __slots__ = ()
    kind = "read"

    def view(self, index: int) -> memoryview:
        """The read-only bytes of block ``index``; tentative until :meth:`check`."""
        return super().view(index).toreadonly()

    def views(self) -> list[memoryview]:
        """All of :meth:`view` in order, in as few pieces as there can be."""
        self.require_active()
        return [self._owner.slot_view(slot).toreadonly() for slot in joined(self.slots)]

    def check(self) -> None:
        """Confirm that all that was read so far is right.

        Raises:
            LeaseExpiredError: If the lease is past its deadline, has ended, or a slot was used again.
        """
        stale = self._owner.first_stale(self.slots)
        if stale is not None:
            raise LeaseExpiredError(
                f"read lease {self.lease_id}: {stale} was used again; what was read is void"
            )
        self.require_active()

    def release(self) -> None:
        """Check, then give the blocks back, also when the check fails.

        Raises:
            LeaseExpiredError: As :meth:`check`; also on a second release, which changes nothing.
        """
        failed: LeaseExpiredError | None = None
        try:
            self.check()
        except LeaseExpiredError as error:
            failed = error
        if not self.end():
            raise LeaseExpiredError(f"read lease {self.lease_id} has ended: {self.reason}")
        if failed is not None:
            raise failed

    def end(self) -> bool:
        """Give the blocks back for a holder who has checked by himself; ``False`` if it had ended before."""
        return self._owner.end_read(self)

    def __enter__(self) -> SlotReadLease:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.state is LeaseState.ENDED:
            return
        try:
            self.release()
        except LeaseExpiredError:
            if exc_info[0] is None:  # an error on its way says more than its consequence
                raise


def checked_indexes(indexes: Iterable[int], count: int) -> frozenset[int]:
    """``indexes`` as a set.

    Raises:
        IndexError: If one is none of ``count`` blocks.
    """
    found = frozenset(indexes)
    if wrong := [index for index in found if not 0 <= index < count]:
        raise IndexError(f"a lease of {count} blocks has no block {wrong[0]}")
    return found


class MappedReadLease:
    """A read lease in another process than the store's: views of mapped segments, checked locally.

    Args:
        arena: The client's map of the tenant's segments.
        ticket: What the store handed out.
    """

    def __init__(self, arena: ArenaMap, ticket: LeaseTicket) -> None:
        self._arena = arena
        self.ticket = ticket

    def __len__(self) -> int:
        return len(self.ticket.keys)

    def view(self, index: int) -> memoryview:
        """The read-only bytes of block ``index``; tentative until :meth:`check`."""
        return self._arena.view(self.ticket.slots[index]).toreadonly()

    def check(self) -> None:
        """Confirm that all that was read so far is right.

        Raises:
            LeaseExpiredError: If the lease is past its deadline or a slot was used again.
        """
        ticket = self.ticket
        late = time.monotonic() - ticket.expires_at
        for slot in ticket.slots:
            if not self._arena.is_current(slot):
                raise LeaseExpiredError(
                    f"read lease {ticket.lease_id}: {slot} was used again; what was read is void"
                )
        if late >= 0 and ticket.keys:
            raise LeaseExpiredError(
                f"read lease {ticket.lease_id} is {late:.3f} s past its deadline; ask again"
            )


class LeaseTable(Generic[_LeaseT]):
    """Leases that hold something, by id, by session and by deadline. The store's lock is held.

    An exception of a signal handler may end :meth:`add` or :meth:`discard` anywhere: what they leave half
    done is passed over, so that no later call fails by it.
    """

    def __init__(self) -> None:
        self._leases: dict[str, _LeaseT] = {}
        self._by_session: dict[str, dict[str, _LeaseT]] = {}
        self._nbytes: dict[str, int] = {}
        self._deadlines: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[_LeaseT]:
        return iter(tuple(self._leases.values()))

    def add(self, lease: _LeaseT) -> None:
        """Enter a new lease."""
        session_id = lease.session.session_id
        self._leases[lease.lease_id] = lease
        self._by_session.setdefault(session_id, {})[lease.lease_id] = lease
        self.charge(session_id, lease.slot_nbytes)
        heapq.heappush(self._deadlines, (lease.expires_at, lease.lease_id))

    def get(self, lease_id: str) -> _LeaseT | None:
        """The lease of that id, if it holds anything."""
        return self._leases.get(lease_id)

    def discard(self, lease: _LeaseT) -> bool:
        """Forget a lease; whether it was there."""
        if self._leases.pop(lease.lease_id, None) is None:
            return False
        session_id = lease.session.session_id
        mine = self._by_session.get(session_id, {})
        mine.pop(lease.lease_id, None)  # it may miss there: see the class
        self.charge(session_id, -lease.slot_nbytes)
        if not mine:
            self._by_session.pop(session_id, None)
        if len(self._deadlines) > 2 * len(self._leases) + 64:
            self._deadlines = [d for d in self._deadlines if d[1] in self._leases]
            heapq.heapify(self._deadlines)
        return True

    def session_nbytes(self, session: Session) -> int:
        """Bytes that ``session`` and those before it hold: of leases, and what they were charged beside."""
        return sum(self._nbytes.get(one.session_id, 0) for one in (session, *session.earlier))

    def charge(self, session_id: str, nbytes: int) -> None:
        """Count bytes that a session holds, or with a negative number holds no more."""
        left = self._nbytes.get(session_id, 0) + nbytes
        if left:
            self._nbytes[session_id] = left
        else:
            self._nbytes.pop(session_id, None)

    def is_due(self, now: float) -> bool:
        """Whether :meth:`due` may find one; next to nothing to ask."""
        return bool(self._deadlines) and self._deadlines[0][0] <= now

    def due(self, now: float) -> list[_LeaseT]:
        """Active leases whose deadline is not after ``now``; each is named once."""
        found: list[_LeaseT] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            lease = self._leases.get(heapq.heappop(self._deadlines)[1])
            if lease is None:
                continue
            if lease.expires_at > now:  # renewed since it was entered
                heapq.heappush(self._deadlines, (lease.expires_at, lease.lease_id))
            else:
                found.append(lease)
        return found

    def next_deadline(self) -> float | None:
        """When the next lease is due, ``None`` if there is none."""
        while self._deadlines and self._deadlines[0][1] not in self._leases:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def sessions(self) -> list[Session]:
        """Sessions that hold something."""
        return [next(iter(leases.values())).session for leases in self._by_session.values() if leases]

    def of(self, session: Session) -> list[_LeaseT]:
        """The leases of ``session``."""
        return list(self._by_session.get(session.session_id, {}).values())
