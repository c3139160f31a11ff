"""kill -9 at random points of a write load: each block is whole or absent, and nothing else is left."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
import safetensors

from kvferry.core.clock import deadline_in
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.tier import BlockRead, ReadOutcome
from kvferry.testing.blocks import block_bytes
from kvferry.testing.disk_usage import disk_usage

SCRIPT = Path(__file__).with_name("disk_writer.py")


def _load_writer() -> ModuleType:
    found = importlib.util.spec_from_file_location("disk_writer", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


writer = _load_writer()


def run_and_kill(directories: list[Path], capacity: int, seed: int, sync: str, seconds: float) -> int:
    """Kill the writer a while after its first flush; returns how many chains it had flushed."""
    arguments = [":".join(map(str, directories)), str(capacity), str(seed), sync]
    child = subprocess.Popen([sys.executable, str(SCRIPT), *arguments], stdout=subprocess.PIPE, text=True)
    flushed = [0]
    first = threading.Event()

    def listen() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("flushed") and line.endswith("\n"):
                flushed[0] = int(line.split()[1])
                first.set()

    reader = threading.Thread(target=listen)
    reader.start()
    try:
        assert first.wait(60), "the writer has not flushed anything"
        time.sleep(seconds)  # the random point
    finally:
        child.kill()
        child.wait(30)
        reader.join(30)
        assert child.stdout is not None
        child.stdout.close()
    return flushed[0]


def check(directories: list[Path], capacity: int, seed: int, flushed: int, *, all_there: bool) -> None:
    """What a restart finds."""
    tier = DiskTier("disk", DiskOptions(tuple(map(str, directories)), capacity, direct="off"))
    try:
        space = writer.space()
        tier.open(space)
        assert [p for d in directories for p in d.rglob("*.tmp")] == []
        assert sum(map(disk_usage, directories)) <= capacity
        assert tier.usage().used_nbytes == sum(map(disk_usage, directories))
        keys = [key for number in range(flushed + 2) for key in writer.chain(seed, number)]
        reads = [BlockRead(key, memoryview(bytearray(space.spec.block_nbytes))) for key in keys]
        results = tier.read_into(space, reads, deadline=deadline_in(60))
        for read, result in zip(reads, results, strict=True):
            assert result.outcome in (ReadOutcome.HIT, ReadOutcome.MISS), result.reason
            if result.outcome is ReadOutcome.HIT:
                assert bytes(read.into) == block_bytes(read.key, len(read.into))
        if all_there:
            committed = results[: flushed * writer.BLOCKS]
            assert {r.outcome for r in committed} == {ReadOutcome.HIT}
        assert tier.wait_verified(deadline=deadline_in(60))
        assert "corrupt" not in tier.usage().counters
    finally:
        tier.close()


def rounds(tmp_path: Path, count: int) -> None:
    rng = random.Random(17)
    roomy, tight = [tmp_path / "roomy"], [tmp_path / "tight0", tmp_path / "tight1"]
    for seed in range(count):
        sync = ("none", "data", "full")[seed % 3]
        seconds = rng.random() * 0.4
        if seed % 2:
            capacity = 2 << 20  # evicts all the time
            flushed = run_and_kill(tight, capacity, seed, sync, seconds)
            check(tight, capacity, seed, flushed, all_there=False)
        else:
            capacity = 8 << 30
            flushed = run_and_kill(roomy, capacity, seed, sync, seconds)
            check(roomy, capacity, seed, flushed, all_there=True)


def test_kill_at_random_points(tmp_path: Path) -> None:
    rounds(tmp_path, 4)
    for path in [p for p in tmp_path.rglob("*.safetensors") if ".quarantine" not in p.parts][:50]:
        with safetensors.safe_open(path, "np") as file:
            assert file.get_tensor("layers.0.k").shape == writer.SPEC.layers[0].tensors[0].shape


@pytest.mark.soak
def test_kill_at_random_points_50_rounds(tmp_path: Path) -> None:
    rounds(tmp_path, 50)
