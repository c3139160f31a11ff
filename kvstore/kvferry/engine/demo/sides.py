"""The two sides that are compared: the split deployment, asked over HTTP, and the single process."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from kvferry.core.clock import deadline_in, is_past, time_left
from kvferry.core.errors import KVFerryError, ProtocolError, TransferTimeoutError, TransportError
from kvferry.engine.demo.processes import Child
from kvferry.engine.demo.report import PARTS, Answer

__all__ = ["Ask", "Side", "SingleProcess", "SplitDeployment"]

_ENDING_S = 0.5

OnText = Callable[[str], None]
_FIGURES = (
    "kv_nbytes",
    "wire_s",
    "transfer_gb_per_s",
    "overlap",
    "computed_tokens",
    "cached_tokens",
    "generated_tokens",
)


@dataclass(frozen=True, slots=True)
class Ask:
    """How answers are drawn; the same on both sides.

    ``timeout_s`` is for one answer.
    """

    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    timeout_s: float = 1800.0


class Side(Protocol):
    """Generates an answer from a prompt."""

    def generate(self, prompt: Sequence[int], salt: str, ask: Ask, on_text: OnText) -> Answer:
        """Generate; KV is reused only within one ``salt``. ``on_text`` gets the text as it comes."""
        ...


class SplitDeployment:
    """Gateway, prefill worker and decode worker, through the gateway's HTTP interface.

    Args:
        url: Of the gateway.
        check: Raises if one of the processes has ended; asked when a request fails.
        transport: Another way to the gateway than TCP, for tests.
    """

    def __init__(
        self, url: str, check: Callable[[], None], *, transport: httpx.BaseTransport | None = None
    ) -> None:
        # No proxy from the environment: the gateway is on this machine.
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=30.0, transport=transport)
        self._check = check

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def wait_ready(self, deadline: float) -> None:
        """Wait until the gateway has found both workers.

        Raises:
            TransferTimeoutError: Not by ``deadline``; the message has the gateway's reason.
        """
        pause = select.poll()  # no descriptors: only its timeout is used
        while True:
            self._check()
            try:
                answer = self._http.get("/ready")
                if answer.status_code == httpx.codes.OK:
                    return
                reason = _reason(answer.text)
            except httpx.HTTPError as error:
                reason = str(error)
            if is_past(deadline):
                raise TransferTimeoutError(f"the gateway is not ready in time: {reason}")
            pause.poll(50)

    def _check_ending(self) -> None:
        """Raise if a process has ended, the better explanation of a failure.

        Its connections break a moment before it can be seen to have ended.
        """
        pause, deadline = select.poll(), deadline_in(_ENDING_S)
        self._check()
        while not is_past(deadline):
            pause.poll(20)
            self._check()

    def generate(self, prompt: Sequence[int], salt: str, ask: Ask, on_text: OnText) -> Answer:
        """One streamed completion.

        Raises:
            KVFerryError: The gateway refused it or failed, with its message.
            ChildError: One of the processes has ended.
            TransferTimeoutError: Not done within ``ask.timeout_s``.
        """
        body: dict[str, Any] = {
            "prompt": list(prompt),
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "stream": True,
            "cache_salt": salt,
        }
        if ask.seed is not None:
            body["seed"] = ask.seed
        text: list[str] = []
        last: dict[str, Any] = {}
        try:
            for event in self._events(body, deadline_in(ask.timeout_s)):
                if "error" in event:
                    raise KVFerryError(f"the gateway failed: {event['error'].get('message', event['error'])}")
                piece = event["choices"][0]["text"]
                text.append(piece)
                on_text(piece)
                last = event
        except KVFerryError:
            self._check_ending()
            raise
        except httpx.HTTPError as error:
            self._check_ending()
            raise TransportError(f"the request to the gateway failed: {error!r}") from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ProtocolError(
                f"the gateway sent an event that is none of a completion: {error!r}"
            ) from error
        return _answer(len(prompt), "".join(text), last)

    def _events(self, body: dict[str, Any], deadline: float) -> Iterator[dict[str, Any]]:
        timeout = httpx.Timeout(30.0, read=max(1.0, time_left(deadline)))
        with self._http.stream("POST", "/v1/completions", json=body, timeout=timeout) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                raise KVFerryError(
                    f"the gateway refused the request ({response.status_code}): {_message(response.text)}"
                )
            for line in response.iter_lines():
                if is_past(deadline):
                    raise TransferTimeoutError("the answer was not complete in time")
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    continue
                yield json.loads(data)


def _reason(body: str) -> str:
    """Why the gateway is not ready, from the body of ``/ready``."""
    try:
        return str(json.loads(body)["reason"])
    except (ValueError, KeyError, TypeError):
        return body[:500]


def _message(body: str) -> str:
    """What an error's body says to a person; the body itself if it is none of the gateway's."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:500]


def _answer(prompt_tokens: int, text: str, last: dict[str, Any]) -> Answer:
    figures = last.get("kvferry")
    if figures is None:
        raise ProtocolError("the gateway's stream ended without figures; an answer is missing its last event")
    return Answer(
        prompt_tokens=prompt_tokens,
        token_ids=tuple(figures["token_ids"]),
        text=text,
        ttft_s={name: float(figures["ttft_s"][name]) for name in ("total", *PARTS)},
        figures={name: figures[name] for name in _FIGURES},
    )


class SingleProcess:
    """The same engine in one process (:mod:`kvferry.engine.demo.single`), asked through pipes."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._received = b""

    def wait_ready(self, deadline: float) -> None:
        """Wait until the model is loaded."""
        self._receive(deadline)

    def generate(self, prompt: Sequence[int], salt: str, ask: Ask, on_text: OnText) -> Answer:
        """One answer, whole.

        Raises:
            KVFerryError: The process could not generate it.
            ChildError: It has ended.
            TransferTimeoutError: Not done within ``ask.timeout_s``.
        """
        request = {
            "prompt": list(prompt),
            "salt": salt,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "timeout_s": ask.timeout_s,
        }
        if self._child.stdin is None:
            raise ProtocolError("the single process was started without pipes")
        try:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
        except OSError as error:
            self._child.raise_broken(error)
        reply = self._receive(deadline_in(ask.timeout_s))
        if "error" in reply:
            raise KVFerryError(f"the single process failed: {reply['error']}")
        on_text(reply["text"])
        return Answer(
            prompt_tokens=len(prompt),
            token_ids=tuple(reply["token_ids"]),
            text=reply["text"],
            ttft_s={"total": reply["ttft_s"]},
            figures={name: reply[name] for name in ("computed_tokens", "cached_tokens")},
        )

    def _receive(self, deadline: float) -> dict[str, Any]:
        """One line of JSON from the child."""
        if self._child.stdout is None:
            raise ProtocolError("the single process was started without pipes")
        descriptor = self._child.stdout.fileno()
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while b"\n" not in self._received:
            if not poller.poll(time_left(deadline) * 1000):
                raise TransferTimeoutError(f"the {self._child.name} process has not answered in time")
            data = os.read(descriptor, 1 << 16)
            if not data:
                self._child.raise_broken()
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply
