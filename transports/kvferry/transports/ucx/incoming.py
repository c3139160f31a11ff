"""The receiving half of a connection."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from kvferry.core.buffers import copy_into, page_aligned
from kvferry.core.errors import ConnectionClosedError, ProtocolError, TransferTimeoutError
from kvferry.transports.ucx.calls import address_of
from kvferry.transports.ucx.context import Context
from kvferry.transports.ucx.control import ControlSocket
from kvferry.transports.ucx.frames import (
    BESIDE,
    CANCEL,
    HEADER_NBYTES,
    HELLO_TAG,
    LENGTH,
    MAX_BESIDE_NBYTES,
    OPEN,
    Header,
    message_tag,
    open_address,
    parse_header,
    seal_address,
)
from kvferry.transports.ucx.lane import LOOK_EVERY, WINDOW, Lane
from kvferry.transports.ucx.settings import Options
from kvferry.transports.ucx.short import ShortWay
from kvferry.transports.ucx.target import Slot, Target

__all__ = ["Found", "Incoming"]

_MAX_BOUNCE_NBYTES: Final = 64 << 20
_ROUNDS: Final = 8  # looks for messages to one look at the socket
_RECEIVING: Final = "receiving"
_NOTHING: Final = memoryview(b"")
Found: TypeAlias = "int | tuple[int, int, int, int, int] | None"
"""What a short way gives."""
_STATUS, _HANDLE = 0, 3  # of what a short way leaves


@dataclass(frozen=True, slots=True)
class _Early:
    """A frame that came before the messages that stand before it in the stream."""

    position: int
    data: memoryview


class Incoming:
    """Receives; one thread at a time.

    Args:
        control: The connection's socket.
        context: Of UCX.
        options: Of the address.
        key: Of the digests of addresses.
        error_handling: As for :class:`Outgoing`.
        eager: As for :class:`Outgoing`. A message then has as many parts as lay side by side, and goes into
            as many places.
    """

    def __init__(
        self,
        control: ControlSocket,
        context: Context,
        options: Options,
        *,
        key: bytes,
        error_handling: bool,
        eager: bool,
    ) -> None:
        self._control = control
        self._context = context
        self._options = options
        self._key = key
        self._error_handling = error_handling
        self._eager = eager
        self._lane: Lane | None = None
        self._short: ShortWay | None = None
        self._header = memoryview(bytearray(HEADER_NBYTES))
        self._position = 0  # of the next byte that has no place yet
        self._plain = 0  # bytes of a frame that are next, and still in the socket
        self._held = _NOTHING  # bytes that are next
        self._early: deque[_Early] = deque()
        self._bounce: memoryview | None = None
        self._in_flight = False  # a message for which nothing was posted ahead
        self._unproven = False  # messages came whose sender may have given up
        self._ended: ConnectionClosedError | None = None  # what the socket said at its end
        self._reading = False  # inside a frame: an error leaves the stream at an unknown place
        self._broken = ""

    @property
    def lane(self) -> Lane | None:
        """What brings the messages, once there was one."""
        return self._lane

    def receive_short(self, views: Sequence[memoryview], least: int, deadline: float) -> Found:
        """Fill ``least`` bytes (0: all) or more of ``views`` in one call: how many came.

        Else what the long way has to go on with: it does what is unusual, and what is there already.
        """
        short = self._short
        if short is None or self._held or self._plain or self._early or self._ended or self._unproven:
            return None
        self._in_flight = True
        try:
            found = short.receive(views, self._position, least, deadline)
            if type(found) is int:
                self._position += found
            self._in_flight = type(found) is tuple and bool(found[_STATUS] or found[_HANDLE])
        except BaseException as error:
            self._recover(error)
            raise
        return found

    def recv_into(self, views: Sequence[memoryview], deadline: float, found: Found) -> None:
        """Fill ``views``; ``found`` is what the short way left."""
        target = Target(views)
        self._fill(target, target.wanted, deadline, found, guess=not self._eager)

    def recv_at_least(self, view: memoryview, minimum: int, deadline: float, found: Found) -> int:
        """Fill ``minimum`` bytes of ``view``, and more with what is left of a small message; likewise."""
        target = Target([view])
        self._fill(target, minimum, deadline, found, guess=False)
        return target.got

    def ready(self) -> bool:
        """Whether bytes, or the end, are there, as far as the socket does not tell."""
        if self._broken or self._ended or self._held or self._plain or self._early:
            return True
        if self._lane is None:
            return False
        while self._lane.probe(self._position) < 0:  # first: what has come keeps more from coming
            if not self._lane.progress():
                return False
        return True

    def destroy(self) -> None:
        """End the lane; nobody is receiving."""
        if self._lane is not None:
            self._lane.destroy()
            self._lane = self._short = None
        self._broken = self._broken or "it was closed"

    # -- one call --------------------------------------------------------------------------------------

    def _take_over(self, target: Target, found: tuple[int, int, int, int, int], deadline: float) -> None:
        """Go on with what a short way left."""
        lane, (status, got, unproven, handle, nbytes) = self._lane, found
        assert lane is not None
        self._position += got
        target.fill(got)
        self._unproven = bool(unproven)
        if status:
            raise lane.failure(status, _RECEIVING)
        if handle:
            lane.post(handle, (self._short, target))
            self._complete(lane, deadline)
            self._in_flight = False
            self._position += nbytes
            target.fill(nbytes)

    def _fill(self, target: Target, minimum: int, deadline: float, found: Found, *, guess: bool) -> None:
        if self._broken:
            raise ConnectionClosedError(f"{self._control.name} receives no more: {self._broken}")
        try:
            if type(found) is tuple:
                self._take_over(target, found, deadline)
            spare = target.wanted - minimum
            while target.left > spare:
                self._step(target, spare, deadline, guess=guess)
            if self._unproven:
                self._prove(deadline)
        except BaseException as error:
            self._recover(error, posted=any(slot.request is not None for slot in target.slots))
            if isinstance(error, ConnectionClosedError):
                who = "was closed here" if self._control.closed else "was ended by the peer"
                text = f"{self._control.name} {who} after {target.got} of {minimum} bytes"
                raise ConnectionClosedError(text) from error
            if isinstance(error, TransferTimeoutError):
                text = f"{error}, {target.got} of {minimum} bytes had come"
                raise TransferTimeoutError(text) from error
            raise

    def _recover(self, error: BaseException, *, posted: bool = False) -> None:
        """Let nothing come into the views any more.

        What was posted cannot be told from what has begun to come, so it ends with the lane.
        """
        if posted or self._in_flight or self._unproven or self._reading:
            self._broken = str(error) or type(error).__name__
            if self._lane is not None:
                self._lane.destroy()
                self._lane = self._short = None

    def _step(self, target: Target, spare: int, deadline: float, *, guess: bool) -> None:
        if self._held:
            for view in self._take(target, len(self._held)):
                copy_into(view, self._held[: len(view)])
                self._held = self._held[len(view) :]
        elif self._plain:
            n = min(self._plain, target.left)
            self._reading = True
            self._control.recv_into(self._take(target, n), deadline)
            self._reading = False
            self._plain -= n
        elif self._early and self._early[0].position == self._position:
            self._held = self._early.popleft().data
            self._position += len(self._held)
        elif self._lane is None:
            self._await_frame(deadline)
        else:
            self._receive_messages(self._lane, target, spare, deadline, guess=guess)

    def _take(self, target: Target, nbytes: int) -> list[memoryview]:
        """Views for bytes that come without a message."""
        views = target.take(nbytes)
        self._take_back(target)
        return views

    def _take_back(self, target: Target) -> None:
        """End the receives for which no message comes."""
        if target.given_up:
            if self._lane is not None:
                self._lane.give_up(target.given_up)
            target.given_up = []

    @property
    def _bytes_are_next(self) -> bool:
        """Whether what comes next in the stream has come, or comes, through the socket."""
        early = self._early
        return bool(self._held or self._plain or (early and early[0].position == self._position))

    # -- messages --------------------------------------------------------------------------------------

    def _receive_messages(
        self, lane: Lane, target: Target, spare: int, deadline: float, *, guess: bool
    ) -> None:
        """Receive what messages bring, until enough has come or something else is next."""
        slots, progress, finished = target.slots, lane.progress, lane.finished
        ahead, position = 0, self._position  # slots that are posted, and where they end
        rounds = 0
        while target.left > spare:
            if (self._early or self._held or self._plain) and self._bytes_are_next:
                return
            if guess and ahead < WINDOW and ahead < len(slots):
                position = lane.receive_ahead(itertools.islice(slots, ahead, WINDOW), position, _RECEIVING)
                ahead = min(len(slots), WINDOW)
            slot = slots[0]
            request = slot.request
            if request is None or (request and not finished(request, _RECEIVING)):
                rounds += 1
                if progress() and rounds % LOOK_EVERY:
                    continue
                if (nbytes := self._await_message(lane, slot, deadline)) >= 0:
                    self._take_message(lane, nbytes, target, deadline)
                    ahead, position = 0, self._position  # it was cut otherwise
                continue
            slot.request = None
            self._unproven = True
            self._position += len(slot.view)
            target.fill_first()
            ahead -= 1
            if ahead < 0:
                ahead, position = 0, self._position

    def _await_message(self, lane: Lane, slot: Slot, deadline: float) -> int:
        """Wait until ``slot`` may be filled, a frame was read, or a message has come that fits no guess.

        Returns:
            The bytes of such a message, else -1.
        """
        idle_since, probe, progress = 0.0, lane.probe, lane.progress
        while True:
            for _ in range(_ROUNDS):
                if (nbytes := probe(self._position)) >= 0:
                    return nbytes
                if lane.in_progress(slot.request) is False:
                    return -1
                if progress():
                    idle_since = 0.0
            if self._ended is not None:
                return self._last_message(lane, slot, self._ended)
            if lane.socket_ready():
                self._read_frame(deadline)
                return -1
            idle_since = lane.idle(idle_since, deadline, _RECEIVING, reading=True)

    def _last_message(self, lane: Lane, slot: Slot, end: ConnectionClosedError) -> int:
        """After the end of the socket: what came before it may still be on its way through UCX."""

        def done() -> bool:
            return lane.in_progress(slot.request) is False or lane.probe(self._position) >= 0

        while lane.progress():
            pass
        if done() or (slot.request is not None and lane.last_chance(done)):
            return lane.probe(self._position)
        raise end

    def _take_message(self, lane: Lane, nbytes: int, target: Target, deadline: float) -> None:
        """Receive a message that nothing was posted for, in as many places as it needs."""
        target.give_up_first()
        self._take_back(target)
        self._unproven = True
        slot = target.slots[0]
        if nbytes <= len(slot.view) and not self._eager:
            slot = target.split_first(nbytes)
            slot.request = lane.receive(slot.view, message_tag(self._position, nbytes), _RECEIVING)
            return
        placed = min(nbytes, target.left if self._eager else 0)
        views = target.next(placed) if placed else []
        rest = self._bounce_of(nbytes - placed)  # the only case in which bytes are copied
        if rest:
            views.append(rest)
        self._in_flight = True
        lane.scatter(views, message_tag(self._position, nbytes), _RECEIVING)
        self._complete(lane, deadline)
        self._in_flight = False
        self._position += nbytes
        target.fill(placed)
        self._held = rest

    def _complete(self, lane: Lane, deadline: float) -> None:
        """Wait for what is posted on ``lane``, and hear what the sender says meanwhile."""
        idle_since, rounds = 0.0, 0
        while not lane.settled(_RECEIVING):
            rounds += 1
            if lane.progress() and rounds % LOOK_EVERY:
                idle_since = 0.0
            elif self._ended is not None:
                if not lane.last_chance(lambda: lane.settled(_RECEIVING)):
                    raise self._ended
            elif lane.socket_ready():
                self._read_frame(deadline)
            else:
                idle_since = lane.idle(idle_since, deadline, _RECEIVING, reading=True)

    def _bounce_of(self, nbytes: int) -> memoryview:
        if nbytes > _MAX_BOUNCE_NBYTES:
            raise ProtocolError(
                f"{self._control.name}: a message of {nbytes} bytes does not fit the next view, and is "
                f"larger than the {_MAX_BOUNCE_NBYTES} that are buffered",
                remote=True,
            )
        if not nbytes:
            return _NOTHING
        if self._bounce is None or len(self._bounce) < nbytes:
            self._bounce = page_aligned(nbytes)
        return self._bounce[:nbytes]

    def _prove(self, deadline: float) -> None:
        """Make sure that the sender stands by the messages that came.

        One that gives up says so before its memory changes: if no such word is there now, they are good.
        """
        if self._lane is not None:
            self._lane.settle(deadline)
        lane = self._lane
        while not self._plain and not self._ended and lane is not None and lane.socket_ready():
            if not self._read_frame(deadline):
                break
        if self._ended is not None and self._ended.__cause__ is not None:
            raise self._ended  # a reset, not an orderly end
        self._unproven = False

    def _await_frame(self, deadline: float) -> None:
        """Wait for a frame, and read it; for a moment without sleep."""
        if self._ended is not None:
            raise self._ended
        spin_until = min(deadline, time.monotonic() + self._options.spin_s)
        while not self._control.readable(0.0):
            if time.monotonic() < spin_until:
                os.sched_yield()
            elif self._control.readable(deadline):
                break
            else:
                raise TransferTimeoutError(f"{self._control.name}: the deadline passed while receiving")
        self._read_frame(deadline)

    # -- frames ----------------------------------------------------------------------------------------

    def _read_frame(self, deadline: float) -> bool:
        """Read the next frame; ``False`` if what follows is not of the same call of the sender."""
        try:
            self._reading = True
            self._control.recv_into([self._header], deadline)
        except ConnectionClosedError as error:
            self._reading = False
            self._ended = error
            return False
        header = parse_header(self._header, self._control.name)
        if header.kind == CANCEL:
            raise ConnectionClosedError(f"{self._control.name}: the peer gave up sending")
        if header.kind == OPEN:
            self._answer(header, deadline)
        elif not header.flags & BESIDE and header.position == self._position:
            self._plain = header.nbytes
            self._position += header.nbytes
        else:
            self._read_early(header, deadline)
        self._reading = False
        return bool(header.flags & BESIDE)

    def _read_early(self, header: Header, deadline: float) -> None:
        waiting = sum(len(early.data) for early in self._early) + header.nbytes
        if header.position < self._position or waiting > MAX_BESIDE_NBYTES:
            raise ProtocolError(
                f"{self._control.name}: the peer sent {header.nbytes} bytes for position "
                f"{header.position} of the stream, which is at {self._position}",
                remote=True,
            )
        data = np.empty(header.nbytes, np.uint8).data
        self._control.recv_into([data], deadline)
        self._early.append(_Early(header.position, data))

    def _answer(self, header: Header, deadline: float) -> None:
        """The peer is about to send large messages: make the lane, and tell its worker where it is."""
        if self._lane is not None:
            raise ProtocolError(f"{self._control.name}: the peer opened its lane twice", remote=True)
        sealed = memoryview(bytearray(header.nbytes))
        self._control.recv_into([sealed], deadline)
        address = open_address(self._key, sealed, self._control.name)
        self._lane = lane = Lane(self._context, self._control, self._options.spin_s)
        endpoint = lane.endpoint(address, error_handling=self._error_handling)
        own = seal_address(self._key, lane.address)
        hello = memoryview(LENGTH.pack(len(own)) + own)
        lane.send(endpoint, [hello], address_of(hello), len(hello), HELLO_TAG, "answering the peer")
        lane.drive(0, deadline, "answering the peer")
        lane.settle(deadline)
        if self._eager:
            self._short = lane.short_way(self._options.inline_nbytes)
