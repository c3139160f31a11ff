"""Workers whose model and pages are on a device: streams go straight out of the pages, and land in pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.config_sources import load_config
from kvferry.core.errors import ConfigError
from kvferry.device.base import Device
from kvferry.device.cpu import CpuDevice
from kvferry.engine.local import LocalEngine
from kvferry.engine.model import Model
from kvferry.engine.tiny import make_tiny
from kvferry.engine.weights import load_model
from kvferry.engine.workers import common
from kvferry.engine.workers.common import load_engine
from kvferry.engine.workers.decode_worker import DecodeWorker
from kvferry.engine.workers.prefill_worker import PrefillWorker
from kvferry.testing.blocks import wait_until
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire.messages import (
    Finished,
    Generate,
    GenerateReady,
    Prefill,
    PrefillDone,
    SamplingParams,
    TokensOut,
)

OPTIONS = ChannelOptions(role="test", session="test")
SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)
SOON_S = 60.0


def _ask(decode: str, prefill: str, number: int, prompt: list[int]) -> tuple[list[int], int]:
    """A prompt through both workers, as the gateway has it; tokens, and how many were cached."""
    soon, stream = deadline_in(SOON_S), f"s{number}"
    tokens: list[int] = []
    to_decode = Channel.connect(decode, OPTIONS, soon)
    to_prefill = Channel.connect(prefill, OPTIONS, soon)
    generate = Generate(
        request=stream, stream=stream, prompt_tokens=len(prompt), sampling=SAMPLING, timeout_s=SOON_S
    )
    ready = to_decode.call(generate, GenerateReady, deadline=soon)
    message = Prefill(
        request=stream, stream=stream, kv_address=ready.kv_address, sampling=SAMPLING, timeout_s=SOON_S
    )
    to_prefill.send(message, [np.array(prompt, "<u4")], deadline=soon)
    while not isinstance(got := to_decode.receive(soon).message, Finished):
        assert isinstance(got, TokensOut), got
        tokens += got.token_ids
    done = to_prefill.receive(soon).message
    assert isinstance(done, PrefillDone)
    for channel in (to_decode, to_prefill):
        channel.close()
    return tokens, done.cached_tokens


def check_workers(path: Path, host: Model, device: str) -> None:
    """Show that workers on a device answer as one process on the host does, and leave nothing taken."""
    flags: dict[str, Any] = {
        "model.path": str(path), "model.dtype": "float64", "model.threads": 1, "model.device": device,
        "model.block_tokens": 8, "kv.num_blocks": 24, "store.dram_capacity": "4MiB",
        "prefill.listen": "tcp://127.0.0.1:0", "decode.listen": "tcp://127.0.0.1:0",
        "prefill.chunk_tokens": 16,
    }  # fmt: skip
    config = load_config(None, flags=flags).config
    random = np.random.default_rng(3)
    first = [int(t) for t in random.integers(0, 256, 45)]
    prompts = [first, [int(t) for t in random.integers(0, 256, 61)], [*first, 1, 2, 3], first[:8], first[:5]]
    engines = [load_engine(config), load_engine(config)]
    prefill, decode = PrefillWorker(engines[0]), DecodeWorker(engines[1])
    try:
        with LocalEngine(host, block_tokens=8) as local:
            cached = []
            for number, prompt in enumerate(prompts):
                tokens, known = _ask(decode.address, prefill.address, number, prompt)
                assert tokens == local.generate(prompt, SAMPLING).run()
                cached.append(known)
        assert cached == [0, 0, 40, 0, 0]
        for engine in engines:
            kv = engine.kv
            wait_until(lambda kv=kv: kv.free_blocks == kv.num_blocks, 20)  # type: ignore[misc]
            assert engine.link is not None
    finally:
        prefill.close()
        decode.close()


@pytest.fixture(scope="module")
def path(models: Path) -> Path:
    return make_tiny(models / "worker_device", layers=2, hidden=64, head_dim=16)


@pytest.fixture
def as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host as a device like any other."""
    opened: Callable[[str], Device] = lambda _: CpuDevice()  # noqa: E731
    monkeypatch.setattr(common, "open_device", opened)


@pytest.mark.usefixtures("as_device")
def test_workers_on_a_device_answer_as_one_process(path: Path) -> None:
    check_workers(path, load_model(path, "float64"), "given")


@pytest.mark.parametrize(
    ("device", "why"),
    [("tpu:0", "tpu"), ("musa:0", "torch_musa of the same version"), ("cuda:x", "kind and a")],
)
def test_a_device_that_is_not_there_is_said_with_the_remedy(path: Path, device: str, why: str) -> None:
    config = load_config(None, flags={"model.path": str(path), "model.device": device}).config
    with pytest.raises(ConfigError, match=rf"model.device is '{device}': .*{why}.*; cpu always works"):
        load_engine(config)
