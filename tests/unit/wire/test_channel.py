from __future__ import annotations

import logging
import math
import random
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    CapacityError,
    ConfigError,
    ConnectError,
    ConnectionClosedError,
    CorruptBlockError,
    KVFerryError,
    ProtocolError,
    SpecMismatchError,
    TransferTimeoutError,
)
from kvferry.core.spec import KVSpec
from kvferry.transports import Connection
from kvferry.wire import Channel, ChannelOptions, Versions
from kvferry.wire import messages as m
from kvferry.wire.payload import PIECE_NBYTES

KINDS = ["tcp", "inproc"]
OPTIONS = ChannelOptions(role="test", session="s")
PUT = m.PutLayer(layer=3, blocks=(1, 2))


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does; the deadline only ends a broken run."""
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def cut(data: bytearray, rng: random.Random, pieces: int) -> list[memoryview]:
    """``data`` as scattered views."""
    borders = sorted(rng.randint(0, len(data)) for _ in range(pieces - 1))
    view = memoryview(data)
    return [view[a:b] for a, b in zip([0, *borders], [*borders, len(data)], strict=True)]


# ---- frames ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize(
    "nbytes", [1, 1000, PIECE_NBYTES - 1, PIECE_NBYTES, PIECE_NBYTES + 1, 3 * PIECE_NBYTES + 5]
)
def test_payloads_arrive_scattered_into_other_pieces(
    pair: Any, spawn: Any, kind: str, checksum: bool, nbytes: int
) -> None:
    options = ChannelOptions(role="test", session="s", checksum=checksum)
    client, server = pair(kind, client=options, server=options)
    assert client.checksum is server.checksum is checksum
    rng = random.Random(nbytes)
    data = bytearray(rng.randbytes(nbytes))
    sent = spawn(lambda: client.send(PUT, cut(data, rng, 7), deadline=deadline_in(10), request_id=9))
    incoming = server.receive(deadline_in(10))
    assert (incoming.message, incoming.payload_nbytes, incoming.request_id) == (PUT, nbytes, 9)
    got = bytearray(nbytes)
    incoming.read_into(cut(got, rng, 5), deadline_in(10))
    sent.result(10)
    assert got == data
    server.send(m.LayerAck(), deadline=deadline_in(5))
    assert client.receive(deadline_in(5)).message == m.LayerAck()


def test_numpy_payloads_need_no_copy(pair: Any) -> None:
    client, server = pair()
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    client.send(PUT, [array], deadline=deadline_in(5))
    out = np.zeros(12, np.float32)
    server.receive(deadline_in(5)).read_into([out.data], deadline_in(5))
    assert (out.reshape(3, 4) == array).all()


def test_a_small_frame_leaves_in_one_send(connect: Any, spawn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = connect()
    accepted = spawn(lambda: Channel.accept(there, OPTIONS, deadline_in(5)))
    client = Channel.open(here, OPTIONS, deadline_in(5))
    accepted.result(5)
    sends: list[int] = []
    original = here.send

    def counting(parts: Sequence[Any], deadline: float) -> None:
        sends.append(len(parts))
        original(parts, deadline)

    monkeypatch.setattr(here, "send", counting)
    client.send(m.Ping(), deadline=deadline_in(5))
    client.send(PUT, [b"abc", b"de"], deadline=deadline_in(5))
    assert sends == [2, 5]  # header, meta; and two parts of payload, trailer


def test_empty_payload_parts_are_no_payload(pair: Any) -> None:
    client, server = pair()
    client.send(PUT, [b"", bytearray()], deadline=deadline_in(5))
    incoming = server.receive(deadline_in(5))
    assert incoming.payload_nbytes == 0
    incoming.read_into([], deadline_in(5))
    incoming.discard(deadline_in(5))
    assert "PutLayer" in repr(incoming)


def test_views_that_do_not_fit_receive_nothing(pair: Any) -> None:
    client, server = pair()
    client.send(PUT, [b"0123456789"], deadline=deadline_in(5))
    incoming = server.receive(deadline_in(5))
    for views in ([bytearray(9)], [bytearray(6), bytearray(5)], [bytes(10)], []):
        with pytest.raises(ProtocolError, match="10 bytes, to be received into") as caught:
            incoming.read_into([memoryview(v) for v in views], deadline_in(5))
        assert not caught.value.remote
    with pytest.raises(ProtocolError, match="10 payload bytes of the last PutLayer must be read"):
        server.receive(deadline_in(5))
    with pytest.raises(ProtocolError, match="must be read or discarded"):
        server.receive_idle(deadline_in(5))
    assert not server.reusable
    got = bytearray(10)
    incoming.read_into([memoryview(got)], deadline_in(5))
    assert got == b"0123456789"
    assert server.reusable
    with pytest.raises(ProtocolError, match="taken already"):
        incoming.read_into([memoryview(got)], deadline_in(5))
    incoming.discard(deadline_in(5))
    client.send(m.Ping(), deadline=deadline_in(5))
    assert server.receive(deadline_in(5)).message == m.Ping()


@pytest.mark.parametrize("checksum", [True, False])
def test_discard_uses_bounded_memory(pair: Any, spawn: Any, checksum: bool) -> None:
    options = ChannelOptions(role="test", session="s", checksum=checksum)
    client, server = pair(client=options, server=options)
    big = bytes(16 << 20)
    sent = spawn(lambda: client.send(PUT, [big], deadline=deadline_in(20)))
    incoming = server.receive(deadline_in(10))
    tracemalloc.start()
    try:
        incoming.discard(deadline_in(20))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    sent.result(10)
    client.send(m.Ping(), deadline=deadline_in(5))
    assert server.receive(deadline_in(5)).message == m.Ping()


def test_long_meta_arrives_and_too_long_is_refused_before_sending(pair: Any) -> None:
    options = ChannelOptions(role="test", session="s", max_meta_nbytes=300_000, max_payload_nbytes=5)
    client, server = pair(client=options, server=options)
    with pytest.raises(ProtocolError, match="limit is 300000"):
        client.send(m.AbortStream(reason="x" * 300_000), deadline=deadline_in(5))
    with pytest.raises(ProtocolError, match="limit is 5"):
        client.send(PUT, [b"123456"], deadline=deadline_in(5))
    message = m.AbortStream(reason="x" * 200_000)
    client.send(message, deadline=deadline_in(5))
    assert server.receive(deadline_in(5)).message == message


# ---- damage ----------------------------------------------------------------------------------


def handshake_by_hand(sock: socket.socket) -> None:
    """Be a server: take the hello, answer with a welcome, byte by byte as documented."""
    head = read_exactly(sock, 32)
    read_exactly(sock, int.from_bytes(head[20:24], "little"))
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
    meta = msgspec.msgpack.encode(message)
    header = struct.pack("<4sHHIQIQ", b"KVFY", 1, number, bool(payload), 7, len(meta), len(payload))
    if trailer is None:
        trailer = xxhash.xxh3_64_intdigest(payload).to_bytes(8, "little") if payload else b""
    sock.sendall(header + meta + payload + trailer)


@pytest.mark.parametrize("nbytes", [10, PIECE_NBYTES + 100])
def test_a_changed_payload_is_found_and_the_connection_aborted(raw_server: Any, nbytes: int) -> None:
    payload = bytes(nbytes)
    digest = xxhash.xxh3_64_intdigest(payload).to_bytes(8, "little")

    def behave(sock: socket.socket) -> None:
        handshake_by_hand(sock)
        send_raw(sock, 18, PUT, payload, digest)
        send_raw(sock, 18, PUT, payload[:-1] + b"\x01", digest)

    channel = Channel.connect(raw_server(behave), OPTIONS, deadline_in(5))
    views = [memoryview(bytearray(nbytes))]
    channel.receive(deadline_in(5)).read_into(views, deadline_in(5))
    incoming = channel.receive(deadline_in(5))
    with pytest.raises(CorruptBlockError) as caught:
        incoming.read_into(views, deadline_in(5))
    for part in (channel.address, "PutLayer", f"{nbytes} bytes", "request 7", f"{digest[::-1].hex()}"):
        assert part in str(caught.value)
    assert channel.closed
    with pytest.raises(ConnectionClosedError):
        channel.receive(deadline_in(5))


@pytest.mark.parametrize("stop", [1, 31, 32, 40, 60, 100])
def test_a_frame_cut_anywhere_ends_the_channel(raw_server: Any, stop: int) -> None:
    class Cutting:
        def __init__(self, sock: socket.socket) -> None:
            self.sock = sock

        def sendall(self, data: bytes) -> None:
            assert len(data) > stop
            self.sock.sendall(data[:stop])

    def behave(sock: socket.socket) -> None:
        handshake_by_hand(sock)
        send_raw(Cutting(sock), 18, PUT, bytes(64))  # type: ignore[arg-type]
        sock.shutdown(socket.SHUT_WR)

    channel = Channel.connect(raw_server(behave), OPTIONS, deadline_in(5))

    def take() -> None:
        channel.receive(deadline_in(5)).read_into([memoryview(bytearray(64))], deadline_in(5))

    with pytest.raises(ConnectionClosedError):
        take()
    assert channel.closed
    assert not channel.reusable


def test_garbage_inside_the_stream_aborts_with_the_peers_address(raw_server: Any) -> None:
    def behave(sock: socket.socket) -> None:
        handshake_by_hand(sock)
        sock.sendall(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n")

    channel = Channel.connect(raw_server(behave), OPTIONS, deadline_in(5))
    with pytest.raises(ProtocolError, match=f"{channel.address} does not speak kvferry.*HTTP") as caught:
        channel.receive(deadline_in(5))
    assert caught.value.remote
    assert channel.closed


# ---- waiting ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_idle_waits_keep_the_channel_good(pair: Any, kind: str) -> None:
    client, server = pair(kind)
    assert server.receive_idle(deadline_in(0.02)) is None
    client.send(m.Ping(), deadline=deadline_in(5))
    incoming = server.receive_idle(deadline_in(5))
    assert incoming is not None
    assert incoming.message == m.Ping()
    assert server.idle_s == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_receive_gives_up_at_its_deadline(pair: Any, kind: str) -> None:
    _, server = pair(kind)
    started = time.monotonic()
    with pytest.raises(TransferTimeoutError):
        server.receive(deadline_in(0.1))
    assert 0.09 <= time.monotonic() - started < 5
    assert server.closed


def test_half_a_message_is_not_waited_for_for_ever(raw_server: Any) -> None:
    def behave(sock: socket.socket) -> None:
        handshake_by_hand(sock)
        sock.sendall(b"KVFY\x01\x00")

    options = ChannelOptions(role="test", session="s", frame_timeout_s=0.2)
    channel = Channel.connect(raw_server(behave), options, deadline_in(5))
    started = time.monotonic()
    with pytest.raises(TransferTimeoutError):
        channel.receive_idle(deadline_in(0.1))
    assert time.monotonic() - started < 5
    assert channel.closed


@pytest.mark.parametrize("kind", KINDS)
def test_abort_wakes_the_receiver_and_the_sender(pair: Any, spawn: Any, kind: str) -> None:
    client, server = pair(kind)
    receiving = spawn(lambda: server.receive(deadline_in(30)))
    sending = spawn(lambda: server.send(PUT, [bytes(64 << 20)], deadline=deadline_in(30)))
    until(lambda: server._waiting and server._send_lock.locked())
    server.abort()
    for future in (receiving, sending):
        with pytest.raises(ConnectionClosedError):
            future.result(10)
    with pytest.raises(ConnectionClosedError):
        client.receive(deadline_in(5)).discard(deadline_in(5))


def test_send_gives_up_on_a_peer_that_does_not_read(pair: Any) -> None:
    client, _ = pair()
    with pytest.raises(TransferTimeoutError):
        client.send(PUT, [bytes(64 << 20)], deadline=deadline_in(0.2))
    assert client.closed


def test_senders_take_turns_and_receivers_may_not(pair: Any, spawn: Any) -> None:
    client, server = pair()
    blocked = spawn(lambda: client.send(PUT, [bytes(32 << 20)], deadline=deadline_in(30)))
    until(client._send_lock.locked)
    with pytest.raises(TransferTimeoutError, match="another thread was sending"):
        client.send(m.Ping(), deadline=deadline_in(0.05))
    assert not client.closed
    waiting = spawn(lambda: client.receive(deadline_in(30)))
    until(lambda: client._waiting)
    with pytest.raises(ProtocolError, match="two threads receive"):
        client.receive(deadline_in(5))
    second = spawn(lambda: client.send(m.Ping(), deadline=deadline_in(30)))
    server.receive(deadline_in(10)).discard(deadline_in(20))
    assert server.receive(deadline_in(10)).message == m.Ping()
    blocked.result(10)
    second.result(10)
    assert client.idle_s >= 0
    server.send(m.Pong(at=1.0), deadline=deadline_in(5))
    assert waiting.result(10).message == m.Pong(at=1.0)


def test_closing_delivers_what_was_sent(pair: Any) -> None:
    client, server = pair()
    client.send(m.Ping(), deadline=deadline_in(5))
    client.close()
    client.close()
    assert server.receive(deadline_in(5)).message == m.Ping()
    with pytest.raises(ConnectionClosedError):
        server.receive(deadline_in(5))


# ---- calls -----------------------------------------------------------------------------------


def test_call_returns_the_answer(pair: Any, spawn: Any) -> None:
    client, server = pair()

    def serve() -> None:
        for _ in range(2):
            request = server.receive(deadline_in(10))
            request.discard(deadline_in(10))
            server.reply(request, m.Pong(at=float(request.payload_nbytes)), deadline=deadline_in(5))
        server.receive(deadline_in(10))
        server.send(m.Pong(at=7.0), deadline=deadline_in(5))  # does not echo the id

    served = spawn(serve)
    assert client.call(m.Ping(), m.Pong, deadline=deadline_in(10)) == m.Pong(at=0.0)
    assert client.call(PUT, m.Pong, payload=[b"abc"], deadline=deadline_in(10)) == m.Pong(at=3.0)
    assert client.call(m.Ping(), m.Pong, deadline=deadline_in(10)) == m.Pong(at=7.0)
    served.result(10)
    assert client.reusable


def test_a_failure_comes_back_as_its_class(pair: Any) -> None:
    client, server = pair()
    server.send_failure(CapacityError("arena\nfull"), deadline=deadline_in(5))
    with pytest.raises(CapacityError) as caught:
        client.call(m.Ping(), m.Pong, deadline=deadline_in(5))
    assert str(caught.value) == f"{client.address}: arena\N{REPLACEMENT CHARACTER}full"
    assert not client.reusable
    assert not client.closed


@pytest.mark.parametrize(
    ("answer", "request_id", "match"),
    [(m.Ping(), 0, "answered with Ping"), (m.Pong(at=0.0), 77, "answered request 77, asked was 1")],
)
def test_a_wrong_answer_ends_the_channel(pair: Any, answer: m.Message, request_id: int, match: str) -> None:
    client, server = pair()
    server.send(answer, deadline=deadline_in(5), request_id=request_id)
    with pytest.raises(ProtocolError, match=match) as caught:
        client.call(m.Ping(), m.Pong, deadline=deadline_in(5))
    assert caught.value.remote
    assert client.closed


def test_peers_with_other_specs_refuse_before_any_kv(pair: Any, spawn: Any, spec: KVSpec) -> None:
    """C109: the refusal shows both sides."""
    client, server = pair()
    other = KVSpec(model="tiny", revision="r2", layers=spec.layers[:1], block_tokens=32)

    def serve() -> None:
        begin = server.receive(deadline_in(10)).message
        assert isinstance(begin, m.BeginStream)
        assert begin.spec == other
        text = f"ours {spec.describe()}, yours {begin.spec.describe()}"
        server.send_failure(SpecMismatchError(text), deadline=deadline_in(5))

    served = spawn(serve)
    begin = m.BeginStream(stream="s", spec=other, keys=bytes(32), tail_tokens=31)
    with pytest.raises(SpecMismatchError) as caught:
        client.call(begin, m.StreamReady, deadline=deadline_in(10))
    served.result(10)
    assert spec.describe() in str(caught.value)
    assert other.describe() in str(caught.value)


# ---- handshake -------------------------------------------------------------------------------


def drip(sock: socket.socket) -> None:
    """A valid welcome header, one byte at a time: never done, never silent."""
    header = struct.pack("<4sHHIQIQ", b"KVFY", 1, 2, 0, 0, 60_000, 0)
    for byte in header + bytes(60_000):
        sock.sendall(bytes([byte]))
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("behave", "error", "match"),
    [
        (lambda sock: None, ConnectError, "no handshake within 0.3 s"),
        (lambda sock: sock.sendall(b"KVF"), ConnectError, "no handshake within 0.3 s"),
        (lambda sock: sock.sendall(b"\x01\x02\x03"), ConnectError, "no handshake within"),
        (drip, ConnectError, "no handshake within"),
        (lambda sock: sock.sendall(random.Random(1).randbytes(500)), ProtocolError, "does not speak kvferry"),
        (lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), ProtocolError, "look like HTTP"),
        (lambda sock: sock.sendall(b"\x15\x03\x01\x00\x02\x02\x16"), ProtocolError, "look like TLS"),
        (lambda sock: sock.shutdown(socket.SHUT_WR), ConnectError, "closed during the handshake"),
        (lambda sock: send_raw(sock, 5, m.Pong()), ProtocolError, "'pong' in state 'offered'"),
        (lambda sock: sock.close(), ConnectError, "closed during the handshake"),
    ],
    ids=["silent", "3 bytes", "3 other bytes", "drip", "garbage", "http", "tls", "ends", "pong", "closes"],
)
def test_a_server_that_is_none_fails_the_connect_in_time(
    raw_server: Any, behave: Any, error: type[Exception], match: str
) -> None:
    """C067."""
    address = raw_server(behave)
    options = ChannelOptions(role="test", session="s", hello_timeout_s=0.3)
    started = time.monotonic()
    with pytest.raises(error, match=match) as caught:
        Channel.connect(address, options, deadline_in(30))
    assert time.monotonic() - started < 5
    assert address in str(caught.value)


def test_the_callers_deadline_also_bounds_the_handshake(raw_server: Any) -> None:
    address = raw_server(lambda sock: None)
    started = time.monotonic()
    with pytest.raises(ConnectError, match=address):
        Channel.connect(address, OPTIONS, deadline_in(0.2))
    assert time.monotonic() - started < 4.5


def test_a_malformed_address_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        Channel.connect("tcp://[::1:9", OPTIONS, deadline_in(1))


def accepting(spawn: Any, there: Connection, options: ChannelOptions = OPTIONS) -> Any:
    return spawn(lambda: Channel.accept(there, options, deadline_in(5)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("client", "server", "agreed"), [((1, 2), (1, 1), 1), ((2, 3), (1, 2), 2)])
def test_neighbouring_versions_talk(
    pair: Any, kind: str, client: tuple[int, int], server: tuple[int, int], agreed: int
) -> None:
    here, there = pair(
        kind,
        client=ChannelOptions(role="c", session="s", versions=Versions(*client)),
        server=ChannelOptions(role="s", session="s", versions=Versions(*server)),
    )
    assert here.peer.version == there.peer.version == agreed
    here.send(m.Ping(), deadline=deadline_in(5))
    assert there.receive(deadline_in(5)).message == m.Ping()


@pytest.mark.parametrize("kind", KINDS)
def test_no_common_version_is_told_to_both(connect: Any, spawn: Any, kind: str) -> None:
    here, there = connect(kind)
    accepted = accepting(spawn, there)
    options = ChannelOptions(role="c", session="s", versions=Versions(4, 5))
    with pytest.raises(ProtocolError, match=r"this side speaks 1\.\.1, the peer 4\.\.5") as caught:
        Channel.open(here, options, deadline_in(5))
    assert here.peer_address in str(caught.value)
    with pytest.raises(ProtocolError, match=r"4\.\.5"):
        accepted.result(5)


def test_the_peers_describe_themselves(pair: Any) -> None:
    client, server = pair(
        client=ChannelOptions(role="prefill", session="a", capabilities=("x",), credential=b"hunter2"),
        server=ChannelOptions(role="decode", session="b", capabilities=("y", "z"), epoch="e7"),
    )
    assert (client.peer.role, client.peer.session, client.peer.epoch) == ("decode", "b", "e7")
    assert client.peer.capabilities == ("y", "z")
    assert client.peer.credential is None
    assert (server.peer.role, server.peer.session, server.peer.epoch) == ("prefill", "a", "")
    assert server.peer.credential == b"hunter2"
    assert server.peer.capabilities == ("x",)
    assert client.peer.address == client.address
    assert "Channel" in repr(client)


def test_credentials_show_nowhere(pair: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    options = ChannelOptions(role="c", session="s", credential=b"hunter2")
    client, server = pair(client=options)
    assert "hunter2" not in f"{options!r} {server.peer!r} {client!r} {server!r} {caplog.text}"


def test_clock_offset_is_within_its_error(pair: Any, raw_server: Any) -> None:
    client, server = pair()
    assert abs(client.peer.clock_offset) <= client.peer.clock_error + 1e-6
    assert client.peer.clock_error < 5
    assert server.peer.clock_offset <= 0  # same clock, one direction: too small by one message
    assert server.peer.clock_error == math.inf
    asked = time.monotonic()
    other = Channel.connect(raw_server(handshake_by_hand), OPTIONS, deadline_in(5))
    answered = time.monotonic()
    assert abs(other.peer.clock_offset - (1000 - (asked + answered) / 2)) <= answered - asked
    assert 0 < other.peer.clock_error <= (answered - asked) / 2 + 1e-6
    other.abort()


def test_a_stranger_with_a_wrong_first_message_gets_no_answer(connect: Any, spawn: Any) -> None:
    here, there = connect()
    accepted = accepting(spawn, there)
    here.send([b"\x80\x04\x95 not a hello"], deadline_in(5))
    with pytest.raises(ProtocolError, match="pickle"):
        accepted.result(5)
    with pytest.raises(ConnectionClosedError):
        here.recv_into([memoryview(bytearray(1))], deadline_in(5))


def test_a_client_that_leaves_in_the_handshake(connect: Any, spawn: Any) -> None:
    here, there = connect()
    accepted = accepting(spawn, there)
    here.send([b"KVFY\x01"], deadline_in(5))
    here.close()
    with pytest.raises(ConnectError, match="closed during the handshake"):
        accepted.result(5)


def test_an_unexpected_error_in_the_handshake_leaves_no_connection(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = connect()

    def fails(parts: Sequence[Any], deadline: float) -> None:
        raise RuntimeError("broken transport")

    monkeypatch.setattr(here, "send", fails)
    with pytest.raises(RuntimeError):
        Channel.open(here, OPTIONS, deadline_in(5))
    with pytest.raises(ConnectionClosedError):
        there.recv_into([memoryview(bytearray(1))], deadline_in(5))


def test_a_peer_that_left_cannot_be_told_why_it_is_refused(connect: Any, spawn: Any) -> None:
    here, there = connect()
    hello = m.Hello(min_version=8, max_version=9, session="s")
    meta = msgspec.msgpack.encode(hello)
    here.send([struct.pack("<4sHHIQIQ", b"KVFY", 8, 1, 0, 0, len(meta), 0), meta], deadline_in(5))
    here.abort()
    with pytest.raises(KVFerryError):
        accepting(spawn, there).result(5)


def test_linger_reads_what_still_comes(pair: Any, spawn: Any) -> None:
    client, server = pair()

    def push() -> None:
        client.send(PUT, [bytes(4 << 20)], deadline=deadline_in(20))
        client.send(PUT, [bytes(4 << 20)], deadline=deadline_in(20))
        client.close()

    pushed = spawn(push)
    server.receive(deadline_in(10))
    server.linger(deadline_in(20))
    pushed.result(10)


def test_threads_of_the_tests_are_gone() -> None:
    assert not [t for t in threading.enumerate() if t.name.startswith("kvferry-")]
