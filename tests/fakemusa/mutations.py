"""Faults for the copy engine, as a pytest plug-in: the suite must fail with each of them.

``KVFERRY_MUTATION`` names one. They are the races that asynchronous copies of others have shipped with.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError
from kvferry.device.copy_engine import CopyEngine
from kvferry.device.copy_lane import Lane
from kvferry.device.pinned import Slot


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
        if slot is not None:
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
        with contextlib.suppress(KVFerryError):
            ticket.wait(deadline_in(5))
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

if name := os.environ.get("KVFERRY_MUTATION"):
    MUTATIONS[name]()
