"""``device.gather`` and ``device.scatter``: blocks between an engine's pages on a device and their slots."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Final

import numpy as np

from kvferry.bench.beside_memcpy import beside_memcpy
from kvferry.bench.pairing import Progress
from kvferry.bench.results import Result, Sample
from kvferry.bench.scenarios.device import DeviceOptions
from kvferry.core.buffers import address_of, page_aligned
from kvferry.core.clock import deadline_in, is_past
from kvferry.core.errors import TransferTimeoutError
from kvferry.core.paged_copy import BlockCopier, HostCopier, Transfer, pages_kernel
from kvferry.core.regions import LAYOUTS, Region, RegionPlan
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.device import CopyEngine, Device
from kvferry.device.block_copier import DeviceCopier

__all__ = ["DevicePages", "pages_spec", "run_gather", "run_scatter"]

_WAIT_S: Final = 60.0
_TOKENS, _HEADS, _DIM, _LAYERS = 16, 8, 128, 16
_BATCH_NBYTES: Final = 64 << 20
_LAYOUTS: Final = ("stacked_nhd", "packed_hnd")
_POLL_S: Final = 20e-6


def pages_spec(layers: int) -> KVSpec:
    """Blocks of 16 tokens of 8 heads of 128 in bfloat16: K and V of a layer are 64 KiB."""
    shape = (_TOKENS, _HEADS, _DIM)
    layer = LayerSpec((TensorSpec("k", shape, DType.BFLOAT16), TensorSpec("v", shape, DType.BFLOAT16)))
    return KVSpec(model="bench", revision="1", layers=(layer,) * layers, block_tokens=_TOKENS)


class DevicePages:
    """An engine's pages on a device, or in host memory where that is the device.

    Args:
        device: The device.
        spec: Of the blocks.
        layout: Of the pages.
        pages: How many.
    """

    def __init__(self, device: Device, spec: KVSpec, layout: str, pages: int) -> None:
        sizes = {"b": pages, "s": 2, "n": _TOKENS, "h": _HEADS, "d": _DIM, "c": 2 * _DIM}
        shape = tuple(sizes[axis] for axis in LAYOUTS[layout])
        strides = tuple(2 * math.prod(shape[at + 1 :]) for at in range(len(shape)))
        self.regions = []
        for layer in range(len(spec.layers)):
            memory = device.empty(2 * math.prod(shape))
            _, address = device.memory_of(memory)
            self.regions.append(
                Region(
                    layer=layer,
                    layout=layout,
                    address=address,
                    shape=shape,
                    strides=strides,
                    itemsize=2,
                    device=device.kind,
                    owner=memory,
                )
            )


class _Moves:
    """Pages and slots that walk, and batches between them."""

    def __init__(self, device: Device, engine: CopyEngine, layout: str, options: DeviceOptions) -> None:
        self._spec = pages_spec(_LAYERS)
        self.nbytes = self._spec.block_nbytes
        count = max(2, options.walk_nbytes // self.nbytes)
        self.batch = max(1, min(_BATCH_NBYTES // self.nbytes, count // 2))
        self._plan = RegionPlan(self._spec, DevicePages(device, self._spec, layout, count).regions)
        self._memory = page_aligned(count * self.nbytes)
        some = np.random.default_rng(2).integers(0, 1 << 63, 1 << 16, np.uint64).view(np.uint8)
        np.frombuffer(self._memory, np.uint8)[:] = np.resize(some, len(self._memory))
        np.frombuffer(self._memory, np.uint64)[:: 1 << 9] = np.arange(-(-len(self._memory) // 4096))
        self._slots = [self._memory[at : at + self.nbytes] for at in range(0, len(self._memory), self.nbytes)]
        self._order = np.random.default_rng(3).permutation(count)
        self._count, self._at = count, 0
        engine.register(self._memory)
        self._copier: BlockCopier = HostCopier() if device.kind == "cpu" else DeviceCopier(engine)

    def _move(self, *, to_pages: bool) -> Sample:
        ids = [int(self._order[(self._at + n) % self._count]) for n in range(self.batch)]
        slots = [self._slots[(self._at + n) % self._count] for n in range(self.batch)]
        self._at = (self._at + self.batch) % self._count
        cpu, start = time.process_time(), time.perf_counter()
        self.move(ids, slots, to_pages=to_pages)
        seconds = time.perf_counter() - start
        return Sample(seconds, self.batch * self.nbytes, time.process_time() - cpu)

    def move(self, ids: list[int], slots: list[memoryview], *, to_pages: bool) -> None:
        """All layers of some blocks, as a job does it."""
        transfer = Transfer(self._plan, ids, slots, to_pages=to_pages)
        layers = range(len(self._spec.layers))
        copying = self._copier.start(transfer, layers, 0, len(ids), None)
        deadline = deadline_in(_WAIT_S)
        while copying is not None and not copying.query():
            if is_past(deadline):
                raise TransferTimeoutError(f"{len(ids)} blocks were not moved within {_WAIT_S:g} s")
            time.sleep(_POLL_S)

    def gather(self) -> Sample:
        """One batch out of the pages."""
        return self._move(to_pages=False)

    def scatter(self) -> Sample:
        """One batch into them."""
        return self._move(to_pages=True)

    def verify(self) -> bool:
        """Whether bytes come back from the pages that they were put into."""
        ids, slots = [1, 0], self._slots[:2]
        before = [bytes(slot) for slot in slots]
        self.move(ids, slots, to_pages=True)
        for slot in slots:
            slot[:] = bytes(len(slot))
        self.move(ids, slots, to_pages=False)
        assert address_of(self._memory) == address_of(slots[0])
        return before == [bytes(slot) for slot in slots]


def run_gather(device: Device, options: DeviceOptions, progress: Progress) -> Iterator[Result]:
    """Blocks of 16 tokens, 64 KiB a layer, out of pages anywhere."""
    yield from _run("device.gather", device, options, progress)


def run_scatter(device: Device, options: DeviceOptions, progress: Progress) -> Iterator[Result]:
    """The same into pages."""
    yield from _run("device.scatter", device, options, progress)


def _run(scenario: str, device: Device, options: DeviceOptions, progress: Progress) -> Iterator[Result]:
    kernel = "device" if device.kind != "cpu" else "numpy" if pages_kernel() is None else "native"
    for layout in _LAYOUTS:
        with closing(CopyEngine(device, slots=8, slot_nbytes=4 << 20)) as engine:
            moves = _Moves(device, engine, layout, options)
            params = options.params(
                nbytes=moves.nbytes,
                layer_nbytes=moves.nbytes // _LAYERS,
                batch=moves.batch,
                layout=layout,
                copy=kernel,
            )
            yield beside_memcpy(
                scenario,
                moves.gather if scenario == "device.gather" else moves.scatter,
                (moves.nbytes, moves.batch),
                options,
                progress,
                params=params,
                verify=moves.verify,
            )
