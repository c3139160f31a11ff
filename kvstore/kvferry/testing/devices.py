"""Conformance suite of devices and of the copy engine over them; see :class:`DeviceSuite`."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvferry.core.buffers import PAGE_NBYTES, page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError, DeviceError, RequestCancelledError, TransferTimeoutError
from kvferry.device.base import Device, DeviceBytes, Event
from kvferry.device.copy_engine import CopyEngine
from kvferry.device.pinned import Slot
from kvferry.device.tickets import CopyPart, CopyTicket
from kvferry.testing.device_hooks import filled
from kvferry.testing.devices_jobs import DeviceJobs
from kvferry.testing.devices_pages import DevicePages, ample_s

__all__ = ["DeviceSuite"]

_N = 1 << 16
_SLOW_S = 0.05


def _slower_if_late(test: Callable[[Any, Device], None]) -> Callable[[Any, Device], None]:
    """For tests that look while work is under way: again, with slow work, if their thread came too late."""

    @functools.wraps(test)
    def tried(self: DeviceSuite, lazy: Device) -> None:
        try:
            test(self, lazy)
        except (AssertionError, pytest.fail.Exception):
            self.set_latency(lazy, 0.0)
            lazy.synchronize()
            self.slow_s = 20 * _SLOW_S
            test(self, lazy)

    return tried


class DeviceSuite(DevicePages, DeviceJobs):
    """What every device must do. Inherit it in a test class and give the :class:`DeviceHooks`.

    ``set_latency`` gives the time of every copy.
    """

    slow_s = _SLOW_S

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        """A device whose work is done, and none of whose host memory is pinned, after the test."""
        made = self.make_device()
        self._pinned_views: list[memoryview] = []
        yield made
        self.set_latency(made, 0.0)
        made.synchronize()
        for view in self._pinned_views:
            made.host_unregister(view)
        gc.collect()
        self.end_device(made)

    @pytest.fixture
    def lazy(self, device: Device) -> Device:
        """The device, if it works behind the caller."""
        if not device.asynchronous:
            pytest.skip("its copies are done when the call returns")
        return device

    # ---- the device ---------------------------------------------------------------------------------

    def test_bytes_go_there_and_back(self, device: Device) -> None:
        """Any size, any alignment, from a slice into a slice."""
        stream, memory = device.new_stream(), device.empty(_N)
        here, back = page_aligned(_N), page_aligned(_N)
        here[:] = np.random.default_rng(1).bytes(_N)
        for start, end in ((0, _N), (1, 2), (4095, 4097), (17, 17), (100, 33_333)):
            back[:] = bytes(_N)
            device.copy(memory[start:end], device.host_bytes(here)[start:end], stream)
            device.copy(device.host_bytes(back)[start:end], memory[start:end], stream)
            stream.synchronize()
            assert back[start:end] == here[start:end]
            assert not any(back[:start])
            assert not any(back[end:])

    def test_sizes_that_differ_are_refused(self, device: Device) -> None:
        """And nothing is written."""
        stream, memory = device.new_stream(), device.empty(64)
        with pytest.raises(ValueError, match="63 bytes into 64"):
            device.copy(memory, device.host_bytes(page_aligned(63)), stream)

    def test_more_than_its_memory_is_refused_with_the_figures(self, device: Device) -> None:
        """The device goes on working."""
        if device.kind == "cpu":
            pytest.skip("the host overcommits")
        total = device.memory().total_nbytes
        with pytest.raises(CapacityError, match="free"):
            device.empty(total * 2)
        self.test_bytes_go_there_and_back(device)

    def test_memory_is_counted(self, device: Device) -> None:
        """What is taken is not free, and comes back."""
        before = device.memory()
        assert 0 < before.free_nbytes <= before.total_nbytes
        if device.kind == "cpu":
            return
        memory = device.empty(8 << 20)
        assert device.memory().free_nbytes <= before.free_nbytes - memory.numel()
        del memory
        gc.collect()
        assert device.memory().free_nbytes == before.free_nbytes

    def test_the_current_stream_is_the_threads_own(self, device: Device) -> None:
        """And the old one comes back, also after an error."""
        outer, stream = device.current_stream(), device.new_stream()
        seen: list[object] = []
        with pytest.raises(KeyError), device.use(stream):  # noqa: PT012 - what is raised ends the use
            assert device.current_stream() == stream
            thread = threading.Thread(target=lambda: seen.append(device.current_stream()))
            thread.start()
            thread.join()
            raise KeyError
        assert device.current_stream() == outer
        assert seen == [outer]

    @_slower_if_late
    def test_a_copy_without_wait_is_stale_and_with_an_event_right(self, lazy: Device) -> None:
        """Streams are ordered by events alone (C004)."""
        memory, stream, here = lazy.empty(_N), lazy.new_stream(), self._pinned(lazy)
        self.kernel(lazy, memory, 5)  # it may have been anything
        lazy.synchronize()
        self.kernel(lazy, memory, 7, self.slow_s)
        lazy.copy(here.bytes, memory, stream)
        stream.synchronize()
        assert here.byte != 7
        lazy.synchronize()
        self.kernel(lazy, memory, 9, self.slow_s)
        event = lazy.event()
        event.record(lazy.current_stream())
        stream.wait_event(event)
        lazy.copy(here.bytes, memory, stream)
        assert not event.query()
        stream.synchronize()
        assert event.query()
        assert here.byte == 9

    @_slower_if_late
    def test_pageable_memory_blocks_and_pinned_does_not(self, lazy: Device) -> None:
        """Which is why everything passes through registered memory."""
        memory, stream, pinned = lazy.empty(_N), lazy.new_stream(), self._pinned(lazy)
        self.set_latency(lazy, self.slow_s)
        started = time.monotonic()
        lazy.copy(memory, lazy.host_bytes(page_aligned(_N)), stream)
        assert time.monotonic() - started >= 0.9 * self.slow_s
        event = lazy.event()
        lazy.copy(memory, pinned.bytes, stream)
        event.record(stream)
        assert not event.query()
        stream.synchronize()

    @_slower_if_late
    def test_a_wait_takes_the_event_as_it_is_then(self, lazy: Device) -> None:
        """Recorded again, it does not extend a wait that is queued."""
        memory, stream, event = lazy.empty(_N), lazy.new_stream(), lazy.event()
        self.kernel(lazy, memory, 1)
        event.record(lazy.current_stream())
        stream.wait_event(event)
        self.kernel(lazy, memory, 2, 10 * self.slow_s)
        event.record(lazy.current_stream())
        stream.synchronize()
        assert not event.query()

    @_slower_if_late
    def test_freed_memory_is_somebody_elses_at_once(self, lazy: Device) -> None:
        """A copy in flight does not keep its source: who copies must hold it."""
        stream = lazy.new_stream()
        for held in (False, True):
            here, memory = self._pinned(lazy), lazy.empty(_N)
            self.kernel(lazy, memory, 6)
            lazy.synchronize()
            self.set_latency(lazy, self.slow_s)
            lazy.copy(here.bytes, memory, stream)
            keep = memory if held else None
            del memory
            gc.collect()
            stream.synchronize()
            self.set_latency(lazy, 0.0)
            assert (here.byte == 6) == held
            del keep

    # ---- the copy engine over it --------------------------------------------------------------------

    def test_staged_and_direct_copies_are_exact(self, device: Device) -> None:
        """Parts smaller and larger than a slot, both ways; memory that is registered needs no slot."""
        sizes = (1, 4096, 3 * PAGE_NBYTES + 5, 100, 5 * PAGE_NBYTES)
        here, back = page_aligned(sum(sizes)), page_aligned(sum(sizes))
        here[:] = np.random.default_rng(2).bytes(len(here))
        with closing(self._engine(device, slots=2, slot_nbytes=PAGE_NBYTES)) as engine:
            for direct in (False, True):
                back[:] = bytes(len(back))
                if direct:
                    assert engine.register(here)
                    assert engine.register(back)
                memory = device.empty(len(here))
                loaded = engine.copy_in(_parts(memory, here, sizes))
                loaded.order(device.current_stream(), deadline_in(ample_s()))
                event = device.event()
                event.record(device.current_stream())
                engine.copy_out(_parts(memory, back, sizes), after=[event]).wait(deadline_in(ample_s()))
                assert back == here
            engine.unregister(here)

    def test_a_save_right_behind_the_kernel_is_never_stale(self, device: Device) -> None:
        """C004: again and again, the bytes are those of the kernel before."""
        memory, here = device.empty(_N), page_aligned(_N)
        with closing(self._engine(device)) as engine:
            for number in range(1, 21):
                self.kernel(device, memory, number, 0.002)
                self._save(device, engine, [(memory, here)]).wait(deadline_in(ample_s()))
                assert bytes(here) == bytes([number]) * _N

    def test_layers_overlap_and_come_in_order(self, lazy: Device) -> None:
        """Copies of one layer go on while the next computes, and nobody sees another layer's bytes.

        No clock judges it: the second layer computes until the first has come, and the model's thread has
        queued all of them by then, with fewer slots than layers.
        """
        layers = 4
        memory = [lazy.empty(_N) for _ in range(layers)]
        got: list[tuple[int, int, int]] = []
        came = threading.Semaphore(0)
        with closing(self._engine(lazy, slots=2, slot_nbytes=_N)) as engine:
            events = [self._computed(lazy, memory[0], 1)]
            with self.shut_gate(lazy):
                events += [self._computed(lazy, memory[layer], layer + 1) for layer in range(1, layers)]
                tickets = [self._lend(engine, got, came, n, memory[n], events[n]) for n in range(layers)]
                assert came.acquire(timeout=ample_s())
                assert got == [(0, 1, 1)]
                assert not any(ticket.settled for ticket in tickets[1:])
            tickets[-1].wait(deadline_in(ample_s()))
        assert got == [(layer, layer + 1, layer + 1) for layer in range(layers)]

    def _computed(self, device: Device, memory: DeviceBytes, byte: int) -> Event:
        self.kernel(device, memory, byte)
        event = device.event()
        event.record(device.current_stream())
        return event

    def _lend(
        self,
        engine: CopyEngine,
        got: list[tuple[int, int, int]],
        came: threading.Semaphore,
        layer: int,
        memory: DeviceBytes,
        event: Event,
    ) -> CopyTicket:
        def ready(_: CopyTicket, slot: Slot | None) -> None:
            assert slot is not None
            got.append((layer, slot.view[0], slot.view[-1]))
            slot.release()
            came.release()

        return engine.lend_out([memory], ready, after=[event])

    def test_a_slot_is_nobody_elses_until_it_is_released(self, device: Device) -> None:
        """A consumer slower than the copies: more layers than slots, and the model's thread never waits."""
        layers = 12
        memory = [device.empty(_N) for _ in range(layers)]
        lent: list[tuple[int, Slot]] = []
        came = threading.Semaphore(0)
        with closing(self._engine(device, slots=2, slot_nbytes=_N)) as engine:
            for layer in range(layers):
                self.kernel(device, memory[layer], layer + 1)
                event = device.event()
                event.record(device.current_stream())

                def ready(_: CopyTicket, slot: Slot | None, layer: int = layer) -> None:
                    assert slot is not None
                    lent.append((layer, slot))
                    came.release()

                engine.lend_out([memory[layer]], ready, after=[event])
            assert came.acquire(timeout=ample_s())
            assert came.acquire(timeout=ample_s())
            assert not came.acquire(timeout=0.05), "both slots are lent"
            for number in range(layers):
                assert number < 2 or came.acquire(timeout=ample_s())
                layer, slot = lent[number]
                assert layer == number
                assert bytes(slot.view) == bytes([layer + 1]) * _N
                slot.release()
                with pytest.raises(RuntimeError, match="twice"):
                    slot.release()

    def test_a_load_waits_for_the_last_reader_of_its_target(self, lazy: Device) -> None:
        """The copy into a block that is still read comes after the read."""
        memory, old, new, seen = lazy.empty(_N), filled(_N, 1), filled(_N, 2), self._pinned(lazy)
        with closing(self._engine(lazy)) as engine:
            engine.copy_in([(memory, old)]).wait(deadline_in(ample_s()))
            other = lazy.empty(_N)
            self.kernel(lazy, other, 0, self.slow_s)
            lazy.copy(seen.bytes, memory, lazy.current_stream())  # the reader, behind a slow kernel
            read = lazy.event()
            read.record(lazy.current_stream())
            ticket = engine.copy_in([(memory, new)], after=[read])
            ticket.wait(deadline_in(ample_s()))
            assert read.query()
            assert seen.byte == 1

    @_slower_if_late
    def test_cancel_returns_when_no_more_bytes_can_come(self, lazy: Device) -> None:
        """What waits is dropped; what is in flight ends first."""
        memory = lazy.empty(_N)
        here = [filled(_N, 0) for _ in range(4)]
        self.kernel(lazy, memory, 5)
        lazy.synchronize()
        with closing(self._engine(lazy, slots=1, slot_nbytes=_N, max_copies=1)) as engine:
            self.set_latency(lazy, self.slow_s)
            tickets = [engine.copy_out([(memory, view)]) for view in here]
            assert not tickets[-2].cancel(time.monotonic() - 1) or tickets[-2].settled
            assert tickets[-1].cancel(deadline_in(ample_s()))
            assert tickets[-2].cancel(deadline_in(ample_s()))
            copies = [bytes(here[2]), bytes(here[3])]
            for ticket in tickets[:2]:
                ticket.wait(deadline_in(ample_s()))
            with pytest.raises(RequestCancelledError):
                tickets[-1].wait(deadline_in(ample_s()))
            assert copies == [bytes(here[2]), bytes(here[3])]
            assert bytes(here[3]) == bytes(_N)
            assert bytes(here[0]) == bytes([5]) * _N

    @_slower_if_late
    def test_a_wait_ends_at_its_deadline_and_the_copy_goes_on(self, lazy: Device) -> None:
        """Its buffers are the engine's until the ticket is settled."""
        memory, here = lazy.empty(_N), filled(_N, 0)
        self.kernel(lazy, memory, 8)
        lazy.synchronize()
        with closing(self._engine(lazy)) as engine:
            self.set_latency(lazy, 2 * self.slow_s)
            ticket = engine.copy_out([(memory, here)])
            with pytest.raises(TransferTimeoutError):
                ticket.wait(deadline_in(0.001))
            ticket.wait(deadline_in(ample_s()))
            assert bytes(here) == bytes([8]) * _N

    def test_the_end_is_told_once(self, device: Device) -> None:
        """Also of a request without bytes; what a callback raises harms nobody."""
        memory, here = device.empty(_N), page_aligned(_N)
        told: list[CopyTicket] = []

        def done(ticket: CopyTicket) -> None:
            told.append(ticket)
            raise KeyError("the callback's own")

        with closing(self._engine(device)) as engine:
            tickets = [
                engine.copy_out([(memory, here)], done=done),
                engine.copy_out([], done=done),
                engine.copy_in([(memory[:0], here[:0])], done=done),
            ]
            for ticket in tickets:
                ticket.wait(deadline_in(ample_s()))
        assert sorted(map(id, told)) == sorted(map(id, tickets))

    def test_a_closed_engine_says_so_and_leaves_nothing(self, device: Device) -> None:
        """What waits is cancelled, what is in flight ends, nothing stays pinned, no thread is left."""
        memory, here = device.empty(_N), page_aligned(_N)
        engine = self._engine(device, slots=1, slot_nbytes=_N, max_copies=1)
        self.set_latency(device, self.slow_s)
        tickets = [engine.copy_out([(memory, here)]) for _ in range(5)]
        engine.close()
        engine.close()
        assert all(ticket.settled for ticket in tickets)
        assert not [t for t in threading.enumerate() if t.name == f"kvferry-copy-{device.name}"]
        with pytest.raises(DeviceError, match="closed"):
            engine.copy_out([(memory, here)])

    # ---- means --------------------------------------------------------------------------------------

    def _engine(
        self, device: Device, *, slots: int = 4, slot_nbytes: int = _N, max_copies: int = 64
    ) -> CopyEngine:
        return CopyEngine(
            device, slots=slots, slot_nbytes=slot_nbytes, max_copies=max_copies, on_pin_failure="stop"
        )

    def _save(self, device: Device, engine: CopyEngine, parts: list[CopyPart]) -> CopyTicket:
        """As a model's thread saves: right after the kernel was queued."""
        event = device.event()
        event.record(device.current_stream())
        return engine.copy_out(parts, after=[event])

    def _pinned(self, device: Device) -> _Pinned:
        view = page_aligned(_N)
        device.host_register(view)
        self._pinned_views.append(view)
        return _Pinned(view, device.host_bytes(view))


@dataclass(frozen=True)
class _Pinned:
    view: memoryview
    bytes: DeviceBytes

    @property
    def byte(self) -> int:
        """The one byte that it consists of; -1 if they differ."""
        return self.view[0] if len(set(self.view)) == 1 else -1


def _parts(memory: DeviceBytes, here: memoryview, sizes: tuple[int, ...]) -> list[CopyPart]:
    ends = np.cumsum(sizes).tolist()
    return [(memory[end - n : end], here[end - n : end]) for n, end in zip(sizes, ends, strict=True)]
