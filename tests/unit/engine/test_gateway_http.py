"""The HTTP edge over a fake router, driven through the ASGI interface so that a client can go away."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.applications import Starlette

from kvferry.core.errors import (
    CapacityError,
    ConnectError,
    KVFerryError,
    OverloadedError,
    RequestError,
    TransferTimeoutError,
)
from kvferry.engine.gateway.errors import NoWorkerError
from kvferry.engine.gateway.events import Done, Event, Failed, OnEvent, Tokens
from kvferry.engine.gateway.http import HttpLimits, create_app
from kvferry.engine.gateway.metrics import GatewayMetrics
from kvferry.engine.gateway.request import CompletionRequest, ServedModel
from kvferry.engine.gateway.timing import Marks
from kvferry.engine.tokenizer import ByteTokenizer

TIMEOUT_S = 20.0


def done(reason: str = "length", generated: int = 3) -> Done:
    return Done(reason, Marks(0.0, 0.5, 1.0, 1.25, 1.5), 5, 2, 3, generated, 4096, 0.5)


class FakeRun:
    def __init__(self, on_event: OnEvent, after_stop: Sequence[Event]) -> None:
        self.stopped = threading.Event()
        self.cancelled = threading.Event()
        self._on_event = on_event
        self._after_stop = after_stop

    def stop(self) -> None:
        self.stopped.set()
        for event in self._after_stop:
            self._on_event(event)

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class FakeRouter:
    """Reports ``events`` at once, and ``after_stop`` once a stop was asked for."""

    events: Sequence[Event] = ()
    after_stop: Sequence[Event] = ()
    not_served: KVFerryError | None = None
    refused: KVFerryError | None = None
    runs: list[FakeRun] = field(default_factory=list)
    requests: list[CompletionRequest] = field(default_factory=list)

    def served(self) -> ServedModel:
        if self.not_served is not None:
            raise self.not_served
        return ServedModel("tiny", 272, 64, ByteTokenizer())

    def submit(self, request: CompletionRequest, arrived: float, on_event: OnEvent) -> FakeRun:
        if self.refused is not None:
            raise self.refused
        assert arrived > 0
        run = FakeRun(on_event, self.after_stop)
        self.runs.append(run)
        self.requests.append(request)
        for event in self.events:
            on_event(event)
        return run


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        chunks = self.body.decode().split("\n\n")
        assert chunks[-1] == ""
        assert all(c.startswith("data: ") for c in chunks[:-1])
        data = [c.removeprefix("data: ") for c in chunks[:-1]]
        assert data[-1] == "[DONE]"
        return [json.loads(d) for d in data[:-1]]


def http(
    router: FakeRouter,
    method: str = "POST",
    path: str = "/v1/completions",
    body: object = None,
    *,
    gone_when: Callable[[], bool] | None = None,
    limits: HttpLimits = HttpLimits(),  # noqa: B008
    metrics: GatewayMetrics | None = None,
    stuck: bool = False,
    app: Starlette | None = None,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> Reply:
    """One request; with ``gone_when`` the client goes once that holds, with ``stuck`` it takes nothing."""
    app = app or create_app(router, limits, metrics or GatewayMetrics())
    reply = Reply()
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"test"), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }

    async def run() -> None:
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": data, "more_body": False}
            while gone_when is None or not gone_when():
                await asyncio.sleep(0.005)
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            if stuck:
                await asyncio.sleep(TIMEOUT_S)
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            else:
                reply.body += message.get("body", b"")

        await asyncio.wait_for(app(scope, receive, send), TIMEOUT_S)

    asyncio.run(run())
    return reply


ASK: dict[str, Any] = {"prompt": [1, 2, 3, 4, 5], "max_tokens": 3}
GOOD: list[Event] = [Tokens(0, (104,)), Tokens(1, (105, 33)), done()]


def test_a_completion() -> None:
    router = FakeRouter(GOOD)
    reply = http(router, body=ASK)
    assert reply.status == 200
    answer = reply.json
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["id"].startswith("cmpl-")
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hi!", "length")
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    figures = answer["kvferry"]
    assert figures["token_ids"] == [104, 105, 33]
    assert (figures["computed_tokens"], figures["cached_tokens"], figures["generated_tokens"]) == (3, 2, 3)
    assert (figures["kv_nbytes"], figures["wire_s"], figures["overlap"]) == (4096, 0.5, 0.5)
    assert figures["transfer_gb_per_s"] == 4096 / 0.5 / 1e9
    ttft = figures["ttft_s"]
    assert (ttft["queue"], ttft["prefill"], ttft["transfer_exposed"]) == (0.5, 0.5, 0.25)
    assert ttft["total"] == sum(ttft[k] for k in ("queue", "prefill", "transfer_exposed", "first_decode"))
    assert router.runs[0].cancelled.is_set()


def test_a_stream_is_one_event_a_batch_of_tokens_then_the_figures_then_done() -> None:
    reply = http(FakeRouter(GOOD), body={**ASK, "stream": True})
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    first, second, last = reply.events
    assert (first["choices"][0]["text"], first["choices"][0]["token_ids"]) == ("h", [104])
    assert (second["choices"][0]["text"], second["choices"][0]["finish_reason"]) == ("i!", None)
    assert (last["choices"][0]["text"], last["choices"][0]["finish_reason"]) == ("", "length")
    assert last["usage"]["total_tokens"] == 8
    assert last["kvferry"]["token_ids"] == [104, 105, 33]
    assert first["id"] == last["id"]
    assert "usage" not in first


def test_an_incomplete_character_is_held_back_and_given_at_the_end() -> None:
    tokens: list[Event] = [Tokens(0, (0xC3,)), Tokens(1, (0xA4,)), Tokens(2, (0xC3,)), done()]
    events = http(FakeRouter(tokens), body={**ASK, "stream": True}).events
    assert [e["choices"][0]["text"] for e in events] == ["", "ä", "", "\ufffd"]
    assert http(FakeRouter(tokens), body=ASK).json["choices"][0]["text"] == "ä\ufffd"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_request_at_the_worker(stream: bool) -> None:
    router = FakeRouter(
        [Tokens(0, (97,)), Tokens(1, (98, 99))], after_stop=[Tokens(3, (100,)), done("cancelled", 4)]
    )
    reply = http(router, body={**ASK, "stop": "bc", "stream": stream})
    assert router.runs[0].stopped.is_set()
    assert reply.status == 200
    answers = reply.events if stream else [reply.json]
    assert "".join(a["choices"][0]["text"] for a in answers) == "a"
    assert answers[-1]["choices"][0]["finish_reason"] == "stop"
    assert answers[-1]["kvferry"]["token_ids"] == [97, 98, 99]
    assert answers[-1]["usage"]["completion_tokens"] == 3


ERRORS = [
    (RequestError("too long"), 400),
    (OverloadedError("full"), 429),
    (CapacityError("no room"), 429),
    (NoWorkerError("none"), 503),
    (ConnectError("refused"), 502),
    (TransferTimeoutError("late"), 504),
    (KVFerryError("odd"), 502),
]


@pytest.mark.parametrize(("error", "status"), ERRORS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_has_its_status(
    error: KVFerryError, status: int, stream: bool
) -> None:
    reply = http(FakeRouter([Failed(error)]), body={**ASK, "stream": stream})
    assert reply.status == status
    assert reply.json["error"]["message"] == str(error)
    assert reply.json["error"]["code"] == error.code
    assert ("retry-after" in reply.headers) == (status in (429, 503))


def test_an_error_after_the_first_token_is_an_event_before_done() -> None:
    router = FakeRouter([Tokens(0, (104,)), Failed(ConnectError("decode went away"))])
    reply = http(router, body={**ASK, "stream": True})
    assert reply.status == 200
    first, last = reply.events
    assert first["choices"][0]["text"] == "h"
    assert last["error"]["message"] == "decode went away"
    assert "choices" not in last


def test_an_error_after_some_tokens_is_a_status_where_nothing_was_sent() -> None:
    router = FakeRouter([Tokens(0, (104,)), Failed(ConnectError("decode went away"))])
    assert http(router, body=ASK).status == 502


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_request_never_looks_complete(stream: bool) -> None:
    reply = http(FakeRouter([Tokens(0, (104,)), done("cancelled", 1)]), body={**ASK, "stream": stream})
    answers = reply.events if stream else [reply.json]
    assert answers[-1]["error"]["code"] == "cancelled"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("events", [[], [Tokens(0, (104,))]])
def test_a_client_that_goes_away_cancels_the_request(stream: bool, events: list[Event]) -> None:
    router = FakeRouter(events)
    metrics = GatewayMetrics()
    http(router, body={**ASK, "stream": stream}, gone_when=lambda: bool(router.runs), metrics=metrics)
    assert router.runs[0].cancelled.is_set()
    assert metrics.metrics.value("kvferry_gateway_requests_total", code="499") == 1
    assert metrics.metrics.value("kvferry_gateway_in_flight_requests") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_takes_nothing_is_given_up(stream: bool) -> None:
    router = FakeRouter(GOOD)
    http(router, body={**ASK, "stream": stream}, stuck=True, limits=HttpLimits(send_timeout_s=0.05))
    assert router.runs[0].cancelled.is_set()


def test_bad_requests_never_reach_the_router() -> None:
    router = FakeRouter(GOOD)
    bad: list[object] = [b"{", b"\x80", {**ASK, "max_tokens": "x"}, {**ASK, "max_token": 1}, {"prompt": []}]
    for body in bad:
        reply = http(router, body=body)
        assert reply.status == 400
        assert reply.json["error"]["type"] == "invalid_request_error"
    too_long = http(router, body={**ASK, "max_tokens": 60})
    assert "together 65: over the limit of 64" in too_long.json["error"]["message"]
    assert http(router, body={**ASK, "model": "gpt"}).status == 404
    big = http(router, body=b" " * 2000, limits=HttpLimits(max_body_nbytes=1000))
    assert (big.status, "1000 bytes" in big.json["error"]["message"]) == (400, True)
    assert router.requests == []


def test_a_body_that_is_announced_as_too_long_is_not_waited_for() -> None:
    router, limits = FakeRouter(GOOD), HttpLimits(max_body_nbytes=1000)
    # shorter than it says: only the announcement can be the reason
    for announced in (b"1001", b"9" * 30):
        reply = http(router, body=ASK, headers=[(b"content-length", announced)], limits=limits)
        assert (reply.status, "1000 bytes" in reply.json["error"]["message"]) == (400, True)
    assert http(router, body=ASK, headers=[(b"content-length", b"1000")], limits=limits).status == 200


def test_bodies_are_bounded_together_and_count_only_while_they_are_read() -> None:
    router = FakeRouter(GOOD)
    app = create_app(router, HttpLimits(max_body_nbytes=100, max_bodies_nbytes=150), GatewayMetrics())
    statuses: list[int] = []
    waiting = asyncio.Event()

    async def ask(body: bytes, rest: bytes = b"", go_on: asyncio.Event | None = None) -> None:
        parts = [body, rest] if go_on else [body]

        async def receive() -> dict[str, Any]:
            if len(parts) == 1 and go_on:
                waiting.set()  # what came before has been counted
                await go_on.wait()
            if not parts:
                await asyncio.sleep(TIMEOUT_S)
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await asyncio.wait_for(app(scope, receive, send), TIMEOUT_S)

    async def run() -> None:
        go_on = asyncio.Event()
        good = json.dumps(ASK).encode()
        slow = asyncio.create_task(ask(b" " * (90 - len(good)) + good[:-1], good[-1:], go_on))
        await asyncio.wait_for(waiting.wait(), TIMEOUT_S)
        await ask(b" " * (70 - len(good)) + good)
        assert statuses == [429]
        await ask(good)
        go_on.set()
        await slow
        await ask(b" " * (90 - len(good)) + good)
        assert statuses == [429, 200, 200, 200]

    asyncio.run(run())


def test_the_router_may_refuse() -> None:
    reply = http(FakeRouter(refused=OverloadedError("8 requests are under way")), body=ASK)
    assert (reply.status, reply.headers["retry-after"]) == (429, "1")


def test_health_and_models() -> None:
    up, down = FakeRouter(), FakeRouter(not_served=NoWorkerError("decode is not up"))
    assert http(up, "GET", "/live").status == http(down, "GET", "/live").status == 200
    assert http(up, "GET", "/ready").json == {"ready": True, "model": "tiny", "max_model_len": 64}
    reply = http(down, "GET", "/ready")
    assert (reply.status, reply.json["reason"]) == (503, "decode is not up")
    model = http(up, "GET", "/v1/models").json["data"][0]
    assert model["id"] == "tiny"
    assert abs(model["created"] - time.time()) < 60
    assert http(down, "GET", "/v1/models").status == 503
    assert http(down, body=ASK).status == 503


def test_an_answer_an_error_and_the_router_have_one_request_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    router = FakeRouter(GOOD)
    for body in (ASK, {**ASK, "stream": True}):
        reply = http(router, body=body)
        answer = reply.events[0] if "stream" in body else reply.json
        assert answer["id"] == reply.headers["x-request-id"] == router.requests[-1].id
    for bad in (http(FakeRouter(), body=b"{"), http(FakeRouter(refused=OverloadedError("full")), body=ASK)):
        name = bad.json["error"]["request_id"]
        assert name.startswith("cmpl-")
        assert name == bad.headers["x-request-id"]
        assert f"request {name} is refused" in caplog.text
    limited = FakeRouter(refused=OverloadedError("full"))
    caplog.set_level(logging.DEBUG)
    app = create_app(limited, HttpLimits(), GatewayMetrics())
    names = [http(limited, body=ASK, app=app).json["error"]["request_id"] for _ in range(2)]
    levels = [[r.levelname for r in caplog.records if name in r.getMessage()] for name in names]
    assert levels == [["INFO"], ["DEBUG"]]
    late = FakeRouter([Tokens(0, (104,)), Failed(ConnectError("gone"))])
    events = http(late, body={**ASK, "stream": True}).events
    assert events[-1]["error"]["request_id"] == events[0]["id"] == late.requests[0].id


def test_unknown_paths_and_methods_are_json_errors() -> None:
    assert http(FakeRouter(), "GET", "/v1/other").status == 404
    reply = http(FakeRouter(), "GET", "/v1/completions")
    assert (reply.status, reply.json["error"]["type"]) == (405, "invalid_request_error")


def test_metrics_count_what_was_served() -> None:
    metrics = GatewayMetrics()
    http(FakeRouter(GOOD), body=ASK, metrics=metrics)
    http(FakeRouter(GOOD), body={**ASK, "stream": True}, metrics=metrics)
    http(FakeRouter(GOOD), body=b"{", metrics=metrics)
    text = http(FakeRouter(), "GET", "/metrics", metrics=metrics).body.decode()
    assert 'kvferry_gateway_requests_total{code="200"} 2.0' in text
    assert 'kvferry_gateway_requests_total{code="400"} 1.0' in text
    assert 'kvferry_gateway_tokens_total{kind="generated"} 6.0' in text
    assert "kvferry_gateway_kv_bytes_total 8192.0" in text
    assert 'kvferry_gateway_ttft_seconds_count{part="transfer_exposed"} 2.0' in text


def test_a_bug_is_a_500_that_says_nothing_of_the_inside() -> None:
    class Broken(FakeRouter):
        def submit(self, request: CompletionRequest, arrived: float, on_event: OnEvent) -> FakeRun:
            raise ZeroDivisionError("secret")

    reply = http(Broken(), body=ASK)
    assert reply.status == 500
    assert b"secret" not in reply.body
