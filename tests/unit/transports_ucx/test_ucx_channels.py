"""Channels over UCX: their frames go the short way, and what is unusual is as over any other connection."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectionClosedError, ProtocolError
from kvferry.core.native import native
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire import messages as m
from kvferry.wire.short import MessageWay

pytestmark = pytest.mark.skipif(native().library is None, reason="needs the native library")

_OPTIONS = ChannelOptions(role="test", session="s", checksum=False)
_SIZES = (1, 4000, 8191, 8192, 8193, 12_000, 16_384, 16_385, 65_536, 1 << 20, (5 << 20) + 1)


@pytest.fixture(params=["tls=posix,cma", "tls=tcp&net_devices=lo"])
def two(
    request: pytest.FixtureRequest,
    meet: Callable[[str], AbstractContextManager[tuple[Any, Any]]],
    pool: ThreadPoolExecutor,
) -> Iterator[tuple[Channel, Channel]]:
    """Client and server, without checksums."""
    with meet(request.param) as (one, other):
        server = pool.submit(Channel.accept, other, _OPTIONS, deadline_in(30))
        yield Channel.open(one, _OPTIONS, deadline_in(30)), server.result(30)


def _frame(rng: random.Random, nbytes: int) -> tuple[m.PutLayer, list[bytes]]:
    """A message with a payload of ``nbytes``, cut by chance."""
    blocks = tuple(range(rng.randrange(9)))
    cuts = sorted(rng.randrange(nbytes + 1) for _ in range(rng.randrange(4)))
    data = rng.randbytes(nbytes)
    parts = [data[start:end] for start, end in zip([0, *cuts], [*cuts, nbytes], strict=True)]
    return m.PutLayer(layer=rng.randrange(1 << 20), blocks=blocks), parts


def _serve(server: Channel, count: int, rng: random.Random) -> list[tuple[m.Message, bytes]]:
    """Receive frames into places that are cut otherwise, and answer each."""
    found = []
    for _ in range(count):
        incoming = server.receive_idle(deadline_in(30))
        assert incoming is not None
        place = memoryview(bytearray(incoming.payload_nbytes))
        cut = rng.randrange(len(place) + 1)
        incoming.read_into([place[:cut], place[cut:]], deadline_in(30))
        server.reply(incoming, m.LayerAck(count=len(place)), deadline=deadline_in(30))
        found.append((incoming.message, place.tobytes()))
    return found


@pytest.mark.parametrize("long", ["neither", "sender", "receiver"])
def test_frames_arrive_as_by_the_long_way(
    two: tuple[Channel, Channel], pool: ThreadPoolExecutor, long: str
) -> None:
    client, server = two
    assert all(isinstance(end._short, MessageWay) for end in two)
    if long != "neither":
        (client if long == "sender" else server)._short = None
    rng = random.Random(5)
    frames = [_frame(rng, nbytes) for nbytes in (0, *_SIZES, *rng.sample(_SIZES, len(_SIZES)), 0)]

    served = pool.submit(_serve, server, len(frames), random.Random(6))
    for message, parts in frames:
        answer = client.call(message, m.LayerAck, payload=parts, deadline=deadline_in(30))
        assert answer.count == sum(map(len, parts))

    assert served.result(30) == [(message, b"".join(parts)) for message, parts in frames]


def test_the_short_way_is_taken(
    two: tuple[Channel, Channel], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, server = two
    monkeypatch.delattr(type(server._reader), "read_whole")
    monkeypatch.delattr(type(server._reader), "read_payload")
    frame, parts = _frame(random.Random(7), 1 << 20)

    served = pool.submit(_serve, server, 20, random.Random(8))
    for _ in range(20):
        client.call(frame, m.LayerAck, payload=parts, deadline=deadline_in(30))

    assert len(served.result(30)) == 20


def test_places_that_do_not_fit_are_refused_and_the_payload_is_still_there(
    two: tuple[Channel, Channel], pool: ThreadPoolExecutor
) -> None:
    client, server = two
    for nbytes in (100, 1 << 20):
        frame, parts = _frame(random.Random(9), nbytes)
        sent = pool.submit(client.send, frame, parts, deadline=deadline_in(30))
        incoming = server.receive(deadline_in(30))
        place = memoryview(bytearray(nbytes))
        with pytest.raises(ProtocolError, match=f"{nbytes} bytes, to be received into {nbytes - 1}"):
            incoming.read_into([place[1:]], deadline_in(30))

        incoming.read_into([place], deadline_in(30))

        assert place == b"".join(parts)
        sent.result(30)


def test_an_idle_end_waits_in_vain_and_then_hears_of_the_end(two: tuple[Channel, Channel]) -> None:
    client, server = two
    assert server.receive_idle(deadline_in(0.01)) is None
    client.close()
    with pytest.raises(ConnectionClosedError):
        server.receive_idle(deadline_in(30))
