"""``device.copy_in`` and ``device.copy_out``: the copy engine beside bare copies of pinned memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np

from kvferry.bench.ceilings import MemcpyCold
from kvferry.bench.pairing import Progress, run_paired
from kvferry.bench.results import Result, Sample, summarise
from kvferry.bench.scenarios.device import DeviceOptions
from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.device import CopyEngine, CopyPart, Device

__all__ = ["run_copy_in", "run_copy_out"]

_WAIT_S = 60.0
_RUN_NBYTES = 64 << 20
_SLOT_NBYTES = 4 << 20


class _Copies:
    """Pieces of device and host memory that walk, and copies between them in three ways.

    Args:
        device: The device.
        engine: Of it.
        nbytes: Of a piece.
        options: Of the benchmark.
        inward: Whether to the device.
        direct: Whether the host's memory is registered; else it passes through slots.
    """

    def __init__(
        self,
        device: Device,
        engine: CopyEngine,
        nbytes: int,
        options: DeviceOptions,
        *,
        inward: bool,
        direct: bool,
    ) -> None:
        self._device, self._engine, self._nbytes, self._inward = device, engine, nbytes, inward
        count = options.walk_nbytes // nbytes
        self.pieces = max(1, min(count, _RUN_NBYTES // nbytes))
        self._host = page_aligned(count * nbytes)
        some = np.random.default_rng(1).integers(0, 1 << 63, 1 << 16, np.uint64).view(np.uint8)
        np.frombuffer(self._host, np.uint8)[:] = np.resize(some, len(self._host))
        self._memory = device.empty(count * nbytes)
        self._bare_host = page_aligned(count * nbytes)
        device.host_register(self._bare_host)
        self._bare = device.host_bytes(self._bare_host)
        self._stream = device.new_stream()
        self._direct = direct and engine.register(self._host)
        self._count, self._at = count, 0

    def close(self) -> None:
        """Unpin it."""
        self._device.synchronize()
        self._device.host_unregister(self._bare_host)
        if self._direct:
            self._engine.unregister(self._host)

    def _take(self) -> list[tuple[int, int]]:
        found = []
        for _ in range(self.pieces):
            found.append((self._at * self._nbytes, (self._at + 1) * self._nbytes))
            self._at = (self._at + 1) % self._count
        return found

    def by_engine(self) -> Sample:
        """One request of all pieces."""
        parts: list[CopyPart] = [(self._memory[a:b], self._host[a:b]) for a, b in self._take()]
        copy = self._engine.copy_in if self._inward else self._engine.copy_out
        cpu, start = time.process_time(), time.perf_counter()
        copy(parts).wait(deadline_in(_WAIT_S))
        seconds = time.perf_counter() - start
        return Sample(seconds, self.pieces * self._nbytes, time.process_time() - cpu)

    def bare(self) -> Sample:
        """The same pieces from or to registered memory, one call of the device each, and one wait."""
        pairs = [(self._memory[a:b], self._bare[a:b]) for a, b in self._take()]
        start = time.perf_counter()
        for there, here in pairs:
            if self._inward:
                self._device.copy(there, here, self._stream)
            else:
                self._device.copy(here, there, self._stream)
        self._stream.synchronize()
        return Sample(time.perf_counter() - start, self.pieces * self._nbytes)

    def verify(self) -> bool:
        """Whether bytes go there and back."""
        a, b = self._take()[0]
        before, back = bytes(self._host[a:b]), page_aligned(b - a)
        self._engine.copy_in([(self._memory[a:b], self._host[a:b])]).wait(deadline_in(_WAIT_S))
        if self._inward:
            self._engine.copy_out([(self._memory[a:b], back)]).wait(deadline_in(_WAIT_S))
            return before == back
        self._host[a:b] = bytes(b - a)
        self._engine.copy_out([(self._memory[a:b], self._host[a:b])]).wait(deadline_in(_WAIT_S))
        return before == self._host[a:b]


def run_copy_in(device: Device, options: DeviceOptions, progress: Progress) -> Iterator[Result]:
    """From the host to the device, from registered memory and through slots."""
    yield from _run("device.copy_in", device, options, progress)


def run_copy_out(device: Device, options: DeviceOptions, progress: Progress) -> Iterator[Result]:
    """From the device to the host."""
    yield from _run("device.copy_out", device, options, progress)


def _run(scenario: str, device: Device, options: DeviceOptions, progress: Progress) -> Iterator[Result]:
    for nbytes in options.sizes:
        for direct in (True, False):
            with (
                closing(CopyEngine(device, slots=8, slot_nbytes=_SLOT_NBYTES)) as engine,
                closing(
                    _Copies(device, engine, nbytes, options, inward=scenario.endswith("in"), direct=direct)
                ) as copies,
            ):
                way = "registered" if direct else "slots"
                subjects: dict[str, Callable[[], Sample]] = {"subject": copies.by_engine}
                if device.asynchronous:
                    subjects["pinned_copy"] = copies.bare
                subjects["memcpy_cold"] = MemcpyCold(nbytes, copies.pieces, walk_nbytes=options.walk_nbytes)
                samples = run_paired(
                    subjects, runs=options.runs, warmup=options.warmup, progress=progress,
                    label=f"{scenario} nbytes={nbytes} host={way}",
                )  # fmt: skip
                values = {name: [one.gb_per_s for one in found] for name, found in samples.items()}
                params = options.params(nbytes=nbytes, batch=copies.pieces, host=way)
                verified = copies.verify()
                yield summarise(
                    scenario, params, "GB/s", values, samples=samples["subject"], verified=verified
                )
