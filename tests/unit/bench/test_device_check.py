from __future__ import annotations

import importlib.util

import pytest

from kvferry.bench.device_check import Verdict, check, judge, run_suite
from kvferry.bench.registry import Options
from kvferry.bench.results import Param, Result
from kvferry.core.errors import ConfigError


def _result(scenario: str, value: float = 1.0, *, verified: bool = True, **ratios: float) -> Result:
    params: dict[str, Param] = {"host": "registered", "compute_part": 1.0}
    unit = "GB/s" if ratios else "of the shorter"
    return Result(
        scenario=scenario, params=params, value=value, unit=unit, spread=(value, value), runs=9,
        ratios=ratios, verified=verified,
    )  # fmt: skip


def _results(copy: float, hidden: float, *, verified: bool = True) -> list[Result]:
    return [
        _result("device.copy_in", pinned_copy=0.99, memcpy_cold=0.1),
        _result("device.copy_in", pinned_copy=copy, memcpy_cold=0.1),
        _result("device.copy_out", pinned_copy=0.95, memcpy_cold=0.1),
        _result("device.gather", memcpy_cold=0.5, verified=verified),
        _result("device.scatter", memcpy_cold=0.9),
        _result("device.save_layers.hidden", hidden),
    ]


def _judged(results: list[Result], *, asynchronous: bool = True) -> dict[str, Verdict]:
    return {one.check: one for one in judge(results, asynchronous=asynchronous)}


def test_a_device_is_judged_by_its_copies_and_what_they_hide() -> None:
    good = _judged(_results(0.91, 0.92))
    assert [name for name, one in good.items() if one.ok] == ["copy_in", "copy_out", "save_layers", "bytes"]
    assert good["gather"].ok is good["scatter"].ok is None
    bad = _judged(_results(0.89, 0.88, verified=False))
    assert [name for name, one in bad.items() if one.ok is False] == ["copy_in", "save_layers", "bytes"]
    assert bad["copy_in"].value == 0.89
    assert "device.gather" in bad["bytes"].detail


def test_the_host_is_judged_by_its_pages() -> None:
    found = _judged(_results(0.91, 0.1), asynchronous=False)
    assert {name: one.ok for name, one in found.items()} == {
        "copy_in": None, "copy_out": None, "save_layers": None,
        "gather": False, "scatter": True, "bytes": True,
    }  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch")
def test_the_suites_run_in_a_process_of_their_own_and_say_what_failed() -> None:
    good = run_suite("cpu", "sizes_that_differ")
    assert good.ok
    assert good.detail == "1 passed, 0 skipped, 0 failed"
    bad = run_suite("cpu:0x", "sizes_that_differ")
    assert bad.ok is False
    assert "0 passed" in bad.detail
    assert "test_sizes_that_differ_are_refused: " in bad.detail
    assert "cpu:0x" in bad.detail


def test_a_simulated_device_is_not_checked() -> None:
    with pytest.raises(ConfigError, match="cpu, cuda or musa"):
        list(check(Options(runs=1, params={"device": "sim"}), lambda *_: None))
