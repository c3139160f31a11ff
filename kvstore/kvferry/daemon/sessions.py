"""Sessions of the daemon: whose connections they are, and the leases that they hold by number."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable
from itertools import chain
from typing import Final

from kvferry.core.errors import (
    CapacityError,
    KVFerryError,
    LeaseExpiredError,
    OverloadedError,
    ProtocolError,
)
from kvferry.core.leases import LeaseState, SlotReadLease
from kvferry.core.session_store import SessionStore
from kvferry.core.sessions import Session
from kvferry.core.write_leases import SlotWriteLease
from kvferry.store.tiered import TieredStore
from kvferry.wire.channel import Channel

__all__ = ["EngineSession", "Sessions"]

log = logging.getLogger(__name__)

_MAX_LEASES: Final = 65536
_MAX_ABANDONED: Final = 4096
_MAX_CONNECTIONS: Final = 64
_MAX_LEFT_BEHIND: Final = 16
_LOOK_THROUGH: Final = 1024
_LOADING: Final = ("load", "peer_read")
_SAVING: Final = ("save", "commit", "peer_write")


class EngineSession:
    """One engine: its tenant's store as it sees it, and its leases by the numbers that it gave them.

    Thread safe; :class:`Sessions` counts the connections. Nothing here is called under the store's lock.
    """

    def __init__(self, tenant: str, name: str, store: TieredStore) -> None:
        self.tenant = tenant
        self.name = name
        self.core = Session(name)
        self.store: SessionStore = store.for_session(self.core)
        self.connections = 0
        self.loaded_blocks = self.saved_blocks = 0
        self.processes: set[int] = set()
        self.left_behind: list[EngineSession] = []
        """Earlier sessions of the same name with slots in quarantine, which this one may end."""
        self._lock = threading.Lock()
        self._leases: dict[int, SlotReadLease | SlotWriteLease] = {}
        self._abandoned: dict[int, None] = {}

    def __repr__(self) -> str:
        return f"<EngineSession {self.name} of {self.tenant}: {self.connections} connections>"

    def count(self, verb: str, blocks: int) -> None:
        """A request has moved blocks."""
        if not blocks:
            return
        with self._lock:
            if verb in _LOADING:
                self.loaded_blocks += blocks
            elif verb in _SAVING:
                self.saved_blocks += blocks

    @property
    def lease_count(self) -> int:
        """Leases that have a number."""
        with self._lock:
            return len(self._leases)

    @property
    def holds_slots(self) -> bool:
        """Whether a write lease is left that nobody has ended: its slots may be in quarantine."""
        with self._lock:
            return any(isinstance(one, SlotWriteLease) for one in self._leases.values())

    @property
    def may_be_written(self) -> bool:
        """Whether a slot is left that somebody may write into though the session has ended."""
        return self.holds_slots and not self.core.writers_gone

    def expect(self, number: int) -> None:
        """See that a lease of this number may begin, before anything is taken for it.

        Raises:
            ProtocolError: If there is one already.
            CapacityError: If the session has as many as it may.
        """
        with self._lock:
            if number in self._leases:
                raise ProtocolError(f"session {self.name} has a lease number {number:x} already", remote=True)
            if len(self._leases) < _MAX_LEASES:
                return
            self._drop_over()
            if len(self._leases) >= _MAX_LEASES:
                raise CapacityError(
                    f"session {self.name} holds {len(self._leases)} leases, the most it may; release some"
                )

    def add(self, number: int, lease: SlotReadLease | SlotWriteLease) -> None:
        """Enter a lease that holds something.

        Raises:
            LeaseExpiredError: If its holder has abandoned it meanwhile; it is ended.
        """
        if not lease.keys:
            return
        with self._lock:
            abandoned = number in self._abandoned
            if abandoned:
                del self._abandoned[number]
            else:
                self._leases[number] = lease
                if len(self._leases) % _LOOK_THROUGH == 0:
                    self._drop_over()
        if abandoned:
            _end(lease)
            raise LeaseExpiredError(f"lease {number:x} was abandoned by its holder before it began")

    def get(self, number: int) -> SlotReadLease | SlotWriteLease:
        """The lease of that number.

        Raises:
            LeaseExpiredError: If there is none any more.
        """
        with self._lock:
            found = self._leases.get(number)
        if found is None:
            raise LeaseExpiredError(f"session {self.name} has no lease number {number:x} (any more)")
        return found

    def forget(self, number: int) -> None:
        """A lease has ended by its own call."""
        with self._lock:
            self._leases.pop(number, None)

    def end(self, numbers: Iterable[int]) -> int:
        """Release, or abort, leases by their holder's word; returns how many were found."""
        count = 0
        for number in numbers:
            with self._lock:
                lease = self._leases.pop(number, None)
            if lease is not None:
                _end(lease)
                count += 1
            elif self not in self.left_behind:  # one list for all of the name: those in it ask nobody else
                count += sum(old.end([number]) for old in list(self.left_behind))
        return count

    def abandon(self, numbers: Iterable[int]) -> None:
        """End leases that may not have begun yet: those do not begin."""
        for number in numbers:
            if self.end([number]):
                continue
            with self._lock:
                while len(self._abandoned) >= _MAX_ABANDONED:
                    del self._abandoned[next(iter(self._abandoned))]
                self._abandoned[number] = None

    def _drop_over(self) -> None:
        """Forget read leases that are over; those of writing wait for their holder's word."""
        over = [
            n
            for n, one in self._leases.items()
            if isinstance(one, SlotReadLease) and one.state is not LeaseState.ACTIVE
        ]
        for number in over:
            del self._leases[number]


def _end(lease: SlotReadLease | SlotWriteLease) -> None:
    if isinstance(lease, SlotWriteLease):
        lease.abort()
    else:
        lease.end()


class Sessions:
    """All sessions by tenant and name. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: dict[tuple[str, str], EngineSession] = {}
        self._left: dict[tuple[str, str], list[EngineSession]] = {}

    @property
    def active(self) -> list[EngineSession]:
        """Sessions with a connection."""
        with self._lock:
            return list(self._active.values())

    @property
    def left_behind(self) -> int:
        """Sessions that are over, but whose processes may still write into slots of theirs."""
        with self._lock:
            return sum(map(len, self._left.values()))

    def join(self, channel: Channel, tenant: str, store: TieredStore) -> EngineSession:
        """The session of a new connection, made if it is its first.

        Raises:
            OverloadedError: If it, or its process, has more than it may.
            StoreError: If its process is gone.
        """
        pid = channel.peer_pid or 0
        name = channel.peer.session
        with self._lock:
            session = self._active.get((tenant, name)) or EngineSession(tenant, name, store)
            if session.connections >= _MAX_CONNECTIONS:
                raise OverloadedError(
                    f"session {name} has {session.connections} connections, the most it may"
                )
            if pid > 0:
                self._require_no_trail(pid)
                session.core.watch(pid)
                session.processes.add(pid)
            session.connections += 1
            session.left_behind = self._left.setdefault((tenant, name), [])
            self._active[tenant, name] = session
            self._count_earlier(session)
        return session

    def _count_earlier(self, session: EngineSession) -> None:
        """What earlier sessions of its name, or of its processes under others, left counts as its own."""
        session.core.earlier = tuple(
            one.core
            for (tenant, name), left in self._left.items()
            for one in left
            if tenant == session.tenant
            and (name == session.name or not one.processes.isdisjoint(session.processes))
        )

    def _require_no_trail(self, pid: int) -> None:
        trail = sum(pid in one.processes for left in self._left.values() for one in left)
        if trail >= _MAX_LEFT_BEHIND:
            raise OverloadedError(
                f"process {pid} has left {trail} sessions with slots that it may still write; abort its "
                "write leases, or end it"
            )

    def leave(self, session: EngineSession) -> None:
        """A connection is gone; with the last one the session ends, and its leases with it."""
        key = (session.tenant, session.name)
        with self._lock:
            session.connections -= 1
            last = not session.connections
            if last:
                del self._active[key]
        if not last:
            return
        session.core.end()
        with self._lock:
            over = not session.may_be_written
            if not over:
                self._left.setdefault(key, []).append(session)
            elif not self._left.get(key) and key not in self._active:
                self._left.pop(key, None)
        if over:
            session.core.close()

    def sweep(self) -> None:
        """Forget those that were left behind and hold nothing more, or whose processes are gone."""
        over: list[EngineSession] = []
        with self._lock:
            for key, left in list(self._left.items()):
                over += [session for session in left if not session.may_be_written]
                left[:] = [session for session in left if session not in over]
                if not left and key not in self._active:
                    del self._left[key]
            if over:
                for session in self._active.values():
                    self._count_earlier(session)
        for session in over:
            session.core.close()

    def end_all(self) -> None:
        """End all sessions: the store is about to close."""
        with self._lock:
            left = list(chain.from_iterable(self._left.values()))
        for session in self.active + left:
            with contextlib.suppress(KVFerryError):
                session.core.close()
