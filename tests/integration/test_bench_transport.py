"""``kvferry bench transport``: every scenario runs at a tiny scale, no figure is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from kvferry.bench.link.memory import LinkMemory
from kvferry.bench.registry import Options, run_group
from kvferry.bench.scenarios.transport import is_installed
from kvferry.core.errors import CorruptBlockError
from kvferry.testing.processes import Command
from kvferry.transports.mooncake import unavailable

FIELDS = {
    "scenario", "params", "value", "unit", "spread", "runs", "baselines", "ratios", "ratio_spread", "p50_us",
    "p99_us", "cpu_s_per_gb", "verified",
}  # fmt: skip
BARE: dict[str, set[str]] = {
    "tcp": {"raw_socket"}, "tls": {"bare_ssl"}, "unix": {"raw_unix"}, "ucx": {"raw_socket"}, "inproc": set(),
}  # fmt: skip
KINDS = ("put", "get", "roundtrip", "batch")
needs_mooncake = pytest.mark.skipif(bool(unavailable()) and "CI" not in os.environ, reason=unavailable())
needs_ucx = pytest.mark.skipif(
    not is_installed("ucx") and "CI" not in os.environ, reason="needs the extra ucx"
)
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
    assert counts == {"put": 8, "get": 8, "roundtrip": 4, "batch": 4, "rate": 2}
    for line in found:
        check(line, "tcp")


def here(**params: Any) -> list[dict[str, Any]]:
    """As the command has it, but in this process; with one checksum and batch unless told otherwise."""
    asked: dict[str, Any] = {
        "sizes": "64KiB",
        "requests": 5,
        "walk": "1MiB",
        "batch": "4",
        "checksum": "xxh3",
        "with": "none",
    }
    options = Options(runs=1, warmup=0, params=asked | params)
    found = [json.loads(one.to_json()) for one in run_group("transport", options, lambda *_: None)]
    for line in found:
        assert line["params"]["failed"] == 0
        assert line["value"] > 0
    return found


@pytest.mark.parametrize(
    "scenario",
    [
        *("tls.get", "tls.roundtrip", "unix.put", "unix.batch", "inproc.put", "inproc.batch"),
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in (
                "tls.put",
                "tls.batch",
                "unix.get",
                "unix.roundtrip",
                "inproc.get",
                "inproc.roundtrip",
            )
        ),
    ],
)
def test_the_other_schemes(scenario: str) -> None:
    (line,) = here(scenario=f"transport.{scenario}")
    check(line, scenario.partition(".")[0])


def test_a_rate_with_the_lanes_that_were_asked_for() -> None:
    found = here(scenario="transport.tcp.rate", lanes="1,3", seconds=0.1)
    assert [line["params"]["lanes"] for line in found] == [1, 3]


@needs_ucx
@pytest.mark.parametrize("kind", ["put", *(pytest.param(kind, marks=pytest.mark.soak) for kind in KINDS[1:])])
def test_ucx_beside_bare_ucxx(kind: str) -> None:
    found = here(scenario=f"transport.ucx.{kind}", **{"with": "ucxx"})
    assert [line["params"]["tls"] for line in found] == ["posix,cma", "tcp"]
    for line in found:
        check(line, "ucx", {"ucxx"})


@needs_mooncake
def test_tcp_beside_mooncake() -> None:
    (line,) = here(scenario="transport.tcp.put", lanes="1", **{"with": "mooncake"})
    assert line["params"]["mooncake_te_failed"] == 0
    check(line, "tcp", {name for name in line["ratios"] if name.startswith("mooncake_te")} | {"mooncake_te"})


@pytest.mark.parametrize("kind", ["put", "get"])
def test_tcp_beside_redis(kind: str) -> None:
    (line,) = here(scenario=f"transport.tcp.{kind}", lanes="1", **{"with": "redis"})
    check(line, "tcp", {"redis"})


def test_verify_compares_in_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By who received it: here for a get, the peer for a put; a wrong byte ends the benchmark."""
    compared: list[int] = []
    compare = LinkMemory.compare

    def count(self: LinkMemory, first: int, places: list[memoryview]) -> None:
        compared.append(len(places))
        compare(self, first, places)

    monkeypatch.setattr(LinkMemory, "compare", count)
    for verify in (False, True):
        for kind in ("put", "get"):  # inproc: both ends are in this process
            compared.clear()
            (line,) = here(scenario=f"transport.inproc.{kind}", verify=verify)
            assert line["params"]["verify"] is verify
            operations = line["params"]["operations"]
            assert compared == [4] * (operations * (2 if verify else 1))  # a round, and the one after all
    monkeypatch.setattr(
        LinkMemory, "compare", lambda *_: (_ for _ in ()).throw(CorruptBlockError("other bytes"))
    )
    with pytest.raises(CorruptBlockError, match="other bytes"):
        here(scenario="transport.inproc.put", verify=True)


@needs_mooncake
@pytest.mark.parametrize("operation", ["write", pytest.param("read", marks=pytest.mark.soak)])
def test_windows(operation: str) -> None:
    found = lines("--scenario", f"transport.mooncake.{operation}", "--sizes", "64KiB", "--batch", "1,4")
    assert [line["params"]["batch"] for line in found] == [1, 4]
    for line in found:
        assert line["verified"] is True
        assert set(line["ratios"]) == {"mooncake_te"}


def check(line: dict[str, Any], scheme: str, others: set[str] | None = None) -> None:
    _, named, kind = line["scenario"].split(".")
    params = line["params"]
    assert named == scheme == params["transport"]
    assert line["verified"] is True
    assert params["operations"] > 0
    if kind in ("put", "get"):
        one_lane = {"one_lane"} if params["lanes"] == 2 else set()
        handed = {"memcpy_handed"} if params.get("pinned") else set()
        expected = BARE[scheme] | {"memcpy_cold"} | one_lane | handed | (others or set())
        assert set(line["ratios"]) == expected
        assert line["unit"] == "GB/s"
    elif kind == "roundtrip":
        assert set(line["ratios"]) == BARE[scheme]
        assert line["p50_us"] <= line["p99_us"]
        assert params["nbytes"] == 4096
    elif kind == "batch":
        assert set(line["ratios"]) == {"one_message"} | BARE[scheme]
    else:
        assert set(line["ratios"]) == {"asked"}
        assert params["lanes"] in (1, 2)  # those that were asked for


@pytest.mark.parametrize("url", ["tcp://[::1]:0", pytest.param("ucx://127.0.0.1:0?tls=tcp", marks=needs_ucx)])
def test_a_server_of_its_own(url: str) -> None:
    scheme = url.partition(":")[0]
    with Command("bench", "server", "--listen", url, "--walk", "1MiB") as server:
        address = server.wait_ready()["listen"]
        if scheme == "tcp":  # what a bare host and port mean
            address = address.removeprefix("tcp://")
            found = lines(
                "--connect", address, "--sizes", "64KiB", "--batch", "1", "--requests", "5", "--verify",
                "--checksum", "off",
            )  # fmt: skip
        else:
            found = here(connect=address)
        assert [line["scenario"] for line in found] == [f"transport.{scheme}.{kind}" for kind in KINDS]
        for line in found:
            assert line["params"]["peer"] == "remote"
            assert line["params"]["verify"] is (scheme == "tcp")
            check(line, scheme)
        assert server.terminate() == 0


def test_the_table_has_the_ratios() -> None:
    done = bench("--scenario", "transport.inproc.put", "--sizes", "64KiB", "--batch", "1")
    assert done.returncode == 0, done.stderr
    assert "transport.inproc.put" in done.stdout
    assert "memcpy_cold" in done.stdout
    assert "bytes compared after the rounds" in done.stdout
