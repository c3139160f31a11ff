"""Between pages on a device and a worker's streams, layer by layer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kvferry.core.buffers import PAGE_NBYTES
from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError
from kvferry.device import CopyEngine, CopyPart, CopyTicket, Event
from kvferry.device.spans import PageRow
from kvferry.engine.paged_kv import PagedKV
from kvferry.streaming import LayerSender, PageSender

__all__ = ["DeviceLink", "Landing"]

_log = logging.getLogger(__name__)
_END_S: Final = 10.0
_SLOTS: Final = 16
_FURTHER_SLOTS: Final = 8
_SLOT_NBYTES: Final = 1 << 20


class DeviceLink:
    """The copy engines of a worker's streams, which no other copies wait behind.

    What a stalled peer does not take stays in pinned slots, so each stream out of the pages has the slots of
    an engine to itself: as many engines as there are streams at a time, of which one that no stream has is
    used again by the next. Thread safe.

    Args:
        kv: Its pages, on a device.
    """

    def __init__(self, kv: PagedKV) -> None:
        self._kv, pool = kv, kv.pool
        self._rows = [PageRow(pool.device, pool.plan, layer) for layer in range(kv.num_layers)]
        largest = max(row.nbytes for row in self._rows)
        self._slot_nbytes = max(_SLOT_NBYTES, -(-largest // PAGE_NBYTES) * PAGE_NBYTES)
        self._engine = CopyEngine(pool.device, slots=_SLOTS, slot_nbytes=self._slot_nbytes)
        self._lock = threading.Lock()
        self._streams: dict[CopyEngine, int] = {self._engine: 0}

    @contextmanager
    def sender(self, sender: LayerSender) -> Iterator[PageSender]:
        """A stream out of the pages; it has not begun, and ends with the context."""
        engine = self._take()
        try:
            with PageSender(sender, engine, self._kv.pool.plan) as pages:
                yield pages
        finally:
            self._give(engine)

    def _take(self) -> CopyEngine:
        """An engine that no stream has; a further one if there is none."""
        with self._lock:
            free = [one for one, streams in self._streams.items() if not streams and not one.lent_slots]
            if free:
                self._streams[free[0]] += 1
                return free[0]
        try:
            made = CopyEngine(
                self._kv.pool.device, slots=_FURTHER_SLOTS, inward_slots=1, slot_nbytes=self._slot_nbytes
            )
        except KVFerryError as error:  # no memory left
            with self._lock:
                shared = min(self._streams, key=lambda one: self._streams[one])
                self._streams[shared] += 1
            _log.warning("a stream shares pinned slots with another, and may wait for it: %s", error)
            return shared
        with self._lock:
            self._streams[made] = 1
        return made

    def _give(self, engine: CopyEngine) -> None:
        """A stream has ended; beside the first engine, one more is kept for the next."""
        surplus: list[CopyEngine] = []
        with self._lock:
            self._streams[engine] -= 1
            free = [one for one, streams in self._streams.items() if not streams and not one.lent_slots]
            for one in free[2:] if self._engine in free else free[1:]:
                del self._streams[one]
                surplus.append(one)
        for one in surplus:
            one.close()

    @property
    def engines(self) -> int:
        """How many there are."""
        return len(self._streams)

    def landing(self, pages: Sequence[int], events: Sequence[Event]) -> Landing:
        """Where the KV of a prompt comes into pages.

        Args:
            pages: The caller's.
            events: Of their last users.
        """
        return Landing(self._kv, self._engine.copy_in, self._rows, pages, tuple(events))

    def close(self) -> None:
        """End them, when no stream is open any more."""
        for engine in list(self._streams):
            engine.close()


class Landing:
    """KV on its way into pages, each layer when it has come. For one thread."""

    def __init__(
        self,
        kv: PagedKV,
        copy_in: Callable[..., CopyTicket],
        rows: Sequence[PageRow],
        pages: Sequence[int],
        events: tuple[Event, ...],
    ) -> None:
        self._kv, self._copy_in, self._rows, self._pages, self._events = kv, copy_in, rows, pages, events
        self._tickets: list[CopyTicket] = []

    def put_layer(self, layer: int, views: Sequence[memoryview], tokens: int) -> None:
        """Begin to copy one layer of the first ``tokens`` tokens; waits for nobody.

        Args:
            layer: Its number.
            views: As :meth:`LayerReceiver.view` gives them, of each block; they stay until :meth:`end`.
            tokens: Of the prompt.

        Raises:
            KVFerryError: If the device has failed.
        """
        size, parts = self._kv.block_tokens, list[CopyPart]()
        for number, view in enumerate(views):
            halves = self._kv.halves(layer, view, min(size, tokens - number * size))
            for there, here in zip(self._rows[layer].sources(self._pages[number]), halves, strict=True):
                parts.append((there[: len(here)], here))
        self._tickets.append(self._copy_in(parts, after=self._events))

    def wait(self, deadline: float) -> None:
        """Until all layers are in place.

        Raises:
            KVFerryError: If they will not be, or are not by the deadline.
        """
        for ticket in self._tickets:
            ticket.wait(deadline)

    def end(self) -> bool:
        """Copy nothing more; whether no copy is in flight, so that views and pages are the caller's."""
        until = deadline_in(_END_S)
        for ticket in self._tickets:
            ticket.cancel(0.0)
        if all(ticket.cancel(until) for ticket in self._tickets):
            return True
        _log.error("%s does not end a copy: its pages stay taken", self._kv.pool.device.name)
        return False
