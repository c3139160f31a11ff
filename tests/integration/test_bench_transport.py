"""``kvferry bench transport``: every scenario runs at a tiny scale, no figure is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from kvferry.testing.processes import Command
from kvferry.transports.mooncake import unavailable

FIELDS = {
    "scenario", "params", "value", "unit", "spread", "runs", "baselines", "ratios", "ratio_spread", "p50_us",
    "p99_us", "cpu_s_per_gb", "verified",
}  # fmt: skip
BARE = {"tcp": {"raw_socket"}, "tls": {"bare_ssl"}, "unix": {"raw_unix"}, "inproc": set()}
MORE = [pytest.param(name, marks=pytest.mark.soak) for name in ("unix.get", "unix.rpc", "inproc.put")]
MAIN = "from kvferry.cli import main; main()"


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN, "bench", "transport", "--runs", "1", "--walk", "1MiB", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def lines(*args: str) -> list[dict[str, Any]]:
    done = bench(*args, "--json")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for line in found:
        assert set(line) == FIELDS
        assert line["value"] > 0
        assert line["spread"][0] <= line["value"] <= line["spread"][1]
        assert line["params"].get("failed", 0) == 0
    return found


def test_every_scenario_of_tcp() -> None:
    found = lines(
        "--scheme", "tcp", "--sizes", "64KiB", "--lanes", "1,2", "--requests", "5", "--with", "none",
        "--seconds", "0.1", "--batch", "1,4",
    )  # fmt: skip
    counts = Counter(line["scenario"].removeprefix("transport.tcp.") for line in found)
    assert counts == {"put": 8, "get": 8, "rpc": 4, "batch": 2, "rate": 2}
    for line in found:
        check(line, "tcp")


@pytest.mark.parametrize(
    "scenario",
    [
        "tls.put",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("unix.get", "unix.rpc", "inproc.put")),
    ],
)
def test_the_other_schemes(scenario: str) -> None:
    found = lines("--scenario", f"transport.{scenario}", "--sizes", "64KiB", "--requests", "5")
    assert len(found) == (2 if scenario.endswith("rpc") else 4)
    for line in found:
        check(line, scenario.partition(".")[0])


@pytest.mark.skipif(bool(unavailable()) and "CI" not in os.environ, reason=unavailable())
@pytest.mark.parametrize("operation", ["write", pytest.param("read", marks=pytest.mark.soak)])
def test_windows(operation: str) -> None:
    found = lines("--scenario", f"transport.mooncake.{operation}", "--sizes", "64KiB", "--batch", "1,4")
    assert [line["params"]["batch"] for line in found] == [1, 4]
    for line in found:
        assert line["verified"] is True
        assert set(line["ratios"]) == {"mooncake_te"}


def check(line: dict[str, Any], scheme: str) -> None:
    _, named, kind = line["scenario"].split(".")
    params = line["params"]
    assert named == scheme == params["transport"]
    assert line["verified"] is True
    assert params["operations"] > 0
    if kind in ("put", "get"):
        one_lane = {"one_lane"} if params["lanes"] == 2 else set()
        assert set(line["ratios"]) == BARE[scheme] | {"memcpy_cold"} | one_lane
        assert line["unit"] == "GB/s"
    elif kind == "rpc":
        assert set(line["ratios"]) == BARE[scheme]
        assert line["p50_us"] <= line["p99_us"]
        assert params["nbytes"] == 4096
    elif kind == "batch":
        assert set(line["ratios"]) == {"one_message", "raw_socket"}
    else:
        assert set(line["ratios"]) == {"asked"}
        assert params["lanes"] in (1, 4)


def test_a_peer_of_its_own() -> None:
    with Command("bench", "transport", "--serve", "tcp://127.0.0.1:0", "--walk", "1MiB") as peer:
        address = peer.wait_ready()["listen"]
        found = lines("--address", address, "--sizes", "64KiB", "--batch", "1", "--requests", "5")
        assert [line["scenario"] for line in found] == [
            f"transport.tcp.{kind}" for kind in ("put", "put", "get", "get", "rpc", "rpc")
        ]
        for line in found:
            assert line["params"]["peer"] == "remote"
            assert line["verified"] is True
            assert "raw_socket" in line["ratios"]
        assert peer.terminate() == 0


def test_the_table_has_the_ratios() -> None:
    done = bench("--scenario", "transport.inproc.put", "--sizes", "64KiB", "--batch", "1")
    assert done.returncode == 0, done.stderr
    assert "transport.inproc.put" in done.stdout
    assert "memcpy_cold" in done.stdout
    assert "bytes compared" in done.stdout
