"""``kvferry bench store``: every scenario runs at a tiny scale and prints its fields; no figure is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FIELDS = {
    "scenario", "params", "value", "unit", "spread", "runs", "baselines", "ratios", "ratio_spread", "p50_us",
    "p99_us", "cpu_s_per_gb", "verified",
}  # fmt: skip
BASELINES = {
    "store.save.dram": {"memcpy_cold", "memcpy_private"},
    "store.load.dram": {"memcpy_cold"},
    "store.evict": {"memcpy_cold", "memcpy_private"},
    "store.write.disk": {"disk_pattern"},
    "store.read.disk": {"disk_pattern"},
}
MAIN = "from kvferry.cli import main; main()"


def bench(folder: Path, *args: str, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN, "bench", "store", "--dir", str(folder), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def of(lines: list[dict[str, Any]], scenario: str, **params: object) -> list[dict[str, Any]]:
    return [
        line for line in lines if line["scenario"] == scenario and params.items() <= line["params"].items()
    ]


def test_every_scenario_runs_and_prints_its_fields(tmp_path: Path) -> None:
    done = bench(
        tmp_path, "--runs", "1", "--sizes", "64KiB,256KiB", "--walk", "2MiB", "--entries", "512", "--json"
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for line in lines:
        assert set(line) == FIELDS
        assert line["value"] > 0 or line["unit"] == "bytes"  # of so few entries memory need not grow
        assert line["spread"][0] <= line["value"] <= line["spread"][1]
        assert line["runs"] == 1
        assert line["params"]["cpus"] >= 1
    for scenario, baselines in BASELINES.items():
        found = of(lines, scenario)
        assert {line["params"]["nbytes"] for line in found} == {64 << 10, 256 << 10}
        for line in found:
            assert set(line["ratios"]) == baselines
            assert line["verified"] is True
            assert line["p50_us"] <= line["p99_us"]
            assert line["params"]["walk_nbytes"] == 2 << 20
            assert {"threads", "batch", "checksum"} <= set(line["params"])
            assert line["unit"] == ("us/block" if scenario == "store.load.dram" else "GB/s")
            assert (line["cpu_s_per_gb"] is None) == (scenario == "store.load.dram")
    for scenario in ("store.write.disk", "store.read.disk"):
        for line in of(lines, scenario):
            assert {"sync", "direct", "header_nbytes", "filesystem"} <= set(line["params"])
            assert line["params"]["dir"] == str(tmp_path)
    check_lookup(lines)
    check_restart(lines)
    assert not list(tmp_path.iterdir())


def check_lookup(lines: list[dict[str, Any]]) -> None:
    timed, memory = of(lines, "store.lookup", entries=512)
    assert (timed["unit"], memory["unit"]) == ("us", "bytes")
    assert timed["params"]["blocks"] == 512
    assert timed["params"]["flush_nbytes"] == 2 << 20
    assert set(timed["ratios"]) == {"plain_dict"}
    assert timed["p50_us"] <= timed["p99_us"]
    assert timed["verified"] is False


def check_restart(lines: list[dict[str, Any]]) -> None:
    ready, verified, memory = of(lines, "store.restart", entries=512)
    assert ready["params"]["measured"] == "ready"
    assert verified["params"]["measured"] == "headers verified, after ready"
    for line in (ready, verified):
        assert line["unit"] == "s"
        assert set(line["ratios"]) == {"disk_pattern"}
        assert line["verified"] is True
        assert line["params"]["spoiled"] == 8
    assert memory["unit"] == "bytes"


def test_one_scenario_is_a_table_with_its_baseline(tmp_path: Path) -> None:
    done = bench(
        tmp_path, "--scenario", "store.save.dram", "--runs", "1", "--sizes", "64KiB", "--walk", "1MiB"
    )
    assert done.returncode == 0, done.stderr
    assert "store.save.dram" in done.stdout
    assert "memcpy_cold" in done.stdout
    assert "bytes compared" in done.stdout
    assert "store.load.dram" not in done.stdout


def test_the_disk_tier_has_a_codec(tmp_path: Path) -> None:
    small = ("--runs", "1", "--sizes", "256KiB", "--walk", "2MiB", "--json")
    for scenario, codec in (("store.write.disk", "int8"), ("store.read.disk", "ebp")):
        done = bench(tmp_path, "--scenario", scenario, "--codec", codec, *small)
        assert done.returncode == 0, done.stderr
        (line,) = [json.loads(line) for line in done.stdout.splitlines()]
        assert line["params"]["codec"] == codec
        assert line["params"]["ratio"] > 1.3
        assert line["verified"] is True
        assert set(line["ratios"]) == {"disk_pattern"}
    done = bench(tmp_path, "--scenario", "store.write.disk", "--codec", "epb")
    assert done.returncode == 2
    assert "did you mean ebp" in done.stderr


def test_the_redis_tier_beside_a_client_and_a_bare_socket(tmp_path: Path) -> None:
    small = ("--runs", "1", "--sizes", "64KiB,1MiB", "--walk", "4MiB", "--json")
    for scenario, bare in (("redis.set", "raw_set"), ("redis.get", "raw_get")):
        done = bench(tmp_path, "--scenario", scenario, *small)
        assert done.returncode == 0, done.stderr
        printed = [json.loads(line) for line in done.stdout.splitlines()]
        lines = [line for line in printed if line["scenario"] == scenario]
        bars = [line for line in printed if line["scenario"] == f"{scenario}.raw"]
        for own in (lines, bars):
            assert [(line["params"]["nbytes"], line["params"]["batch"]) for line in own] == [
                (64 << 10, 1), (64 << 10, 32), (1 << 20, 1), (1 << 20, 32)
            ]  # fmt: skip
        assert [set(line["ratios"]) for line in bars] == [{"redis_py"}] * 4
        for line in lines:
            assert set(line) == FIELDS
            assert set(line["ratios"]) == {bare, "redis_py"}
            assert line["verified"] is True


def test_an_unknown_scenario_is_refused_by_name(tmp_path: Path) -> None:
    done = bench(tmp_path, "--scenario", "store.saves.dram")
    assert done.returncode == 2
    assert "store.save.dram" in done.stderr
    assert not done.stdout


MIB = 1 << 20


def misses(line: dict[str, Any]) -> list[str]:
    """Which bars of the issue a result does not reach.

    Small calls and small files are not judged by a ratio: Python takes some microseconds for each, which
    do not grow with the block.
    """
    scenario, params, ratios = line["scenario"], line["params"], line["ratios"]
    bars = {"verified": line["verified"] or scenario not in BASELINES}
    if (
        scenario == "store.save.dram"
        and params["nbytes"] >= MIB
        and params["nbytes"] * params["batch"] >= 4 * MIB
    ):
        bars["save >= 0.9 memcpy"] = ratios["memcpy_cold"] >= 0.9
    elif scenario == "store.load.dram":
        bars["load <= 20 us"] = params["batch"] > 1 or line["p50_us"] <= 20
        bars["load <= 2 us a block"] = params["batch"] < 256 or line["value"] <= 2
    elif scenario == "store.lookup":
        bars["lookup"] = line["value"] <= (400 if line["unit"] == "bytes" else 800)
    elif scenario in ("store.write.disk", "store.read.disk") and params["nbytes"] >= MIB:
        bars["disk >= 0.9 pattern"] = ratios["disk_pattern"] >= 0.9
    elif scenario == "store.restart" and line["unit"] == "s":
        bars["restart"] = line["value"] <= (3 if params["measured"] == "ready" else 20) and line["verified"]
    elif scenario.startswith(("daemon.", "redis.")):
        bars |= daemon_bars(line)
    return [f"{name}: {line}" for name, reached in bars.items() if not reached]


def daemon_bars(line: dict[str, Any]) -> dict[str, bool]:
    """Those of the daemon and of the redis tier; LMCache's server where it is installed beside it."""
    scenario, params, ratios = line["scenario"], line["params"], line["ratios"]
    nbytes, batch, url = params["nbytes"], params["batch"], params.get("url", "")
    lmcache = ratios.get("lmcache_server", 9.0)
    bars = {}
    if scenario in ("redis.set", "redis.get"):
        bars["redis >= 0.8 raw"] = ratios.get("raw_set", ratios.get("raw_get")) >= 0.8
        # at 64 KiB a bare socket is not 2.5 times as fast itself
        bars["redis >= 2.5 redis-py"] = nbytes < MIB or ratios["redis_py"] >= 2.5
    elif scenario == "daemon.load" and url.startswith("unix") and params["touch"] == "none" and nbytes == MIB:
        bars["a lease's time"] = line["p50_us"] <= (150 if batch == 1 else 450)
    elif scenario in ("daemon.save", "daemon.load") and url.startswith("unix"):
        bars["unix beside LMCache"] = lmcache >= (2.0 if scenario == "daemon.save" else 1.2)
        if scenario == "daemon.save" and nbytes * batch >= 32 * MIB:
            bars["save >= 0.85 memcpy"] = ratios["memcpy_cold"] >= 0.85
    elif scenario in ("daemon.save", "daemon.load"):
        bars["tcp beside LMCache"] = lmcache >= 1.0
        bars["tcp >= 0.85 bare"] = nbytes < MIB or ratios["tcp_bare"] >= 0.85
    return bars


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("url", ["unix:auto", "tcp:auto"])
def test_the_bars_of_the_daemon_at_full_scale(tmp_path: Path, url: str) -> None:
    done = bench(tmp_path, "--url", url, "--runs", "9", "--json", timeout=1700)
    assert done.returncode == 0, done.stderr
    missed = [miss for line in map(json.loads, done.stdout.splitlines()) for miss in misses(line)]
    assert not missed, "\n".join(missed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_bars_at_full_scale(tmp_path: Path) -> None:
    done = bench(tmp_path, "--runs", "15", "--json", timeout=3500)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    missed = [miss for line in lines for miss in misses(line)]
    single = [line["p50_us"] for line in of(lines, "store.load.dram", batch=1)]
    if max(single) > 1.5 * min(single):
        missed.append(f"a load's time grows with the block: {single}")
    assert not missed, "\n".join(missed)
