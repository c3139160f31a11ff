"""A request to the copy engine, and the ticket its owner holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvferry.core.clock import time_left
from kvferry.core.errors import KVFerryError, RequestCancelledError, TransferTimeoutError
from kvferry.device.base import DeviceBytes, Event, Stream
from kvferry.device.pinned import Slot

__all__ = ["CopyPart", "CopyTicket", "Request"]

CopyPart: TypeAlias = "tuple[DeviceBytes, memoryview]"
"""Bytes of the device, and as many of the host: a flat view."""


class CopyTicket:
    """What becomes of a request. Thread safe.

    Until :attr:`settled` the buffers are the engine's: a device may still read or write them.
    """

    __slots__ = ("_cancelled", "_cond", "_event", "error", "nbytes", "settled", "stop")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.settled = False
        """Whether no copy of it is in flight and none will come."""
        self.error: KVFerryError | None = None
        """Why it failed, if it did: :class:`RequestCancelledError` if it was cancelled."""
        self.stop = False
        """Whether it was cancelled before all its copies were queued."""
        self._event: Event | None = None
        self._cond: threading.Condition
        self._cancelled: threading.Event

    def attach(self, cond: threading.Condition, cancelled: threading.Event) -> None:
        """For the engine: its condition, which guards the ticket, and what tells it of a cancel."""
        self._cond, self._cancelled = cond, cancelled

    def wait(self, deadline: float) -> None:
        """Until all bytes are where they should be.

        Raises:
            DeviceError: If the device failed.
            RequestCancelledError: If it was cancelled.
            TransferTimeoutError: At the deadline; the copies go on.
        """
        with self._cond:
            if not self._cond.wait_for(lambda: self.settled, time_left(deadline)):
                raise TransferTimeoutError(f"a copy of {self.nbytes} bytes was not done by its deadline")
        if self.error is not None:
            raise self.error

    def order(self, stream: Stream, deadline: float) -> None:
        """Let ``stream`` wait, on the device, for these copies: what is queued there next sees the bytes.

        The host waits only until the copies are queued: an event that is not recorded yet orders nothing.

        Raises:
            DeviceError: If the device failed.
            RequestCancelledError: If it was cancelled.
            TransferTimeoutError: If the copies were not even queued by the deadline.
        """
        with self._cond:
            if not self._cond.wait_for(lambda: self._event is not None or self.settled, time_left(deadline)):
                raise TransferTimeoutError(f"a copy of {self.nbytes} bytes was not queued by its deadline")
        if self.error is not None:
            raise self.error
        if self._event is not None:
            stream.wait_event(self._event)

    def cancel(self, deadline: float) -> bool:
        """Stop it: copies not queued yet are not made; those in flight cannot be called back.

        Returns:
            Whether it is settled: no more bytes of it will be read or written. If not, the deadline came
            first: its buffers must not be used for anything else before :attr:`settled`.
        """
        with self._cond:
            self.stop = True
            self._cancelled.set()
            self._cond.notify_all()
            return self._cond.wait_for(lambda: self.settled, time_left(deadline))

    def queued(self, event: Event) -> None:
        """For the engine: all copies are queued, and ``event`` is recorded behind them."""
        with self._cond:
            self._event = event
            self._cond.notify_all()

    def settle(self, error: KVFerryError | None) -> None:
        """For the engine: the end."""
        with self._cond:
            self.error = error
            self.settled = True
            self._cond.notify_all()


class Request:
    """Copies that were asked for together; the engine's thread works through it piece by piece."""

    __slots__ = ("_at", "_part", "after", "direct", "done", "hold", "in_flight", "parts", "ready", "ticket")

    def __init__(
        self,
        parts: Sequence[CopyPart],
        after: tuple[Event, ...],
        hold: object,
        done: Callable[[CopyTicket], None] | None,
        direct: list[DeviceBytes] | None,
    ) -> None:
        for there, here in parts:
            if there.numel() != len(here):
                raise ValueError(
                    f"copy between {there.numel()} bytes of a device and {len(here)} of the host"
                )
        self.parts: list[tuple[DeviceBytes, memoryview | None]] = [part for part in parts if len(part[1])]
        self.direct = direct if direct is None else [d for d in direct if d.numel()]
        self.after, self.hold, self.done = after, hold, done
        self.ready: Callable[[CopyTicket, Slot | None], None] | None = None
        self.ticket = CopyTicket(sum(there.numel() for there, _ in self.parts))
        self.in_flight = 0
        self._part = self._at = 0

    @classmethod
    def lending(
        cls,
        sources: Sequence[DeviceBytes],
        after: tuple[Event, ...],
        hold: object,
        ready: Callable[[CopyTicket, Slot | None], None],
    ) -> Request:
        """A request whose bytes stay in a slot that ``ready`` is given."""
        made = cls((), after, hold, None, None)
        made.parts = [(source, None) for source in sources]
        made.ready = ready
        made.ticket.nbytes = sum(source.numel() for source in sources)
        return made

    @property
    def begun(self) -> bool:
        """Whether a piece of it was taken."""
        return bool(self._part or self._at)

    @property
    def exhausted(self) -> bool:
        """Whether all its pieces were taken."""
        return self._part >= len(self.parts)

    def take_direct(self, most: int) -> list[tuple[DeviceBytes, DeviceBytes]]:
        """The next pairs of device and registered host bytes, at most so many."""
        assert self.direct is not None
        start, self._part = self._part, min(self._part + most, len(self.parts))
        return [(self.parts[i][0], self.direct[i]) for i in range(start, self._part)]

    def take_staged(self, nbytes: int, most: int) -> list[tuple[DeviceBytes, memoryview | None]]:
        """The next pieces that fit a slot of ``nbytes`` together, at most so many; a part may be cut."""
        taken: list[tuple[DeviceBytes, memoryview | None]] = []
        while nbytes and not self.exhausted and len(taken) < most:
            there, here = self.parts[self._part]
            size = min(nbytes, there.numel() - self._at)
            end = self._at + size
            taken.append((there[self._at : end], None if here is None else here[self._at : end]))
            nbytes -= size
            self._at = end
            if end == there.numel():
                self._part, self._at = self._part + 1, 0
        return taken

    def settle(self, error: KVFerryError | None) -> None:
        """Tell the owner; the engine lets go of the buffers first."""
        if error is None and self.ticket.stop and not self.exhausted:
            error = RequestCancelledError("the copy was cancelled")
        self.parts, self.direct, self.hold = [], None, None
        self.ticket.settle(error)
