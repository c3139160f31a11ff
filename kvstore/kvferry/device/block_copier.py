"""Blocks between their slots in host memory and an engine's paged memory on a device.

The pages of a layer are copied as the runs of bytes that they are, by the copy engines of the device: no
gather kernel competes with attention. Where the engine's layout scatters what a block has in a row (heads
before tokens, K and V packed), whole pages are copied and put in order on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np

from kvferry.core.buffers import ByteArray, page_aligned
from kvferry.core.paged_copy import Event, Transfer
from kvferry.core.regions import Part, RegionPlan
from kvferry.device.base import DeviceBytes
from kvferry.device.base import Event as DeviceEvent
from kvferry.device.copy_engine import CopyEngine
from kvferry.device.tickets import CopyPart, CopyTicket

__all__ = ["DeviceCopier", "DeviceCopying"]

_FEW_RUNS: Final = 4  # a page in so many pieces at most is copied piece by piece


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
        runs: list[CopyPart] = []
        pages: list[_Scattered] = []
        for layer in layers:
            for span in _spans(self._engine, transfer.plan, layer):
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
            return DeviceCopying(ticket)

        def put_in_order() -> None:
            for one, view in zip(pages, staging, strict=True):
                one.arrange(view, to_page=False)

        ticket = self._engine.copy_out(parts, after=events, hold=transfer)
        return DeviceCopying(ticket, put_in_order)


class DeviceCopying:
    """See :class:`~kvferry.core.paged_copy.Copying`. For one thread."""

    def __init__(self, ticket: CopyTicket, last: Callable[[], None] | None = None) -> None:
        self._ticket, self._last = ticket, last

    def query(self) -> bool:
        """Whether it is over; the first call that says so has put the bytes of scattered pages in order."""
        if not self._ticket.settled:
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
class _Span:
    """Bytes of every page of a region that belong to some parts of a layer, in one row.

    Attributes:
        memory: All of the region's.
        start: Of page 0's, in ``memory``.
        page_nbytes: From one page's to the next's.
        nbytes: How many.
        parts: What they are, each with the place of its first byte within the span.
    """

    memory: DeviceBytes
    start: int
    page_nbytes: int
    nbytes: int
    parts: tuple[tuple[int, Part], ...]

    @property
    def scattered(self) -> bool:
        """Whether a block has them in too many pieces to copy one by one."""
        return sum(_times(part) for _, part in self.parts) > _FEW_RUNS

    @property
    def dense(self) -> bool:
        """Whether all of them are some part's: else they may not be written as a whole."""
        return sum(_times(part) * part.run for _, part in self.parts) == self.nbytes

    def page(self, number: int) -> DeviceBytes:
        """Those of one page."""
        start = self.start + number * self.page_nbytes
        return self.memory[start : start + self.nbytes]

    def runs(self, slot: memoryview, number: int) -> list[CopyPart]:
        """Each run of one page with its place in the block."""
        page, found = self.page(number), []
        for at, part in self.parts:
            there, here = _offsets(part)
            for a, b in zip(there, here, strict=True):
                begin = part.offset + int(b)
                found.append((page[at + int(a) : at + int(a) + part.run], slot[begin : begin + part.run]))
        return found


@dataclass(frozen=True)
class _Scattered:
    """One page whose bytes are put in order on the host."""

    span: _Span
    slot: memoryview
    number: int

    def bytes(self) -> DeviceBytes:
        """Of the page."""
        return self.span.page(self.number)

    def arrange(self, staged: memoryview, *, to_page: bool) -> None:
        """Between the page's order, in ``staged``, and the block's."""
        page, block = np.frombuffer(staged, np.uint8), np.frombuffer(self.slot, np.uint8)
        for at, part in self.span.parts:
            shape = (*(loop.times for loop in part.loops), part.run)
            there = _strided(page, at, shape, (*(loop.page_step for loop in part.loops), 1))
            here = _strided(block, part.offset, shape, (*(loop.slot_step for loop in part.loops), 1))
            np.copyto(*((there, here) if to_page else (here, there)))


def _strided(array: ByteArray, at: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> ByteArray:
    view: ByteArray = np.ndarray(shape, np.uint8, array.data, at, steps)
    return view


def _times(part: Part) -> int:
    times = 1
    for loop in part.loops:
        times *= loop.times
    return times


def _offsets(part: Part) -> tuple[ByteArray, ByteArray]:
    """Where each run starts in the page and in the block, from the part's own starts on."""
    there = here = np.zeros(1, np.int64)
    for loop in part.loops:
        steps = np.arange(loop.times)
        there = (there[:, None] + steps * loop.page_step).ravel()
        here = (here[:, None] + steps * loop.slot_step).ravel()
    return there, here  # type: ignore[return-value]


def _extent(part: Part) -> int:
    return part.run + sum((loop.times - 1) * loop.page_step for loop in part.loops)


def _spans(engine: CopyEngine, plan: RegionPlan, layer: int) -> list[_Span]:
    """The parts of a layer, those together that lie among each other; made once a plan."""
    held: list[_Span] | None = plan.derived.get(layer)
    if held is None:
        held = plan.derived[layer] = _make_spans(engine, [p for p in plan.layers[layer] if p.address])
    return held


def _make_spans(engine: CopyEngine, parts: Sequence[Part]) -> list[_Span]:
    found: list[_Span] = []
    together: list[Part] = []
    end = 0
    for part in [*sorted(parts, key=lambda part: part.address), None]:
        if together and (part is None or part.address >= end or part.page_nbytes != together[0].page_nbytes):
            region = together[0].region
            assert region is not None
            memory, base = engine.device.memory_of(region.owner)
            first = together[0].address
            placed = tuple((one.address - first, one) for one in together)
            found.append(_Span(memory, first - base, together[0].page_nbytes, end - first, placed))
            together = []
        if part is not None:
            end = max(end, part.address + _extent(part)) if together else part.address + _extent(part)
            together.append(part)
    return found


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
