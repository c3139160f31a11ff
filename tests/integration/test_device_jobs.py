"""An engine's pages on a device, saved to and loaded from a daemon and a store in this process by jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvferry.client import BlockMover, Client
from kvferry.core.buffers import ByteArray, page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.config_sources import load_config
from kvferry.core.memory import MemoryStore
from kvferry.core.regions import Region
from kvferry.core.spec import KVSpec
from kvferry.daemon import Daemon
from kvferry.device import CopyEngine
from kvferry.device.block_copier import DeviceCopier
from kvferry.testing.blocks import small_spec, wait_until
from kvferry.testing.sim_device import SimBytes, SimDevice

LAYERS, PAGES = 4, 12
SPEC = small_spec("on-a-device", layers=LAYERS)


@pytest.fixture
def device() -> Iterator[SimDevice]:
    made = SimDevice(fixed_s=0.002, jitter_s=0.002)
    yield made
    made.close()


def pages_of(device: SimDevice, spec: KVSpec = SPEC) -> tuple[list[SimBytes], list[Region]]:
    shape = (2, PAGES, *spec.layers[0].tensors[0].shape)
    strides = np.empty(shape, np.uint8).strides
    memories = [device.empty(int(np.prod(shape))) for _ in spec.layers]
    regions = [
        Region(
            layer=layer,
            layout="stacked_nhd",
            address=memory.data_ptr(),
            shape=shape,
            strides=strides,
            itemsize=1,
            device="sim",
            owner=memory,
        )
        for layer, memory in enumerate(memories)
    ]
    return memories, regions


def test_the_arena_of_a_daemon_is_pinned_while_it_lives(device: SimDevice, tmp_path: Path) -> None:
    """Copies go straight into it, with no slot; that of a daemon that has ended is not kept."""
    settings = [f"daemon.socket={tmp_path}/d", "daemon.listen=none", "daemon.disk=none", "daemon.http=none"]
    config = load_config(None, assignments=[*settings, "store.dram_capacity=1MiB"]).config
    memories, regions = pages_of(device)
    with closing(CopyEngine(device, slots=1, slot_nbytes=4096, on_pin_failure="stop")) as engine:
        ring = device.pinned_nbytes
        with (
            closing(Daemon(config)),
            Client(f"unix://{tmp_path}/d", copiers={"sim": DeviceCopier(engine)}) as client,
        ):
            namespace = client.namespace(SPEC)
            pages = namespace.register(regions)
            keys = namespace.keys(range(4 * SPEC.block_tokens))
            save = pages.save("save", keys, [7, 2, 9, 4], parent=None, deadline=deadline_in(20))
            for layer, memory in enumerate(memories):
                device.kernel(memory, layer + 1)
                event = device.event()
                event.record(device.current_stream())
                save.layer(layer, event)
            assert save.wait(deadline=deadline_in(20))
            assert save.stored == 4
            assert engine.registered_nbytes == device.pinned_nbytes - ring == 1 << 20
            lease = namespace.load(keys, deadline=deadline_in(20))
            load = pages.load("load", lease, [0, 1, 2, 3], deadline=deadline_in(20))
            for layer in range(LAYERS):
                assert load.order_layer(layer, device.current_stream(), deadline=deadline_in(20))
            assert load.wait(deadline=deadline_in(20))
            assert load.ok
            layers = read_all(engine, memories)
            assert all((both[:, :4] == layer + 1).all() for layer, both in enumerate(layers))
            del lease, load, save, pages, namespace
        wait_until(lambda: device.pinned_nbytes == ring, 20)
        assert not engine.registered_nbytes


def read_all(engine: CopyEngine, memories: Sequence[SimBytes]) -> list[ByteArray]:
    found = []
    for memory in memories:
        here = page_aligned(memory.numel())
        engine.copy_out([(memory, here)]).wait(deadline_in(20))
        found.append(np.frombuffer(here, np.uint8).reshape(2, PAGES, -1))
    return found


def test_the_arena_passes_through_slots_where_it_cannot_be_pinned(caplog: pytest.LogCaptureFixture) -> None:
    """One line says why; the bytes are the same."""
    with (
        closing(SimDevice(max_pinned_nbytes=2 * 4096)) as device,
        closing(CopyEngine(device, slots=1, slot_nbytes=4096)) as engine,
        closing(MemoryStore(64 * SPEC.block_nbytes)) as store,
        BlockMover({"sim": DeviceCopier(engine)}) as mover,
    ):
        memories, regions = pages_of(device)
        namespace = store.namespace(SPEC)
        pages = mover.register(namespace, regions)
        for number in range(2):
            device.kernel(memories[0], 7 + number)
            keys = namespace.keys([number] * SPEC.block_tokens)
            event = device.event()
            event.record(device.current_stream())
            save = pages.save("save", keys, [3], parent=None, deadline=deadline_in(20))
            save.all_layers(event)
            assert save.wait(deadline=deadline_in(20))
            with namespace.load(keys, deadline=deadline_in(20)) as lease:
                assert set(lease.layer(0, 0)) == {7 + number}
    lines = [record.message for record in caplog.records if "cannot be pinned" in record.message]
    assert len(lines) == 1
    assert "store.dram_capacity" in lines[0]
    assert "RLIMIT_MEMLOCK" in lines[0]


@pytest.mark.parametrize(("compute_s", "copy_s", "least_s"), [(0.01, 0.01, 0.32), (0.01, 0.02, 0.64)])
def test_copies_hide_behind_compute(compute_s: float, copy_s: float, least_s: float) -> None:
    """On the device's own clock, 32 layers: all but the last copy, or all but the first kernel, are hidden.

    The bars are 1.15 x compute where both take as long, and 1.1 x copy where that takes twice the time.
    """
    spec = small_spec("overlap", layers=32, pages=4)
    with (
        closing(SimDevice(sleeps=False)) as device,
        closing(CopyEngine(device, slots=2, slot_nbytes=4096)) as engine,
        closing(MemoryStore(16 * spec.block_nbytes)) as store,
        BlockMover({"sim": DeviceCopier(engine)}) as mover,
    ):
        memories, regions = pages_of(device, spec)
        device.s_per_mib = copy_s * (1 << 20) / (2 * spec.layers[0].nbytes)
        namespace = store.namespace(spec)
        pages = mover.register(namespace, regions)
        keys = namespace.keys(range(2 * spec.block_tokens))
        save = pages.save("save", keys, [4, 7], parent=None, deadline=deadline_in(60))
        for layer, memory in enumerate(memories):
            device.kernel(memory, layer, compute_s)
            event = device.event()
            event.record(device.current_stream())
            save.layer(layer, event)
        assert save.wait(deadline=deadline_in(60))
        assert save.stored == 2
        assert least_s < device.clock <= least_s + min(compute_s, copy_s) + 1e-6


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
        for layer, both in enumerate(read_all(engine, memories)):
            assert (both[:, :4] == layer + 1).all()
            assert (both[:, 4:] == 0xAA).all()
        assert store.stats().pinned_nbytes == 0
