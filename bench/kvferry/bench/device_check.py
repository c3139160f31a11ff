"""``kvferry bench device --check``: suites and benchmark on one device, and whether it is as it should be."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

import msgspec

from kvferry.bench.pairing import Progress
from kvferry.bench.registry import Options
from kvferry.bench.results import Result
from kvferry.bench.scenarios import device as bench
from kvferry.core.errors import ConfigError, PluginUnavailableError
from kvferry.core.install_hint import install_hint
from kvferry.device import open_device

__all__ = ["Verdict", "check", "judge", "run_suite"]

_SUITE_S: Final = 200.0
_WHOLE_S: Final = 300.0
_COPY: Final = 0.9
_HIDDEN: Final = 0.9
_PAGES: Final = 0.8
_MOST_NAMES: Final = 8


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the check.

    Attributes:
        check: What.
        value: Its figure.
        bar: What it has to be at least (``took``: at most).
        ok: Whether it is; ``None`` where this device cannot be judged by it.
        detail: In words.
    """

    check: str
    value: float
    bar: float
    ok: bool | None
    detail: str

    def to_json(self) -> str:
        """One line."""
        return msgspec.json.encode(self).decode()


def check(options: Options, progress: Progress) -> Iterator[Result | Verdict]:
    """Run everything: verdict of the suites, results of the benchmark, verdicts of those.

    Raises:
        ConfigError: If the device cannot be checked, or pytest is missing; see :func:`open_device`.
    """
    started = time.monotonic()
    name = str(options.param("device", "cpu"))
    if name.partition(":")[0] == "sim":
        raise ConfigError("the check is for a device of this machine: cpu, cuda or musa")
    asynchronous = open_device(name).asynchronous
    progress("suites of devices, pools and tiers", 0, 1)
    yield run_suite(name)
    results: list[Result] = []
    for result in bench.run(options, progress):
        results.append(result)
        yield result
    yield from judge(results, asynchronous=asynchronous)
    took = time.monotonic() - started
    yield Verdict(check="took", value=took, bar=_WHOLE_S, ok=took <= _WHOLE_S, detail="seconds in all")


def run_suite(device: str, select: str = "") -> Verdict:
    """Run the suites of :mod:`kvferry.testing.real_device` in a process of their own.

    Args:
        device: Its name.
        select: Only tests of such names, as pytest's ``-k`` takes them.

    Raises:
        PluginUnavailableError: Without pytest.
    """
    if importlib.util.find_spec("pytest") is None:
        raise PluginUnavailableError(f"the check needs pytest: {install_hint('dev')}")
    environment = os.environ | {"KVFERRY_CHECK_DEVICE": device}
    environment |= {"KVFERRY_POOL_STRESS": "2000", "KVFERRY_C004_RUNS": "200"} if not select else {}
    for variable in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST"):
        environment.pop(variable, None)
    with tempfile.TemporaryDirectory(prefix="kvf-check-") as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir",
            folder, f"--junit-xml={report}", "-k", select, "--pyargs", "kvferry.testing.real_device",
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=_SUITE_S, check=False
            )
        except subprocess.TimeoutExpired:
            return _suite(0, False, f"not done within {_SUITE_S:g} s")
        if not report.exists():
            return _suite(0, False, (done.stderr or done.stdout).strip()[-2000:])
        return _read(report)


def _suite(passed: int, ok: bool, detail: str) -> Verdict:
    return Verdict(check="suite", value=passed, bar=1, ok=ok, detail=detail)


def _read(report: Path) -> Verdict:
    cases = list(ET.parse(report).iter("testcase"))  # noqa: S314 - our own child wrote it
    failed = [
        f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}: "
        f"{(problem.get('message') or '').splitlines()[0] if problem.get('message') else problem.tag}"
        for case in cases
        if (problem := _problem(case)) is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - skipped - len(failed)
    text = f"{passed} passed, {skipped} skipped, {len(failed)} failed"
    return _suite(passed, bool(passed) and not failed, "\n".join([text, *failed[:_MOST_NAMES]]))


def _problem(case: ET.Element) -> ET.Element | None:
    failure = case.find("failure")
    return case.find("error") if failure is None else failure


def judge(results: Sequence[Result], *, asynchronous: bool) -> Iterator[Verdict]:
    """Bars of the figures.

    Args:
        results: Of the benchmark.
        asynchronous: Whether the device works behind the caller; the host has no pinned copies, and computes
            with what copies.
    """
    for way in ("copy_in", "copy_out"):
        ratios = [
            one.ratios["pinned_copy"]
            for one in results
            if one.scenario == f"device.{way}" and one.params["host"] == "registered" and asynchronous
        ]
        yield _bar(way, ratios, _COPY, "of a bare copy of pinned memory, the worst of the sizes")
    hidden = [
        one.value
        for one in results
        if one.scenario == "device.save_layers.hidden" and one.params["compute_part"] == 1.0 and asynchronous
    ]
    yield _bar("save_layers", hidden, _HIDDEN, "of the copies hidden behind products of matrices as long")
    for way in ("gather", "scatter"):
        ratios = [
            one.ratios["memcpy_cold"]
            for one in results
            if one.scenario == f"device.{way}" and not asynchronous
        ]
        yield _bar(way, ratios, _PAGES, "of a cold memcpy, the worse of the layouts")
    wrong = [one.scenario for one in results if not one.verified and one.unit == "GB/s"]
    detail = f"wrong: {', '.join(wrong)}" if wrong else "all bytes of the benchmark are right"
    yield Verdict(check="bytes", value=len(wrong), bar=0, ok=not wrong, detail=detail)


def _bar(name: str, values: Sequence[float], bar: float, of: str) -> Verdict:
    if not values:
        return Verdict(check=name, value=0.0, bar=bar, ok=None, detail="not judged on this device")
    return Verdict(check=name, value=min(values), bar=bar, ok=min(values) >= bar, detail=of)
