"""Workers whose peers answer nothing, or something else than they should."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvferry.core.clock import deadline_in, is_past
from kvferry.core.config import Config
from kvferry.core.config_sources import load_config
from kvferry.core.errors import KVFerryError
from kvferry.engine.tiny import make_tiny
from kvferry.engine.workers.common import load_engine
from kvferry.engine.workers.decode_worker import DecodeWorker
from kvferry.engine.workers.prefill_worker import PrefillWorker
from kvferry.testing.deployment import is_idle
from kvferry.wire import Channel, ChannelOptions, ChannelServer
from kvferry.wire.messages import (
    BeginStream,
    Cancel,
    Describe,
    Description,
    Failure,
    Finished,
    FinishStream,
    Generate,
    GenerateReady,
    Handoff,
    LayerAck,
    Prefill,
    PutLayer,
    RngState,
    SamplingParams,
    Status,
    StatusReport,
    StreamReady,
)

OPTIONS = ChannelOptions(role="test", session="test")
SOON_S = 5.0
"""Within a fraction of a second on a quiet machine; the request itself may take a minute."""
TOKENS = 5
GREEDY = SamplingParams(max_tokens=3)
SAMPLED = SamplingParams(max_tokens=3, temperature=1.0, seed=1)
RNG = RngState(key=(1, 2), counter=(0, 0, 0, 1), buffer=(1, 2, 3, 4), buffer_pos=4)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    model = make_tiny(tmp_path_factory.mktemp("model") / "tiny", layers=1, max_positions=256)
    flags: dict[str, Any] = {
        "model.path": str(model),
        "model.threads": 1,
        "kv.num_blocks": 16,
        "store.dram_capacity": "4MiB",
        "prefill.listen": "tcp://127.0.0.1:0",
        "decode.listen": "tcp://127.0.0.1:0",
    }
    return load_config(None, flags=flags).config


@pytest.fixture(scope="module")
def prefill(config: Config) -> Iterator[str]:
    worker = PrefillWorker(load_engine(config))
    yield worker.address
    worker.close()


@pytest.fixture(scope="module")
def decode(config: Config) -> Iterator[str]:
    worker = DecodeWorker(load_engine(config))
    yield worker.address
    worker.close()


def connect(address: str) -> Channel:
    return Channel.connect(address, OPTIONS, deadline_in(SOON_S))


def wait_idle(address: str) -> None:
    channel, limit = connect(address), deadline_in(SOON_S)
    while not is_idle(found := channel.call(Status(), StatusReport, deadline=limit)):
        assert not is_past(limit), found
        threading.Event().wait(0.02)
    channel.close()


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_decode_worker_that_never_agrees_holds_no_place_of_a_request_given_up(
    prefill: str, how: str
) -> None:
    opened, over = threading.Event(), threading.Event()

    def silent(channel: Channel) -> None:
        channel.receive(deadline_in(SOON_S))
        opened.set()
        over.wait(60.0)
        channel.abort()

    decode = ChannelServer("tcp://127.0.0.1:0", OPTIONS, silent, name="test-silent")
    channel = connect(prefill)
    try:
        message = Prefill(request="r", stream="s", kv_address=decode.address, sampling=GREEDY, timeout_s=60.0)
        tokens = np.arange(40, dtype="<u4")
        channel.send(message, [tokens], deadline=deadline_in(SOON_S))
        assert opened.wait(SOON_S)
        if how == "cancel":
            channel.send(Cancel(), deadline=deadline_in(SOON_S))
            answer = channel.receive(deadline_in(SOON_S)).message
            assert isinstance(answer, Failure)
            assert answer.code == "cancelled"
        channel.close()
        wait_idle(prefill)
    finally:
        channel.close()
        over.set()
        decode.close()


def handoff(sampling: SamplingParams, **fields: Any) -> Handoff:
    given = {"prompt_tokens": TOKENS, "cached_tokens": 0, "first_token": 7, "sampling": sampling}
    return Handoff(**{**given, **fields})


def hand_over(address: str, sampling: SamplingParams, given: Handoff) -> Finished:
    """Be the gateway and the prefill worker of one request; the KV is zeros."""
    gateway, limit = connect(address), deadline_in(SOON_S)
    spec = gateway.call(Describe(), Description, deadline=limit).spec
    message = Generate(request="r", stream="s", prompt_tokens=TOKENS, sampling=sampling, timeout_s=60.0)
    kv = connect(gateway.call(message, GenerateReady, deadline=limit).kv_address)
    try:
        begin = BeginStream(stream="s", spec=spec, keys=b"", tail_tokens=TOKENS, tells_lossy=True)
        kv.call(begin, StreamReady, deadline=limit)
        rows = bytes(spec.layers[0].data_nbytes // spec.block_tokens * TOKENS)
        kv.call(PutLayer(layer=0, blocks=(0,)), LayerAck, payload=[rows], deadline=limit)
        kv.send(FinishStream(handoff=given), deadline=limit)
        while True:
            answer = gateway.receive(limit).message
            if isinstance(answer, Failure):
                raise KVFerryError(answer.message)
            if isinstance(answer, Finished):
                return answer
    finally:
        kv.close()
        gateway.close()


def test_a_handoff_of_this_request_is_taken(decode: str) -> None:
    assert hand_over(decode, GREEDY, handoff(GREEDY)).generated_tokens == 3
    assert hand_over(decode, SAMPLED, handoff(SAMPLED, rng=RNG)).generated_tokens == 3
    wait_idle(decode)


@pytest.mark.parametrize(
    ("sampling", "given", "message"),
    [
        (GREEDY, handoff(GREEDY, first_token=272), "token 272, outside the vocabulary"),
        (GREEDY, handoff(GREEDY, prompt_tokens=6), "of 6 tokens, 5 were asked"),
        (GREEDY, handoff(GREEDY, cached_tokens=2**60), r"of 5 tokens were cached"),
        (GREEDY, handoff(GREEDY, cached_tokens=5), r"5 of 5 tokens were cached"),
        (GREEDY, handoff(SAMPLED, rng=RNG), r"drawn by .*asked was"),
        (GREEDY, handoff(GREEDY, rng=RNG), "generator state given"),
        (SAMPLED, handoff(SAMPLED), "generator state missing"),
    ],
)
def test_a_handoff_of_another_request_is_refused(
    decode: str, sampling: SamplingParams, given: Handoff, message: str
) -> None:
    with pytest.raises(KVFerryError, match=message):
        hand_over(decode, sampling, given)
    wait_idle(decode)
