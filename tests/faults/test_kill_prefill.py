"""Workers are killed, and clients leave, in the middle of a transfer over a slow link."""

from __future__ import annotations

import json
import signal
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
from kvferry.wire.messages import SamplingParams, StatusReport

LAYERS = 8
PROMPT = np.random.default_rng(4).integers(0, 256, 500).tolist()
SHORT = np.random.default_rng(5).integers(0, 256, 32).tolist()
TOKEN_NBYTES = LAYERS * 2 * 2 * 32 * 4
KV_NBYTES = len(PROMPT) * TOKEN_NBYTES
NOTICED_S = 60.0
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
    with SplitDeployment(model, settings, decode_settings=[slow, "decode.drain=60s"]) as deployment:
        yield deployment


class Asking:
    """A request in a thread of its own, until some but not all of its KV has reached decode."""

    def __init__(self, split: SplitDeployment) -> None:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self._thread = threading.Thread(
            target=lambda: self.answers.append(split.ask(body)), name="kvferry-test-ask"
        )
        self._thread.start()
        wait_mid_stream(split)
        assert self._thread.is_alive()

    def answer(self) -> tuple[int, dict[str, Any]]:
        self._thread.join(NOTICED_S)
        assert not self._thread.is_alive()
        return self.answers[0]


def wait_mid_stream(split: SplitDeployment) -> None:
    limit = deadline_in(30)
    while not (status := split.status("decode")).streams_nbytes:
        assert time.monotonic() < limit
        threading.Event().wait(0.02)
    assert status.streams_nbytes < KV_NBYTES
    assert status.store_leases


def wait_for(split: SplitDeployment, role: str, expected: StatusReport) -> None:
    limit = deadline_in(NOTICED_S)
    while (status := split.status(role)) != expected:
        assert time.monotonic() < limit, f"{status}, expected: {expected}"
        threading.Event().wait(0.02)


def test_a_killed_prefill_worker_leaves_nothing_and_its_successor_is_found(
    split: SplitDeployment, expected: list[int]
) -> None:
    short = split.complete(SHORT, max_tokens=4)["kvferry"]
    assert short["kv_nbytes"] == len(SHORT) * TOKEN_NBYTES
    split.wait_idle(NOTICED_S)
    before = split.status("decode")
    assert before.store_entries == len(SHORT) // 16
    asking = Asking(split)
    split.prefill.process.kill()
    status, answer = asking.answer()
    assert status == 502
    assert answer["error"]["type"] == "upstream_error"
    # Nothing partial is visible, and everything that was reserved is back.
    wait_for(split, "decode", before)
    assert "Traceback" not in split.decode.err
    assert split.get("/live")[0] == 200
    status, answer = split.ask({"prompt": PROMPT, "max_tokens": 8})
    assert (status, answer["error"]["code"]) in ((503, "no_worker"), (502, "connect"))

    split.prefill = split.start_prefill(split.addresses["prefill"])
    assert split.prefill.wait_ready()["listen"] == split.addresses["prefill"]
    split.wait_ready()
    # The new worker computes all of it again; decode, which has it, asks for nothing.
    again = split.complete(SHORT, max_tokens=4)["kvferry"]
    assert again["token_ids"] == short["token_ids"]
    assert (again["computed_tokens"], again["cached_tokens"], again["kv_nbytes"]) == (len(SHORT), 0, 0)
    figures = split.complete(PROMPT, max_tokens=8)["kvferry"]
    assert figures["token_ids"] == expected
    assert figures["kv_nbytes"] == KV_NBYTES  # decode had kept nothing of the first try
    split.wait_idle(NOTICED_S)


def test_a_client_that_goes_away_in_mid_transfer_frees_both_workers(split: SplitDeployment) -> None:
    connection = split.connect()
    body = {"prompt": PROMPT[::-1], "max_tokens": 8}
    connection.request("POST", "/v1/completions", json.dumps(body))
    wait_mid_stream(split)
    entries = split.status("decode").store_entries
    connection.close()
    split.wait_idle(NOTICED_S)
    assert split.status("decode").store_entries == entries
    assert split.status("decode").store_quarantined_nbytes == 0


def test_a_killed_decode_worker_frees_prefill_and_its_successor_is_found(
    split: SplitDeployment, expected: list[int]
) -> None:
    connection = split.connect()
    body = {"prompt": PROMPT[1:], "max_tokens": 8}
    connection.request("POST", "/v1/completions", json.dumps(body))
    wait_mid_stream(split)
    split.decode.process.kill()
    killed = time.monotonic()
    assert connection.getresponse().status == 502
    assert time.monotonic() - killed < NOTICED_S
    connection.close()
    split.wait_idle(NOTICED_S, roles=["prefill"])

    split.decode = split.start_decode(split.addresses["decode"])
    ready = split.decode.wait_ready()
    assert ready["listen"] == split.addresses["decode"]
    split.addresses["kv"] = ready["kv"]
    split.wait_ready()
    figures = split.complete(PROMPT, max_tokens=8)["kvferry"]
    assert figures["token_ids"] == expected
    assert figures["cached_tokens"] == len(PROMPT) // 16 * 16  # prefill had kept them
    assert figures["kv_nbytes"] == KV_NBYTES  # the new decode worker had nothing
    split.wait_idle(NOTICED_S)


def test_a_second_signal_ends_a_worker_that_still_drains(split: SplitDeployment) -> None:
    connection = split.connect()
    connection.request("POST", "/v1/completions", json.dumps({"prompt": PROMPT[2:], "max_tokens": 8}))
    wait_mid_stream(split)
    split.decode.process.send_signal(signal.SIGTERM)
    limit = deadline_in(20)
    while "a second signal stops at once" not in split.decode.err:
        assert time.monotonic() < limit
        threading.Event().wait(0.02)
    assert split.decode.process.poll() is None
    split.decode.process.send_signal(signal.SIGTERM)
    assert split.decode.wait(NOTICED_S) == 1
    assert connection.getresponse().status == 502
    connection.close()
