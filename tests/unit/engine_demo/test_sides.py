from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError, ProtocolError, TransferTimeoutError, TransportError
from kvferry.engine.demo.display import printable
from kvferry.engine.demo.processes import ChildError, Processes
from kvferry.engine.demo.sides import Ask, SingleProcess, SplitDeployment

FIGURES: dict[str, Any] = {
    "ttft_s": {"total": 1.0, "queue": 0.1, "prefill": 0.7, "transfer_exposed": 0.1, "first_decode": 0.1},
    "kv_nbytes": 10,
    "wire_s": 0.1,
    "transfer_gb_per_s": 1e-7,
    "overlap": 0.0,
    "computed_tokens": 3,
    "cached_tokens": 0,
    "generated_tokens": 2,
    "token_ids": [7, 8],
}


def event(text: str, **more: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text}], **more}


def sse(*events: object) -> bytes:
    return b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events) + b"data: [DONE]\n\n"


def split(
    handler: Callable[[httpx.Request], httpx.Response], check: Callable[[], None] = lambda: None
) -> SplitDeployment:
    return SplitDeployment("http://gateway", check, transport=httpx.MockTransport(handler))


def test_a_stream_becomes_an_answer() -> None:
    asked: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(200, content=sse(event("a"), event("b"), event("", kvferry=FIGURES)))

    seen: list[str] = []
    answer = split(handler).generate([1, 2, 3], "salt", Ask(5, 0.5, 9), seen.append)
    assert (answer.text, answer.token_ids, answer.prompt_tokens) == ("ab", (7, 8), 3)
    assert answer.ttft_s == FIGURES["ttft_s"]
    assert answer.figures["kv_nbytes"] == 10
    assert seen == ["a", "b", ""]
    assert asked == [
        {
            "prompt": [1, 2, 3],
            "max_tokens": 5,
            "temperature": 0.5,
            "seed": 9,
            "stream": True,
            "cache_salt": "salt",
        }
    ]


@pytest.mark.parametrize(
    ("response", "kind", "says"),
    [
        (httpx.Response(400, text="over the limit of 8"), KVFerryError, "400.*over the limit of 8"),
        (
            httpx.Response(400, json={"error": {"message": "too long"}}),
            KVFerryError,
            r"^the gateway refused the request \(400\): too long$",
        ),
        (
            httpx.Response(200, content=sse(event("a"), {"error": {"message": "worker gone"}})),
            KVFerryError,
            "gone",
        ),
        (httpx.Response(200, content=sse(event("a"))), ProtocolError, "without figures"),
        (httpx.Response(200, content=sse({"choices": []})), ProtocolError, "none of a completion"),
        (httpx.Response(200, content=b"data: {oops\n\n"), ProtocolError, "none of a completion"),
    ],
)
def test_what_goes_wrong_at_the_gateway_is_said(
    response: httpx.Response, kind: type[KVFerryError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        split(lambda _: response).generate([1], "s", Ask(5), lambda _: None)


def test_a_lost_connection_names_the_process_that_ended() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset", request=request)

    def check() -> None:
        raise ChildError("the decode process ended", name="decode")

    with pytest.raises(TransportError, match="request to the gateway failed"):
        split(handler).generate([1], "s", Ask(5), lambda _: None)
    with pytest.raises(ChildError, match="decode"):
        split(handler, check).generate([1], "s", Ask(5), lambda _: None)
    with pytest.raises(ChildError, match="decode"):
        split(lambda _: httpx.Response(502), check).generate([1], "s", Ask(5), lambda _: None)


def test_a_process_that_is_seen_to_have_ended_a_moment_later_is_named_too() -> None:
    asked = 0

    def check() -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise ChildError("the prefill process ended", name="prefill")

    with pytest.raises(ChildError, match="prefill"):
        split(lambda _: httpx.Response(502), check).generate([1], "s", Ask(5), lambda _: None)


def test_an_answer_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(TransferTimeoutError, match="not complete in time"):
        split(lambda _: httpx.Response(200, content=sse(event("a")))).generate(
            [1], "s", Ask(5, timeout_s=-1.0), lambda _: None
        )


def test_waiting_for_the_gateway_gives_its_reason() -> None:
    replies: Iterator[httpx.Response] = iter([httpx.Response(503, text="no worker"), httpx.Response(200)])
    split(lambda _: next(replies)).wait_ready(deadline_in(30))
    with pytest.raises(TransferTimeoutError, match=r"in time: no decode worker$"):
        split(lambda _: httpx.Response(503, json={"reason": "no decode worker"})).wait_ready(deadline_in(0.1))


ECHO = """if True:
    import json, sys
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["salt"] == "bad":
            print(json.dumps({"error": "no room"}), flush=True)
        elif request["salt"] == "die":
            sys.exit("ouch")
        elif request["salt"] != "mute":
            print(json.dumps({"ttft_s": 0.5, "token_ids": request["prompt"], "text": "x" * 200000,
                              "computed_tokens": 1, "cached_tokens": 2}), flush=True)
"""


def test_the_single_process_answers_through_pipes() -> None:
    with Processes() as children:
        single = SingleProcess(children.start("single", [sys.executable, "-c", ECHO], talks=True))
        single.wait_ready(deadline_in(30))
        ask = Ask(5, timeout_s=30.0)
        answer = single.generate([4, 5], "s", ask, lambda _: None)
        assert (answer.token_ids, len(answer.text), answer.ttft_s) == ((4, 5), 200000, {"total": 0.5})
        with pytest.raises(KVFerryError, match="no room"):
            single.generate([4], "bad", ask, lambda _: None)
        with pytest.raises(TransferTimeoutError, match="not answered in time"):
            single.generate([4], "mute", Ask(5, timeout_s=0.1), lambda _: None)
        with pytest.raises(ChildError, match="exit status 1") as raised:
            single.generate([4], "die", ask, lambda _: None)
        assert raised.value.tail == "ouch"
        with pytest.raises(ChildError):
            single.generate([4], "s", ask, lambda _: None)


def test_what_a_model_says_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\n\tc é") == "a\ufffd[2Jb\ufffd\n\ufffdc é"
