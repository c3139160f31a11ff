from __future__ import annotations

import random
import socket
import threading
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import xxhash

from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    CapacityError,
    ConnectionClosedError,
    CorruptBlockError,
    ProtocolError,
    SpecMismatchError,
    TransferTimeoutError,
)
from kvferry.core.spec import KVSpec
from kvferry.transports.hashed import PIECE_NBYTES
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire import messages as m

KINDS = ["tcp", "inproc"]
OPTIONS = ChannelOptions(role="test", session="s")
PUT = m.PutLayer(layer=3, blocks=(1, 2))


def cut(data: bytearray, rng: random.Random, pieces: int) -> list[memoryview]:
    """``data`` as scattered views."""
    borders = sorted(rng.randint(0, len(data)) for _ in range(pieces - 1))
    view = memoryview(data)
    return [view[a:b] for a, b in zip([0, *borders], [*borders, len(data)], strict=True)]


@pytest.fixture(scope="module", autouse=True)
def threads_before() -> set[threading.Thread]:
    """Those that tests of other modules in this process left."""
    return set(threading.enumerate())


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
    sent = spawn(lambda: client.send(PUT, cut(data, rng, 7), deadline=deadline_in(20), request_id=9))
    incoming = server.receive(deadline_in(20))
    assert (incoming.message, incoming.payload_nbytes, incoming.request_id) == (PUT, nbytes, 9)
    got = bytearray(nbytes)
    incoming.read_into(cut(got, rng, 5), deadline_in(20))
    sent.result(20)
    assert got == data
    server.send(m.LayerAck(), deadline=deadline_in(20))
    assert client.receive(deadline_in(20)).message == m.LayerAck()


def test_numpy_payloads_need_no_copy(pair: Any) -> None:
    client, server = pair()
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    client.send(PUT, [array], deadline=deadline_in(20))
    out = np.zeros(12, np.float32)
    server.receive(deadline_in(20)).read_into([out.data], deadline_in(20))
    assert (out.reshape(3, 4) == array).all()


def test_a_small_frame_leaves_in_one_send(connect: Any, spawn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ChannelOptions(role="test", session="s", checksum=False)
    here, there = connect()
    accepted = spawn(lambda: Channel.accept(there, options, deadline_in(20)))
    client = Channel.open(here, options, deadline_in(20))
    accepted.result(20)
    sends: list[int] = []
    original = here.send

    def counting(parts: Sequence[Any], deadline: float) -> None:
        sends.append(len(parts))
        original(parts, deadline)

    monkeypatch.setattr(here, "send", counting)
    client._short = None  # it makes its system calls itself
    client.send(m.Ping(), deadline=deadline_in(20))
    client.send(PUT, [b"abc", b"de"], deadline=deadline_in(20))
    assert sends == [1, 3]  # header with meta; and two parts of payload behind theirs


def test_empty_payload_parts_are_no_payload(pair: Any) -> None:
    client, server = pair()
    client.send(PUT, [b"", bytearray()], deadline=deadline_in(20))
    incoming = server.receive(deadline_in(20))
    assert incoming.payload_nbytes == 0
    incoming.read_into([], deadline_in(20))
    incoming.discard(deadline_in(20))
    assert "PutLayer" in repr(incoming)


def test_views_that_do_not_fit_receive_nothing(pair: Any) -> None:
    client, server = pair()
    client.send(PUT, [b"0123456789"], deadline=deadline_in(20))
    incoming = server.receive(deadline_in(20))
    for views in ([bytearray(9)], [bytearray(6), bytearray(5)], [bytes(10)], []):
        with pytest.raises(ProtocolError, match="10 bytes, to be received into") as caught:
            incoming.read_into([memoryview(v) for v in views], deadline_in(20))
        assert not caught.value.remote
    with pytest.raises(ProtocolError, match="10 payload bytes of the last PutLayer must be read"):
        server.receive(deadline_in(20))
    with pytest.raises(ProtocolError, match="must be read or discarded"):
        server.receive_idle(deadline_in(20))
    assert not server.reusable
    got = bytearray(10)
    incoming.read_into([memoryview(got)], deadline_in(20))
    assert got == b"0123456789"
    assert server.reusable
    with pytest.raises(ProtocolError, match="taken already"):
        incoming.read_into([memoryview(got)], deadline_in(20))
    incoming.discard(deadline_in(20))
    client.send(m.Ping(), deadline=deadline_in(20))
    assert server.receive(deadline_in(20)).message == m.Ping()


@pytest.mark.parametrize("checksum", [True, False])
def test_discard_uses_bounded_memory(pair: Any, spawn: Any, checksum: bool) -> None:
    options = ChannelOptions(role="test", session="s", checksum=checksum)
    client, server = pair(client=options, server=options)
    big = bytes(16 << 20)
    sent = spawn(lambda: client.send(PUT, [big], deadline=deadline_in(20)))
    incoming = server.receive(deadline_in(20))
    tracemalloc.start()
    try:
        incoming.discard(deadline_in(20))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    sent.result(20)
    client.send(m.Ping(), deadline=deadline_in(20))
    assert server.receive(deadline_in(20)).message == m.Ping()


def test_long_meta_arrives_and_too_long_is_refused_before_sending(pair: Any) -> None:
    options = ChannelOptions(role="test", session="s", max_meta_nbytes=300_000, max_payload_nbytes=5)
    client, server = pair(client=options, server=options)
    with pytest.raises(ProtocolError, match="limit is 300000"):
        client.send(m.AbortStream(reason="x" * 300_000), deadline=deadline_in(20))
    with pytest.raises(ProtocolError, match="limit is 5"):
        client.send(PUT, [b"123456"], deadline=deadline_in(20))
    message = m.AbortStream(reason="x" * 200_000)
    client.send(message, deadline=deadline_in(20))
    assert server.receive(deadline_in(20)).message == message


# ---- damage ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [10, PIECE_NBYTES + 100])
def test_a_changed_payload_is_found_and_the_connection_aborted(
    raw_server: Any, nbytes: int, peer: Any
) -> None:
    payload = bytes(nbytes)
    digest = xxhash.xxh3_64_intdigest(peer.raw(18, PUT, payload)).to_bytes(8, "little")

    def behave(sock: socket.socket) -> None:
        peer.handshake_by_hand(sock)
        peer.send_raw(sock, 18, PUT, payload)
        peer.send_raw(sock, 18, PUT, payload[:-1] + b"\x01", digest)

    channel = Channel.connect(raw_server(behave), OPTIONS, deadline_in(20))
    views = [memoryview(bytearray(nbytes))]
    channel.receive(deadline_in(20)).read_into(views, deadline_in(20))
    incoming = channel.receive(deadline_in(20))
    with pytest.raises(CorruptBlockError) as caught:
        incoming.read_into(views, deadline_in(20))
    for part in (channel.address, "PutLayer", f"{nbytes} bytes", "request 7", f"{digest[::-1].hex()}"):
        assert part in str(caught.value)
    assert channel.closed
    with pytest.raises(ConnectionClosedError):
        channel.receive(deadline_in(20))


@pytest.mark.parametrize("stop", [1, 31, 32, 40, 60, 100])
def test_a_frame_cut_anywhere_ends_the_channel(raw_server: Any, stop: int, peer: Any) -> None:
    class Cutting:
        def __init__(self, sock: socket.socket) -> None:
            self.sock = sock

        def sendall(self, data: bytes) -> None:
            assert len(data) > stop
            self.sock.sendall(data[:stop])

    def behave(sock: socket.socket) -> None:
        peer.handshake_by_hand(sock)
        peer.send_raw(Cutting(sock), 18, PUT, bytes(64))
        sock.shutdown(socket.SHUT_WR)

    channel = Channel.connect(raw_server(behave), OPTIONS, deadline_in(20))

    def take() -> None:
        channel.receive(deadline_in(20)).read_into([memoryview(bytearray(64))], deadline_in(20))

    with pytest.raises(ConnectionClosedError):
        take()
    assert channel.closed
    assert not channel.reusable


def test_garbage_inside_the_stream_aborts_with_the_peers_address(raw_server: Any, peer: Any) -> None:
    def behave(sock: socket.socket) -> None:
        peer.handshake_by_hand(sock)
        sock.sendall(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n")

    channel = Channel.connect(raw_server(behave), OPTIONS, deadline_in(20))
    with pytest.raises(ProtocolError, match=f"{channel.address} does not speak kvferry.*HTTP") as caught:
        channel.receive(deadline_in(20))
    assert caught.value.remote
    assert channel.closed


# ---- waiting ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_idle_waits_keep_the_channel_good(pair: Any, kind: str) -> None:
    client, server = pair(kind)
    assert server.receive_idle(deadline_in(0.02)) is None
    client.send(m.Ping(), deadline=deadline_in(20))
    incoming = server.receive_idle(deadline_in(20))
    assert incoming is not None
    assert incoming.message == m.Ping()
    assert server.idle_s == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_wait_sees_the_peer_go(pair: Any, kind: str, until: Any) -> None:
    client, server = pair(kind)
    assert not server.readable()
    client.abort()
    until(server.readable)
    with pytest.raises(ConnectionClosedError):
        server.receive_idle(deadline_in(20))
    assert server.closed


@pytest.mark.parametrize("kind", KINDS)
def test_receive_gives_up_at_its_deadline(pair: Any, kind: str) -> None:
    _, server = pair(kind)
    started = time.monotonic()
    with pytest.raises(TransferTimeoutError):
        server.receive(deadline_in(0.1))
    assert time.monotonic() - started >= 0.09
    assert server.closed


def test_half_a_message_is_not_waited_for_for_ever(raw_server: Any, peer: Any, until: Any) -> None:
    def behave(sock: socket.socket) -> None:
        peer.handshake_by_hand(sock)
        sock.sendall(b"KVFY\x01\x00")

    options = ChannelOptions(role="test", session="s", frame_timeout_s=0.2)
    channel = Channel.connect(raw_server(behave), options, deadline_in(20))
    until(channel.readable)
    with pytest.raises(TransferTimeoutError):
        channel.receive_idle(deadline_in(0.1))
    assert channel.closed


@pytest.mark.parametrize("kind", KINDS)
def test_abort_wakes_the_receiver_and_the_sender(pair: Any, spawn: Any, kind: str, until: Any) -> None:
    client, server = pair(kind)
    receiving = spawn(lambda: server.receive(deadline_in(30)))
    sending = spawn(lambda: server.send(PUT, [bytes(64 << 20)], deadline=deadline_in(30)))
    until(lambda: server._waiting and server._send_lock.locked())
    server.abort()
    for future in (receiving, sending):
        with pytest.raises(ConnectionClosedError):
            future.result(20)
    with pytest.raises(ConnectionClosedError):
        client.receive(deadline_in(20)).discard(deadline_in(20))


def test_send_gives_up_on_a_peer_that_does_not_read(pair: Any) -> None:
    client, _ = pair()
    with pytest.raises(TransferTimeoutError):
        client.send(PUT, [bytes(64 << 20)], deadline=deadline_in(0.2))
    assert client.closed


def test_senders_take_turns_and_receivers_may_not(pair: Any, spawn: Any, until: Any) -> None:
    client, server = pair()
    blocked = spawn(lambda: client.send(PUT, [bytes(32 << 20)], deadline=deadline_in(30)))
    until(client._send_lock.locked)
    with pytest.raises(TransferTimeoutError, match="another thread was sending"):
        client.send(m.Ping(), deadline=deadline_in(0.05))
    assert not client.closed
    waiting = spawn(lambda: client.receive(deadline_in(30)))
    until(lambda: client._waiting)
    with pytest.raises(ProtocolError, match="two threads receive"):
        client.receive(deadline_in(20))
    second = spawn(lambda: client.send(m.Ping(), deadline=deadline_in(30)))
    server.receive(deadline_in(20)).discard(deadline_in(20))
    assert server.receive(deadline_in(20)).message == m.Ping()
    blocked.result(20)
    second.result(20)
    assert client.idle_s >= 0
    server.send(m.Pong(at=1.0), deadline=deadline_in(20))
    assert waiting.result(20).message == m.Pong(at=1.0)


def test_closing_delivers_what_was_sent(pair: Any) -> None:
    client, server = pair()
    client.send(m.Ping(), deadline=deadline_in(20))
    client.close()
    client.close()
    assert server.receive(deadline_in(20)).message == m.Ping()
    with pytest.raises(ConnectionClosedError):
        server.receive(deadline_in(20))


# ---- calls -----------------------------------------------------------------------------------


def test_call_returns_the_answer(pair: Any, spawn: Any) -> None:
    client, server = pair()

    def serve() -> None:
        for _ in range(2):
            request = server.receive(deadline_in(20))
            request.discard(deadline_in(20))
            server.reply(request, m.Pong(at=float(request.payload_nbytes)), deadline=deadline_in(20))
        server.receive(deadline_in(20))
        server.send(m.Pong(at=7.0), deadline=deadline_in(20))  # does not echo the id

    served = spawn(serve)
    assert client.call(m.Ping(), m.Pong, deadline=deadline_in(20)) == m.Pong(at=0.0)
    assert client.call(PUT, m.Pong, payload=[b"abc"], deadline=deadline_in(20)) == m.Pong(at=3.0)
    assert client.call(m.Ping(), m.Pong, deadline=deadline_in(20)) == m.Pong(at=7.0)
    served.result(20)
    assert client.reusable


def test_a_failure_comes_back_as_its_class(pair: Any) -> None:
    client, server = pair()
    server.send_failure(CapacityError("arena\nfull"), deadline=deadline_in(20))
    with pytest.raises(CapacityError) as caught:
        client.call(m.Ping(), m.Pong, deadline=deadline_in(20))
    assert str(caught.value) == f"{client.address}: arena\N{REPLACEMENT CHARACTER}full"
    assert not client.reusable
    assert not client.closed


@pytest.mark.parametrize(
    ("answer", "request_id", "match"),
    [(m.Ping(), 0, "answered with Ping"), (m.Pong(at=0.0), 77, "answered request 77, asked was 1")],
)
def test_a_wrong_answer_ends_the_channel(pair: Any, answer: m.Message, request_id: int, match: str) -> None:
    client, server = pair()
    server.send(answer, deadline=deadline_in(20), request_id=request_id)
    with pytest.raises(ProtocolError, match=match) as caught:
        client.call(m.Ping(), m.Pong, deadline=deadline_in(20))
    assert caught.value.remote
    assert client.closed


def test_peers_with_other_specs_refuse_before_any_kv(pair: Any, spawn: Any, spec: KVSpec) -> None:
    """C109: the refusal shows both sides."""
    client, server = pair()
    other = KVSpec(model="tiny", revision="r2", layers=spec.layers[:1], block_tokens=32)

    def serve() -> None:
        begin = server.receive(deadline_in(20)).message
        assert isinstance(begin, m.BeginStream)
        assert begin.spec == other
        text = f"ours {spec.describe()}, yours {begin.spec.describe()}"
        server.send_failure(SpecMismatchError(text), deadline=deadline_in(20))

    served = spawn(serve)
    begin = m.BeginStream(stream="s", spec=other, keys=bytes(32), tail_tokens=31)
    with pytest.raises(SpecMismatchError) as caught:
        client.call(begin, m.StreamReady, deadline=deadline_in(20))
    served.result(20)
    assert spec.describe() in str(caught.value)
    assert other.describe() in str(caught.value)


# ---- the end ---------------------------------------------------------------------------------


def test_linger_reads_what_still_comes(pair: Any, spawn: Any) -> None:
    client, server = pair()

    def push() -> None:
        client.send(PUT, [bytes(4 << 20)], deadline=deadline_in(20))
        client.send(PUT, [bytes(4 << 20)], deadline=deadline_in(20))
        client.close()

    pushed = spawn(push)
    server.receive(deadline_in(20))
    server.linger(deadline_in(20))
    pushed.result(20)


def test_threads_of_the_tests_are_gone(threads_before: set[threading.Thread]) -> None:
    left = set(threading.enumerate()) - threads_before
    assert not [t for t in left if t.name.startswith("kvferry-")]
