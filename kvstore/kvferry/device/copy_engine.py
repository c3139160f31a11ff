"""The copy engine: bytes between a device and the host, behind everybody's back, in order and never early.

One stream each way and one thread, which queues the copies, asks for their end and tells the owners. The
model's thread only records an event and appends a request: it never waits, however full the slots are.

A copy whose host side lies in memory registered with the device (an arena, see :meth:`CopyEngine.register`)
goes straight there; any other passes through pinned slots in chunks. Requests of one direction are done in
the order they came; within a request nothing is promised.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvferry.core.clock import time_left
from kvferry.core.errors import ConfigError, DeviceError, OverloadedError
from kvferry.device.base import Device, DeviceBytes, Event
from kvferry.device.copy_lane import Lane
from kvferry.device.pinned import PinFailure, PinnedSlots, Slot
from kvferry.device.registered import RegisteredMemory
from kvferry.device.tickets import CopyPart, CopyTicket, Request

__all__ = ["CopyEngine"]

_log = logging.getLogger(__name__)
_STOP_S: Final = 30.0
_SWEEP_S: Final = 1.0


class CopyEngine:
    """Copies between one device and the host; see the module. Thread safe.

    ``done`` and ``ready`` callbacks run on the engine's thread: they must be quick and must not wait for
    another copy. What they raise is logged.

    Args:
        device: The device.
        slots: Pinned slots *a direction*.
        inward_slots: Pinned slots to the device, if it is another number.
        slot_nbytes: Bytes of a slot: the largest piece that one copy through slots moves.
        max_copies: Copies that may be queued on the device at a time, a direction; beyond about 1,000 a
            driver makes the caller wait.
        max_requests: Requests that may wait here, a direction.
        poll_s: Pause between two looks at the oldest copy in flight.
        on_pin_failure: ``pageable`` or ``stop``, see :func:`~kvferry.device.pinned.pin`.

    Raises:
        ConfigError: For sizes that cannot be.
        DeviceError: If memory cannot be pinned and ``on_pin_failure`` is ``stop``.
    """

    def __init__(
        self,
        device: Device,
        *,
        slots: int = 8,
        inward_slots: int | None = None,
        slot_nbytes: int = 4 << 20,
        max_copies: int = 512,
        max_requests: int = 1 << 16,
        poll_s: float = 100e-6,
        on_pin_failure: PinFailure = "pageable",
    ) -> None:
        if max_copies < 1 or max_requests < 1:
            raise ConfigError(f"{max_copies} copies and {max_requests} requests: both must be at least 1")
        self.device, self._poll_s, self._max_requests = device, poll_s, max_requests
        self._cond = threading.Condition()
        self._error: DeviceError | None = None
        self._closing = False
        self._registered = RegisteredMemory(device, on_pin_failure)
        self._sweep_at = 0.0
        self._slots: list[PinnedSlots] = []
        try:
            for count in (slots, slots if inward_slots is None else inward_slots):
                self._slots.append(PinnedSlots(device, self._cond, count, slot_nbytes, on_pin_failure))
        except BaseException:
            for made in self._slots:
                made.close()
            raise
        self._out = Lane(device, self._slots[0], self._cond, max_copies=max_copies, inward=False)
        self._in = Lane(device, self._slots[1], self._cond, max_copies=max_copies, inward=True)
        self._thread = threading.Thread(target=self._run, name=f"kvferry-copy-{device.name}", daemon=True)
        self._thread.start()

    @property
    def error(self) -> DeviceError | None:
        """What the device died of: every request fails with it from then on."""
        return self._error

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot."""
        return self._slots[0].slot_nbytes

    @property
    def lent_slots(self) -> int:
        """Slots that copies out of the device are in, or that who sends from them has not released."""
        return self._slots[0].count - self._slots[0].free

    @property
    def pinned(self) -> bool:
        """Whether the slots are pinned; if not, copies block the engine's thread."""
        return all(slots.pinned for slots in self._slots)

    def register(self, view: memoryview) -> bool:
        """Pin host memory whole, so that copies from and to it need no slot; not in steady state.

        Returns:
            Whether that worked; if not, and failures are allowed, its copies pass through slots.

        Raises:
            DeviceError: See :func:`~kvferry.device.pinned.pin`.
        """
        return self._registered.add(view)

    def adopt(self, view: memoryview) -> None:
        """Register the segment of an arena that ``view`` lies in, unless it is, or cannot be.

        A segment is pinned once, as a whole, and no more when nobody else has a view of it: its daemon has
        ended. Memory that is no segment, or may only be read, passes through slots.

        Raises:
            DeviceError: See :func:`~kvferry.device.pinned.pin`.
        """
        self._registered.adopt(view)

    @property
    def registered_nbytes(self) -> int:
        """Bytes of host memory that copies reach directly."""
        return self._registered.nbytes

    def unregister(self, view: memoryview) -> None:
        """Unpin what was registered. The caller has seen the end of all copies from and to it.

        Raises:
            ValueError: If it is not registered.
        """
        self._registered.remove(view)

    def copy_out(
        self,
        parts: Sequence[CopyPart],
        *,
        after: Sequence[Event] = (),
        hold: object = None,
        done: Callable[[CopyTicket], None] | None = None,
    ) -> CopyTicket:
        """Copy from the device to the host.

        Args:
            parts: Pairs of device bytes and the host memory they go to, equally large.
            after: Events that the copies wait for on the device: those recorded behind the kernels that
                write the bytes. They must be recorded before this call and not again until it has begun.
            hold: Kept until the copies are done, beside the parts themselves.
            done: Called with the ticket when all bytes are in host memory, or will never be.

        Raises:
            ValueError: If a pair is not equally large.
            OverloadedError: If too many requests wait.
            DeviceError: If the device has failed or the engine is closed.
        """
        return self._submit(
            self._out, Request(parts, tuple(after), hold, done, self._registered.direct(parts))
        )

    def copy_in(
        self,
        parts: Sequence[CopyPart],
        *,
        after: Sequence[Event] = (),
        hold: object = None,
        done: Callable[[CopyTicket], None] | None = None,
    ) -> CopyTicket:
        """Copy from the host to the device; as :meth:`copy_out`, but for the direction.

        Args:
            parts: Pairs of device bytes and the host memory that they come from.
            after: Events of the last readers of the device's bytes.
            hold: See :meth:`copy_out`.
            done: Called when all bytes are on the device. Work of the device need not wait for it on the
                host: :meth:`CopyTicket.order` lets a stream wait.
        """
        return self._submit(
            self._in, Request(parts, tuple(after), hold, done, self._registered.direct(parts))
        )

    def lend_out(
        self,
        sources: Sequence[DeviceBytes],
        ready: Callable[[CopyTicket, Slot | None], None],
        *,
        after: Sequence[Event] = (),
        hold: object = None,
    ) -> CopyTicket:
        """Copy from the device into one pinned slot and hand that out, for what sends from host memory.

        Args:
            sources: Bytes of the device; in the slot they follow each other without a gap.
            ready: Called with the slot when the bytes are in it; who gets it releases it, when the network
                has finished with it. ``None`` if the copies failed or were cancelled.
            after: See :meth:`copy_out`.
            hold: See :meth:`copy_out`.

        Raises:
            ConfigError: If the sources are larger than a slot, or have no bytes.
            OverloadedError: If too many requests wait.
            DeviceError: If the device has failed or the engine is closed.
        """
        nbytes = sum(source.numel() for source in sources)
        if not 0 < nbytes <= self.slot_nbytes:
            raise ConfigError(
                f"{nbytes} bytes at once, a pinned slot has {self.slot_nbytes}; raise slot_nbytes"
            )
        return self._submit(self._out, Request.lending(sources, tuple(after), hold, ready))

    def close(self, *, deadline: float | None = None) -> None:
        """Cancel what waits, see the end of what is in flight, end the thread and unpin. Idempotent.

        Copies that a hanging device does not end by the deadline keep their memory pinned for good.

        Args:
            deadline: In 30 s if it is not given.
        """
        with self._cond:
            if self._closing:
                return
            self._closing = True
            for lane in (self._out, self._in):
                lane.cancel_all()
            self._cond.notify_all()
        self._thread.join(_STOP_S if deadline is None else time_left(deadline))
        if self._thread.is_alive():
            _log.error(
                "%s: copies are still in flight when they may be waited for no longer; their memory stays "
                "pinned", self.device.name,
            )  # fmt: skip
            return
        if self._error is None:
            for slots in self._slots:
                slots.close()
        self._registered.close(unpin=self._error is None)

    def _submit(self, lane: Lane, request: Request) -> CopyTicket:
        with self._cond:
            if self._error is not None:
                raise DeviceError(f"{self.device.name} failed before: {self._error}") from self._error
            if self._closing:
                raise DeviceError(f"the copy engine of {self.device.name} is closed")
            if len(lane.waiting) >= self._max_requests:
                raise OverloadedError(
                    f"{len(lane.waiting)} copies wait for {self.device.name}; try again when some are done"
                )
            lane.waiting.append(request)
            request.ticket.attach(self._cond, lane.cancelled)
            self._cond.notify_all()
        return request.ticket

    # ---- the engine's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        lanes = (self._out, self._in)
        while True:
            try:
                moved = [lane.step() for lane in lanes]
                self._sweep()
            except Exception as error:  # noqa: BLE001 - a thread root; the device's errors are of many classes
                self._fail(error)
                moved = [True]
            with self._cond:
                if any(moved):
                    continue
                if any(lane.in_flight for lane in lanes):
                    self._cond.wait(self._poll_s)
                elif self._closing and not any(lane.waiting for lane in lanes):
                    return
                elif not any(lane.can_start() for lane in lanes):
                    self._cond.wait(_SWEEP_S if self._registered.has_segments else None)

    def _sweep(self) -> None:
        if self._registered.has_segments and (now := time.monotonic()) >= self._sweep_at:
            self._sweep_at = now + _SWEEP_S
            self._registered.sweep()

    def _fail(self, error: Exception) -> None:
        """The device is dead: everything in flight and waiting fails with the cause, and all that comes."""
        cause = error if isinstance(error, DeviceError) else DeviceError(f"{self.device.name}: {error}")
        if cause is not error:
            cause.__cause__ = error
        _log.error("%s: %s; nothing is copied from or to it any more", self.device.name, cause)
        with self._cond:
            self._error = cause
        for lane in (self._out, self._in):
            lane.fail(cause)
