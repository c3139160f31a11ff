"""Connected channels, raw peers that break the rules, and an example of each message."""

from __future__ import annotations

import itertools
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import pytest
import xxhash

from kvferry import transports
from kvferry.core.clock import deadline_in
from kvferry.core.spec import DType, KeyScope, KVSpec, LayerSpec, TensorSpec
from kvferry.testing.daemon_frames import daemon_frames, frame_of_place, frames_of_loss
from kvferry.transports import Connection
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire import messages as m
from kvferry.wire.messages import Message
from kvferry.wire.protocol import (
    MAGIC,
    SUPPORTED,
    Limits,
    MessageReceived,
    Side,
    State,
    Versions,
    WireProtocol,
)

T = TypeVar("T")

_numbers = itertools.count()
_NO_LIMITS = Limits()
_HELLO = m.Hello(min_version=1, max_version=1, session="s")


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
                stream="st",
                spec=spec,
                keys=bytes(range(64)),
                tail_tokens=3,
                scope=scope,
                timeout_s=5.0,
                codecs=("ebp",),
            ),
        ),
        Example("stream_ready", m.StreamReady(missing=(0, 1, 300), ring=4)),
        Example("put_layer", m.PutLayer(layer=1, blocks=(0, 70000)), bytes(range(256)) * 4),
        Example("layer_ack", m.LayerAck(count=2)),
        Example("finish_stream", m.FinishStream(handoff=handoff, wire_s=0.25)),
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
        Example(
            "stream_slots",
            m.StreamSlots(
                epoch="e1", slots=(m.PlacedSlot(block=3, segment=1, offset=1 << 20, generation=7),)
            ),
        ),
        Example("layer_placed", m.LayerPlaced(layer=1, blocks=(0, 3))),
        Example("put_encoded", m.PutEncoded(layer=1, blocks=(0, 3)), bytes(range(100))),
        Example("encoded_ack", m.EncodedAck(decode_s=0.25)),
        Example(
            "stream_windows",
            m.StreamWindows(transport="mooncake", grants=(b"KVMC", b"\x00\xff"), slots=((3, 1, 1 << 20),)),
        ),
        Example("attach_arena", m.AttachArena(epoch="e1", known=2), b"", 5),
        Example(
            "arena_segments",
            m.ArenaSegments(
                tenant="default",
                epoch="e1",
                first=2,
                total=3,
                segments=(m.SharedSegment(segment=2, nbytes=64 << 20),),
                writable=True,
            ),
            b"",
            5,
        ),
        *(Example(str(one.__struct_config__.tag), one, data, 5) for one, data in daemon_frames(spec, scope)),
        *(Example(f"{one.__struct_config__.tag}, loss", one) for one in frames_of_loss(spec, handoff)),
        Example("open_namespace, instead", frame_of_place(spec)),
    ]


@pytest.fixture
def spec() -> KVSpec:
    """A small spec of two layers."""
    return _spec()


@pytest.fixture(scope="session")
def examples() -> list[Example]:
    """One frame of each message type."""
    return _examples()


def shaken(
    *, limits: Limits = _NO_LIMITS, checksum: bool = True, versions: Versions = SUPPORTED
) -> tuple[WireProtocol, WireProtocol]:
    """Client and server after their handshake."""
    client = WireProtocol(Side.CLIENT, limits, checksum=checksum, versions=versions)
    server = WireProtocol(Side.SERVER, limits, checksum=checksum, versions=versions)
    hello = m.Hello(min_version=versions.lowest, max_version=versions.highest, session="s", checksum=checksum)
    feed(server, client.encode(hello))
    welcome = m.Welcome(version=server.version, session="s", epoch="e", checksum=server.checksum)
    feed(client, server.encode(welcome))
    assert client.state is server.state is State.OPEN
    return client, server


def feed(protocol: WireProtocol, stream: bytes, cuts: Iterable[int] = ()) -> list[Any]:
    """Give ``stream`` to ``protocol`` in pieces that end at ``cuts``; its events, payloads in between."""
    events: list[Any] = []
    borders = sorted({c for c in cuts if 0 < c < len(stream)} | {len(stream)})
    payload_left, payload, at = 0, b"", 0
    for border in borders:
        while at < border:
            if payload_left:
                taken = stream[at : min(border, at + payload_left)]
                payload, payload_left, at = payload + taken, payload_left - len(taken), at + len(taken)
                if not payload_left:
                    events.append(payload)
                    payload = b""
                    protocol.payload_taken()
                continue
            assert protocol.wanted > 0
            piece = stream[at : min(border, at + protocol.wanted)]
            at += len(piece)
            event = protocol.receive(piece)
            if event is not None:
                events.append(event)
            if isinstance(event, MessageReceived):
                payload_left = event.payload_nbytes
    return events


def frame(protocol: WireProtocol, message: Message, payload: bytes = b"", request_id: int = 0) -> bytes:
    data = protocol.encode(message, len(payload), request_id) + payload
    if payload and protocol.checksum:
        data += protocol.trailer(xxhash.xxh3_64_intdigest(data))
    return data


def raw_frame(
    number: int,
    meta: bytes,
    *,
    magic: bytes = MAGIC,
    version: int = 1,
    flags: int = 1,
    request_id: int = 0,
    meta_nbytes: int | None = None,
    payload_nbytes: int = 0,
) -> bytes:
    """A frame written from the table in docs/wire.md, not by the code under test."""
    length = len(meta) if meta_nbytes is None else meta_nbytes
    header = struct.pack("<4sHHIQIQ", magic, version, number, flags, request_id, length, payload_nbytes)
    return header + meta + (checksum(header + meta) if flags & 1 and not payload_nbytes else b"")


def checksum(data: bytes) -> bytes:
    """The trailer of a frame."""
    return xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")


def sender_for(cls: type[Message], protocols: tuple[WireProtocol, WireProtocol]) -> WireProtocol:
    """A protocol that may send ``cls`` now (handshake messages need a fresh one)."""
    if cls is m.Hello:
        return WireProtocol(Side.CLIENT)
    if cls is m.Welcome:
        server = WireProtocol(Side.SERVER)
        feed(server, WireProtocol(Side.CLIENT).encode(_HELLO))
        return server
    return protocols[0]


def receiver_for(cls: type[Message], protocols: tuple[WireProtocol, WireProtocol]) -> WireProtocol:
    if cls is m.Hello:
        return WireProtocol(Side.SERVER)
    if cls is m.Welcome:
        client = WireProtocol(Side.CLIENT)
        client.encode(_HELLO)
        return client
    return protocols[1]


def handshake_by_hand(sock: socket.socket) -> None:
    """Be a server: take the hello, answer with a welcome, byte by byte as documented."""
    head = read_exactly(sock, 32)
    read_exactly(sock, int.from_bytes(head[20:24], "little") + 8)
    send_raw(sock, 2, m.Welcome(version=1, session="raw", epoch="e", received_at=1000.0, sent_at=1000.0))


def read_exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = sock.recv(nbytes - len(data))
        if not piece:
            raise ConnectionResetError
        data += piece
    return data


def send_raw(
    sock: socket.socket, number: int, message: m.Message, payload: bytes = b"", trailer: bytes | None = None
) -> None:
    data = raw(number, message, payload)
    sock.sendall(data + (checksum(data) if trailer is None else trailer))


def raw(number: int, message: m.Message, payload: bytes = b"") -> bytes:
    """A frame up to its trailer."""
    meta = msgspec.msgpack.encode(message)
    return struct.pack("<4sHHIQIQ", b"KVFY", 1, number, 1, 7, len(meta), len(payload)) + meta + payload


def _until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does; the deadline only ends a broken run."""
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


class Wire:
    """What tests of the protocol do by hand."""

    shaken = staticmethod(shaken)
    feed = staticmethod(feed)
    frame = staticmethod(frame)
    raw_frame = staticmethod(raw_frame)
    sender_for = staticmethod(sender_for)
    receiver_for = staticmethod(receiver_for)


@pytest.fixture(scope="session")
def wire() -> Wire:
    """Functions to make and feed frames."""
    return Wire()


class RawPeer:
    """A server of three functions over a plain socket."""

    handshake_by_hand = staticmethod(handshake_by_hand)
    raw = staticmethod(raw)
    send_raw = staticmethod(send_raw)


@pytest.fixture
def peer() -> RawPeer:
    """Functions of a peer that is written by hand."""
    return RawPeer()


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Wait for what another thread does; the deadline only ends a broken run."""
    return _until


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
    folder = tempfile.TemporaryDirectory(prefix="kvf-")  # short, as the path of a socket must be

    def make(kind: str = "tcp") -> tuple[Connection, Connection]:
        url = {
            "tcp": "tcp://127.0.0.1:0",
            "lanes": "tcp://127.0.0.1:0?lanes=3",
            "paced": "tcp://127.0.0.1:0?lanes=3",
            "auto": "auto://127.0.0.1:0?require=tcp",
            "inproc": f"inproc://wire-test-{next(_numbers)}",
            "unix": f"unix://{folder.name}/s",
        }[kind]
        listener = transports.listen(url)
        address = listener.address + ("&rate=10GB/s" if kind == "paced" else "")  # the client's end
        made.append(transports.connect(address, deadline_in(20)))
        made.append(listener.accept(deadline_in(20)))
        listener.close()
        return made[-2], made[-1]

    yield make
    for connection in made:
        connection.abort()
    folder.cleanup()


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
        accepted = spawn(lambda: Channel.accept(there, server_options, deadline_in(20)))
        client_options = client or ChannelOptions(role="client", session="s-client")
        opened = Channel.open(here, client_options, deadline_in(20))
        return opened, accepted.result(20)

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
                    sock.settimeout(20)
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
        thread.join(20)
        assert not thread.is_alive()
