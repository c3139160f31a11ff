"""Which bytes of an engine's pages on a device belong to a layer, in as few pieces as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvferry.core.buffers import ByteArray
from kvferry.core.paged_copy import move_part
from kvferry.core.regions import Part, RegionPlan
from kvferry.device.base import Device, DeviceBytes
from kvferry.device.tickets import CopyPart

__all__ = ["PageRow", "Span", "spans_of"]

_FEW_RUNS: Final = 4  # a page in so many pieces at most is copied piece by piece


@dataclass(frozen=True)
class Span:
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
        return sum(part.runs for _, part in self.parts) > _FEW_RUNS

    @property
    def dense(self) -> bool:
        """Whether all of them are some part's: else they may not be written as a whole."""
        return sum(part.runs * part.run for _, part in self.parts) == self.nbytes

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


def _offsets(part: Part) -> tuple[ByteArray, ByteArray]:
    """Where each run starts in the page and in the block, from the part's own starts on."""
    there = here = np.zeros(1, np.int64)
    for loop in part.loops:
        steps = np.arange(loop.times)
        there = (there[:, None] + steps * loop.page_step).ravel()
        here = (here[:, None] + steps * loop.slot_step).ravel()
    return there, here  # type: ignore[return-value]


def spans_of(device: Device, plan: RegionPlan, layer: int) -> list[Span]:
    """The parts of a layer, those together that lie among each other; made once a plan."""
    held: list[Span] | None = plan.derived.get(layer)
    if held is None:
        held = plan.derived[layer] = _make_spans(device, [p for p in plan.layers[layer] if p.address])
    return held


def _make_spans(device: Device, parts: Sequence[Part]) -> list[Span]:
    found: list[Span] = []
    together: list[Part] = []
    end = 0
    for part in [*sorted(parts, key=lambda part: part.address), None]:
        if together and (part is None or part.address >= end or part.page_nbytes != together[0].page_nbytes):
            region = together[0].region
            assert region is not None
            memory, base = device.memory_of(region.owner)
            first = together[0].address
            placed = tuple((one.address - first, one) for one in together)
            found.append(Span(memory, first - base, together[0].page_nbytes, end - first, placed))
            together = []
        if part is not None:
            end = max(end, part.address + part.extent) if together else part.address + part.extent
            together.append(part)
    return found


class PageRow:
    """One layer of a page as a row of bytes on the host, and the tensors in it.

    Args:
        device: Where the pages are.
        plan: Of the pages.
        layer: Number of the layer.

    Attributes:
        nbytes: Of the row.
        spare_nbytes: Of the memory that tensors take whose bytes are scattered in the row.
    """

    def __init__(self, device: Device, plan: RegionPlan, layer: int) -> None:
        self.nbytes = self.spare_nbytes = 0
        self._pieces: list[tuple[Span, int, int]] = []
        found: dict[int, tuple[Part, int | None]] = {}  # by the place in the block: of the bytes in the row
        for span in spans_of(device, plan, layer):
            if span.scattered:
                for at, part in span.parts:
                    found[part.offset] = (replace(part, address=self.nbytes + at), None)
                self._take(span, 0, span.nbytes)
                continue
            for at, part in span.parts:
                found[part.offset] = (part, self.nbytes)
                for start in _offsets(part)[0]:
                    self._take(span, at + int(start), part.run)
        self._tensors: list[tuple[Part | None, int]] = []
        begin = plan.spec.layer_slice(layer).start
        for slot in plan.spec.layers[layer].slots():
            known = found[begin + slot.offset] if slot.spec.nbytes else None
            if known is not None and known[1] is None:
                self._tensors.append((replace(known[0], offset=self.spare_nbytes), 0))
                self.spare_nbytes += -(-slot.spec.nbytes // 64) * 64
            else:
                self._tensors.append((None, (known and known[1]) or 0))

    def _take(self, span: Span, start: int, nbytes: int) -> None:
        self._pieces.append((span, start, nbytes))
        self.nbytes += nbytes

    def sources(self, page: int) -> list[DeviceBytes]:
        """What of a page makes the row, one behind the other."""
        whole: dict[int, DeviceBytes] = {}
        found = []
        for span, start, nbytes in self._pieces:
            of = whole.setdefault(id(span), span.page(page))
            found.append(of[start : start + nbytes])
        return found

    def tensors(self, row: memoryview, spare: memoryview, sizes: Sequence[int]) -> list[memoryview]:
        """The tensors of the layer, in the order of the spec.

        Args:
            row: The bytes of a page.
            spare: As much memory as :attr:`spare_nbytes` says, for this page alone.
            sizes: Bytes to take of each tensor, from its start on.
        """
        views = []
        for (part, place), nbytes in zip(self._tensors, sizes, strict=True):
            if part is None:
                views.append(row[place : place + nbytes])
                continue
            there, here = np.frombuffer(row, np.uint8), np.frombuffer(spare, np.uint8)
            move_part(part, there, part.address, here, to_page=False)
            views.append(spare[part.offset : part.offset + nbytes])
        return views
