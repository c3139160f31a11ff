"""The device suite through torch's real path for ``musa``, and that the suite sees races.

The C++ fake of ``tests/fakemusa`` stands in for the card. Everything runs in processes of its own: torch
knows one such device a process and for good, and a mutated copy engine is nobody's else.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).parents[1]
_ON_HOST = [
    str(_TESTS / "conformance" / f"test_{name}.py") for name in ("devices", "device_pools", "device_tier")
]
_SIM = [_ON_HOST[0], "-k", "TestSim and not heads_land"]
_MUSA = [str(_TESTS / "fakemusa" / "musa_suite.py")]
_HEADER = Path(sysconfig.get_paths()["include"]) / "Python.h"
_MUTATIONS = [
    "no_wait_event",
    "retire_without_query",
    "slot_freed_before_consumption",
    "copy_on_the_compute_stream",
    "host_sync_per_layer",
    "ready_event_on_the_copy_stream",
]
_POOL = [str(_TESTS / "unit" / "store_device" / "test_pool.py")]
_POOL_MUTATIONS = [
    "page_reused_before_its_copy_out_is_done",
    "held_block_evicted",
    "last_reader_forgotten",
    "copy_down_before_the_kernel",
    "copy_up_before_the_reader",
    "reader_before_the_kernel",
    "kernel_before_the_reader",
    "committed_before_it_is_copied",
]


def _missing() -> str:
    if importlib.util.find_spec("torch") is None:
        return "no torch"
    if shutil.which("g++") is None:
        return "no g++: the fake device is compiled"
    return "" if _HEADER.exists() else f"no {_HEADER}: the fake device is compiled against Python's headers"


_on_fake_musa = pytest.mark.skipif(bool(_missing()), reason=_missing())


def _pytest(*arguments: str, mutation: str = "") -> subprocess.CompletedProcess[str]:
    paths = [str(_TESTS / "fakemusa"), *(p for p in sys.path if p)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "FAKEMUSA_MUTATION": mutation}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mutations", *arguments]
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=900)


@_on_fake_musa
@pytest.mark.timeout(900)  # the first run compiles for a minute or more
def test_the_suite_on_a_fake_musa_device() -> None:
    result = _pytest(*_MUSA)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-4000:]
    assert " passed" in result.stdout


def _races() -> Iterator[Any]:
    """Each mutation with the tests that must see it."""
    for mutation in _MUTATIONS:
        yield pytest.param(_SIM, mutation, id=f"sim-{mutation}")
        marks = (pytest.mark.soak, _on_fake_musa)
        yield pytest.param(_MUSA, mutation, id=f"fakemusa-{mutation}", marks=marks)
    for mutation in _POOL_MUTATIONS:
        yield pytest.param(_POOL, mutation, id=f"pool-{mutation}", marks=pytest.mark.soak)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("tests", "mutation"), [*_races()])
def test_a_race_is_seen(tests: list[str], mutation: str) -> None:
    result = _pytest("-x", *tests, mutation=mutation)
    assert result.returncode == 1, result.stdout[-8000:] + result.stderr[-4000:]
    assert "1 failed" in result.stdout


@pytest.mark.soak
@_on_fake_musa
@pytest.mark.timeout(3600)
def test_ten_thousand_blocks_on_a_fake_musa_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_POOL_STRESS", "10000")
    monkeypatch.setenv("KVFERRY_C004_RUNS", "200")
    result = _pytest(*_MUSA, "-k", "TestFakeMusaPool")
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-4000:]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "suite",
    [
        pytest.param([*_ON_HOST, "-k", "TestCpu"], id="cpu"),
        pytest.param([*_ON_HOST, "-k", "TestSim"], id="sim"),
        pytest.param(_MUSA, id="fakemusa", marks=_on_fake_musa),
    ],
)
def test_five_and_twenty_times_without_a_flake(suite: list[str]) -> None:
    for number in range(25):
        result = _pytest(*suite, "-m", "not soak")
        assert result.returncode == 0, f"run {number}: {result.stdout[-8000:]}"
