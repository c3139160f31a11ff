"""Bytes with their hash behind them over sockets: by the native library, and piece by piece."""

from __future__ import annotations

import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectionClosedError, ProtocolError, TransferTimeoutError
from kvferry.testing.threads import until_asleep
from kvferry.transports import hashed
from kvferry.transports.hashed_socket import HashedSocketConnection
from kvferry.transports.unix import UnixConnection

DATA = np.random.default_rng(3).integers(0, 256, 3_000_000, np.uint8).tobytes()
HEAD = b"a head of some bytes"
SIZES = (1, 5000, 16 << 10, (16 << 10) + 1, 65_536, 131_072 + 16_384, 600_001, 2_500_003)
Pair = tuple[HashedSocketConnection, HashedSocketConnection]


@pytest.fixture(params=["native", "pieces"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pieces":
        monkeypatch.setattr("kvferry.transports.hashed_socket.hashed_stream", lambda: None)
    elif hashed.hashed_stream() is None:
        pytest.skip("the native library is not there")
    return str(request.param)


@pytest.fixture(params=["tcp", "unix"])
def pair(request: pytest.FixtureRequest, way: str) -> Iterator[Pair]:
    del way
    if request.param == "tcp":
        yield request.getfixturevalue("hashed_tcp")
        return
    here, there = socket.socketpair()
    made: Pair = (unix(here), unix(there))
    yield made
    for connection in made:
        connection.abort()


@pytest.fixture
def spawn() -> Iterator[Callable[[Callable[[], object]], Future[object]]]:
    threads: list[threading.Thread] = []

    def start(function: Callable[[], object]) -> Future[object]:
        done: Future[object] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the test asks for it
                done.set_exception(error)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return done

    yield start
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def unix(sock: socket.socket) -> UnixConnection:
    return UnixConnection(
        sock, local_address="unix:///here", peer_address="unix:///there", credentials=(1, 2, 3)
    )


def cut(view: memoryview, seed: int) -> list[memoryview]:
    """Into up to 200 parts, some of them empty."""
    chance = random.Random(seed)
    ends = sorted(chance.randrange(len(view) + 1) for _ in range(seed * 50))
    return [view[a:b] for a, b in zip([0, *ends], [*ends, len(view)], strict=True)]


@pytest.mark.parametrize("parts", [0, 1, 4])
def test_bytes_and_their_hash_arrive(
    pair: Pair, spawn: Callable[[Callable[[], object]], Future[object]], parts: int
) -> None:
    one, other = pair
    for nbytes in SIZES:
        data = memoryview(DATA)[:nbytes]
        sent = spawn(lambda data=data: one.send_hashed(HEAD, cut(data, parts), deadline_in(20)))  # type: ignore[misc]
        place = bytearray(nbytes + 2)
        head = bytearray(len(HEAD))
        other.recv_into([memoryview(head)], deadline_in(20))
        views = cut(memoryview(place)[1:-1], parts // 2)
        found, came = other.recv_hashed(HEAD, views, deadline_in(20))
        sent.result(20)
        assert head == HEAD
        assert place[1:-1] == data
        assert place[0] == place[-1] == 0
        assert found == came == xxh3_64_intdigest(HEAD + data.tobytes())
    one.send([b"next"], deadline_in(20))
    rest = bytearray(4)
    other.recv_into([memoryview(rest)], deadline_in(20))
    assert rest == b"next"


def test_what_was_changed_on_the_way_is_seen(pair: Pair) -> None:
    one, other = pair
    one.send([b"x" * 100, bytes(8)], deadline_in(20))
    place = bytearray(100)
    found, came = other.recv_hashed(HEAD, [memoryview(place)], deadline_in(20))
    assert found == xxh3_64_intdigest(HEAD + b"x" * 100)
    assert came == 0


def until_inside(connection: HashedSocketConnection) -> None:
    """Wait until a thread is in a call of the connection."""
    until = time.monotonic() + 30
    while not connection._guard.inside:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_deadline_ends_both_ways(pair: Pair) -> None:
    one, other = pair
    start = time.monotonic()
    with pytest.raises(TransferTimeoutError, match="the deadline passed while sending"):
        one.send_hashed(HEAD, [memoryview(DATA)] * 10, deadline_in(0.2))
    place = memoryview(bytearray(100 << 20))
    with pytest.raises(TransferTimeoutError, match=r"receiving, \d+ of \d+ bytes had come"):
        other.recv_hashed(HEAD, [place], deadline_in(0.2))
    assert 0.35 < time.monotonic() - start < 20


def test_a_trickle_does_not_stretch_the_deadline(
    pair: Pair, spawn: Callable[[Callable[[], object]], Future[object]]
) -> None:
    one, other = pair
    stop = threading.Event()

    def trickle() -> None:
        until = time.monotonic() + 60
        while not stop.wait(0.02) and time.monotonic() < until:
            one.send([b"z" * 1000], deadline_in(60))

    place = memoryview(bytearray(16 << 20))
    done = spawn(trickle)
    start = time.monotonic()
    try:
        with pytest.raises(TransferTimeoutError):
            other.recv_hashed(HEAD, [place], deadline_in(0.4))
        assert time.monotonic() - start < 20  # each of its waits could last as long
    finally:
        stop.set()
    done.result(20)


def test_the_end_of_the_stream_says_after_how_many_bytes(pair: Pair) -> None:
    one, other = pair
    one.send([b"x" * 70_000], deadline_in(20))
    one.close()
    with pytest.raises(ConnectionClosedError, match="was ended by the peer after 70000 of 200008 bytes"):
        other.recv_hashed(HEAD, [memoryview(bytearray(200_000))], deadline_in(20))


@pytest.mark.parametrize("receiving", [True, False])
def test_an_abort_wakes_a_call_inside(
    pair: Pair, spawn: Callable[[Callable[[], object]], Future[object]], receiving: bool
) -> None:
    one, other = pair
    if receiving:
        done = spawn(lambda: other.recv_hashed(HEAD, [memoryview(bytearray(100_000))], deadline_in(30)))
    else:
        done = spawn(lambda: one.send_hashed(HEAD, [memoryview(DATA)] * 30, deadline_in(30)))
    connection = other if receiving else one
    until_inside(connection)
    connection.abort()
    with pytest.raises(ConnectionClosedError, match="closed"):
        done.result(20)


def test_a_signal_reaches_its_handler(
    pair: Pair, spawn: Callable[[Callable[[], object]], Future[object]]
) -> None:
    _, other = pair

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def kill() -> None:
        until_inside(other)
        main = threading.main_thread()
        until_asleep(main.native_id or 0, deadline_in(30))
        signal.pthread_kill(main.ident or 0, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        killed = spawn(kill)
        with pytest.raises(KeyboardInterrupt):
            other.recv_hashed(HEAD, [memoryview(bytearray(1000))], deadline_in(60))
        killed.result(20)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_stray_descriptors_end_a_connection(way: str) -> None:
    del way
    here, there = socket.socketpair()
    connection = unix(there)
    socket.send_fds(here, [b"x" * 1000], [here.fileno()])
    with pytest.raises(ProtocolError, match="attached descriptors where none are due"):
        connection.recv_hashed(HEAD, [memoryview(bytearray(992))], deadline_in(20))
    connection.abort()
    here.close()
