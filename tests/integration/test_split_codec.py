"""The split with a codec on the link between prefill and decode."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.core.clock import deadline_in, is_past
from kvferry.core.config import Config, StreamConfig
from kvferry.core.errors import ConfigError
from kvferry.engine.local import LocalEngine
from kvferry.engine.tiny import make_tiny
from kvferry.engine.weights import load_model
from kvferry.engine.workers.common import stream_codec
from kvferry.testing.deployment import SplitDeployment
from kvferry.wire.messages import SamplingParams

SETTINGS = [
    "model.threads=1",
    "model.max_model_len=512",
    "model.dtype=bfloat16",
    "kv.num_blocks=64",
    "store.dram_capacity=16MiB",
    "prefill.chunk_tokens=64",
    "stream.codec=ebp",
]
PROMPT = [(7 * i) % 250 for i in range(150)]  # 9 full blocks and a tail


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", max_positions=512)


@pytest.fixture(scope="module")
def split(model: Path) -> Iterator[SplitDeployment]:
    with SplitDeployment(model, SETTINGS) as deployment:
        yield deployment


def test_a_lossless_codec_changes_no_token(split: SplitDeployment, model: Path) -> None:
    with contextlib.closing(LocalEngine(load_model(model, "bfloat16"), chunk_tokens=64)) as engine:
        expected = engine.generate(PROMPT, SamplingParams(max_tokens=8)).run()
    assert split.complete(PROMPT, max_tokens=8)["kvferry"]["token_ids"] == expected
    assert split.status("prefill").stream_codec == f"ebp | {split.addresses['kv']}: ebp: configured"
    assert split.status("decode").stream_codec == "ebp"
    assert "lossy" not in split.prefill.err


def test_the_gateway_exports_what_workers_choose(split: SplitDeployment) -> None:
    split.complete([5, *PROMPT], max_tokens=1)
    figure = (
        f'kvferry_stream_codec_chosen{{codec="ebp",link="{split.addresses["kv"]}",'
        f'worker="{split.addresses["prefill"]}"}} 1.0'
    )
    limit = deadline_in(20)
    while figure not in (text := split.get("/metrics")[1].decode()):  # workers are asked every 2 s
        assert not is_past(limit), text
        time.sleep(0.05)


def test_a_lossy_codec_is_said_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        codec = stream_codec(Config(stream=StreamConfig(codec="int8")))
    assert codec.describe() == "int8 (lossy accepted)"
    assert caplog.messages == ["lossy: int8 encodes KV that is streamed; answers may differ"]
    with pytest.raises(ConfigError, match=r"stream\.codec is 'ebb'"):
        stream_codec(Config(stream=StreamConfig(codec="ebb")))
