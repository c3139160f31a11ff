"""Payloads that are lent to the kernel: the same bytes as any, but not copied by the sender."""

from __future__ import annotations

import random
import resource
import signal
import socket
import struct
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectionClosedError, CorruptBlockError, TransferTimeoutError
from kvferry.core.native import native
from kvferry.transports import lanes
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire import messages as m

pytestmark = pytest.mark.skipif(native().library is None, reason="needs the native library")

PUT = m.PutLayer(layer=1, blocks=())
LENT_NBYTES = 256 << 10


@pytest.fixture(params=["tcp", "unix", "lanes"])
def two(request: pytest.FixtureRequest, pair: Any) -> tuple[Channel, Channel]:
    """Client and server."""
    made: tuple[Channel, Channel] = pair(request.param)
    return made


def cut(rng: random.Random, data: bytes, parts: int) -> list[memoryview]:
    ends = [0, *sorted(rng.randrange(len(data) + 1) for _ in range(parts - 1)), len(data)]
    return [memoryview(data)[a:b] for a, b in pairwise(ends)]


def pipes() -> int:
    """How many ends of pipes this process has."""
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        try:
            found += str(one.readlink()).startswith("pipe:")
        except OSError:  # that of the folder itself
            continue
    return found


@pytest.mark.parametrize("kind", ["tcp", "unix", "lanes", "small stripes", "inproc"])
@pytest.mark.parametrize("checksum", [True, False])
def test_they_arrive_as_they_are(
    pair: Any, spawn: Any, monkeypatch: pytest.MonkeyPatch, kind: str, checksum: bool
) -> None:
    if kind == "small stripes":
        kind = "lanes"
        monkeypatch.setattr(lanes, "STRIPE_NBYTES", 100_000)
    options = ChannelOptions(role="test", session="s", checksum=checksum)
    client, server = pair(kind, client=options, server=options)
    rng = random.Random(f"{kind}{checksum}")
    sizes = [1, LENT_NBYTES - 1, LENT_NBYTES, 1 << 20, (1 << 20) + 1, 3_000_001]
    payloads = [(rng.randbytes(size), parts) for size in sizes for parts in (1, 2, 60, 200)]

    def send() -> None:
        for data, parts in payloads:
            client.send(PUT, cut(rng, data, parts), deadline=deadline_in(20), lent=True)

    sent = spawn(send)
    for data, _ in payloads:
        place = memoryview(bytearray(len(data)))
        server.receive(deadline_in(20)).read_into([place], deadline_in(20))
        assert place == data
    sent.result(20)


def test_what_changes_before_it_has_arrived_is_found_damaged(pair: Any) -> None:
    """And so they are not copied; what is not lent is."""
    for lent in (False, True):
        client, server = pair("tcp")
        client._connection.bare.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        data, place = bytearray(LENT_NBYTES), memoryview(bytearray(LENT_NBYTES))
        client.send(PUT, [data], deadline=deadline_in(20), lent=lent)
        data[LENT_NBYTES // 2] = 1
        incoming = server.receive(deadline_in(20))
        if lent:
            with pytest.raises(CorruptBlockError, match="xxh3_64"):
                incoming.read_into([place], deadline_in(20))
        else:
            incoming.read_into([place], deadline_in(20))
            assert place == bytes(LENT_NBYTES)


def test_without_a_pipe_they_are_copied(pair: Any, spawn: Any) -> None:
    client, server = pair("tcp")
    data, place = random.Random(1).randbytes(2 << 20), memoryview(bytearray(2 << 20))
    received = spawn(lambda: server.receive(deadline_in(20)).read_into([place], deadline_in(20)))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        client.send(PUT, [data], deadline=deadline_in(20), lent=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    received.result(20)
    assert place == data


def test_a_pipe_that_could_not_be_made_is_not_asked_for_each_time(pair: Any, spawn: Any) -> None:
    client, server = pair("tcp")
    place = memoryview(bytearray(LENT_NBYTES))

    def save() -> int:
        """Ends of pipes that it makes."""
        before = pipes()
        received = spawn(lambda: server.receive(deadline_in(20)).read_into([place], deadline_in(20)))
        client.send(PUT, [bytes(LENT_NBYTES)], deadline=deadline_in(20), lent=True)
        received.result(20)
        return pipes() - before

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        client.send(PUT, [bytes(LENT_NBYTES)], deadline=deadline_in(20), lent=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    server.receive(deadline_in(20)).read_into([place], deadline_in(20))
    made = [save() for _ in range(300)]
    assert sum(made) == 2
    assert made.index(2) > 100


def test_the_pipe_goes_with_the_channel(pair: Any, spawn: Any) -> None:
    client, server = pair("tcp")
    place = memoryview(bytearray(1 << 20))
    before = pipes()
    for _ in range(3):
        received = spawn(lambda: server.receive(deadline_in(20)).read_into([place], deadline_in(20)))
        client.send(PUT, [bytes(1 << 20)], deadline=deadline_in(20), lent=True)
        received.result(20)
        assert pipes() == before + 2
    client.abort()
    client._short = None
    assert pipes() == before


def test_a_deadline_while_the_peer_takes_nothing(two: tuple[Channel, Channel]) -> None:
    """The kernel takes 16 pages after the other, and waits for each as long as it may for all."""
    client, _ = two
    began = time.monotonic()
    with pytest.raises(TransferTimeoutError, match="sending"):
        client.send(PUT, [bytes(32 << 20)], deadline=deadline_in(0.6), lent=True)
    assert time.monotonic() - began < 1.0
    assert client.closed


def test_what_was_lent_already_is_copied_where_no_call_may_wait_any_more(pair: Any, spawn: Any) -> None:
    client, server = pair("tcp")
    data, place = random.Random(4).randbytes(16 << 20), memoryview(bytearray(16 << 20))
    client._connection._limit_wait(socket.SO_SNDTIMEO, deadline_in(1.2), "sending")
    limit = client._connection._send_limit
    assert limit >= 1.0
    told = struct.pack("@ll", 0, 50_000)  # no call waits for as long as it is believed to
    client._connection._guard.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, told)
    began = time.monotonic()
    sent = spawn(lambda: client.send(PUT, [data], deadline=began + limit + 0.2, lent=True))
    threading.Event().wait(0.4)  # less than the limit is left then
    server.receive(deadline_in(20)).read_into([place], deadline_in(20))
    sent.result(20)
    assert place == data


def test_an_end_of_the_peer_raises_no_signal(two: tuple[Channel, Channel]) -> None:
    client, server = two
    signals: list[int] = []
    before = signal.signal(signal.SIGPIPE, lambda number, _: signals.append(number))
    try:
        server.close()
        with pytest.raises(ConnectionClosedError):
            client.send(PUT, [bytes(32 << 20)], deadline=deadline_in(20), lent=True)
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert signals == []


def test_a_call_lends_what_it_is_told_to(pair: Any, spawn: Any) -> None:
    client, server = pair("tcp")
    data, place = random.Random(2).randbytes(1 << 20), memoryview(bytearray(1 << 20))

    def serve() -> None:
        for _ in range(2):
            incoming = server.receive(deadline_in(20))
            incoming.read_into([place], deadline_in(20))
            server.reply(incoming, m.LayerAck(count=7), deadline=deadline_in(20))

    served = spawn(serve)
    before = pipes()
    assert client.call(PUT, m.LayerAck, payload=[data], deadline=deadline_in(20)).count == 7
    assert pipes() == before
    assert client.call(PUT, m.LayerAck, payload=[data], deadline=deadline_in(20), lent=True).count == 7
    assert pipes() == before + 2
    assert place == data
    served.result(20)
