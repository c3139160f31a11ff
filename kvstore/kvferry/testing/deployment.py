"""A split deployment of the reference engine on loopback, for tests: three processes and their figures."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kvferry.core.buffers import Buf
from kvferry.core.clock import deadline_in, is_past
from kvferry.core.errors import KVFerryError, TransferTimeoutError
from kvferry.testing.processes import Command
from kvferry.testing.raw_sockets import answer_to
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire.messages import Message, Status, StatusReport

__all__ = ["SplitDeployment"]

_REQUEST_TIMEOUT_S = 60.0
M = TypeVar("M", bound=Message)

_PAUSE = threading.Event()  # never set: a pause with a time limit


class SplitDeployment:
    """Gateway, one prefill worker and one decode worker over one model folder; every port is free.

    A context manager: processes that still run at its end are killed. Methods may be called from any
    thread, those that start and stop processes from one at a time.

    Args:
        model: Folder of the checkpoint.
        settings: ``key=value`` of the configuration, for all three.
        decode_settings: For the decode worker only.
        prefill_settings: For the prefill worker only.
        sockets: Folder where the workers listen on ``unix`` sockets instead of ports; its path is short.
        listen: Where they listen otherwise.
    """

    def __init__(
        self,
        model: Path,
        settings: Sequence[str] = (),
        *,
        decode_settings: Sequence[str] = (),
        prefill_settings: Sequence[str] = (),
        sockets: Path | None = None,
        listen: str = "tcp://127.0.0.1:0",
    ) -> None:
        self._listen = listen
        self._sockets = sockets
        self._words = ["--model", str(model), *_sets(settings)]
        self._decode_words = _sets(decode_settings)
        self._prefill_words = _sets(prefill_settings)
        self._stack = ExitStack()
        self.decode: Command
        self.prefill: Command
        self.gateway: Command
        self.addresses: dict[str, str] = {}

    def __enter__(self) -> SplitDeployment:
        try:
            self.decode = self.start_decode(self._free_address("decode"))
            self.prefill = self.start_prefill(self._free_address("prefill"))
            ready = self.decode.wait_ready()
            self.addresses |= {"decode": ready["listen"], "kv": ready["kv"]}
            self.addresses["prefill"] = self.prefill.wait_ready()["listen"]
            pair = ["--prefill", self.addresses["prefill"], "--decode", self.addresses["decode"]]
            self.gateway = self._start("gateway", "--listen", "http://127.0.0.1:0", *pair, *self._words)
            self.addresses["gateway"] = self.gateway.wait_ready()["listen"]
            self.wait_ready()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _free_address(self, role: str) -> str:
        return self._listen if self._sockets is None else f"unix://{self._sockets}/{role}"

    def _start(self, *words: str) -> Command:
        return self._stack.enter_context(Command(*words))

    def start_decode(self, listen: str) -> Command:
        """Start a decode worker at ``listen``; the caller waits until it is ready."""
        return self._start("decode", "--listen", listen, *self._words, *self._decode_words)

    def start_prefill(self, listen: str) -> Command:
        """Start a prefill worker at ``listen``; the caller waits until it is ready."""
        return self._start("prefill", "--listen", listen, *self._words, *self._prefill_words)

    # ---- HTTP ------------------------------------------------------------------------------------

    def connect(self) -> http.client.HTTPConnection:
        """A connection to the gateway, for the caller to close."""
        url = urlsplit(self.addresses["gateway"])
        assert url.hostname is not None
        return http.client.HTTPConnection(url.hostname, url.port, timeout=_REQUEST_TIMEOUT_S)

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET."""
        connection = self.connect()
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def ask(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body of a completion that does not stream."""
        connection = self.connect()
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
            )
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def complete(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:  # noqa: ANN401
        """The answer to a prompt of token ids, greedy unless told otherwise.

        Raises:
            KVFerryError: If it is no 200.
        """
        status, answer = self.ask({"prompt": list(prompt), "temperature": 0, **fields})
        if status != http.client.OK:
            raise KVFerryError(f"status {status}: {answer}")
        return answer

    def stream(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All events of a completion that streams, without the closing ``[DONE]``."""
        connection = self.connect()
        try:
            connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}))
            lines = connection.getresponse().read().decode().split("\n\n")
        finally:
            connection.close()
        data = [line.removeprefix("data: ") for line in lines if line]
        if data[-1:] != ["[DONE]"]:
            raise KVFerryError(f"a stream without its end: {data[-1:]}")
        return [json.loads(d) for d in data[:-1]]

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the gateway has found both workers.

        Raises:
            TransferTimeoutError: If it has not in time; with its reason.
        """
        deadline = deadline_in(timeout_s)
        while (answer := self.get("/ready"))[0] != http.client.OK:
            if is_past(deadline):
                raise TransferTimeoutError(f"the gateway is not ready: {answer[1]!r}")
            _PAUSE.wait(0.05)

    # ---- workers ---------------------------------------------------------------------------------

    def channel(self, which: str) -> Channel:
        """A channel to ``prefill``, ``decode`` or ``kv``, for the caller to close."""
        options = ChannelOptions(role="test", session="test")
        return Channel.connect(self.addresses[which], options, deadline_in(10.0))

    def call(self, which: str, message: Message, reply_type: type[M], payload: Sequence[Buf] = ()) -> M:
        """One request on a connection of its own; raises what the worker answers."""
        channel = self.channel(which)
        try:
            return channel.call(message, reply_type, payload=payload, deadline=deadline_in(20.0))
        finally:
            channel.close()

    def status(self, role: str) -> StatusReport:
        """How the ``prefill`` or ``decode`` worker stands."""
        return self.call(role, Status(), StatusReport)

    def wait_idle(self, timeout_s: float, roles: Sequence[str] = ("prefill", "decode")) -> None:
        """Wait until workers hold nothing: all paged blocks free, no lease, no stream, no request.

        Raises:
            TransferTimeoutError: If that is not so in time; with their states.
        """
        deadline = deadline_in(timeout_s)
        while True:
            found = [self.status(role) for role in roles]
            if all(map(is_idle, found)):
                return
            if is_past(deadline):
                raise TransferTimeoutError(f"workers hold something after {timeout_s:g} s: {found}")
            _PAUSE.wait(0.02)

    def raw(self, which: str, data: bytes) -> bytes:
        """Send bytes to a port, say that there are no more, and return what came back until the end."""
        return answer_to(self.addresses[which], data)


def is_idle(status: StatusReport) -> bool:
    """Whether a worker holds nothing for any request; what it keeps for reuse does not count."""
    held = status.total_blocks - status.free_blocks
    counts = (held, status.running, status.waiting, status.streams, status.store_leases)
    return not any((*counts, status.store_pinned_nbytes, status.store_quarantined_nbytes))


def _sets(settings: Sequence[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]
