"""``kvferry bench store --url``: every scenario runs at a tiny scale; no figure is judged."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MAIN = "from kvferry.cli import main; main()"


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN, "bench", "store", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.parametrize("url", ["unix:auto", "tcp:auto"])
def test_saves_and_loads_stand_beside_what_bounds_them(url: str) -> None:
    done = bench("--url", url, "--sizes", "64KiB", "--walk", "1MiB", "--runs", "1", "--json")
    assert done.returncode == 0, done.stderr
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    lines = [line for line in printed if line["scenario"].startswith("daemon.")]
    others = {line["scenario"] for line in printed if line not in lines}
    assert others == {"redis.set", "redis.set.raw", "redis.get", "redis.get.raw"}
    paged = [line for line in lines if "layout" in line["params"]]
    assert [(line["scenario"], line["params"]["layout"]) for line in paged] == [
        (f"daemon.{verb}", layout)
        for verb in ("gather", "scatter")
        for layout in ("stacked_nhd", "packed_hnd")
    ]
    assert all(line["verified"] and set(line["ratios"]) == {"memcpy_cold"} for line in paged)
    lines = [line for line in lines if line not in paged]
    found = {(line["scenario"], line["params"]["batch"], line["params"]["touch"]): line for line in lines}
    assert set(found) == {
        ("daemon.save", 1, "all"), ("daemon.save", 8, "all"),
        *(("daemon.load", batch, touch) for batch in (1, 16) for touch in ("none", "all")),
    }  # fmt: skip
    for (_, _, touch), line in found.items():
        addresses = touch == "none" and url == "unix:auto"
        assert line["unit"] == ("us" if addresses else "GB/s")
        assert set(line["ratios"]) == {"memcpy_cold"} | ({"tcp_bare"} if url == "tcp:auto" else set())
        assert line["params"]["url"] == url
        assert line["verified"] is True
        assert line["value"] > 0
        assert line["p50_us"] <= line["p99_us"]


def test_what_has_no_daemon_takes_no_url() -> None:
    done = bench("--url", "unix:auto", "--scenario", "store.lookup")
    assert done.returncode == 2
    assert "daemon.save" in done.stderr
    done = bench("--url", "unix:///nowhere/d.sock", "--sizes", "64KiB", "--walk", "1MiB", "--runs", "1")
    assert done.returncode == 1
    assert "/nowhere/d.sock" in done.stderr
