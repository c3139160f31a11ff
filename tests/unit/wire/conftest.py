"""Connections over sockets, so that these tests need no transport and can also break the bytes."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import pytest

from kvferry.core.buffers import Buf, as_bytes_view
from kvferry.core.clock import time_left
from kvferry.core.errors import ConnectionClosedError, TransferTimeoutError
from kvferry.core.spec import DType, KeyScope, KVSpec, LayerSpec, TensorSpec
from kvferry.transports.base import Connection, Listener
from kvferry.wire import messages as m
from kvferry.wire.messages import Message


class SocketConnection(Connection):
    """The transport contract over a connected socket, as simply as possible."""

    def __init__(self, sock: socket.socket, name: str = "fake://peer") -> None:
        self.sock = sock
        self.name = name
        self.sends: list[int] = []
        """How many bytes each call of send took."""

    @property
    def local_address(self) -> str:
        return "fake://here"

    @property
    def peer_address(self) -> str:
        return self.name

    def send(self, parts: Sequence[Buf], deadline: float) -> None:
        data = b"".join(as_bytes_view(part) for part in parts)
        self.sends.append(len(data))
        self.sock.settimeout(max(time_left(deadline), 1e-6))
        try:
            self.sock.sendall(data)
        except TimeoutError as error:
            raise TransferTimeoutError(f"{self.name}: send timed out") from error
        except OSError as error:
            raise ConnectionClosedError(f"{self.name}: {error}") from error

    def recv_into(self, views: Sequence[memoryview], deadline: float) -> None:
        for view in views:
            taken = 0
            while taken < len(view):
                if not self.wait_readable(deadline):
                    raise TransferTimeoutError(f"{self.name}: timed out after {taken} bytes")
                try:
                    count = self.sock.recv_into(view[taken:])
                except OSError as error:
                    raise ConnectionClosedError(f"{self.name}: {error}") from error
                if count == 0:
                    raise ConnectionClosedError(f"{self.name}: closed after {taken} bytes")
                taken += count

    def wait_readable(self, deadline: float) -> bool:
        try:
            return bool(select.select([self.sock], [], [], time_left(deadline))[0])
        except (OSError, ValueError) as error:
            raise ConnectionClosedError(f"{self.name}: {error}") from error

    def close(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def abort(self) -> None:
        self.close()


Pair: TypeAlias = "Callable[[], tuple[SocketConnection, SocketConnection]]"


@pytest.fixture
def socket_pair() -> Iterator[Pair]:
    """Makes pairs of connected :class:`SocketConnection`."""
    made: list[socket.socket] = []

    def make() -> tuple[SocketConnection, SocketConnection]:
        ends = socket.socketpair()
        made.extend(ends)
        return SocketConnection(ends[0], "fake://server"), SocketConnection(ends[1], "fake://client")

    yield make
    for sock in made:
        sock.close()


class SocketListener(Listener):
    """Loopback TCP, so that raw clients can talk to a server under test."""

    def __init__(self) -> None:
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.closed = False

    @property
    def address(self) -> str:
        host, port = self.sock.getsockname()
        return f"tcp://{host}:{port}"

    def accept(self, deadline: float) -> Connection:
        while not self.closed:
            if not select.select([self.sock], [], [], min(0.05, time_left(deadline)))[0]:
                if time_left(deadline) == 0:
                    raise TransferTimeoutError("nobody came")
                continue
            sock, (host, port) = self.sock.accept()
            return SocketConnection(sock, f"tcp://{host}:{port}")
        raise ConnectionClosedError("the listener was closed")

    def close(self) -> None:
        self.closed = True


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


@pytest.fixture
def listener() -> Iterator[SocketListener]:
    """A listener on loopback TCP."""
    made = SocketListener()
    yield made
    made.close()
    made.sock.close()
