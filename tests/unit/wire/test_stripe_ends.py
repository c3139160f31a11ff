"""Frames that cross the end of a stripe, wherever it lies: some of their bytes are of another lane."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import xxhash

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectionClosedError, CorruptBlockError, TransferTimeoutError
from kvferry.core.native import native
from kvferry.transports import lanes
from kvferry.transports.sockets import SocketConnection
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire import messages as m
from kvferry.wire.incoming import Incoming

STRIPE = 1 << 17
LANES = 3  # of the connections that are made here
MESSAGE = m.PutLayer(layer=5, blocks=(1, 2, 3))
HEAD = 32 + len(msgspec.msgpack.encode(MESSAGE))
NBYTES = STRIPE - HEAD + 40_000  # of which 40,000 are of the second lane
needs_native = pytest.mark.skipif(native().library is None, reason="needs the native library")


@pytest.fixture
def two(
    request: pytest.FixtureRequest, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[Channel, Channel]:
    """Client and server over lanes of small stripes, whose limits are set: no frame needs the long way."""
    kind, checksum = getattr(request, "param", ("lanes", True))
    monkeypatch.setattr(lanes, "STRIPE_NBYTES", STRIPE)
    options = ChannelOptions(role="test", session="s", checksum=checksum)
    client, server = pair(kind, client=options, server=options)
    data, place = bytes(LANES * STRIPE), memoryview(bytearray(LANES * STRIPE))
    for _ in range(2):
        client.send(MESSAGE, [data], deadline=deadline_in(10))
        server.receive(deadline_in(10)).read_into([place], deadline_in(10))
    return client, server


def soon() -> float:
    return deadline_in(30)


@pytest.mark.parametrize("two", [(k, c) for k in ("lanes", "paced") for c in (True, False)], indirect=True)
@pytest.mark.parametrize("long", ["", "client", "server", "both"])
def test_a_frame_is_whole_wherever_it_is_cut(two: tuple[Channel, Channel], long: str) -> None:
    client, server = two
    for end in two:
        if long in ("both", "client" if end is client else "server"):
            end._short = None
    rng, trailer = random.Random(1), 8 if client._protocol.checksum else 0
    for stripes, behind in itertools.product((1, LANES, LANES + 1), range(-trailer - 2, 3)):
        nbytes = stripes * STRIPE - HEAD + behind  # so the payload ends there, or the trailer
        data, place = rng.randbytes(nbytes), memoryview(bytearray(nbytes))
        cut = rng.randrange(nbytes)
        client.send(MESSAGE, [data[:cut], data[cut:]], deadline=soon(), request_id=100 + behind)
        client.send(
            MESSAGE, [data[:5]], deadline=soon()
        )  # begins on the first lane again, maybe received ahead
        incoming = server.receive(soon())
        assert (incoming.message, incoming.request_id) == (MESSAGE, 100 + behind)
        cut = rng.randrange(7, nbytes)
        incoming.read_into([place[:7], place[7:cut], place[cut:]], soon())
        assert place == data
        assert server.readable()
        server.receive(soon()).read_into([place[:5]], soon())
        assert place[:5] == data[:5]
        assert not server.readable()


@pytest.mark.parametrize("long", [False, True])
def test_a_message_may_be_longer_than_a_stripe(two: tuple[Channel, Channel], long: bool) -> None:
    client, server = two
    message = m.PutLayer(layer=5, blocks=tuple(range(1 << 16, (1 << 16) + STRIPE // 4)))
    assert len(msgspec.msgpack.encode(message)) > STRIPE
    for _ in range(3):
        client.send(message, [b"x" * 99] if long else (), deadline=soon())
        client.send(MESSAGE, deadline=soon())
        incoming = server.receive(soon())
        assert incoming.message == message
        incoming.discard(soon())
        assert server.receive(soon()).message == MESSAGE


@needs_native
def test_who_is_cut_takes_the_short_way(
    two: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def the_long_way(*args: object) -> None:
        pytest.fail("a frame took the long way")

    client, server = two
    monkeypatch.setattr(Channel, "_send_frame", the_long_way)
    for nbytes in (5_000, NBYTES, 3 * STRIPE):
        client.send(MESSAGE, [bytes(nbytes)], deadline=soon())
        server.receive(soon()).read_into([memoryview(bytearray(nbytes))], soon())
        assert not server._took_long_way


def lanes_of(end: Channel) -> tuple[SocketConnection, ...]:
    assert isinstance(end._connection, lanes.LaneConnection)
    return end._connection._lanes


def begun(ends: tuple[Channel, Channel], behind: int) -> tuple[Incoming, SocketConnection]:
    """A payload of which ``behind`` bytes of the second stripe have come, not all; and the lane of that."""
    client, server = ends
    head = client._protocol.encode(MESSAGE, NBYTES, 7)
    client._connection.begin_sending()
    client._connection.send([(head + bytes(NBYTES))[: STRIPE + behind]], soon())
    return server.receive(soon()), lanes_of(server)[1]


@pytest.mark.parametrize("behind", [0, 10_000])
@pytest.mark.parametrize("how", ["aborted here", "closed there", "reset there"])
def test_an_end_behind_a_crossing(
    two: tuple[Channel, Channel], spawn: Any, until: Callable[..., None], how: str, behind: int
) -> None:
    client, server = two
    incoming, lane = begun(two, behind)
    taking = spawn(lambda: incoming.read_into([memoryview(bytearray(NBYTES))], soon()))
    until(lambda: lane._guard.inside)
    end = {
        "aborted here": server.abort,
        "closed there": client._connection.close,
        "reset there": client.abort,
    }
    end[how]()
    got = STRIPE - HEAD + behind
    said = {
        "aborted here": r"was closed here",
        "closed there": rf"ended by the peer after {got} of {NBYTES + 8} bytes",
        "reset there": r"ended by the peer",
    }
    with pytest.raises(ConnectionClosedError, match=said[how]):
        taking.result(20)
    assert server.closed
    until(lambda: all(one.fileno() < 0 for one in lanes_of(server)))  # nobody is left inside of one


def test_a_lane_that_was_closed_when_it_is_due_to_receive(two: tuple[Channel, Channel]) -> None:
    client, server = two
    client.send(MESSAGE, [bytes(NBYTES)], deadline=soon())
    incoming = server.receive(soon())
    lanes_of(server)[1].abort()
    with pytest.raises(ConnectionClosedError):
        incoming.read_into([memoryview(bytearray(NBYTES))], soon())
    assert server.closed


def test_a_lane_that_was_closed_when_it_is_due_to_send(two: tuple[Channel, Channel]) -> None:
    client, _ = two
    lanes_of(client)[1].abort()
    with pytest.raises(ConnectionClosedError):
        client.send(MESSAGE, [bytes(NBYTES)], deadline=soon())
    assert client.closed


def test_a_deadline_behind_a_crossing(two: tuple[Channel, Channel]) -> None:
    incoming, _ = begun(two, 10_000)
    with pytest.raises(TransferTimeoutError, match="deadline passed"):
        incoming.read_into([memoryview(bytearray(NBYTES))], deadline_in(0.8))
    assert two[1].closed


def test_damage_behind_a_crossing(two: tuple[Channel, Channel]) -> None:
    client, server = two
    frame = client._protocol.encode(MESSAGE, NBYTES, 7) + bytes(NBYTES)
    sent = xxhash.xxh3_64_intdigest(frame)
    damaged = bytearray(frame + sent.to_bytes(8, "little"))
    damaged[-100] = 1
    found = xxhash.xxh3_64_intdigest(damaged[:-8])
    client._connection.begin_sending()
    client._connection.send([damaged], soon())
    with pytest.raises(CorruptBlockError, match=f"{found:016x}, sent was {sent:016x}"):
        server.receive(soon()).read_into([memoryview(bytearray(NBYTES))], soon())
