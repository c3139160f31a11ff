"""The commands that show the speed of streaming: that they run, and what they print."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

FIELDS = {
    "scenario", "params", "value", "unit", "spread", "runs", "baselines", "ratios", "ratio_spread", "p50_us",
    "p99_us", "cpu_s_per_gb", "verified",
}  # fmt: skip
MAIN = "from kvferry.cli import main; main()"


def bench(*args: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "bench", *args], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def lines(*args: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in bench(*args, "--json")[0].splitlines()]
    for line in found:
        assert set(line) == FIELDS
        assert line["value"] > 0
        assert line["spread"][0] <= line["value"] <= line["spread"][1]
    return found


def test_throughput_stands_beside_a_bare_socket_and_memcpy() -> None:
    found = lines("stream", "--runs", "1", "--layers", "2", "--tokens", "256")
    assert [line["params"]["checksum"] for line in found] == ["xxh3", "off"]
    for line in found:
        assert line["scenario"] == "stream.layers"
        assert line["unit"] == "GB/s"
        assert set(line["ratios"]) == {"raw_socket", "memcpy_cold"}
        assert line["runs"] == 1
        assert line["verified"] is True
        assert line["cpu_s_per_gb"] is not None


def test_on_one_machine_memory_is_written_by_the_sender() -> None:
    (line,) = lines("stream", "--runs", "1", "--layers", "2", "--tokens", "256", "--transport", "unix")
    assert line["params"]["transport"] == "unix"
    assert line["params"]["checksum"] == "off"
    assert line["verified"] is True


def test_overlap_stands_beside_the_longer_of_both_and_sending_at_the_end() -> None:
    pytest.importorskip("torch")
    (line,) = lines("stream", "--model", "tiny", "--runs", "1", "--tokens", "256")
    assert line["unit"] == "s"
    assert set(line["ratios"]) == {"compute", "transfer", "after_last_layer", "max_compute_transfer"}
    assert line["params"]["layers"] >= 24
    longer = max(line["baselines"]["compute"], line["baselines"]["transfer"])
    assert line["baselines"]["max_compute_transfer"] == longer


def test_table_and_list_name_the_scenario() -> None:
    out, _ = bench("stream", "--runs", "1", "--layers", "1", "--tokens", "64")
    assert "stream.layers" in out
    assert "raw_socket" in out
    assert "stream.layers" in bench("list")[0]
