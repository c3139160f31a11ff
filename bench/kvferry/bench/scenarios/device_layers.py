"""``device.save_layers``: layers saved while the next are computed, beside compute and copies alone."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, Final

import numpy as np

from kvferry.bench.pairing import Progress, run_paired
from kvferry.bench.results import Result, Sample, summarise
from kvferry.bench.scenarios.device import DeviceOptions
from kvferry.bench.scenarios.device_pages import DevicePages, pages_spec
from kvferry.client import BlockMover
from kvferry.core.clock import deadline_in
from kvferry.core.errors import StoreError
from kvferry.core.memory import MemoryStore
from kvferry.core.paged_copy import BlockCopier
from kvferry.device import CopyEngine, Device
from kvferry.device.block_copier import DeviceCopier
from kvferry.testing.sim_device import SimDevice

__all__ = ["run_save_layers"]

_WAIT_S: Final = 60.0
_BLOCKS: Final = 32
_ROWS: Final = 256
_DEVICE_ROWS: Final = 2048
_TRIES: Final = 5


class _Compute:
    """Something that takes a given time on the device's current stream, or in this thread on the host."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._times = 1
        self._seconds = 0.0
        if isinstance(device, SimDevice):
            self._target = device.empty(64)
        elif device.kind == "cpu":
            self._host = np.random.default_rng(4).standard_normal((_ROWS, _ROWS), np.float32)
            self._out = np.empty_like(self._host)
        else:
            torch: Any = importlib.import_module("torch")
            where = f"{device.kind}:{device.index}"
            self._a = torch.rand(_DEVICE_ROWS, _DEVICE_ROWS, dtype=torch.bfloat16, device=where)
            self._b, self._matmul = torch.empty_like(self._a), torch.matmul

    def calibrate(self, seconds: float) -> None:
        """Let one call take about so long."""
        self._seconds = seconds
        if isinstance(self._device, SimDevice):
            return
        for _ in range(_TRIES):
            self._device.synchronize()
            start = time.perf_counter()
            for _ in range(8):
                self()
            self._device.current_stream().synchronize()
            taken = (time.perf_counter() - start) / 8
            self._times = max(1, round(self._times * seconds / max(taken, 1e-6)))

    def __call__(self) -> None:
        """One layer."""
        if isinstance(self._device, SimDevice):
            self._device.kernel(self._target, 1, self._seconds)
            return
        for _ in range(self._times):
            if self._device.kind == "cpu":
                np.matmul(self._host, self._host, out=self._out)
            else:
                self._matmul(self._a, self._a, out=self._b)


class _Model:
    """Layers that compute, and pages that are saved.

    Attributes:
        blocked: Seconds that the model's thread spent in our calls, a run with both.
    """

    def __init__(self, device: Device, mover: BlockMover, store: MemoryStore, options: DeviceOptions) -> None:
        self._device, self._store, self._layers = device, store, options.layers
        self._spec = pages_spec(options.layers)
        self.nbytes = _BLOCKS * self._spec.block_nbytes
        self.compute = _Compute(device)
        self._namespace = store.namespace(self._spec)
        self._keys = self._namespace.keys(range(_BLOCKS * self._spec.block_tokens))
        self._ids = np.random.default_rng(5).permutation(2 * _BLOCKS)[:_BLOCKS].tolist()
        pages = DevicePages(device, self._spec, "stacked_nhd", 2 * _BLOCKS)
        self._pages = mover.register(self._namespace, pages.regions)
        self.blocked: list[float] = []

    def run(self, *, computes: bool, saves: bool) -> Sample:
        """All layers, until everything is done."""
        job, blocked = None, 0.0
        start = time.perf_counter()
        if saves:
            deadline = deadline_in(_WAIT_S)
            job = self._pages.save("save", self._keys, self._ids, parent=None, deadline=deadline)
        for layer in range(self._layers):
            if computes:
                self.compute()
            if job is not None:
                called = time.perf_counter()
                event = self._device.event()
                event.record(self._device.current_stream())
                job.layer(layer, event)
                blocked += time.perf_counter() - called
        if computes:
            self._device.current_stream().synchronize()
        if job is not None:
            job.wait(deadline=deadline_in(_WAIT_S))
        seconds = time.perf_counter() - start
        if job is not None:
            if job.stored != _BLOCKS:
                raise StoreError(f"{job.stored} of {_BLOCKS} blocks were saved: {job.error}")
            self._namespace.remove(self._keys)
            if computes:
                self.blocked.append(blocked / seconds)
        return Sample(seconds, self.nbytes)

    def whole(self) -> Sample:
        """Both."""
        return self.run(computes=True, saves=True)

    def copy_alone(self) -> Sample:
        """What is there already is saved."""
        return self.run(computes=False, saves=True)

    def compute_alone(self) -> Sample:
        """Nothing is saved."""
        return self.run(computes=True, saves=False)


def run_save_layers(device: Device, options: DeviceOptions, progress: Progress) -> Iterator[Result]:
    """Compute as long as the copies, and half as long: total time, what of it is hidden, who is held up."""
    nbytes = 2 * _BLOCKS * pages_spec(options.layers).block_nbytes
    with (
        closing(CopyEngine(device, slots=8, slot_nbytes=4 << 20)) as engine,
        closing(MemoryStore(nbytes)) as store,
        BlockMover(_copiers(device, engine)) as mover,
    ):
        model = _Model(device, mover, store, options)
        for part in (1.0, 0.5):
            alone = statistics.median(model.copy_alone().seconds for _ in range(3))
            model.compute.calibrate(part * alone / options.layers)
            model.blocked.clear()
            samples = run_paired(
                {"subject": model.whole, "compute": model.compute_alone, "copy": model.copy_alone},
                runs=options.runs, warmup=options.warmup, progress=progress,
                label=f"device.save_layers compute={part:g}",
            )  # fmt: skip
            params = options.params(
                layers=options.layers,
                blocks=_BLOCKS,
                layer_nbytes=model.nbytes // options.layers,
                compute_part=part,
            )
            del params["walk_nbytes"]
            yield from _results(params, samples, model.blocked[-options.runs :])


def _copiers(device: Device, engine: CopyEngine) -> dict[str, BlockCopier]:
    return {} if device.kind == "cpu" else {device.kind: DeviceCopier(engine)}


def _results(params: Any, samples: dict[str, list[Sample]], blocked: Sequence[float]) -> Iterator[Result]:  # noqa: ANN401
    taken = {name: [1e3 * one.seconds for one in found] for name, found in samples.items()}
    yield summarise("device.save_layers", params, "ms", taken, samples=samples["subject"])
    rounds = zip(taken["subject"], taken["compute"], taken["copy"], strict=True)
    hidden = [(compute + copy - whole) / min(compute, copy) for whole, compute, copy in rounds]
    yield summarise("device.save_layers.hidden", params, "of the shorter", {"subject": hidden})
    yield summarise("device.save_layers.blocked", params, "of the time", {"subject": list(blocked)})
