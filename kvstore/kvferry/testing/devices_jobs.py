"""The part of the device suite about jobs and streams of an engine's pages; see :class:`DeviceJobs`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvferry.client import BlockMover
from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, RequestCancelledError
from kvferry.core.memory import MemoryStore
from kvferry.core.paged_copy import HostCopier, Transfer
from kvferry.core.regions import Region, RegionPlan
from kvferry.core.spec import KVSpec
from kvferry.device.block_copier import DeviceCopier
from kvferry.device.copy_engine import CopyEngine
from kvferry.streaming import LayerSender, PageSender
from kvferry.testing.device_hooks import DeviceHooks
from kvferry.testing.devices_pages import (
    ample_s,
    device_bytes,
    host_regions,
    on_device,
    pages_spec,
    read_region,
)
from kvferry.testing.prompt_kv import PromptKV
from kvferry.testing.streams import DecodeEnd
from kvferry.wire.messages import Handoff, SamplingParams

if TYPE_CHECKING:
    from kvferry.device.base import Device, Event

__all__ = ["DeviceJobs"]


class DeviceJobs(DeviceHooks):
    """What jobs and streams of pages must do on every device."""

    def test_layers_are_saved_behind_kernels_and_loaded_before_readers(self, device: Device) -> None:
        """C004: bytes are the kernels', the device waits for a load, the arena is copied to directly."""
        spec = pages_spec("stacked_nhd")
        regions = [on_device(device, region) for region in host_regions(spec, "stacked_nhd")]
        with (
            closing(CopyEngine(device, slots=1, slot_nbytes=4096, on_pin_failure="stop")) as engine,
            closing(MemoryStore(64 * 4096)) as store,
            BlockMover({device.kind: DeviceCopier(engine)}) as mover,
        ):
            namespace = store.namespace(spec)
            keys = namespace.keys(range(3 * spec.block_tokens))
            pages = mover.register(namespace, regions)
            save = pages.save("save", keys, [5, 0, 3], parent=None, deadline=deadline_in(ample_s()))
            for layer, region in enumerate(regions):
                self.kernel(device, device_bytes(region), layer + 1, 0.01)
                save.layer(layer, _event_now(device))
            assert save.wait(deadline=deadline_in(ample_s()))
            assert save.ok
            for region in regions:
                self.kernel(device, device_bytes(region), 0xAA, 0.005)
            lease = namespace.load(keys, deadline=deadline_in(ample_s()))
            load = pages.load(
                "load", lease, [1, 2, 6], deadline=deadline_in(ample_s()), after=_event_now(device)
            )
            for layer, region in enumerate(regions):
                stream, memory = device.current_stream(), device_bytes(region)
                assert load.order_layer(layer, stream, deadline=deadline_in(ample_s()))
                seen = page_aligned(memory.numel())
                device.copy(device.host_bytes(seen), memory, stream)
                stream.synchronize()
                both = np.frombuffer(seen, np.uint8).reshape(2, 7, -1)
                assert (both[:, [1, 2, 6]] == layer + 1).all()
                assert (both[:, [0, 3, 4, 5]] == 0xAA).all()
            assert load.wait(deadline=deadline_in(ample_s()))
            assert load.ok
            assert engine.registered_nbytes == store.arena.mapped_nbytes

    def test_nothing_is_written_once_a_load_is_cancelled(self, lazy: Device) -> None:
        """Cancel waits for what the device has begun, however long that takes."""
        spec = pages_spec("stacked_nhd")
        regions = [on_device(lazy, region) for region in host_regions(spec, "stacked_nhd")]
        with (
            closing(CopyEngine(lazy, slots=1, slot_nbytes=4096)) as engine,
            closing(MemoryStore(64 * 4096)) as store,
            BlockMover({lazy.kind: DeviceCopier(engine)}) as mover,
        ):
            namespace = store.namespace(spec)
            keys = namespace.keys(range(spec.block_tokens))
            blocks = [(keys[0], page_aligned(spec.block_nbytes))]
            assert namespace.save(blocks, parent=None, deadline=deadline_in(ample_s())) == 1
            pages = mover.register(namespace, regions)
            with self.shut_gate(lazy):
                lease = namespace.load(keys, deadline=deadline_in(ample_s()))
                after = _event_now(lazy)
                load = pages.load("load", lease, [4], deadline=deadline_in(3 * ample_s()), after=after)
                assert load.order_layer(
                    1, lazy.new_stream(), deadline=deadline_in(ample_s())
                )  # all is queued
                cancelling = threading.Thread(target=load.cancel)
                cancelling.start()
                cancelling.join(0.05)
                assert cancelling.is_alive()
                assert not after.query()
            cancelling.join(ample_s())
            assert load.done
            assert isinstance(load.error, RequestCancelledError)
            for region in regions:
                self.kernel(lazy, device_bytes(region), 7)
            lazy.synchronize()
            assert all(set(read_region(engine, region)) == {7} for region in regions)
            assert not store.stats().pinned_nbytes

    @pytest.mark.parametrize("layout", ["block_stacked_nhd", "hnd", "packed_nhd", "nd"])
    def test_a_stream_goes_straight_from_pages(self, device: Device, layout: str) -> None:
        """Through one slot, each layer behind the kernel before it; the tail block too (C081)."""
        spec = pages_spec(layout)
        kv = PromptKV(spec, 2 * spec.block_tokens + 1)
        table = [5, 0, 3]
        regions = [on_device(device, region) for region in _pages_of(spec, layout, kv, table)]
        with (
            closing(MemoryStore(64 * 4096)) as store,
            DecodeEnd("inproc://pages", store, spec, ring=1) as end,
            closing(CopyEngine(device, slots=1, slot_nbytes=4096)) as engine,
            PageSender(LayerSender(end.connect(), spec), engine, RegionPlan(spec, regions)) as sender,
        ):
            missing = sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(ample_s()))
            assert missing == {0, 1}
            receiver = end.receiver(deadline_in(ample_s()))
            with pytest.raises(ConfigError, match="page 7"):
                sender.put_layer(0, [(0, 7)])
            reads = []
            for layer in range(len(spec.layers)):
                chunks = [(0, 5)], [(1, 0), (2, 3)]
                reads += [sender.put_layer(layer, chunk, _event_now(device)) for chunk in chunks]
            handoff = Handoff(
                prompt_tokens=len(kv.tokens), cached_tokens=0, first_token=1, sampling=SamplingParams()
            )
            done = sender.finish(handoff, deadline_in(ample_s()))
            assert done.stored_blocks == 2
            assert all(read.query() and read.wait(0.0) for read in reads)
            with store.namespace(spec).load(kv.keys, deadline=deadline_in(ample_s())) as lease:
                assert [bytes(lease.view(block)) for block in (0, 1)] == [kv.block_bytes(b) for b in (0, 1)]
            for layer in range(len(spec.layers)):
                assert bytes(receiver.view(layer, 2)) == kv.layer_bytes(layer, 2)


def _event_now(device: Device) -> Event:
    event = device.event()
    event.record(device.current_stream())
    return event


def _pages_of(spec: KVSpec, layout: str, kv: PromptKV, table: Sequence[int]) -> list[Region]:
    """An engine's pages with a prompt in them, the rows of the tail block before others."""
    regions = host_regions(spec, layout)
    blocks = [page_aligned(spec.block_nbytes) for _ in table]
    for number, block in enumerate(blocks):
        block[:] = bytes([0x77]) * len(block)
        for layer, found in enumerate(spec.layers):
            begin = spec.layer_slice(layer).start
            for slot, tensor in zip(found.slots(), kv.tensors(layer, number), strict=True):
                at = begin + slot.offset
                block[at : at + tensor.nbytes] = tensor.tobytes()
    transfer = Transfer(RegionPlan(spec, regions), table, blocks, to_pages=True)
    HostCopier().start(transfer, range(len(spec.layers)), 0, len(table), None)
    return regions
