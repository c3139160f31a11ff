"""The part of the device suite about an engine's pages; see :class:`DevicePages`."""

from __future__ import annotations

import itertools
import math
import time
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvferry.core.buffers import ByteArray, page_aligned
from kvferry.core.clock import deadline_in, is_past
from kvferry.core.errors import DeviceError
from kvferry.core.paged_copy import Copying, Event, HostCopier, Transfer
from kvferry.core.regions import LAYOUTS, Region, RegionPlan
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.device.block_copier import DeviceCopier
from kvferry.device.copy_engine import CopyEngine
from kvferry.testing.device_hooks import DeviceHooks
from kvferry.testing.resharding import DevicePlace, ShardedKV, check_loads, check_saves

if TYPE_CHECKING:
    from kvferry.device.base import Device, DeviceBytes

__all__ = [
    "DevicePages",
    "ample_s",
    "device_bytes",
    "host_regions",
    "memory_behind",
    "on_device",
    "pages_spec",
    "read_region",
]

_PAGES, _TOKENS, _HEADS, _DIM = 7, 4, 3, 10
_USED = (5, 0, 3)  # pages of three blocks, in no order
_ITEM = DType.BFLOAT16.itemsize
_AMPLE = {"seconds": 20.0}


def ample_s(seconds: float | None = None) -> float:
    """What a test waits at most for what comes at once; set to less where it is to fail."""
    if seconds is not None:
        _AMPLE["seconds"] = seconds
    return _AMPLE["seconds"]


class DevicePages(DeviceHooks):
    """What :class:`~kvferry.device.block_copier.DeviceCopier` must do on every device."""

    @pytest.mark.parametrize("layout", sorted(LAYOUTS))
    def test_pages_of_every_layout_are_exact(self, device: Device, layout: str) -> None:
        """As the same copies on the host make them, and nothing beside them is touched (C006, C081)."""
        spec = pages_spec(layout)
        loaded, saved = _slots(spec, 1), _slots(spec, 2)
        expected = host_regions(spec, layout)
        mirror = RegionPlan(spec, expected)
        HostCopier().start(Transfer(mirror, _USED, loaded, to_pages=True), (0, 1), 0, 3, None)
        regions = [on_device(device, region) for region in host_regions(spec, layout)]
        plan = RegionPlan(spec, regions)
        with closing(CopyEngine(device, slots=2, slot_nbytes=4096)) as engine:
            copier = DeviceCopier(engine)
            for layer in (0, 1):
                _finish(copier.start(Transfer(plan, _USED, loaded, to_pages=True), [layer], 0, 3, None))
            for there, here in zip(regions, expected, strict=True):
                assert read_region(engine, there) == bytes(memory_behind(here))
            _finish(copier.start(Transfer(plan, _USED, saved, to_pages=False), (0, 1), 0, 3, None))
        padded = [bytes(slot) for slot in saved]
        assert padded == [_without_padding(spec, slot) for slot in loaded]

    def test_pages_are_saved_behind_the_kernel_that_writes_them(self, device: Device) -> None:
        """The event goes along to the device; nobody waits for it here."""
        spec = pages_spec("stacked_nhd")
        regions = [on_device(device, region) for region in host_regions(spec, "stacked_nhd")]
        plan, slots = RegionPlan(spec, regions), _slots(spec, 3)
        with closing(CopyEngine(device, slots=2, slot_nbytes=4096)) as engine:
            copier = DeviceCopier(engine)
            for region in regions:
                self.kernel(device, device_bytes(region), 9, 0.02)
            event = device.event()
            event.record(device.current_stream())
            after: Event = event
            _finish(copier.start(Transfer(plan, _USED, slots, to_pages=False), (0, 1), 1, 2, after))
        untouched, *full = (bytes(slot) for slot in slots)
        assert untouched == bytes(_slots(spec, 3)[0])
        nines = _without_padding(spec, memoryview(bytes([9]) * spec.block_nbytes))
        assert full == [nines, nines]

    @pytest.mark.parametrize(
        ("layout", "kv_heads"), [("nhd", 8), ("hnd", 8), ("stacked_nhd", 2), ("stacked_hnd", 2)]
    )
    def test_heads_land_between_tensor_parallel_sizes(
        self, device: Device, layout: str, kv_heads: int
    ) -> None:
        """C104: blocks of a group of any size into pages of any other, and back, with copies of heads too."""
        with closing(CopyEngine(device, slots=4, slot_nbytes=1 << 16)) as engine:
            place, kv = DevicePlace(engine), ShardedKV(kv_heads)
            for sizes in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)):
                check_loads(place, kv, layout, sizes)
                check_saves(place, kv, layout, sizes)

    def test_another_devices_memory_is_refused(self, device: Device) -> None:
        """Before a copy could poison the process (C117)."""
        with pytest.raises(DeviceError, match="no memory of it"):
            device.memory_of(np.zeros(4))


def pages_spec(layout: str) -> KVSpec:
    """Small blocks of two layers that a layout can hold."""
    shape = (_TOKENS, _HEADS, _DIM) if "h" in LAYOUTS[layout] else (_TOKENS, _DIM)
    names = ("k", "v") if layout != "nd" else ("latent",)
    layer = LayerSpec(tuple(TensorSpec(name, shape, DType.BFLOAT16) for name in names))
    return KVSpec(model="pages", revision="r", layers=(layer, layer), block_tokens=_TOKENS)


def _slots(spec: KVSpec, seed: int) -> list[memoryview]:
    random = np.random.default_rng(seed)
    slots = [page_aligned(spec.block_nbytes) for _ in _USED]
    for slot in slots:
        slot[:] = random.bytes(len(slot))
    return slots


def _without_padding(spec: KVSpec, slot: memoryview) -> bytes:
    """As a save makes it: zeros where no tensor is."""
    block = bytearray(slot)
    for layer, held in enumerate(spec.layers):
        place = spec.layer_slice(layer)
        block[place.start + held.data_nbytes : place.stop] = bytes(held.nbytes - held.data_nbytes)
    return bytes(block)


def host_regions(spec: KVSpec, layout: str) -> list[Region]:
    """Regions of an engine's pages in host memory, of a layout, filled with one byte."""
    axes = LAYOUTS[layout]
    sizes = {"b": _PAGES, "s": 2, "n": _TOKENS, "h": _HEADS, "d": _DIM, "c": 2 * _DIM}
    shape = tuple(sizes[axis] for axis in axes)
    apart = [""] if "s" in axes or "c" in axes else [t.name for t in spec.layers[0].tensors]
    regions = []
    for layer in range(len(spec.layers)):
        for tensor in apart:
            memory = np.full(math.prod(shape) * _ITEM, 0xEE, np.uint8)
            array = memory.view(np.uint16).reshape(shape)
            regions.append(
                Region(
                    layer=layer,
                    layout=layout,
                    tensor=tensor,
                    address=int(memory.ctypes.data),
                    shape=shape,
                    strides=array.strides,
                    itemsize=_ITEM,
                    owner=memory,
                )
            )
    return regions


def on_device(device: Device, like: Region) -> Region:
    """The same region in the device's memory, with the same bytes."""
    here = memory_behind(like)
    memory = device.empty(here.nbytes)
    device.copy(memory, device.host_bytes(here.data), stream := device.new_stream())
    stream.synchronize()
    _, address = device.memory_of(memory)
    return Region(
        layer=like.layer, layout=like.layout, tensor=like.tensor, address=address, shape=like.shape,
        strides=like.strides, itemsize=like.itemsize, owner=memory, device=device.kind,
    )  # fmt: skip


def memory_behind(region: Region) -> ByteArray:
    """Of a region in host memory."""
    assert isinstance(region.owner, np.ndarray)
    return region.owner


def device_bytes(region: Region) -> DeviceBytes:
    """Of a region on a device."""
    memory: DeviceBytes = region.owner  # type: ignore[assignment]
    return memory


def read_region(engine: CopyEngine, region: Region) -> bytes:
    """What a region on a device holds."""
    memory = device_bytes(region)
    here = page_aligned(memory.numel())
    engine.copy_out([(memory, here)]).wait(deadline_in(ample_s()))
    return bytes(here)


def _finish(copying: Copying) -> None:
    deadline = deadline_in(ample_s())
    while not copying.query():
        assert not is_past(deadline)
        time.sleep(0.0005)
