"""The split over unix sockets: workers and gateway on one machine, without a port but the gateway's."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.engine.local import LocalEngine
from kvferry.engine.tiny import make_tiny
from kvferry.engine.weights import load_model
from kvferry.testing.deployment import SplitDeployment
from kvferry.wire.messages import SamplingParams

SETTINGS = [
    "model.threads=1",
    "model.max_model_len=512",
    "kv.num_blocks=64",
    "store.dram_capacity=16MiB",
    "prefill.chunk_tokens=64",
]
PROMPT = [(7 * i) % 250 for i in range(150)]  # 9 full blocks and a tail


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", max_positions=512)


@pytest.fixture(scope="module")
def split(model: Path) -> Iterator[SplitDeployment]:
    with (
        tempfile.TemporaryDirectory(prefix="kvf-") as sockets,
        SplitDeployment(model, SETTINGS, sockets=Path(sockets)) as deployment,
    ):
        yield deployment
        assert sorted(p.name for p in Path(sockets).iterdir()) == ["decode", "decode.kv", "prefill"]


def _segments(pid: int) -> set[str]:
    """Inodes of the arena segments that a process has mapped writable."""
    found = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/memfd:kvferry-segment") and "w" in fields[1]:
            found.add(fields[4])
    return found


def test_the_same_tokens_as_in_one_process(split: SplitDeployment, model: Path) -> None:
    assert split.addresses["decode"].startswith("unix://")
    assert split.addresses["kv"] == f"{split.addresses['decode']}.kv"
    with contextlib.closing(LocalEngine(load_model(model), chunk_tokens=64)) as engine:
        expected = engine.generate(PROMPT, SamplingParams(max_tokens=8)).run()
    for _ in range(2):  # also with the prefix stored
        assert split.complete(PROMPT, max_tokens=8)["kvferry"]["token_ids"] == expected
    # prefill has written into decode's memory itself
    assert _segments(split.prefill.process.pid) & _segments(split.decode.process.pid)
