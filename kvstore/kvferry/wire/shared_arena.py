"""The arena of one process, mapped by others of the same machine.

The owner offers the segments of an :class:`~kvferry.core.arena.Arena` over a channel with
:class:`ArenaOffer`; a client keeps a map of them with :class:`SharedArena`. A client asks once
(``attach_arena``), later when it meets a slot in a segment that it does not know; the owner may also tell
by itself when the arena has grown. What is passed are descriptors, so both sides see the same memory and a
block is there for the other as soon as its address is.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvferry.core.arena import Arena, ArenaMap, SegmentInfo, Slot
from kvferry.core.errors import AuthError, ProtocolError, StoreError
from kvferry.core.segments import MappedSegment
from kvferry.wire.channel import Channel
from kvferry.wire.incoming import Incoming
from kvferry.wire.messages import ArenaSegments, AttachArena, SharedSegment

__all__ = ["SHARED_ARENA", "ArenaOffer", "SharedArena", "can_share_arena"]

SHARED_ARENA: Final = "shared_arena"
"""The capability: this end understands ``attach_arena`` and ``arena_segments``."""

_SEGMENTS_A_FRAME: Final = 64  # 128 descriptors: far below what a process may open by default
_MAX_ASKS: Final = 4096  # frames, of 64 segments of at least a page: no arena has more


def can_share_arena(channel: Channel) -> bool:
    """Whether the peer of ``channel`` is on this machine, reached by ``unix``, and knows shared arenas."""
    return channel.shares_memory and SHARED_ARENA in channel.peer.capabilities


class ArenaOffer:
    """The owner's side, for one channel: passes the segments of an arena. Thread safe.

    Args:
        channel: Over ``unix``; its peer is of the arena's tenant, which the caller has made sure of.
        arena: Whose segments are offered.
        may_write: Whether the peer has the right to write. In an arena of mode ``shared`` only who may
            write gets the segments, since a descriptor cannot be made read-only; one of mode ``copy``
            is mapped read-only by everybody.
    """

    def __init__(self, channel: Channel, arena: Arena, *, may_write: bool) -> None:
        self._channel = channel
        self._arena = arena
        self._may_write = may_write
        self._lock = threading.Lock()
        self._told = 0

    def answer(self, request: Incoming, deadline: float) -> None:
        """Answer an ``attach_arena``.

        Raises:
            AuthError: If the peer may not have them; to be told to it as a failure.
            StoreError: If the arena is closed.
            KVFerryError: As :meth:`Channel.send`.
        """
        message = request.message
        if not isinstance(message, AttachArena):
            raise ProtocolError(f"{type(message).__name__} is no request for an arena")
        first = message.known if message.epoch == self._arena.epoch else 0
        with self._lock:
            self._send(first, deadline, request.request_id)

    def announce(self, deadline: float) -> int:
        """Send the segments that this channel was not told of yet; near-free if there are none.

        For channels whose client takes frames that it did not ask for (:meth:`SharedArena.take`).

        Returns:
            How many were sent.

        Raises:
            KVFerryError: As :meth:`answer`.
        """
        with self._lock:
            before = self._told
            while self._arena.segment_count > self._told:
                self._send(self._told, deadline, 0)
            return self._told - before

    def _send(self, first: int, deadline: float, request_id: int) -> None:
        if self._arena.shared and not self._may_write:
            raise AuthError(
                f"{self._channel.address}: the arena of tenant {self._arena.tenant} is mapped writable, "
                "which takes the right to write; use the message path, or an arena of mode copy"
            )
        layout, fds = self._arena.export(first, _SEGMENTS_A_FRAME)
        try:
            message = ArenaSegments(
                tenant=layout.tenant,
                epoch=layout.epoch,
                first=first,
                total=self._arena.segment_count,
                segments=tuple(SharedSegment(segment=s.segment, nbytes=s.nbytes) for s in layout.segments),
                writable=self._arena.shared,
            )
            self._channel.send(message, deadline=deadline, request_id=request_id, descriptors=fds)
        finally:
            for fd in fds:
                os.close(fd)
        self._told = max(self._told, first + len(layout.segments))


class SharedArena:
    """The client's side: a map of an arena that is kept up to date. Thread safe.

    One a process and owner, whatever channels there are to it. Mapping a segment brings in all of its
    pages, so the first read of a block is as fast as any other. The memory of an owner that has ended stays
    in use until :meth:`forget_gone` is called, as a long-running client does once a second.

    Args:
        max_nbytes: Most bytes to map, without what the owner gave back; by default the memory of the machine.
    """

    def __init__(self, max_nbytes: int | None = None) -> None:
        self._max_nbytes = max_nbytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._lock = threading.Lock()
        self._map: ArenaMap | None = None
        self._writable = False
        self._closed = False
        self._owner = -1  # a descriptor of the owner's process

    @property
    def epoch(self) -> str:
        """Epoch of the arena that is mapped, empty if none is. Another one means a restarted owner."""
        current = self._map
        return current.epoch if current is not None else ""

    @property
    def writable(self) -> bool:
        """Whether slots may be written through :meth:`view`."""
        return self._writable

    @property
    def map(self) -> ArenaMap:
        """The present map; a lease keeps the one that it began with.

        Raises:
            StoreError: If none is attached.
        """
        current = self._map
        if current is None:
            raise StoreError("no arena is attached; attach first")
        return current

    def attach(self, channel: Channel, deadline: float) -> ArenaMap:
        """Ask the owner for all segments that are not mapped yet; nothing else may be under way.

        After a restart of the owner (a new epoch) the old map is forgotten here: its memory goes with the
        last lease that uses it.

        Raises:
            ProtocolError: If a descriptor is not what the owner says, or cannot be passed at all.
            StoreError: If the owner offers more than ``max_nbytes``.
            KVFerryError: As :meth:`Channel.call`, with the owner's reason if it refuses.
        """
        for _ in range(_MAX_ASKS):
            current = self._map
            ask = AttachArena(epoch=self.epoch, known=current.segments if current is not None else 0)
            answer = channel.call(ask, ArenaSegments, deadline=deadline)
            self._add(channel, answer, deadline)
            if answer.first + len(answer.segments) >= answer.total:
                return self.map
            if not answer.segments:
                break
        raise ProtocolError(
            f"{channel.address}: the owner of the arena never named all segments", remote=True
        )

    def take(self, channel: Channel, incoming: Incoming, deadline: float) -> None:
        """Map what an ``arena_segments`` frame brought that came unasked; raises as :meth:`attach`."""
        message = incoming.message
        if not isinstance(message, ArenaSegments):
            raise ProtocolError(f"{type(message).__name__} brings no segments")
        self._add(channel, message, deadline)

    def view(self, slot: Slot) -> memoryview:
        """The bytes of ``slot``; see :meth:`ArenaMap.view`.

        Raises:
            StoreError: If its segment is not mapped: :meth:`attach` again.
        """
        return self.map.view(slot)

    def forget_gone(self) -> bool:
        """Forget the map if the owner's process has ended, and say whether it has; near-free.

        If it runs on, segments are forgotten that it uses no more. Leases keep what they began with.
        """
        with self._lock:
            if self._map is not None:
                self._map.forget_retired()
            if self._owner < 0:
                return False
            poll = select.poll()
            poll.register(self._owner, select.POLLIN)
            if not poll.poll(0):
                return False
            self._map = None
            self._watch_owner(None)
            return True

    def close(self) -> None:
        """Forget the map; the memory goes with its last view. A second call does nothing."""
        with self._lock:
            self._closed = True
            self._map = None
            self._watch_owner(None)

    def __del__(self) -> None:
        if getattr(self, "_owner", -1) >= 0:
            os.close(self._owner)

    def _watch_owner(self, pid: int | None) -> None:
        if self._owner >= 0:
            os.close(self._owner)
        self._owner = -1
        if pid is not None and pid > 0:  # 0: a process that this one's namespace does not show
            with contextlib.suppress(OSError):
                self._owner = os.pidfd_open(pid)

    def _add(self, channel: Channel, message: ArenaSegments, deadline: float) -> None:
        with _received(channel, 2 * len(message.segments), deadline) as fds, self._lock:
            if self._closed:
                raise StoreError("the map of the arena was closed")
            current = self._map
            if current is None or current.epoch != message.epoch:
                if message.first:
                    raise ProtocolError(
                        f"{channel.address}: a new arena begins with segment {message.first}", remote=True
                    )
                current = ArenaMap(message.tenant, message.epoch)
            current.forget_retired()
            self._check(channel, current, message)
            for offered, data, table in zip(message.segments, fds[::2], fds[1::2], strict=True):
                if offered.segment >= current.segments:
                    info = SegmentInfo(offered.segment, offered.nbytes, message.tenant)
                    self._require_room(channel, current, info, table)
                    _map_segment(current, info, data, table, writable=message.writable)
            if current is not self._map:
                self._watch_owner(channel.peer_pid)
            self._map, self._writable = current, message.writable

    def _check(self, channel: Channel, current: ArenaMap, message: ArenaSegments) -> None:
        numbers = [s.segment for s in message.segments]
        expected = list(range(message.first, message.first + len(numbers)))
        if numbers != expected or message.first > current.segments or message.tenant != current.tenant:
            raise ProtocolError(
                f"{channel.address}: named segments {numbers[:8]} of tenant {message.tenant!r}, where number "
                f"{current.segments} of tenant {current.tenant!r} is next",
                remote=True,
            )

    def _require_room(self, channel: Channel, current: ArenaMap, info: SegmentInfo, table: int) -> None:
        total = current.mapped_nbytes + info.nbytes - MappedSegment.told_gone(info, table)
        if total > self._max_nbytes:
            raise StoreError(
                f"{channel.address}: an arena of {total} bytes or more is offered, at most "
                f"{self._max_nbytes} are mapped (max_nbytes)"
            )


def _map_segment(current: ArenaMap, info: SegmentInfo, data: int, table: int, *, writable: bool) -> None:
    try:
        current.add(info, data, table, writable=writable)
    except PermissionError as error:
        raise ProtocolError(
            f"segment {info.segment} is sealed against writing, though the owner offered it writable",
            remote=True,
        ) from error
    except OSError as error:
        raise StoreError(
            f"segment {info.segment} of {info.nbytes} bytes cannot be mapped: {error.strerror}"
        ) from error


@contextmanager
def _received(channel: Channel, count: int, deadline: float) -> Iterator[list[int]]:
    """The descriptors behind a frame, open for as long as they are being mapped."""
    fds = channel.receive_descriptors(count, deadline) if count else []
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)
