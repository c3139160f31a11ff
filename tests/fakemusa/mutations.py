"""Faults for the copy engine and the pool, as a pytest plug-in: their tests must fail with each of them.

``FAKEMUSA_MUTATION`` names one. They are the races that asynchronous copies of others have shipped with.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError, TransferTimeoutError
from kvferry.device.copy_engine import CopyEngine
from kvferry.device.copy_lane import Lane
from kvferry.device.pinned import Slot
from kvferry.store.device.demotion import Demotion
from kvferry.store.device.pool import DevicePool
from kvferry.store.device.space import PoolSpace
from kvferry.store.device.table import PageTable
from kvferry.testing.devices_pages import ample_s


def no_wait_event() -> None:
    """The copy stream does not wait for the kernel."""
    Lane._wait_for = lambda self, request: None  # type: ignore[method-assign]


class _AlwaysDone:
    def __init__(self, event: Any) -> None:
        self.record = event.record

    def query(self) -> bool:
        return True


def retire_without_query() -> None:
    """A copy is taken for done once it is queued."""
    launched = Lane._launched

    def mutated(self: Lane, launch: Any) -> None:
        launch.event = _AlwaysDone(launch.event)
        launched(self, launch)

    Lane._launched = mutated  # type: ignore[method-assign]


def slot_freed_before_consumption() -> None:
    """The ring takes the slot back while the network still sends from it."""
    settle, release = Lane._settle, Slot.release

    def mutated(self: Lane, request: Any, slot: Slot | None, error: Any) -> None:
        if slot is not None and slot.held:
            release(slot)
        settle(self, request, slot, error)

    def once(self: Slot) -> None:
        if self.held:
            release(self)

    Lane._settle = mutated  # type: ignore[method-assign]
    Slot.release = once  # type: ignore[method-assign]


def copy_on_the_compute_stream() -> None:
    """Right, but nothing overlaps."""
    begin = Lane.__init__

    def mutated(self: Lane, device: Any, *args: Any, **options: Any) -> None:
        begin(self, device, *args, **options)
        self._stream = device.current_stream()

    Lane.__init__ = mutated  # type: ignore[method-assign]


def host_sync_per_layer() -> None:
    """The model's thread waits for each copy."""
    submit = CopyEngine._submit

    def mutated(self: CopyEngine, lane: Any, request: Any) -> Any:
        ticket = submit(self, lane, request)
        try:
            ticket.wait(deadline_in(1))
        except TransferTimeoutError:
            raise
        except KVFerryError:
            pass
        return ticket

    CopyEngine._submit = mutated  # type: ignore[method-assign]


def ready_event_on_the_copy_stream() -> None:
    """The event that copies wait for says nothing about the kernel."""
    wait_for = Lane._wait_for

    def mutated(self: Lane, request: Any) -> None:
        if not request.begun:
            for event in request.after:
                event.record(self._stream)
        wait_for(self, request)

    Lane._wait_for = mutated  # type: ignore[method-assign]


MUTATIONS: dict[str, Callable[[], None]] = {
    mutate.__name__: mutate
    for mutate in (
        no_wait_event,
        retire_without_query,
        slot_freed_before_consumption,
        copy_on_the_compute_stream,
        host_sync_per_layer,
        ready_event_on_the_copy_stream,
    )
}


def page_reused_before_its_copy_out_is_done() -> None:
    """What leaves gives its page away as soon as its copy is asked for."""
    end, finish, early = Demotion._end, Demotion._finish, set[int]()

    def eager(self: Demotion, flight: Any) -> None:
        with self._pool.lock:
            for job in flight.jobs:
                if job.leaving:
                    early.add(id(job))
                    self._pool.table.left(job.block)
            self._pool.changed.notify_all()
        end(self, flight)

    def late(self: Demotion, batch: Any) -> None:
        finish(self, [job for job in batch if id(job) not in early])

    Demotion._end = eager  # type: ignore[method-assign]
    Demotion._finish = late  # type: ignore[method-assign]


def held_block_evicted() -> None:
    """Reference counts are not looked at."""

    def careless(self: PageTable, block: Any) -> None:
        if not (block.stored or block.leaving):
            self.give_back([page for page in block.pages if page in self._block])

    module = importlib.import_module("kvferry.store.device.pool")
    module.is_held = lambda entry: entry.leaving  # type: ignore[attr-defined]
    PageTable._free_unused = careless  # type: ignore[method-assign]
    PageTable._count = lambda self, block, sign: setattr(  # type: ignore[method-assign]
        self, "idle_pages", self.idle_pages + sign * bool(block.stored and not block.leaving)
    )


def last_reader_forgotten() -> None:
    """A page that is given back is anybody's at once."""
    PageTable.used = lambda self, pages, event: None  # type: ignore[method-assign]


def copy_down_before_the_kernel() -> None:
    """A block is copied while the kernel that writes it still runs."""
    start = DevicePool.start_copy

    def mutated(self: DevicePool, pages: Any, views: Any, events: Any, *, to_pages: bool) -> Any:
        return start(self, pages, views, events if to_pages else (), to_pages=to_pages)

    DevicePool.start_copy = mutated  # type: ignore[method-assign]


def copy_up_before_the_reader() -> None:
    """A page is filled while its last reader still reads."""
    start = DevicePool.start_copy

    def mutated(self: DevicePool, pages: Any, views: Any, events: Any, *, to_pages: bool) -> Any:
        return start(self, pages, views, () if to_pages else events, to_pages=to_pages)

    DevicePool.start_copy = mutated  # type: ignore[method-assign]


class _NoStream:
    def wait_event(self, event: Any) -> None:
        """Nobody waits."""


def reader_before_the_kernel() -> None:
    """A block is read on one stream before it is written on another."""
    acquire = PoolSpace.acquire

    def mutated(self: PoolSpace, keys: Any, **options: Any) -> Any:
        options["stream"] = _NoStream()
        return acquire(self, keys, **options)

    PoolSpace.acquire = mutated  # type: ignore[method-assign]


def kernel_before_the_reader() -> None:
    """A page is written on one stream before it was read on another."""
    allocate = DevicePool.allocate

    def mutated(self: DevicePool, count: int, **options: Any) -> Any:
        options["stream"] = _NoStream()
        return allocate(self, count, **options)

    DevicePool.allocate = mutated  # type: ignore[method-assign]


def committed_before_it_is_copied() -> None:
    """The store below publishes what has not come yet."""
    end = Demotion._end

    def mutated(self: Demotion, flight: Any) -> None:
        flight.copying = None
        end(self, flight)

    Demotion._end = mutated  # type: ignore[method-assign]


POOL_MUTATIONS: dict[str, Callable[[], None]] = {
    mutate.__name__: mutate
    for mutate in (
        page_reused_before_its_copy_out_is_done,
        held_block_evicted,
        last_reader_forgotten,
        copy_down_before_the_kernel,
        copy_up_before_the_reader,
        reader_before_the_kernel,
        kernel_before_the_reader,
        committed_before_it_is_copied,
    )
}

if name := os.environ.get("FAKEMUSA_MUTATION"):
    ample_s(3.0)
    (MUTATIONS | POOL_MUTATIONS)[name]()
