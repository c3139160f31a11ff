"""Blocks between their slots in host memory and an engine's paged memory on a device.

The pages of a layer are copied as the runs of bytes that they are, by the copy engines of the device: no
gather kernel competes with attention. Where the engine's layout scatters what a block has in a row (heads
before tokens, K and V packed), whole pages are copied and put in order on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from kvferry.core.buffers import page_aligned
from kvferry.core.paged_copy import Event, Transfer, move_part
from kvferry.device.base import DeviceBytes, Stream
from kvferry.device.base import Event as DeviceEvent
from kvferry.device.copy_engine import CopyEngine
from kvferry.device.spans import Span, spans_of
from kvferry.device.tickets import CopyPart, CopyTicket

__all__ = ["DeviceCopier", "DeviceCopying"]


class DeviceCopier:
    """The :class:`~kvferry.core.paged_copy.BlockCopier` of one device. For one thread.

    Give it to :class:`~kvferry.client.mover.BlockMover` under the device's kind.

    Args:
        engine: Makes the copies; not closed here.
    """

    orders_events = True

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine

    def start(
        self, transfer: Transfer, layers: Sequence[int], first: int, count: int, after: Event | None
    ) -> DeviceCopying:
        """See :class:`~kvferry.core.paged_copy.BlockCopier`.

        Args:
            transfer: Its plan's regions have arrays of this device as owners.
            layers: Layers to move.
            first: Number of the first block.
            count: Blocks.
            after: An event of the device, recorded: the copies wait for it there.
        """
        for slot in transfer.slots[first : first + count]:
            self._engine.adopt(slot)
        runs: list[CopyPart] = []
        pages: list[_Scattered] = []
        for layer in layers:
            for span in spans_of(self._engine.device, transfer.plan, layer):
                for index in range(first, first + count):
                    slot, page = transfer.slots[index], int(transfer.pages[index])
                    if span.scattered and (span.dense or not transfer.to_pages):
                        pages.append(_Scattered(span, slot, page))
                    else:
                        runs += span.runs(slot, page)
            if not transfer.to_pages:
                _zero_padding(transfer, layer, first, count)
        events = () if after is None else (cast("DeviceEvent", after),)
        staging = _staging(pages)
        parts = [*runs, *((one.bytes(), view) for one, view in zip(pages, staging, strict=True))]
        if transfer.to_pages:
            for one, view in zip(pages, staging, strict=True):
                one.arrange(view, to_page=True)
            ticket = self._engine.copy_in(parts, after=events, hold=transfer)
            return DeviceCopying(ticket, transfer)

        def put_in_order() -> None:
            for one, view in zip(pages, staging, strict=True):
                one.arrange(view, to_page=False)

        ticket = self._engine.copy_out(parts, after=events, hold=transfer)
        return DeviceCopying(ticket, transfer, put_in_order)


class DeviceCopying:
    """See :class:`~kvferry.core.paged_copy.OrderedCopying`. For one thread."""

    def __init__(
        self, ticket: CopyTicket, transfer: Transfer, last: Callable[[], None] | None = None
    ) -> None:
        self._ticket, self._transfer, self._last = ticket, transfer, last

    def order(self, stream: Stream, deadline: float) -> None:
        """See :meth:`CopyTicket.order`."""
        self._ticket.order(stream, deadline)

    def query(self) -> bool:
        """Whether it is over; the first call that says so has put the bytes of scattered pages in order.

        When the transfer is to stop, copies that the device has not begun are not made.
        """
        if not self._ticket.settled:
            if self._transfer.stop.value and not self._ticket.stop:
                self._ticket.cancel(time.monotonic())
            return False
        if self._ticket.error is not None:
            raise self._ticket.error
        last, self._last = self._last, None
        if last is not None:
            last()
        return True

    def wait(self, deadline: float) -> None:
        """Until the bytes are where they should be, those of scattered pages in order.

        Raises:
            DeviceError: If the device failed.
            TransferTimeoutError: At the deadline; the copies go on.
        """
        self._ticket.wait(deadline)
        self.query()

    def cancel(self) -> bool:
        """Make no more copies; whether none is in flight either, so that the buffers are the caller's."""
        return self._ticket.cancel(0.0)

    @property
    def settled(self) -> bool:
        """Whether no copy is in flight and none will come."""
        return self._ticket.settled


@dataclass(frozen=True)
class _Scattered:
    """One page whose bytes are put in order on the host."""

    span: Span
    slot: memoryview
    number: int

    def bytes(self) -> DeviceBytes:
        """Of the page."""
        return self.span.page(self.number)

    def arrange(self, staged: memoryview, *, to_page: bool) -> None:
        """Between the page's order, in ``staged``, and the block's."""
        page, block = np.frombuffer(staged, np.uint8), np.frombuffer(self.slot, np.uint8)
        for at, part in self.span.parts:
            move_part(part, page, at, block, to_page=to_page)


def _zero_padding(transfer: Transfer, layer: int, first: int, count: int) -> None:
    for part in transfer.plan.layers[layer]:
        if not part.address:
            for index in range(first, first + count):
                transfer.slots[index][part.offset : part.offset + part.run] = bytes(part.run)


def _staging(pages: Sequence[_Scattered]) -> list[memoryview]:
    """Host memory for whole pages, each on its own cache lines."""
    sizes = [-(-one.span.nbytes // 64) * 64 for one in pages]
    memory, views, at = page_aligned(sum(sizes)) if pages else memoryview(b""), [], 0
    for one, size in zip(pages, sizes, strict=True):
        views.append(memory[at : at + one.span.nbytes])
        at += size
    return views
