"""Conformance suite of a pool on a device; see :class:`DevicePoolSuite`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.memory import MemoryStore
from kvferry.core.regions import LAYOUTS, Region
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.device.base import Device
from kvferry.store.device import DevicePool
from kvferry.testing.blocks import block_bytes
from kvferry.testing.device_hooks import DeviceHooks
from kvferry.testing.pool_stress import PoolStress, page_runs, stress_spec

__all__ = ["DevicePoolSuite"]

_AMPLE_S = 20.0


class DevicePoolSuite(DeviceHooks):
    """What a :class:`~kvferry.store.device.DevicePool` must do on every device.

    Inherit it in a test class and give the hooks; ``set_latency`` gives the most that a copy takes, at random
    where that can be.
    """

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        """A device whose work is done after the test."""
        made = self.make_device()
        yield made
        self.set_latency(made, 0.0)
        self.end_device(made)

    @pytest.mark.parametrize("layout", ["kvferry", "mla", "opaque", *sorted(LAYOUTS)])
    def test_blocks_come_back_from_below_as_they_were(self, device: Device, layout: str) -> None:
        """Down and up again through a pool a quarter as large, in every layout (C006, C081)."""
        spec = _spec(layout)
        store = MemoryStore(64 * 4096)
        namespace = store.namespace(spec)
        own = layout in ("kvferry", "mla", "opaque")
        regions = None if own else _regions(device, spec, layout, 4)
        with DevicePool(spec, device, num_blocks=4 if own else None, regions=regions) as pool:
            space = pool.space(namespace)
            keys = namespace.keys(list(range(16 * spec.block_tokens)))
            blocks = [_block(spec, key) for key in keys]
            for number, key in enumerate(keys):  # each computed elsewhere, and brought up into a page
                namespace.save([(key, blocks[number])], parent=None, deadline=deadline_in(_AMPLE_S))
                held = space.restore([key], deadline=deadline_in(_AMPLE_S))
                assert len(held.pages) == 1
                namespace.remove([key])
                for block in space.blocks():
                    block.saved = False  # so that only the pool has it
                pool.release(held.pages)
            assert pool.flush(deadline=deadline_in(_AMPLE_S))
            assert pool.stats().demoted_blocks == 16
            for number, key in enumerate(keys):
                with namespace.load([key], deadline=deadline_in(_AMPLE_S)) as lease:
                    assert bytes(lease.view(0)) == blocks[number]
        store.close()

    def test_random_saves_loads_evictions_and_reuses(self, device: Device) -> None:
        """Nobody ever sees a wrong byte; ``KVFERRY_POOL_STRESS`` says how many actions there are."""
        wanted = int(os.environ.get("KVFERRY_POOL_STRESS", "300"))
        self.set_latency(device, 0.001)
        done = seed = 0
        while done < wanted:
            stress = PoolStress(device, lambda t, b, s: self.kernel(device, t, b, s), seed=seed)
            figures = stress.run(min(1000, max(20, wanted // 8))).stats()
            done += sum(stress.actions.values()) + figures.evicted_blocks
            assert figures.lost_blocks == 0
            assert figures.demoted_blocks > 0
            assert figures.promoted_blocks > 0
            seed += 1

    def test_c004_a_save_right_behind_the_kernel_is_never_stale(self, device: Device) -> None:
        """Published while the kernel that writes it still runs, a block goes down with the right bytes."""
        runs = int(os.environ.get("KVFERRY_C004_RUNS", "10"))
        seconds = 0.05 if runs >= 200 else 0.005
        spec = stress_spec()
        store = MemoryStore(8 * 4096)
        namespace = store.namespace(spec)
        with closing(DevicePool(spec, device, num_blocks=1)) as pool:
            space = pool.space(namespace)
            for number in range(runs):
                keys = namespace.keys([number] * spec.block_tokens)
                pages = pool.allocate(1, deadline=deadline_in(_AMPLE_S))
                for run in page_runs(pool, pages[0]):
                    self.kernel(device, run, number % 251, seconds)
                space.publish(keys, pages, parent=None)
                pool.release(pages)
                assert pool.flush(deadline=deadline_in(_AMPLE_S))
                with namespace.load(keys, deadline=deadline_in(_AMPLE_S)) as lease:
                    held = np.frombuffer(lease.view(0), np.uint8)
                    for layer in range(len(spec.layers)):
                        slice_ = held[spec.layer_slice(layer)]
                        assert set(slice_[: spec.layers[layer].data_nbytes]) == {number % 251}
        store.close()


def _spec(layout: str) -> KVSpec:
    flat = layout in ("nd", "mla")
    shape = (4, 18) if flat else (4, 2, 10)
    names = ("latent",) if flat or layout == "opaque" else ("k", "v")
    layer = LayerSpec(tuple(TensorSpec(name, shape, DType.BFLOAT16) for name in names))
    name = "engine/pages-v3" if layout == "opaque" else "kvferry"
    return KVSpec(model="pool", revision="r", layers=(layer, layer), block_tokens=4, layout=name)


def _block(spec: KVSpec, key: bytes) -> bytes:
    """Known bytes, with zeros where slices are padded."""
    block = bytearray(block_bytes(key, spec.block_nbytes))  # type: ignore[arg-type]
    for layer, held in enumerate(spec.layers):
        place = spec.layer_slice(layer)
        block[place.start + held.data_nbytes : place.stop] = bytes(held.nbytes - held.data_nbytes)
    return bytes(block)


def _regions(device: Device, spec: KVSpec, layout: str, pages: int) -> list[Region]:
    """An engine's memory in one of the declared layouts."""
    axes = LAYOUTS[layout]
    row = spec.layers[0].tensors[0].shape
    sizes = {"b": pages, "s": 2, "n": 4, "h": row[1], "d": row[-1], "c": 2 * row[-1]}
    shape = tuple(sizes[axis] for axis in axes)
    apart = [""] if "s" in axes or "c" in axes else [tensor.name for tensor in spec.layers[0].tensors]
    strides, step = list[int](), 2
    for size in reversed(shape):
        strides.append(step)
        step *= size
    found = []
    for layer in range(len(spec.layers)):
        for tensor in apart:
            memory = device.empty(step)
            _, address = device.memory_of(memory)
            region = Region(
                layer=layer, layout=layout, tensor=tensor, address=address, shape=shape,
                strides=tuple(reversed(strides)), itemsize=2, owner=memory, device=device.kind,
            )  # fmt: skip
            found.append(region)
    return found
