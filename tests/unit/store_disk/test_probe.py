"""Whether O_DIRECT is taken: by the median of paired rounds, more of them where they do not agree."""

from __future__ import annotations

import os
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvferry.store.disk import probe
from kvferry.store.disk.files import DIRECT, Files

Round = tuple[float, float, float, float]
"""Seconds of a direct write, a cached one, a direct read, a cached one."""


def probed(folder: Path, monkeypatch: pytest.MonkeyPatch, rounds: Sequence[Round]) -> tuple[probe.Probe, int]:
    """What is found where the rounds take so long, and how many of them there were."""
    spans = iter([seconds for one in rounds for seconds in one])
    now, ticks = 0.0, 0

    def perf_counter() -> float:
        nonlocal now, ticks
        ticks += 1
        if ticks % 2 == 0:
            now += next(spans)
        return now

    monkeypatch.setattr(probe, "time", types.SimpleNamespace(perf_counter=perf_counter))
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = probe.probe_direct(Files(), root)
    finally:
        os.close(root)
    assert not list(folder.iterdir())
    return found, ticks // 8


@pytest.mark.skipif(not DIRECT, reason="this system has no O_DIRECT")
@pytest.mark.parametrize(
    ("rounds", "expected", "needed"),
    [
        ([(1.0, 1.0, 1.0, 1.0)] * 3, (True, True), 3),
        ([(1.2, 1.0, 1.2, 1.0)] * 3, (True, True), 3),  # somewhat slower: it leaves memory to others
        ([(2.0, 1.0, 1.0, 2.0)] * 3, (True, False), 3),
        ([(1.0, 2.0, 2.0, 1.0)] * 3, (False, True), 3),
        # one round that something disturbed decides nothing, neither the first nor the last
        ([(3.0, 1.0, 1.0, 1.0)] + [(1.0, 1.1, 1.0, 1.0)] * 8, (True, True), 9),
        ([(1.0, 1.0, 1.0, 3.0), (1.0, 1.0, 2.0, 1.0)] + [(1.0, 1.0, 2.0, 1.0)] * 7, (False, True), 9),
    ],
)
def test_the_median_of_rounds_decides(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rounds: list[Round],
    expected: tuple[bool, bool],
    needed: int,
) -> None:
    found, number = probed(tmp_path, monkeypatch, rounds)
    if found.text.startswith("not used"):
        pytest.skip(f"no O_DIRECT in {tmp_path}: {found.text}")
    assert (found.read, found.write) == expected
    assert number == needed
    assert "GB/s direct" in found.text
