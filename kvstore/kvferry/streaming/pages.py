"""Streams straight out of an engine's pages on a device: :class:`PageSender`."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from functools import partial
from types import TracebackType
from typing import Final

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in, time_left
from kvferry.core.errors import ConfigError, KVFerryError, RequestCancelledError, TransferTimeoutError
from kvferry.core.keys import BlockKey
from kvferry.core.paged_copy import checked_pages
from kvferry.core.regions import RegionPlan
from kvferry.device import CopyEngine, CopyTicket, Event, Slot
from kvferry.device.spans import PageRow
from kvferry.streaming.layout import StreamLayout
from kvferry.streaming.sender import LayerSender
from kvferry.wire.messages import Handoff, StreamDone

__all__ = ["PageSender", "PagesRead"]

_ABORT_S: Final = 10.0


class PagesRead:
    """When a layer of some pages has been read, so that the engine may write them again."""

    def __init__(self, tickets: Sequence[CopyTicket]) -> None:
        self._tickets = tickets

    def query(self) -> bool:
        """Whether it has, or never will be."""
        return all(ticket.settled for ticket in self._tickets)

    def wait(self, deadline: float) -> bool:
        """Wait for it; ``False`` at the deadline."""
        for ticket in self._tickets:
            try:
                ticket.wait(deadline)
            except KVFerryError:
                if not ticket.settled:
                    return False
        return True


class PageSender:
    """Sends blocks that lie in pages on a device, layer by layer, through pinned memory.

    The model's thread records an event behind the kernels that write a layer and calls :meth:`put_layer`,
    which only queues. The device's copy engine copies each page into a pinned slot, from which the network
    sends; a slot comes back when it has. Where none is free, requests wait in the copy engine, however slow
    the network is, and so do other copies out of this device by the same engine: give streams one of their
    own.

    One stream a sender, as :class:`LayerSender`. As a context manager it aborts unless finished.
    :meth:`begin`, :meth:`put_layer` and :meth:`finish` are for one thread.

    Args:
        sender: Of the stream, not begun; not used otherwise.
        engine: Of the device of the pages; not closed here.
        plan: Of the pages, for the same spec as the sender's.

    Raises:
        ConfigError: If a layer of a page is larger than a slot of the engine, or the plan is of a shard.
        DeviceError: If the pages are of another device.
    """

    def __init__(self, sender: LayerSender, engine: CopyEngine, plan: RegionPlan) -> None:
        if plan.shard is not None:
            raise ConfigError(
                f"{plan.shard.describe()}: a stream sends pages with the heads that they have, make its plan "
                "without a shard"
            )
        self._sender, self._engine, self._plan = sender, engine, plan
        self._rows = [PageRow(engine.device, plan, layer) for layer in range(len(plan.layers))]
        for layer, row in enumerate(self._rows):
            if row.nbytes > engine.slot_nbytes:
                raise ConfigError(
                    f"layer {layer} of a page has {row.nbytes} bytes, a pinned slot {engine.slot_nbytes}; "
                    "raise slot_nbytes of the copy engine"
                )
        self._layout = StreamLayout(plan.spec, 0, 0)
        self._cond = threading.Condition()
        self._tickets: set[CopyTicket] = set()
        self._error: KVFerryError | None = None

    @property
    def takes_lossy(self) -> bool:
        """See :attr:`LayerSender.takes_lossy`."""
        return self._sender.takes_lossy

    @property
    def error(self) -> Exception | None:
        """What ended the stream early, or ``None``; to be looked at between layers."""
        return self._error or self._sender.error

    def begin(
        self, stream: str, keys: Sequence[BlockKey], tail_tokens: int, *, deadline: float
    ) -> frozenset[int]:
        """See :meth:`LayerSender.begin`."""
        missing = self._sender.begin(stream, keys, tail_tokens, deadline=deadline)
        self._layout = StreamLayout(self._plan.spec, len(keys), tail_tokens)
        return missing

    def put_layer(
        self, layer: int, blocks: Sequence[tuple[int, int]], event: Event | None = None
    ) -> PagesRead:
        """Queue one layer of some blocks. Waits for nobody; after an error it does nothing.

        Args:
            layer: Number of the layer.
            blocks: Pairs of block number in the stream and number of its page; the tail block's page holds
                its tokens first. As in :meth:`LayerSender.put_layer`, what the receiver has is skipped.
            event: Of the device, recorded behind the kernels that write the layer of these pages; none if
                they are done.

        Returns:
            What tells when the pages have been read.

        Raises:
            ConfigError: For a layer, block or page that is not there.
        """
        if not 0 <= layer < len(self._rows):
            raise ConfigError(f"{self._sender}: layer {layer} is outside 0..{len(self._rows) - 1}")
        checked_pages(self._plan, [page for _, page in blocks])
        for number, _ in blocks:
            if not 0 <= number < self._layout.blocks:
                raise ConfigError(f"{self._sender}: block {number} is outside 0..{self._layout.blocks - 1}")
        wanted = [one for one in blocks if one[0] in self._sender.missing]
        tickets: list[CopyTicket] = []
        row = self._rows[layer]
        step = self._engine.slot_nbytes // row.nbytes if row.nbytes else len(wanted) or 1
        try:
            for at in range(0, len(wanted), step):
                ticket = self._put(layer, wanted[at : at + step], event)
                tickets.append(ticket)
        except KVFerryError as error:
            self._fail(error)
        return PagesRead(tickets)

    def _put(self, layer: int, blocks: Sequence[tuple[int, int]], event: Event | None) -> CopyTicket:
        row = self._rows[layer]
        sources = [source for _, page in blocks for source in row.sources(page)]
        after = () if event is None else (event,)
        with self._cond:  # its end waits for it to be known
            if self.error is not None:
                raise RequestCancelledError(f"{self._sender} has ended: {self.error}")
            ready = partial(self._ready, layer, [number for number, _ in blocks])
            ticket = self._engine.lend_out(sources, ready, after=after, hold=self._plan)
            self._tickets.add(ticket)
        return ticket

    def _ready(self, layer: int, numbers: Sequence[int], ticket: CopyTicket, slot: Slot | None) -> None:
        """The bytes are in a slot, or will never be. On the engine's thread."""
        try:
            if slot is None:
                self._fail(ticket.error or RequestCancelledError(f"{self._sender}: a copy was cancelled"))
            else:
                self._hand_over(layer, numbers, slot)
        except KVFerryError as error:
            self._fail(error)
        finally:
            with self._cond:
                self._tickets.discard(ticket)
                self._cond.notify_all()

    def _hand_over(self, layer: int, numbers: Sequence[int], slot: Slot) -> None:
        row, blocks = self._rows[layer], []
        spare = page_aligned(row.spare_nbytes * len(numbers)) if row.spare_nbytes else memoryview(b"")
        for index, number in enumerate(numbers):
            views = row.tensors(
                slot.view[index * row.nbytes : (index + 1) * row.nbytes],
                spare[index * row.spare_nbytes : (index + 1) * row.spare_nbytes],
                self._layout.tensor_nbytes(layer, number),
            )
            blocks.append((number, views))
        # also where all bytes are in spare memory, so that the slots bound it
        self._sender.put_layer(layer, blocks, sent=slot.release)

    def _fail(self, error: KVFerryError) -> None:
        with self._cond:
            self._error = self._error or error
            self._cond.notify_all()

    def finish(self, handoff: Handoff, deadline: float, *, lossy: Collection[int] = ()) -> StreamDone:
        """Wait until all copies have been made and sent, hand over, and wait until it is published.

        Afterwards, also after an exception, nothing reads the pages, unless the device hangs.

        Raises:
            DeviceError: If the device failed; the stream is aborted.
            TransferTimeoutError: At the deadline; likewise.
            KVFerryError: As :meth:`LayerSender.finish`.
        """
        with self._cond:
            self._cond.wait_for(lambda: not self._tickets or self.error is not None, time_left(deadline))
            error = self.error
            if error is None and self._tickets:
                error = TransferTimeoutError(
                    f"{self._sender}: {len(self._tickets)} copies by the deadline of finish"
                )
        if error is not None and self._sender.error is None:
            self.abort(str(error))
            raise error
        try:
            return self._sender.finish(handoff, deadline, lossy=lossy)
        finally:
            self._settle(deadline_in(_ABORT_S))

    def abort(self, reason: str, *, deadline: float | None = None) -> bool:
        """Give up: nothing of the stream becomes visible. Safe from any thread.

        Returns:
            Whether nothing reads the pages any more. If not, the deadline came first (10 s if none is given).
        """
        self._fail(RequestCancelledError(reason))
        self._sender.abort(reason)
        return self._settle(deadline_in(_ABORT_S) if deadline is None else deadline)

    def _settle(self, deadline: float) -> bool:
        """Make no more copies, and wait for the end of those under way."""
        with self._cond:
            tickets = list(self._tickets)
        for ticket in tickets:
            ticket.cancel(0.0)
        with self._cond:
            return self._cond.wait_for(lambda: not self._tickets, time_left(deadline))

    def __enter__(self) -> PageSender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tickets or self._error is not None or kind is not None:
            self.abort("the sender left before finish")
        else:
            self._sender.__exit__(kind, error, trace)
