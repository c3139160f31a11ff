"""``kvferry bench device``: every scenario runs at a tiny scale; no figure is judged but by the soak test."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

MAIN = "from kvferry.cli import main; main()"
COPIES = ("device.copy_in", "device.copy_out")
PAGES = ("device.gather", "device.scatter")
SAVES = ("device.save_layers", "device.save_layers.hidden", "device.save_layers.blocked")


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN, "bench", "device", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def results(*args: str) -> list[dict[str, Any]]:
    done = bench(*args, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_every_scenario_stands_beside_its_ceiling(device: str) -> None:
    small = ("--walk", "4MiB", "--sizes", "256KiB", "--layers", "2", "--runs", "1")
    lines = results("--device", device, *small)
    ceilings = {"memcpy_cold"} | ({"pinned_copy"} if device == "sim" else set())
    copies = [line for line in lines if line["scenario"] in COPIES]
    assert [(line["scenario"], line["params"]["host"]) for line in copies] == [
        (scenario, host) for scenario in COPIES for host in ("registered", "slots")
    ]
    assert all(line["verified"] and set(line["ratios"]) == ceilings for line in copies)
    pages = [line for line in lines if line["scenario"] in PAGES]
    assert [(line["scenario"], line["params"]["layout"]) for line in pages] == [
        (scenario, layout) for scenario in PAGES for layout in ("stacked_nhd", "packed_hnd")
    ]
    assert all(line["verified"] and set(line["ratios"]) == {"memcpy_cold"} for line in pages)
    assert all(line["params"]["layer_nbytes"] == 1 << 16 for line in pages)
    saves = [line for line in lines if line not in copies and line not in pages]
    assert [(line["scenario"], line["params"]["compute_part"]) for line in saves] == [
        (scenario, part) for part in (1.0, 0.5) for scenario in SAVES
    ]
    assert all(set(line["ratios"]) == {"compute", "copy"} for line in saves if line["unit"] == "ms")
    assert all(line["params"]["device"] == device and line["value"] is not None for line in lines)


def test_what_cannot_be_is_refused() -> None:
    done = bench("--device", "tpu")
    assert done.returncode == 2
    assert "tpu" in done.stderr
    done = bench("--scenario", "device.gahter")
    assert done.returncode == 2
    assert "device.gather" in done.stderr


@pytest.mark.soak
def test_saves_hide_behind_compute_on_the_simulated_device() -> None:
    """As long as compute: at most 1.15 of it; twice as long: 1.1 of the copies; the model is not held up."""
    found = {
        (line["scenario"], line["params"]["compute_part"]): line
        for line in results("--device", "sim", "--scenario", "device.save_layers")
    }
    assert found["device.save_layers", 1.0]["ratios"]["compute"] <= 1.15
    assert found["device.save_layers", 0.5]["ratios"]["copy"] <= 1.1
    for part in (1.0, 0.5):
        assert found["device.save_layers.blocked", part]["value"] < 0.01
