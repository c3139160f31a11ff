"""Who may say what when, and which version and checksums come out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvferry.core.errors import ProtocolError
from kvferry.wire import messages as m
from kvferry.wire.protocol import (
    TRANSITIONS,
    TYPE_NUMBERS,
    MessageReceived,
    Side,
    State,
    TrailerReceived,
    Versions,
    WireProtocol,
    negotiate,
)

HELLO = m.Hello(min_version=1, max_version=1, session="s")


def at_state(side: Side, state: State) -> WireProtocol:
    protocol = WireProtocol(side)
    protocol.state = state
    protocol.version = 1
    return protocol


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("side", list(Side))
def test_who_may_send_what_when(wire: Any, side: Side, state: State, examples: Sequence[Any]) -> None:
    """The whole table, spelled out once more by hand: nothing but the handshake before it is over."""
    for example in examples:
        cls = type(example.message)
        allowed = {
            State.START: (side is Side.CLIENT and cls is m.Hello)
            or (side is Side.SERVER and cls is m.Failure),
            State.OFFERED: side is Side.SERVER and cls in (m.Welcome, m.Failure),
            State.OPEN: cls not in (m.Hello, m.Welcome),
            State.REFUSED: False,
        }[state]
        sender, receiver = at_state(side, state), at_state(side.other, state)
        meta = msgspec.msgpack.encode(example.message)
        data = wire.raw_frame(TYPE_NUMBERS[cls], meta)
        if allowed:
            sender.encode(example.message)
            assert wire.feed(receiver, data)[0].message == example.message
            assert receiver.state is sender.state
        else:
            with pytest.raises(ProtocolError, match="may not send"):
                sender.encode(example.message)
            with pytest.raises(ProtocolError, match="in state"):
                wire.feed(receiver, data)


def test_every_state_has_rules() -> None:
    assert set(TRANSITIONS) == set(State)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 1), (1, 2), 1),
        ((1, 2), (1, 1), 1),
        ((1, 2), (2, 3), 2),
        ((2, 3), (1, 2), 2),
        ((1, 9), (3, 5), 5),
        ((1, 1), (2, 3), None),
        ((2, 3), (1, 1), None),
        ((1, 1), (2, 1), None),
        ((1, 1), (0, 1), None),
        ((1, 1), (1, 70000), None),
    ],
)
def test_negotiation(ours: tuple[int, int], theirs: tuple[int, int], expected: int | None) -> None:
    if expected is None:
        with pytest.raises(ProtocolError) as caught:
            negotiate(Versions(*ours), Versions(*theirs))
        assert f"{theirs[0]}..{theirs[1]}" in str(caught.value)
    else:
        assert negotiate(Versions(*ours), Versions(*theirs)) == expected


@pytest.mark.parametrize(
    ("client_versions", "server_versions", "expected"),
    [((1, 1), (1, 2), 1), ((1, 2), (1, 1), 1), ((2, 3), (1, 2), 2), ((1, 2), (2, 3), 2), ((5, 6), (5, 6), 6)],
)
def test_neighbouring_versions_shake_hands_and_talk(
    wire: Any, client_versions: tuple[int, int], server_versions: tuple[int, int], expected: int
) -> None:
    client = WireProtocol(Side.CLIENT, versions=Versions(*client_versions))
    server = WireProtocol(Side.SERVER, versions=Versions(*server_versions))
    hello = m.Hello(min_version=client_versions[0], max_version=client_versions[1], session="s")
    wire.feed(server, wire.frame(client, hello))
    wire.feed(client, wire.frame(server, m.Welcome(version=server.version, session="s", epoch="e")))
    assert client.version == server.version == expected
    ping = wire.frame(client, m.Ping())
    assert ping[4:6] == bytes([expected, 0])
    assert wire.feed(server, ping)[0].message == m.Ping()


def test_a_much_newer_client_is_refused_with_both_ranges_and_told_so(wire: Any) -> None:
    server = WireProtocol(Side.SERVER)
    meta = {"t": "hello", "min_version": 7, "max_version": 8, "session": "s", "quantum": {"x": 1}}
    with pytest.raises(ProtocolError, match=r"this side speaks 1\.\.1, the peer 7\.\.8; update this side"):
        wire.feed(server, wire.raw_frame(1, msgspec.msgpack.encode(meta), version=7))
    assert server.state is State.OFFERED
    refusal = wire.frame(server, m.Failure(code="protocol", message="no"))
    client = WireProtocol(Side.CLIENT, versions=Versions(7, 8))
    client.encode(m.Hello(min_version=7, max_version=8, session="s"))
    assert wire.feed(client, refusal)[0].message == m.Failure(code="protocol", message="no")
    assert client.state is State.REFUSED


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
def test_checksums_are_off_only_if_both_want_it(wire: Any, ours: bool, theirs: bool, agreed: bool) -> None:
    client, server = WireProtocol(Side.CLIENT, checksum=ours), WireProtocol(Side.SERVER, checksum=theirs)
    wire.feed(server, wire.frame(client, m.Hello(min_version=1, max_version=1, session="s", checksum=ours)))
    wire.feed(
        client, wire.frame(server, m.Welcome(version=1, session="s", epoch="e", checksum=server.checksum))
    )
    assert client.checksum is server.checksum is agreed
    events = wire.feed(server, wire.frame(client, m.PutLayer(layer=0, blocks=()), b"abc"))
    assert [type(e) for e in events] == [MessageReceived, bytes] + [TrailerReceived] * agreed


@pytest.mark.parametrize(
    ("welcome", "match"),
    [
        (m.Welcome(version=2, session="s", epoch="e"), "chose protocol version 2"),
        (m.Welcome(version=1, session="s", epoch="e", checksum=False), "turned checksums off"),
    ],
)
def test_a_client_refuses_a_bad_welcome(wire: Any, welcome: m.Welcome, match: str) -> None:
    client = WireProtocol(Side.CLIENT)
    client.encode(HELLO)
    with pytest.raises(ProtocolError, match=match):
        wire.feed(client, wire.raw_frame(2, msgspec.msgpack.encode(welcome)))


@pytest.mark.parametrize(
    "welcome",
    [
        m.Welcome(version=2, session="s", epoch="e"),
        m.Welcome(version=1, session="s", epoch="e", checksum=False),
    ],
)
def test_a_server_cannot_welcome_to_something_else_than_agreed(wire: Any, welcome: m.Welcome) -> None:
    server = WireProtocol(Side.SERVER)
    wire.feed(server, wire.frame(WireProtocol(Side.CLIENT), HELLO))
    with pytest.raises(ProtocolError, match="welcome with"):
        server.encode(welcome)


def test_a_stranger_may_send_less_than_a_peer(wire: Any) -> None:
    server = WireProtocol(Side.SERVER)
    data = wire.raw_frame(1, b"", meta_nbytes=65537)[:32]
    server.receive(data[:4])
    with pytest.raises(ProtocolError, match="the limit is 65536"):
        server.receive(data[4:])
