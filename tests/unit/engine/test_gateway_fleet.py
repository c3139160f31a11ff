"""Pairs of workers, over real ports with handlers that only describe themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectionClosedError
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.engine.gateway.errors import NoWorkerError
from kvferry.engine.gateway.fleet import Fleet, mismatch
from kvferry.engine.pools import ChannelPools
from kvferry.wire import Channel, ChannelOptions, ChannelServer
from kvferry.wire.messages import Description

LAYER = LayerSpec(tuple(TensorSpec(name, (16, 1, 8), DType.FLOAT32) for name in ("k", "v")))
LOOPBACK = "tcp://127.0.0.1:0"


def description(role: str, *, model: str = "m", **fields: Any) -> Description:
    spec = KVSpec(model=model, revision="r", layers=(LAYER,), block_tokens=16)
    values: dict[str, Any] = {"vocab_size": 100, "max_model_len": 64, **fields}
    return Description(role=role, model=model, revision="r", spec=spec, **values)


Serve = Callable[..., ChannelServer]
Start = Callable[[list[str], list[str]], Fleet]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def serve(stack: ExitStack) -> Serve:
    def start(described: Description, url: str = LOOPBACK) -> ChannelServer:
        def handler(channel: Channel) -> None:
            while True:
                try:
                    request = channel.receive(deadline_in(30))
                except ConnectionClosedError:
                    return
                channel.reply(request, described, deadline=deadline_in(20))

        server = ChannelServer(url, ChannelOptions(role="x", session="x"), handler, name="test-worker")
        stack.callback(server.close)
        return server

    return start


@pytest.fixture
def start(stack: ExitStack) -> Start:
    def begin(prefill: list[str], decode: list[str]) -> Fleet:
        pools = ChannelPools(ChannelOptions(role="gateway", session="g"))
        fleet = Fleet(prefill, decode, pools, connect_timeout_s=2.0, retry_s=0.02, refresh_s=0.05)
        stack.callback(pools.close)
        stack.callback(fleet.close)
        fleet.start()
        return fleet

    return begin


def until(holds: Callable[[], bool]) -> None:
    limit = deadline_in(20)
    while not holds():
        assert time.monotonic() < limit
        threading.Event().wait(0.01)


def reason(fleet: Fleet) -> str:
    try:
        fleet.description()
    except NoWorkerError as error:
        return str(error)
    return ""


def test_mismatch_shows_both_sides() -> None:
    ours = description("prefill")
    assert mismatch(ours, description("decode")) is None
    other = mismatch(ours, description("decode", model="n"))
    assert other is not None
    assert "prefill has m@r" in other
    assert "decode has n@r" in other
    limit = mismatch(ours, description("decode", max_model_len=32))
    assert limit == "max_model_len differs: prefill has 64, decode has 32"


def test_a_pair_is_served_once_both_are_up_and_refused_after_one_left(serve: Serve, start: Start) -> None:
    prefill = serve(description("prefill"))
    decode = serve(description("decode"))
    address = decode.address
    decode.close()
    fleet = start([prefill.address], [address])
    until(lambda: f"decode worker {address}: " in reason(fleet))
    decode = serve(description("decode"), address)
    until(lambda: reason(fleet) == "")
    assert fleet.description().model == "m"
    decode.close()
    until(lambda: address in reason(fleet))


def test_pairs_that_do_not_fit_are_refused_with_both_named(serve: Serve, start: Start) -> None:
    prefill, decode = serve(description("prefill")), serve(description("decode", vocab_size=99))
    fleet = start([prefill.address], [decode.address])
    until(lambda: "refused as a pair" in reason(fleet))
    assert prefill.address in reason(fleet)
    assert decode.address in reason(fleet)
    assert "vocab_size differs: prefill has 100, decode has 99" in reason(fleet)


def test_a_worker_of_the_other_role_is_none(serve: Serve, start: Start) -> None:
    wrong = serve(description("decode"))
    fleet = start([wrong.address], [wrong.address])
    until(lambda: "it is a decode worker, configured as prefill" in reason(fleet))


def test_requests_go_to_the_pair_with_the_least_under_way(serve: Serve, start: Start) -> None:
    prefills = [serve(description("prefill")) for _ in range(2)]
    decodes = [serve(description("decode")) for _ in range(2)]
    fleet = start([s.address for s in prefills], [s.address for s in decodes])
    until(lambda: reason(fleet) == "")
    until(lambda: all(w.description for w in fleet._workers))
    with fleet.pair() as first, fleet.pair() as second:
        assert first.prefill is not second.prefill
        assert first.decode is not second.decode
    assert all(w.in_flight == 0 for w in fleet._workers)


def test_a_worker_that_is_suspected_is_asked_again(serve: Serve, start: Start) -> None:
    prefill, decode = serve(description("prefill")), serve(description("decode"))
    fleet = start([prefill.address], [decode.address])
    until(lambda: reason(fleet) == "")
    with fleet.pair() as pair:
        fleet.suspect(pair.decode)
    until(lambda: reason(fleet) == "")
