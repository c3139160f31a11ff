"""The prefill worker is killed in the middle of a transfer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.core.clock import deadline_in
from kvferry.engine.local import LocalEngine
from kvferry.engine.tiny import make_tiny
from kvferry.engine.weights import load_model
from kvferry.testing.deployment import SplitDeployment
from kvferry.wire.messages import SamplingParams

LAYERS = 8
PROMPT = np.random.default_rng(4).integers(0, 256, 500).tolist()
KV_NBYTES = len(PROMPT) * LAYERS * 2 * 2 * 32 * 4
NOTICED_S = 5.0
"""Within 1 s on a quiet machine."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", layers=LAYERS, max_positions=1024)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    torch.set_num_threads(1)
    with LocalEngine(load_model(model, "float32")) as engine:
        return list(engine.generate(PROMPT, SamplingParams(max_tokens=8)).run())


@pytest.fixture(scope="module")
def split(model: Path) -> Iterator[SplitDeployment]:
    settings = ["model.threads=1", "kv.num_blocks=64", "store.dram_capacity=64MiB"]
    slow = f"decode.kv_listen=tcp://127.0.0.1:0?rate={KV_NBYTES // 8}"  # the whole takes 8 s
    with SplitDeployment(model, settings, decode_settings=[slow]) as deployment:
        yield deployment


def kill_in_mid_stream(split: SplitDeployment, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Ask, kill the prefill worker once some of the KV has been taken, and return the answer."""
    answers: list[tuple[int, dict[str, Any]]] = []
    asking = threading.Thread(target=lambda: answers.append(split.ask(body)), name="kvferry-test-ask")
    asking.start()
    limit = deadline_in(30)
    while not (status := split.status("decode")).streams_nbytes:
        assert time.monotonic() < limit
        threading.Event().wait(0.02)
    assert status.streams_nbytes < KV_NBYTES / 2
    assert status.store_leases
    assert asking.is_alive()
    split.prefill.process.kill()
    killed = time.monotonic()
    asking.join(30)
    assert not asking.is_alive()
    assert time.monotonic() - killed < NOTICED_S
    return answers[0]


def test_a_killed_prefill_worker_leaves_nothing_and_its_successor_is_found(
    split: SplitDeployment, expected: list[int]
) -> None:
    before = split.status("decode")
    status, answer = kill_in_mid_stream(split, {"prompt": PROMPT, "max_tokens": 8, "temperature": 0})
    assert status == 502
    assert answer["error"]["type"] == "upstream_error"
    # Nothing partial is visible, and everything that was reserved is back.
    limit = deadline_in(NOTICED_S)
    while (after := split.status("decode")) != before:
        assert time.monotonic() < limit, f"{after}, before: {before}"
        threading.Event().wait(0.02)
    assert after.store_entries == 0
    assert "Traceback" not in split.decode.err
    assert split.get("/live")[0] == 200
    status, answer = split.ask({"prompt": PROMPT, "max_tokens": 8})
    assert (status, answer["error"]["code"]) in ((503, "no_worker"), (502, "connect"))

    split.prefill = split.start_prefill(split.addresses["prefill"])
    assert split.prefill.wait_ready()["listen"] == split.addresses["prefill"]
    split.wait_ready()
    figures = split.complete(PROMPT, max_tokens=8)["kvferry"]
    assert figures["token_ids"] == expected
    assert figures["kv_nbytes"] == KV_NBYTES  # decode had kept nothing of the first try
    split.wait_idle(NOTICED_S)
