"""An engine's pages on a device, saved to and loaded from a store by jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from kvferry.client import BlockMover
from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.memory import MemoryStore
from kvferry.core.regions import Region
from kvferry.device import CopyEngine
from kvferry.device.block_copier import DeviceCopier
from kvferry.testing.blocks import small_spec, wait_until
from kvferry.testing.sim_device import SimBytes, SimDevice

LAYERS, PAGES = 4, 12
SPEC = small_spec("on-a-device", layers=LAYERS)
ROW = SPEC.layers[0].tensors[0].shape[-1]
SHAPE = (2, PAGES, SPEC.block_tokens, 1, ROW)


@pytest.fixture
def device() -> Iterator[SimDevice]:
    made = SimDevice(fixed_s=0.002, jitter_s=0.002)
    yield made
    made.close()


def pages_of(device: SimDevice) -> tuple[list[SimBytes], list[Region]]:
    strides = np.empty(SHAPE, np.uint8).strides
    memories = [device.empty(int(np.prod(SHAPE))) for _ in range(LAYERS)]
    regions = [
        Region(
            layer=layer,
            layout="stacked_nhd",
            address=memory.data_ptr(),
            shape=SHAPE,
            strides=strides,
            itemsize=1,
            device="sim",
            owner=memory,
        )
        for layer, memory in enumerate(memories)
    ]
    return memories, regions


def test_layers_are_saved_while_the_next_computes_and_loaded_elsewhere(device: SimDevice) -> None:
    """The model's thread records an event a layer and goes on; the bytes are those of the kernels."""
    memories, regions = pages_of(device)
    with (
        closing(CopyEngine(device, slots=2, slot_nbytes=4096)) as engine,
        closing(MemoryStore(64 * SPEC.block_nbytes)) as store,
        BlockMover({"sim": DeviceCopier(engine)}) as mover,
    ):
        namespace = store.namespace(SPEC)
        registration = mover.register(namespace, regions)
        keys = namespace.keys(range(4 * SPEC.block_tokens))
        saving = registration.save("save", keys, [7, 2, 9, 4], parent=None, deadline=deadline_in(20))
        for layer, memory in enumerate(memories):
            device.kernel(memory, layer + 1, 0.01)
            event = device.event()
            event.record(device.current_stream())
            saving.layer(layer, event)
        wait_until(lambda: [done.ok for done in mover.poll()] == [True])
        for memory in memories:
            device.kernel(memory, 0xAA)
        read = device.event()
        read.record(device.current_stream())  # what still uses the pages that the load writes
        lease = namespace.load(keys, deadline=deadline_in(20))
        loading = registration.load("load", lease, [0, 1, 2, 3], deadline=deadline_in(20), after=read)
        for layer in range(LAYERS):
            assert loading.wait_layer(layer, deadline=deadline_in(20))
        wait_until(lambda: [done.ok for done in mover.poll()] == [True])
        for layer, memory in enumerate(memories):
            here = page_aligned(memory.numel())
            engine.copy_out([(memory, here)]).wait(deadline_in(20))
            both = np.frombuffer(here, np.uint8).reshape(2, PAGES, -1)
            assert (both[:, :4] == layer + 1).all()
            assert (both[:, 4:] == 0xAA).all()
        assert store.stats().pinned_nbytes == 0
