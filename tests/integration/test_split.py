"""One request through gateway, prefill worker and decode worker: real processes over a tiny model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    ConnectionClosedError,
    KVFerryError,
    RequestError,
    SpecMismatchError,
    TransferTimeoutError,
)
from kvferry.core.spec import KeyScope
from kvferry.engine.gateway.errors import NoWorkerError
from kvferry.engine.gateway.fleet import Fleet
from kvferry.engine.local import LocalEngine
from kvferry.engine.pools import ChannelPools
from kvferry.engine.tiny import make_tiny
from kvferry.engine.weights import load_model
from kvferry.testing.deployment import SplitDeployment
from kvferry.testing.pickles import telling_pickle
from kvferry.testing.processes import Command
from kvferry.wire import ChannelOptions
from kvferry.wire.messages import (
    BeginStream,
    Cancel,
    Describe,
    Description,
    Failure,
    Finished,
    Generate,
    GenerateReady,
    Prefill,
    PrefillDone,
    SamplingParams,
    StreamReady,
    TokensOut,
)

MAX_MODEL_LEN = 1900
SETTINGS = [
    "model.threads=1",
    f"model.max_model_len={MAX_MODEL_LEN}",
    "kv.num_blocks=160",
    "store.dram_capacity=64MiB",
    "prefill.chunk_tokens=64",
    "decode.max_running=4",
    "log.level=debug",
]
SLACK_S = 25.0
"""On a machine that does other things too, "soon" is tested as this: less than any limit of a worker."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_tiny(folder / "tiny", max_positions=2048)
    make_tiny(folder / "other", seed=1, layers=2, max_positions=2048)
    return folder


@pytest.fixture(scope="module")
def split(models: Path) -> Iterator[SplitDeployment]:
    with SplitDeployment(models / "tiny", SETTINGS) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def other(models: Path) -> Iterator[dict[str, str]]:
    """A prefill worker of another checkpoint."""
    settings = [word for s in SETTINGS for word in ("--set", s)]
    with Command(
        "prefill", "--listen", "tcp://127.0.0.1:0", "--model", str(models / "other"), *settings
    ) as worker:
        yield worker.wait_ready()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Single:
    """The same requests in one process, each salt with a cache of its own, as in the workers."""

    def __init__(self, path: Path) -> None:
        self._model = load_model(path, "float32")
        self._engines: dict[str, LocalEngine] = {}

    def complete(self, prompt: Sequence[int], salt: str, **params: Any) -> list[int]:
        if salt not in self._engines:
            scope = KeyScope(salt=salt.encode())
            self._engines[salt] = LocalEngine(self._model, scope=scope, chunk_tokens=64)
        return list(self._engines[salt].generate(prompt, SamplingParams(**params)).run())

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


@pytest.fixture(scope="module")
def single(models: Path) -> Iterator[Single]:
    engine = Single(models / "tiny")
    yield engine
    engine.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 256, length).tolist()
    return tokens


# ---- the same text -----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 15, 16, 17, 200])
def test_greedy_text_is_that_of_one_process_and_all_blocks_come_back(
    split: SplitDeployment, single: Single, length: int
) -> None:
    prompt = prompt_of(length, seed=length)
    answer = split.complete(prompt, max_tokens=12, cache_salt="greedy")
    split.wait_idle(SLACK_S)
    figures = answer["kvferry"]
    assert figures["token_ids"] == single.complete(prompt, "greedy", max_tokens=12)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == length
    assert figures["computed_tokens"] + figures["cached_tokens"] == length
    assert figures["kv_nbytes"] == length * 4 * 2 * 2 * 32 * 4  # layers, parts, heads, dim, float32
    ttft = figures["ttft_s"]
    parts = [ttft[k] for k in ("queue", "prefill", "transfer_exposed", "first_decode")]
    assert sum(parts) == ttft["total"] > 0
    assert min(parts) >= 0
    assert ttft["prefill"] > 0
    assert figures["wire_s"] > 0


def test_sampled_text_is_that_of_one_process_also_from_cached_blocks(
    split: SplitDeployment, single: Single
) -> None:
    params = {"max_tokens": 24, "temperature": 0.8, "top_p": 0.95, "top_k": 40, "seed": 7}
    prompt = prompt_of(100)
    first = split.complete(prompt, cache_salt="sampled", **params)
    tokens = single.complete(prompt, "sampled", **params)
    assert first["kvferry"]["token_ids"] == tokens
    assert first["kvferry"]["cached_tokens"] == 0
    # The next turn: what was said, and more. Six blocks are kept on both sides.
    turn = prompt + tokens + prompt_of(30, seed=9)
    second = split.complete(turn, cache_salt="sampled", **params)
    figures = second["kvferry"]
    assert figures["token_ids"] == single.complete(turn, "sampled", **params)
    assert figures["cached_tokens"] == second["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert figures["computed_tokens"] == len(turn) - 96
    assert figures["kv_nbytes"] == (len(turn) - 96) * 4 * 2 * 2 * 32 * 4
    # The same again, all full blocks cached: the last token is computed all the same.
    third = split.complete(turn, cache_salt="sampled", **params)
    assert third["kvferry"]["token_ids"] == figures["token_ids"]
    assert third["kvferry"]["cached_tokens"] == len(turn) // 16 * 16
    assert third["kvferry"]["computed_tokens"] >= 1


def test_salts_share_nothing(split: SplitDeployment) -> None:
    prompt = prompt_of(64, seed=3)
    for salt in ("one", "two"):
        assert split.complete(prompt, max_tokens=1, cache_salt=salt)["kvferry"]["cached_tokens"] == 0
    assert split.complete(prompt, max_tokens=1, cache_salt="one")["kvferry"]["cached_tokens"] == 48


def test_what_decode_holds_already_is_not_sent(split: SplitDeployment) -> None:
    prompt = prompt_of(64, seed=5)
    first = split.complete(prompt, max_tokens=2, cache_salt="held")["kvferry"]
    again = split.complete(prompt, max_tokens=2, cache_salt="held")["kvferry"]
    assert first["kv_nbytes"] == 64 * 4 * 2 * 2 * 32 * 4
    assert again["kv_nbytes"] == 0
    assert again["overlap"] is None
    assert again["token_ids"] == first["token_ids"]


def test_text_prompts_and_streams(split: SplitDeployment, single: Single) -> None:
    body = {"prompt": "Hello, world", "max_tokens": 10, "temperature": 0, "cache_salt": "text"}
    events = split.stream(body)
    tokens = [t for e in events for t in e["choices"][0]["token_ids"]]
    assert tokens == single.complete(list(b"Hello, world"), "text", max_tokens=10)
    assert events[-1]["kvferry"]["token_ids"] == tokens
    status, whole = split.ask(body)
    assert status == 200
    assert "".join(e["choices"][0]["text"] for e in events) == whole["choices"][0]["text"]


def test_requests_side_by_side_are_each_as_alone(split: SplitDeployment, single: Single) -> None:
    jobs = [(prompt_of(20 + 13 * n, seed=n), n) for n in range(8)]

    def ask(job: tuple[list[int], int]) -> list[int]:
        prompt, n = job
        answer = split.complete(prompt, max_tokens=20, temperature=0.7, seed=n, cache_salt=f"side {n}")
        return list(answer["kvferry"]["token_ids"])

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, jobs))
    for (prompt, n), tokens in zip(jobs, found, strict=True):
        assert tokens == single.complete(prompt, f"side {n}", max_tokens=20, temperature=0.7, seed=n)
    split.wait_idle(SLACK_S)


def test_a_stop_string_ends_the_text_and_frees_the_worker(split: SplitDeployment) -> None:
    body: dict[str, Any] = {"prompt": prompt_of(20, seed=11), "max_tokens": 400, "temperature": 0}
    whole = split.stream({**body, "max_tokens": 40})
    text = "".join(e["choices"][0]["text"] for e in whole)
    stop = next(c for c in text[2:] if c.isprintable())
    status, answer = split.ask({**body, "stop": stop})
    assert status == 200
    assert answer["choices"][0]["text"] == text[: text.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 60
    split.wait_idle(SLACK_S)


# ---- what is refused ---------------------------------------------------------------------------


def test_a_prompt_over_the_limit_is_refused_and_nothing_is_held(split: SplitDeployment) -> None:
    split.wait_idle(SLACK_S)
    before = [split.status(r) for r in ("prefill", "decode")]
    status, answer = split.ask({"prompt": prompt_of(1860), "max_tokens": 41})
    assert status == 400
    assert "1860 tokens" in answer["error"]["message"]
    assert f"limit of {MAX_MODEL_LEN}" in answer["error"]["message"]
    assert [split.status(r) for r in ("prefill", "decode")] == before


def test_workers_refuse_what_a_gateway_would_not_send(split: SplitDeployment) -> None:
    sampling = SamplingParams(max_tokens=41)
    long = Generate(request="r", stream="s", prompt_tokens=1860, sampling=sampling)
    with pytest.raises(RequestError, match=r"1860 tokens .* over the limit of 1900"):
        split.call("decode", long, GenerateReady)
    prefill = Prefill(request="r", stream="s", kv_address=split.addresses["kv"], sampling=sampling)
    for tokens, match in (
        (prompt_of(1860), "over the limit of 1900"),
        ([], "empty"),
        ([5, 999], "vocabulary"),
    ):
        with pytest.raises(RequestError, match=match):
            split.call("prefill", prefill, PrefillDone, [np.asarray(tokens, "<u4")])
    split.wait_idle(SLACK_S)


def test_a_stream_nobody_expects_is_refused(split: SplitDeployment) -> None:
    spec = split.call("decode", Describe(), Description).spec
    begin = BeginStream(stream="unknown", spec=spec, keys=b"", tail_tokens=3)
    with pytest.raises(RequestError, match="'unknown' is not expected here"):
        split.call("kv", begin, StreamReady)


def test_a_stream_that_never_starts_is_given_up_at_its_deadline(split: SplitDeployment) -> None:
    channel = split.channel("decode")
    started = time.monotonic()
    message = Generate(
        request="r", stream="never", prompt_tokens=100, sampling=SamplingParams(), kv_timeout_s=0.5
    )
    ready = channel.call(message, GenerateReady, deadline=deadline_in(20))
    assert ready.kv_address == split.addresses["kv"]
    assert split.status("decode").free_blocks < split.status("decode").total_blocks
    with pytest.raises(TransferTimeoutError, match="no prefill worker opened it"):
        channel.expect(Finished, deadline_in(20))
    channel.close()
    assert time.monotonic() - started < 0.5 + SLACK_S
    split.wait_idle(SLACK_S)


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_request_given_up_before_its_kv_came_holds_nothing(split: SplitDeployment, how: str) -> None:
    channel = split.channel("decode")
    message = Generate(request="r", stream=f"given up {how}", prompt_tokens=100, sampling=SamplingParams())
    channel.call(message, GenerateReady, deadline=deadline_in(20))
    if how == "cancel":
        channel.send(Cancel(), deadline=deadline_in(20))
        incoming = channel.receive(deadline_in(SLACK_S))
        assert isinstance(incoming.message, Failure)
        assert incoming.message.code == "cancelled"
    channel.close()
    split.wait_idle(SLACK_S)


def test_cancelling_a_generation_ends_it_with_its_figures(split: SplitDeployment) -> None:
    channel = split.channel("decode")
    prompt = prompt_of(40, seed=21)
    sampling = SamplingParams(max_tokens=1800)  # more than there is time for
    message = Generate(request="r", stream="cut short", prompt_tokens=40, sampling=sampling)
    ready = channel.call(message, GenerateReady, deadline=deadline_in(20))
    prefill = Prefill(request="r", stream="cut short", kv_address=ready.kv_address, sampling=sampling)
    split.call("prefill", prefill, PrefillDone, [np.asarray(prompt, "<u4")])
    first = channel.receive(deadline_in(20)).message
    assert isinstance(first, TokensOut)
    channel.send(Cancel(), deadline=deadline_in(20))
    while isinstance(last := channel.receive(deadline_in(SLACK_S)).message, TokensOut):
        pass
    assert isinstance(last, Finished)
    assert last.reason == "cancelled"
    assert 0 < last.generated_tokens < 1800
    channel.close()
    split.wait_idle(SLACK_S)


def test_a_client_that_goes_away_frees_both_workers(split: SplitDeployment) -> None:
    connection = split.connect()
    body = b'{"prompt": [1, 2, 3], "max_tokens": 1800, "stream": true}'
    connection.request("POST", "/v1/completions", body)
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    assert split.status("decode").running == 1
    response.close()
    connection.close()
    split.wait_idle(SLACK_S)
    assert "1800 tokens, length" not in split.decode.err


def test_specs_that_differ_are_refused_and_both_shown(split: SplitDeployment, other: dict[str, str]) -> None:
    """At start by the gateway, and when the stream opens by the workers themselves."""
    pools = ChannelPools(ChannelOptions(role="gateway", session="test"))
    fleet = Fleet([other["listen"]], [split.addresses["decode"]], pools)
    fleet.start()
    try:
        limit = deadline_in(20)
        message = ""
        while "refused as a pair" not in message:
            assert time.monotonic() < limit, message
            with pytest.raises(NoWorkerError) as caught:
                fleet.description()
            message = str(caught.value)
            threading.Event().wait(0.05)
    finally:
        fleet.close()
        pools.close()
    assert "prefill has other@" in message
    assert "decode has tiny@" in message

    sampling = SamplingParams(max_tokens=4)
    channel = split.channel("decode")
    announce = Generate(request="r", stream="mixed", prompt_tokens=20, sampling=sampling)
    ready = channel.call(announce, GenerateReady, deadline=deadline_in(20))
    split.addresses["other"] = other["listen"]
    prefill = Prefill(request="r", stream="mixed", kv_address=ready.kv_address, sampling=sampling)
    payload = [np.asarray(prompt_of(20), "<u4")]
    for leg in (
        lambda: split.call("other", prefill, PrefillDone, payload),
        lambda: channel.expect(Finished, deadline_in(20)),
    ):
        with pytest.raises(SpecMismatchError) as refused:
            leg()
        assert "other@" in str(refused.value)
        assert "tiny@" in str(refused.value)
    channel.close()
    split.wait_idle(SLACK_S)


def test_clients_that_leave_at_any_moment_leave_nothing(split: SplitDeployment, single: Single) -> None:
    """More requests than fit, half of them given up after a random while: queued, in prefill, in decode."""

    def ask(number: int) -> int:
        rng = np.random.default_rng(number)
        prompt = prompt_of(int(rng.choice([1, 16, 17, 100, 600])), seed=number)
        body = {"prompt": prompt, "max_tokens": int(rng.choice([1, 20, 200])), "stream": bool(number % 2)}
        connection = split.connect()
        try:
            connection.request("POST", "/v1/completions", json.dumps(body))
            if rng.random() < 0.5:
                threading.Event().wait(float(rng.random()) * 0.3)
                return 0
            response = connection.getresponse()
            assert b'"error"' not in response.read()
            return response.status
        finally:
            connection.close()

    with ThreadPoolExecutor(12) as pool:
        statuses = set(pool.map(ask, range(60)))
    assert statuses == {0, 200}
    split.wait_idle(SLACK_S)
    prompt = prompt_of(50, seed=50)
    answer = split.complete(prompt, max_tokens=4, cache_salt="after all")
    assert answer["kvferry"]["token_ids"] == single.complete(prompt, "after all", max_tokens=4)
    for process in (split.gateway, split.prefill, split.decode):
        assert "Traceback" not in process.err


def test_garbage_and_pickles_on_every_port_change_nothing(
    split: SplitDeployment, single: Single, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    bad = telling_pickle(marker)
    rng = np.random.default_rng(0)
    for which in ("prefill", "decode", "kv", "gateway"):
        for data in (
            bad,
            b"\x00" * 64,
            b"KVFY" + b"\xff" * 60,
            rng.bytes(4096),
            b"GET / HTTP/1.1\r\n\r\n",
            b"",
        ):
            split.raw(which, data)
    status, _ = split.ask({"prompt": [1], "garbage": "x"})
    assert status == 400
    connection = split.connect()
    connection.request("POST", "/v1/completions", bad)
    assert connection.getresponse().status == 400
    connection.close()
    assert not marker.exists()
    prompt = prompt_of(33, seed=33)
    answer = split.complete(prompt, max_tokens=4, cache_salt="after garbage")
    assert answer["kvferry"]["token_ids"] == single.complete(prompt, "after garbage", max_tokens=4)
    split.wait_idle(SLACK_S)


def test_a_taken_port_is_named_with_the_option_that_moves_it(split: SplitDeployment, models: Path) -> None:
    with Command("decode", "--listen", split.addresses["decode"], "--model", str(models / "other")) as second:
        assert second.wait() == 2
        assert split.addresses["decode"] in second.err
        assert "--listen (decode.listen)" in second.err
        assert "ready" not in second.out
    with Command("gateway", "--listen", split.addresses["gateway"]) as third:
        assert third.wait() == 2
        assert "--listen (gateway.listen)" in third.err


def test_nothing_listens_beyond_loopback(split: SplitDeployment) -> None:
    for address in split.addresses.values():
        assert "//127.0.0.1:" in address


def test_other_hosts_are_let_in_only_when_told_to(models: Path) -> None:
    for role in ("decode", "gateway"):
        more = ("--model", str(models / "tiny")) if role == "decode" else ()
        with Command(role, "--listen", "0.0.0.0:0", *more) as worker:
            assert worker.wait() == 2
            assert "wire.trusted_network=true" in worker.err
            assert f"({role}." in worker.err
            assert "ready" not in worker.out


def test_kv_is_not_sent_to_another_host(split: SplitDeployment) -> None:
    sampling = SamplingParams(max_tokens=2)
    prefill = Prefill(request="r", stream="away", kv_address="tcp://192.0.2.1:9", sampling=sampling)
    with pytest.raises(RequestError, match="not on this host"):
        split.call("prefill", prefill, PrefillDone, [np.asarray([1, 2, 3], "<u4")])
    split.wait_idle(SLACK_S, ("prefill",))


# ---- the last test of the module: it stops everything --------------------------------------------


def test_a_signal_ends_every_process_in_good_order(split: SplitDeployment) -> None:
    answers: list[tuple[int, dict[str, Any]]] = []

    def long_request() -> None:
        answers.append(split.ask({"prompt": [1, 2, 3], "max_tokens": 1800}))

    asking = threading.Thread(target=long_request, name="kvferry-test-ask")
    asking.start()
    limit = deadline_in(20)
    while not split.status("decode").running:
        assert time.monotonic() < limit
    for process in (split.gateway, split.prefill, split.decode):
        started = time.monotonic()
        assert process.terminate() == 0, process.err
        assert time.monotonic() - started < 25
        assert "Traceback" not in process.err
    asking.join(20)
    assert not asking.is_alive()
    ((status, answer),) = answers  # JSON also when its time to end was over
    assert status == 200 or answer["error"]["message"] == "the gateway is shutting down"
    with pytest.raises((ConnectionClosedError, KVFerryError, OSError)):
        split.status("decode")
