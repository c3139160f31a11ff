"""Connected channels, raw peers that break the rules, and an example of each message."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

import pytest

from kvferry import transports
from kvferry.core.clock import deadline_in
from kvferry.core.spec import DType, KeyScope, KVSpec, LayerSpec, TensorSpec
from kvferry.transports import Connection
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire import messages as m
from kvferry.wire.messages import Message

T = TypeVar("T")

_numbers = itertools.count()


class Example(NamedTuple):
    """One frame of each message type; ``name`` is its key in the golden vectors."""

    name: str
    message: Message
    payload: bytes = b""
    request_id: int = 0


def _spec() -> KVSpec:
    tensors = tuple(TensorSpec(name, (16, 2, 8), DType.BFLOAT16) for name in ("k", "v"))
    return KVSpec(model="tiny", revision="r1", layers=(LayerSpec(tensors),) * 2, block_tokens=16)


def _examples() -> list[Example]:
    spec = _spec()
    sampling = m.SamplingParams(
        max_tokens=8, temperature=0.5, top_k=40, top_p=0.9, seed=7, stop_token_ids=(2,)
    )
    rng = m.RngState(key=(1, 2**64 - 1), counter=(1, 2, 3, 4), buffer=(5, 6, 7, 8), buffer_pos=4)
    handoff = m.Handoff(
        prompt_tokens=35,
        cached_tokens=16,
        first_token=11,
        sampling=sampling,
        rng=rng,
        started_at=1.5,
        kv_written_at=2.25,
    )
    scope = KeyScope(adapter="lora", adapter_revision="", salt=b"\x00salt")
    return [
        Example(
            "hello",
            m.Hello(
                min_version=1,
                max_version=1,
                session="s-1",
                role="prefill",
                capabilities=("a", "b"),
                credential=b"\xffsecret",
                checksum=False,
                sent_at=10.5,
            ),
        ),
        Example(
            "welcome",
            m.Welcome(
                version=1,
                session="s-2",
                epoch="e0",
                role="decode",
                capabilities=("a",),
                received_at=20.5,
                sent_at=20.75,
            ),
        ),
        Example("failure", m.Failure(code="capacity", message="arena is full", retryable=True), b"", 3),
        Example("ping", m.Ping(), b"", 2**64 - 1),
        Example("pong", m.Pong(at=1.0)),
        Example(
            "begin_stream",
            m.BeginStream(
                stream="st", spec=spec, keys=bytes(range(64)), tail_tokens=3, scope=scope, timeout_s=5.0
            ),
        ),
        Example("stream_ready", m.StreamReady(missing=(0, 1, 300), ring=4)),
        Example("put_layer", m.PutLayer(layer=1, blocks=(0, 70000)), bytes(range(256)) * 4),
        Example("layer_ack", m.LayerAck(count=2)),
        Example("finish_stream", m.FinishStream(handoff=handoff)),
        Example("stream_done", m.StreamDone(stored_blocks=2, kv_nbytes=4096, wire_s=0.125, complete_at=3.0)),
        Example("abort_stream", m.AbortStream(reason="prefill stopped")),
        Example("describe", m.Describe()),
        Example(
            "description",
            m.Description(
                role="decode",
                model="tiny",
                revision="r1",
                spec=spec,
                vocab_size=259,
                max_model_len=2048,
                eos_token_ids=(2,),
                kv_address="tcp://127.0.0.1:8430",
                running=1,
                queued=2,
                max_prompt_tokens=2000,
            ),
        ),
        Example(
            "prefill",
            m.Prefill(
                request="r", stream="st", kv_address="tcp://[::1]:8430", sampling=sampling, timeout_s=9.5
            ),
            b"\x01\x00\x00\x00\x02\x00\x00\x00",
            9,
        ),
        Example(
            "prefill_done",
            m.PrefillDone(
                prompt_tokens=35,
                cached_tokens=16,
                computed_tokens=19,
                first_token=11,
                started_at=1.0,
                kv_written_at=2.0,
                wire_s=0.5,
                kv_nbytes=8192,
            ),
        ),
        Example("generate", m.Generate(request="r", stream="st", prompt_tokens=35, sampling=sampling)),
        Example("generate_ready", m.GenerateReady(kv_address="tcp://127.0.0.1:8430")),
        Example("tokens", m.TokensOut(index=3, token_ids=(1, 2, 4294967295))),
        Example(
            "finished",
            m.Finished(
                reason="stop",
                generated_tokens=8,
                kv_complete_at=1.0,
                first_token_at=2.0,
                kv_nbytes=8192,
                wire_s=0.5,
                finished_at=3.0,
            ),
        ),
        Example("cancel", m.Cancel()),
        Example("status", m.Status()),
        Example("status_report", m.StatusReport(role="decode", free_blocks=10, total_blocks=12, running=1)),
    ]


@pytest.fixture
def spec() -> KVSpec:
    """A small spec of two layers."""
    return _spec()


@pytest.fixture(scope="session")
def examples() -> list[Example]:
    """One frame of each message type."""
    return _examples()


class Connect(Protocol):
    """Makes two connected ends: client, server."""

    def __call__(self, kind: str = "tcp") -> tuple[Connection, Connection]: ...


class Pair(Protocol):
    """Makes two channels after their handshake: client, server."""

    def __call__(
        self,
        kind: str = "tcp",
        *,
        client: ChannelOptions | None = None,
        server: ChannelOptions | None = None,
    ) -> tuple[Channel, Channel]: ...


class Spawn(Protocol):
    """Runs a call in another thread."""

    def __call__(self, call: Callable[[], T], /) -> Future[T]: ...


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Runs calls in other threads, which the test's end joins."""
    with ThreadPoolExecutor(8) as executor:
        yield executor.submit


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes connections over a transport; they are aborted after the test."""
    made: list[Connection] = []

    def make(kind: str = "tcp") -> tuple[Connection, Connection]:
        url = "tcp://127.0.0.1:0" if kind == "tcp" else f"inproc://wire-test-{next(_numbers)}"
        listener = transports.listen(url)
        made.append(transports.connect(listener.address, deadline_in(5)))
        made.append(listener.accept(deadline_in(5)))
        listener.close()
        return made[-2], made[-1]

    yield make
    for connection in made:
        connection.abort()


@pytest.fixture
def pair(connect: Connect, spawn: Spawn) -> Pair:
    """Makes channels over a transport."""

    def make(
        kind: str = "tcp",
        *,
        client: ChannelOptions | None = None,
        server: ChannelOptions | None = None,
    ) -> tuple[Channel, Channel]:
        here, there = connect(kind)
        server_options = server or ChannelOptions(role="server", session="s-server")
        accepted = spawn(lambda: Channel.accept(there, server_options, deadline_in(5)))
        client_options = client or ChannelOptions(role="client", session="s-client")
        opened = Channel.open(here, client_options, deadline_in(5))
        return opened, accepted.result(5)

    return make


@pytest.fixture
def raw_server() -> Iterator[Callable[[Callable[[socket.socket], None]], str]]:
    """Starts a server that treats each connection as it is told; returns its URL."""
    servers: list[tuple[socket.socket, threading.Thread]] = []

    def start(behave: Callable[[socket.socket], None]) -> str:
        server = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            while True:
                try:
                    sock, _ = server.accept()
                except OSError:
                    return
                with sock:
                    sock.settimeout(10)
                    try:
                        behave(sock)
                        while sock.recv(65536):
                            pass
                    except OSError:
                        continue

        thread = threading.Thread(target=serve, name="raw-server")
        thread.start()
        servers.append((server, thread))
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"

    yield start
    for server, thread in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(10)
        assert not thread.is_alive()
