"""One direction of the copy engine: a stream, what is in flight on it, and what waits."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field

from kvferry.core.buffers import copy_into
from kvferry.core.errors import DeviceError
from kvferry.device.base import Device, Event
from kvferry.device.pinned import PinnedSlots, Slot
from kvferry.device.tickets import Request

__all__ = ["Lane"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Launch:
    """Copies queued on the device, with the event behind them; everything they touch is held here."""

    request: Request
    event: Event
    copies: int
    held: object
    slot: Slot | None = None
    scatter: list[tuple[memoryview, memoryview]] = field(default_factory=list)
    """Pieces of the slot and where the host wants them."""


class Lane:
    """Used by the engine's thread alone, but for ``waiting`` and :meth:`cancel_all`, which ``cond`` guards.

    Args:
        device: The device.
        slots: Pinned slots of this direction.
        cond: The engine's.
        max_copies: Copies in flight at a time.
        inward: Whether to the device.
    """

    def __init__(
        self, device: Device, slots: PinnedSlots, cond: threading.Condition, *, max_copies: int, inward: bool
    ) -> None:
        self._device, self._slots, self._cond = device, slots, cond
        self._max_copies, self._inward = max_copies, inward
        self._stream = device.new_stream()
        self.waiting: deque[Request] = deque()
        self.in_flight: deque[_Launch] = deque()
        self.cancelled = threading.Event()
        self._copies = 0
        self._abandoned: list[_Launch] = []

    def can_start(self) -> bool:
        """Whether a step now would queue something; the caller holds the condition."""
        if self.cancelled.is_set():
            return True
        return bool(self.waiting) and (self.waiting[0].direct is not None or self._slots.free > 0)

    def step(self) -> bool:
        """Finish what the device has finished, then queue what there is room for; whether anything moved.

        Raises:
            Exception: Whatever the device raises: it is dead then, see :meth:`fail`.
        """
        moved = self._retire()
        if self.cancelled.is_set():
            self._drop_cancelled()
            moved = True
        while (request := self._head()) is not None and self._copies < self._max_copies:
            if request.direct is not None:
                self._queue_direct(request)
            elif not self._queue_staged(request):
                break
            moved = True
        return moved

    def cancel_all(self) -> None:
        """Stop everything that waits; the caller holds the condition."""
        for request in self.waiting:
            request.ticket.stop = True
        self.cancelled.set()

    def fail(self, cause: DeviceError) -> None:
        """End everything in flight and waiting with ``cause``. Slots in flight never come back."""
        with self._cond:
            ended = [*dict.fromkeys(launch.request for launch in self.in_flight)]
            ended += [request for request in self.waiting if request not in ended]
            self.waiting.clear()
        self._abandoned = list(self.in_flight)  # a dead device may still write: their memory stays allocated
        self.in_flight.clear()
        self._copies = 0
        for request in ended:
            self._settle(request, None, cause)

    # ---- the end of copies --------------------------------------------------------------------------

    def _retire(self) -> bool:
        """Only the oldest is asked: a stream is done in order."""
        moved = False
        while self.in_flight and self.in_flight[0].event.query():
            launch = self.in_flight[0]  # until it is through: what raises here fails its request too
            request = launch.request
            for source, target in launch.scatter:
                copy_into(target, source)
            lent = request.ready is not None and not request.ticket.stop
            if launch.slot is not None and not lent:
                launch.slot.release()
            self.in_flight.popleft()
            self._copies -= launch.copies
            request.in_flight -= 1
            if (request.exhausted or request.ticket.stop) and not request.in_flight:
                self._settle(request, launch.slot if lent else None, None)
            moved = True
        return moved

    def _settle(self, request: Request, slot: Slot | None, error: DeviceError | None) -> None:
        if request.ticket.settled:
            return
        request.settle(error)
        try:
            if request.ready is not None:
                request.ready(request.ticket, slot)
            elif request.done is not None:
                request.done(request.ticket)
        except Exception:  # noqa: BLE001 - a thread root: a callback must not end the copies of others
            _log.exception("a callback of a copy on %s raised", self._device.name)
            if slot is not None and slot.held:
                slot.release()

    # ---- the start of copies ------------------------------------------------------------------------

    def _head(self) -> Request | None:
        """The request whose turn it is; those that are through are taken off."""
        while True:
            with self._cond:
                if not self.waiting:
                    return None
                request = self.waiting[0]
                if not request.exhausted:
                    return request
                self.waiting.popleft()
            if not request.begun:  # it had no bytes
                self._settle(request, None, None)

    def _drop_cancelled(self) -> None:
        with self._cond:
            self.cancelled.clear()
            dropped = [request for request in self.waiting if request.ticket.stop]
            self.waiting = deque(request for request in self.waiting if not request.ticket.stop)
        for request in dropped:
            if not request.in_flight:
                self._settle(request, None, None)

    def _queue_direct(self, request: Request) -> None:
        self._wait_for(request)
        pairs = request.take_direct(self._max_copies - self._copies)
        for there, here in pairs:
            if self._inward:
                self._device.copy(there, here, self._stream)
            else:
                self._device.copy(here, there, self._stream)
        self._launched(_Launch(request, self._device.event(), len(pairs), pairs))

    def _queue_staged(self, request: Request) -> bool:
        slot = self._slots.take()
        if slot is None:
            return False
        self._wait_for(request)
        lending = request.ready is not None  # whole, in one slot
        most = len(request.parts) if lending else self._max_copies - self._copies
        pieces = request.take_staged(self._slots.slot_nbytes, most)
        scatter: list[tuple[memoryview, memoryview]] = []
        at = 0
        for there, here in pieces:
            size = there.numel()
            staged = slot.bytes[at : at + size]
            if self._inward:
                assert here is not None
                copy_into(slot.view[at : at + size], here)
                self._device.copy(there, staged, self._stream)
            else:
                self._device.copy(staged, there, self._stream)
                if here is not None:
                    scatter.append((slot.view[at : at + size], here))
            at += size
        self._launched(_Launch(request, self._device.event(), len(pieces), pieces, slot, scatter))
        return True

    def _wait_for(self, request: Request) -> None:
        if not request.begun:
            for event in request.after:
                self._stream.wait_event(event)

    def _launched(self, launch: _Launch) -> None:
        launch.event.record(self._stream)
        self._copies += launch.copies
        launch.request.in_flight += 1
        self.in_flight.append(launch)
        if launch.request.exhausted:
            launch.request.ticket.queued(launch.event)
