"""The receiver's part of streams whose sender writes into the reserved slots itself, on the same machine.

The slots lie in the receiver's arena, which the sender has mapped. So a slot that the receiver gives up may
still be written: it stays in quarantine until the sender has said that it is done, or until its process,
known from the kernel, is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvferry.core.arena import Arena
from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError
from kvferry.core.segments import Slot
from kvferry.wire import SHARED_ARENA, ArenaOffer, Channel, can_share_arena
from kvferry.wire.messages import AbortStream, FinishStream, PlacedSlot, StreamSlots

__all__ = ["STREAM_CAPABILITIES", "STREAM_SEGMENTS", "SegmentGrant", "WriterWatch"]

_log = logging.getLogger(__name__)
STREAM_SEGMENTS: Final = "stream_segments"
"""The capability: this end understands ``stream_slots`` and ``layer_placed``."""
STREAM_CAPABILITIES: Final = (SHARED_ARENA, STREAM_SEGMENTS)
"""What both ends name in their channel options so that KV is written straight into the slots."""

_MOST_HELD: Final = 4
_SETTLE_S: Final = 2.0
_EXIT_S: Final = 0.2


@dataclass(slots=True)
class _Held:
    """Slots that a process may still write: open ``writing()`` of their leases."""

    pid: int
    pidfd: int
    writing: contextlib.ExitStack


class WriterWatch:
    """Keeps slots in quarantine for as long as a process may write them. Thread safe; has no thread.

    Whoever needs the room calls :meth:`reap`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[_Held] = []

    def hold(self, pid: int, pidfd: int, writing: contextlib.ExitStack) -> None:
        """Close ``writing`` when the process has ended, which is looked at for a moment right now.

        Args:
            pid: For messages.
            pidfd: Descriptor of the process; owned from here on.
            writing: What keeps the slots in quarantine.
        """
        with self._lock:
            self._held.append(_Held(pid, pidfd, writing))
        if _ended(pidfd, _EXIT_S):
            self.reap()
        else:
            _log.warning(
                "process %d left a stream without a word and may still write into its slots; they stay in "
                "quarantine until it ends", pid,
            )  # fmt: skip

    def reap(self) -> int:
        """Free the slots of processes that have ended; returns how many streams still hold some."""
        with self._lock:
            gone = [held for held in self._held if _ended(held.pidfd, 0)]
            self._held = [held for held in self._held if held not in gone]
            left = len(self._held)
        for held in gone:
            os.close(held.pidfd)
            held.writing.close()
        return left

    def trusts(self, pid: int) -> bool:
        """Whether the process may get further slots to write: it holds few that it left without a word."""
        with self._lock:
            return sum(held.pid == pid for held in self._held) < _MOST_HELD

    def close(self) -> None:
        """Forget everything; for a store that is closed."""
        with self._lock:
            held, self._held = self._held, []
        for one in held:
            os.close(one.pidfd)
            one.writing.close()


class SegmentGrant:
    """Lets the senders of one channel write into slots of an arena.

    Args:
        channel: From the sender.
        arena: In which the store reserves the slots; the sender gets all of its segments.
        watch: Where slots go whose sender left without a word; one a store.
    """

    def __init__(self, channel: Channel, arena: Arena, watch: WriterWatch) -> None:
        self._channel = channel
        self._arena = arena
        self._offer = ArenaOffer(channel, arena, may_write=True)
        self._watch = watch

    @property
    def usable(self) -> bool:
        """Whether the sender is on this machine, knows how, and its process can be watched."""
        pid = self._channel.peer_pid
        self._watch.reap()
        return (
            pid is not None
            and pid > 0  # 0: a process that this one's namespace does not show
            and can_share_arena(self._channel)
            and STREAM_SEGMENTS in self._channel.peer.capabilities
            and self._arena.shared
            and self._watch.trusts(pid)
        )

    def prepare(self, slots: Mapping[int, Slot]) -> _OpenSlots | None:
        """What lets the sender write into these slots; ``None`` if its process cannot be watched."""
        try:
            process = os.pidfd_open(self._channel.peer_pid or 0)
        except (OSError, ValueError):
            return None
        return _OpenSlots(self, slots, process)

    def send(self, slots: Mapping[int, Slot], deadline: float) -> None:
        """Announce the segments, and where each block of the stream lies.

        Raises:
            KVFerryError: As :meth:`Channel.send`.
        """
        self._offer.announce(deadline)
        placed = tuple(
            PlacedSlot(block=block, segment=s.segment, offset=s.offset, generation=s.generation)
            for block, s in slots.items()
        )
        self._channel.send(StreamSlots(epoch=self._arena.epoch, slots=placed), deadline=deadline)

    def end(self, process: int, writing: contextlib.ExitStack, error: BaseException | None) -> None:
        """Close ``writing`` once nobody writes: the sender has said so, or its process has ended."""
        if error is None or _writers_word(self._channel, error):
            os.close(process)
            writing.close()
        else:
            self._watch.hold(self._channel.peer_pid or 0, process, writing)


class _OpenSlots:
    """The slots of one stream that its sender may write."""

    needs_word = True
    """Without a word of the sender only the end of its process frees the slots."""

    def __init__(self, grant: SegmentGrant, slots: Mapping[int, Slot], process: int) -> None:
        self.blocks = frozenset(slots)
        self._grant = grant
        self._slots = slots
        self._process = process

    def send(self, deadline: float) -> None:
        """Announce the slots."""
        self._grant.send(self._slots, deadline)

    def end(self, writing: contextlib.ExitStack, error: BaseException | None) -> None:
        """See :meth:`SegmentGrant.end`."""
        self._grant.end(self._process, writing, error)


def _writers_word(channel: Channel, error: BaseException) -> bool:
    """Tell the sender that the stream is over, and wait for its word that it writes no more.

    Returns:
        Whether it came; never raises a :class:`KVFerryError`, and takes 2 s at most.
    """
    limit = deadline_in(_SETTLE_S)
    try:
        if not channel.closed:
            known = error if isinstance(error, KVFerryError) else KVFerryError(type(error).__name__)
            channel.send_failure(known, deadline=limit)
            while True:
                incoming = channel.receive(limit)
                incoming.discard(limit)
                if isinstance(incoming.message, (AbortStream, FinishStream)):
                    return True
    except KVFerryError as gone:
        _log.debug("%s: no word of the sender: %s", channel.address, gone)
    return False


def _ended(pidfd: int, within_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))
