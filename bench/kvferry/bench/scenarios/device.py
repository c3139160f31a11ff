"""``kvferry bench device``: copies from and to a device, pages moved, layers saved behind compute."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.bench.ceilings import COLD_NBYTES
from kvferry.bench.pairing import MIN_RUNS, Progress
from kvferry.bench.registry import Options
from kvferry.bench.results import Param, Result
from kvferry.core.errors import ConfigError
from kvferry.core.units import parse_nbytes
from kvferry.device import Device, open_device
from kvferry.testing.sim_device import SimDevice

__all__ = ["SCENARIOS", "DeviceOptions", "run"]

SCENARIOS = {
    "device.copy_in": "device_copies:run_copy_in",
    "device.copy_out": "device_copies:run_copy_out",
    "device.gather": "device_pages:run_gather",
    "device.scatter": "device_pages:run_scatter",
    "device.save_layers": "device_layers:run_save_layers",
}
_SIZES = "1MiB,16MiB"
_SIM_S_PER_MIB = 0.5e-3  # 2 GB/s: sleeping that long is exact enough


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """How to run the scenarios.

    Attributes:
        device: Which, as ``musa:0``.
        scenarios: Which, in order.
        sizes: Bytes of one copy.
        layers: Of the pages.
        runs: Rounds that count.
        warmup: Rounds before them.
        walk_nbytes: What both ends of a copy walk through; below 256 MiB they are not cold.
    """

    device: str = "cpu"
    scenarios: tuple[str, ...] = tuple(SCENARIOS)
    sizes: tuple[int, ...] = (1 << 20, 16 << 20)
    layers: int = 32
    runs: int = MIN_RUNS
    warmup: int = 1
    walk_nbytes: int = COLD_NBYTES

    @classmethod
    def of(cls, options: Options) -> DeviceOptions:
        """From what the command line gave.

        Raises:
            ConfigError: For a value that cannot be used.
        """
        scenario = options.scenario(SCENARIOS)
        sizes = tuple(parse_nbytes(size) for size in str(options.param("sizes", _SIZES)).split(","))
        walk = parse_nbytes(options.param("walk", COLD_NBYTES))
        if min(sizes) < 1 or max(sizes) > walk:
            raise ConfigError(f"--sizes {min(sizes)} to {max(sizes)}: at least 1 and at most --walk ({walk})")
        return cls(
            device=str(options.param("device", "cpu")),
            scenarios=(scenario,) if scenario else tuple(SCENARIOS),
            sizes=sizes,
            layers=int(options.param("layers", 32)),
            runs=options.runs,
            warmup=options.warmup,
            walk_nbytes=walk,
        )

    def params(self, **more: Param) -> dict[str, Param]:
        """Of a result."""
        return {"device": self.device, **more, "walk_nbytes": self.walk_nbytes}


def run(options: Options, progress: Progress) -> Iterator[Result]:
    """Run what is asked for on one device."""
    chosen = DeviceOptions.of(options)
    device = _open(chosen.device)
    try:
        for scenario in chosen.scenarios:
            module, function = SCENARIOS[scenario].split(":")
            yield from getattr(importlib.import_module(f"{__package__}.{module}"), function)(
                device, chosen, progress
            )
    finally:
        if isinstance(device, SimDevice):
            device.close()


def _open(name: str) -> Device:
    if name == "sim":
        return SimDevice(total_nbytes=8 << 30, s_per_mib=_SIM_S_PER_MIB)
    return open_device(name)
