"""How channels begin: strangers, versions, and what the ends learn of each other."""

from __future__ import annotations

import logging
import math
import random
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, ConnectError, ConnectionClosedError, KVFerryError, ProtocolError
from kvferry.transports import Connection
from kvferry.wire import Channel, ChannelOptions, Versions, channel
from kvferry.wire import messages as m
from kvferry.wire.handshake import shaking_hands

KINDS = ["tcp", "inproc"]
LATE = "no handshake within 0.3 s; check that kvferry is at the other end, over the same transport"
OPTIONS = ChannelOptions(role="test", session="s")
PONG = struct.pack("<4sHHIQIQ", b"KVFY", 1, 5, 0, 0, 8, 0) + b"\x81\xa1t\xa4pong"


def drip(sock: socket.socket) -> None:
    """A valid welcome header, one byte at a time: never done, never silent."""
    header = struct.pack("<4sHHIQIQ", b"KVFY", 1, 2, 1, 0, 60_000, 0)
    for byte in header + bytes(60_000):
        sock.sendall(bytes([byte]))
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("behave", "error", "match"),
    [
        (lambda sock: None, ConnectError, LATE),
        (lambda sock: sock.sendall(b"KVF"), ConnectError, LATE),
        (lambda sock: sock.sendall(b"\x01\x02\x03"), ConnectError, LATE),
        (drip, ConnectError, LATE),
        (lambda sock: sock.sendall(random.Random(1).randbytes(500)), ProtocolError, "does not speak kvferry"),
        (lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), ProtocolError, "look like HTTP"),
        (lambda sock: sock.sendall(b"\x15\x03\x01\x00\x02\x02\x16"), ProtocolError, "look like TLS"),
        (lambda sock: sock.shutdown(socket.SHUT_WR), ConnectError, "closed during the handshake"),
        (lambda sock: sock.sendall(PONG), ProtocolError, "'pong' in state 'offered'"),
        (lambda sock: sock.close(), ConnectError, "closed during the handshake"),
    ],
    ids=["silent", "3 bytes", "3 other bytes", "drip", "garbage", "http", "tls", "ends", "pong", "closes"],
)
def test_a_server_that_is_none_fails_the_connect_in_time(
    raw_server: Any, behave: Any, error: type[Exception], match: str
) -> None:
    """C067."""
    address = raw_server(behave)
    # who says something wrong is known by it, not by the time that passed: no test may last as long
    options = ChannelOptions(role="test", session="s", hello_timeout_s=0.3 if match == LATE else 1000.0)
    with pytest.raises(error, match=match) as caught:
        Channel.connect(address, options, deadline_in(1000))
    assert address in str(caught.value)


def test_the_time_that_is_named_is_the_one_that_was_given(
    raw_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it named what was left when it began: 0.299 s of 0.3."""

    def late(*given: Any) -> Any:
        time.sleep(0.01)
        return shaking_hands(*given)

    monkeypatch.setattr(channel, "shaking_hands", late)
    options = ChannelOptions(role="test", session="s", hello_timeout_s=0.3)
    with pytest.raises(ConnectError, match=LATE):
        Channel.connect(raw_server(lambda sock: None), options, deadline_in(1000))


def test_the_callers_deadline_also_bounds_the_handshake(raw_server: Any) -> None:
    address = raw_server(lambda sock: None)
    options = ChannelOptions(role="test", session="s", hello_timeout_s=1000.0)
    with pytest.raises(ConnectError, match=address):
        Channel.connect(address, options, deadline_in(0.2))


def test_a_malformed_address_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        Channel.connect("tcp://[::1:9", OPTIONS, deadline_in(1))


def accepting(spawn: Any, there: Connection, options: ChannelOptions = OPTIONS) -> Any:
    return spawn(lambda: Channel.accept(there, options, deadline_in(20)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("client", "server", "agreed"), [((1, 2), (1, 1), 1), ((2, 3), (1, 2), 2)])
def test_neighbouring_versions_talk(
    pair: Any, kind: str, client: tuple[int, int], server: tuple[int, int], agreed: int, peer: Any
) -> None:
    here, there = pair(
        kind,
        client=ChannelOptions(role="c", session="s", versions=Versions(*client)),
        server=ChannelOptions(role="s", session="s", versions=Versions(*server)),
    )
    assert here.peer.version == there.peer.version == agreed
    here.send(m.Ping(), deadline=deadline_in(20))
    assert there.receive(deadline_in(20)).message == m.Ping()


@pytest.mark.parametrize("kind", KINDS)
def test_no_common_version_is_told_to_both(connect: Any, spawn: Any, kind: str) -> None:
    here, there = connect(kind)
    accepted = accepting(spawn, there)
    options = ChannelOptions(role="c", session="s", versions=Versions(4, 5))
    with pytest.raises(ProtocolError, match=r"this side speaks 1\.\.1, the peer 4\.\.5") as caught:
        Channel.open(here, options, deadline_in(20))
    assert here.peer_address in str(caught.value)
    with pytest.raises(ProtocolError, match=r"4\.\.5"):
        accepted.result(20)


def test_the_peers_describe_themselves(pair: Any, peer: Any) -> None:
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


def test_clock_offset_is_within_its_error(pair: Any, raw_server: Any, peer: Any) -> None:
    client, server = pair()
    assert abs(client.peer.clock_offset) <= client.peer.clock_error + 1e-6
    assert client.peer.clock_error < 60
    assert server.peer.clock_offset <= 0  # same clock, one direction: too small by one message
    assert server.peer.clock_error == math.inf
    asked = time.monotonic()
    other = Channel.connect(raw_server(peer.handshake_by_hand), OPTIONS, deadline_in(20))
    answered = time.monotonic()
    assert abs(other.peer.clock_offset - (1000 - (asked + answered) / 2)) <= answered - asked
    assert 0 < other.peer.clock_error <= (answered - asked) / 2 + 1e-6
    other.abort()


def test_a_stranger_with_a_wrong_first_message_gets_no_answer(connect: Any, spawn: Any) -> None:
    here, there = connect()
    accepted = accepting(spawn, there)
    here.send([b"\x80\x04\x95 not a hello"], deadline_in(20))
    with pytest.raises(ProtocolError, match="pickle"):
        accepted.result(20)
    with pytest.raises(ConnectionClosedError):
        here.recv_into([memoryview(bytearray(1))], deadline_in(20))


def test_a_client_that_leaves_in_the_handshake(connect: Any, spawn: Any) -> None:
    here, there = connect()
    accepted = accepting(spawn, there)
    here.send([b"KVFY\x01"], deadline_in(20))
    here.close()
    with pytest.raises(ConnectError, match="closed during the handshake"):
        accepted.result(20)


def test_an_unexpected_error_in_the_handshake_leaves_no_connection(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = connect()

    def fails(parts: Sequence[Any], deadline: float) -> None:
        raise RuntimeError("broken transport")

    monkeypatch.setattr(here, "send", fails)
    with pytest.raises(RuntimeError):
        Channel.open(here, OPTIONS, deadline_in(20))
    with pytest.raises(ConnectionClosedError):
        there.recv_into([memoryview(bytearray(1))], deadline_in(20))


def test_a_peer_that_left_cannot_be_told_why_it_is_refused(connect: Any, spawn: Any) -> None:
    here, there = connect()
    hello = m.Hello(min_version=8, max_version=9, session="s")
    meta = msgspec.msgpack.encode(hello)
    here.send([struct.pack("<4sHHIQIQ", b"KVFY", 8, 1, 0, 0, len(meta), 0), meta], deadline_in(20))
    here.abort()
    with pytest.raises(KVFerryError):
        accepting(spawn, there).result(20)
