"""The split with KV written over a region transport."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.core.config import Config, StreamConfig
from kvferry.core.errors import ConfigError
from kvferry.engine.local import LocalEngine
from kvferry.engine.tiny import make_tiny
from kvferry.engine.weights import load_model
from kvferry.engine.workers.common import open_regions
from kvferry.testing.deployment import SplitDeployment
from kvferry.transports.mooncake import unavailable
from kvferry.wire.messages import SamplingParams

pytestmark = pytest.mark.skipif(bool(unavailable()) and "CI" not in os.environ, reason=unavailable())

SETTINGS = [
    "model.threads=1",
    "model.max_model_len=512",
    "kv.num_blocks=64",
    "store.dram_capacity=16MiB",
    "prefill.chunk_tokens=64",
    "log.level=debug",
    "stream.regions=mooncake",
]
PROMPT = [(7 * i) % 250 for i in range(150)]  # 9 full blocks and a tail


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", max_positions=512)


@pytest.fixture(scope="module")
def split(model: Path) -> Iterator[SplitDeployment]:
    with SplitDeployment(model, [*SETTINGS, "stream.trusted_peers=127.0.0.1,10.0.0.0/8"]) as deployment:
        yield deployment


def test_the_same_tokens_as_in_one_process(split: SplitDeployment, model: Path) -> None:
    with contextlib.closing(LocalEngine(load_model(model), chunk_tokens=64)) as engine:
        expected = engine.generate(PROMPT, SamplingParams(max_tokens=8)).run()
    for _ in range(2):  # also with the prefix stored
        assert split.complete(PROMPT, max_tokens=8)["kvferry"]["token_ids"] == expected
    split.wait_idle(20)
    said = split.prefill.err
    assert "9 blocks go over mooncake" in said
    assert "goes by frames" not in said


def test_nothing_starts_without_trusted_peers() -> None:
    with pytest.raises(ConfigError, match=r"stream\.trusted_peers"):
        open_regions(Config(stream=StreamConfig(regions="mooncake")))
    assert open_regions(Config()) is None
