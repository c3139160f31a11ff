"""Values received with their checksums: the same bytes however they come; what is of another form stays."""

from __future__ import annotations

import array
import fcntl
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectionClosedError, TransferTimeoutError
from kvferry.transports import replies as replies_module
from kvferry.transports.hashed_socket import HashedSocketConnection
from kvferry.transports.replies import Ahead, Form, Taken, reply_stream

START, PREFIX = b"$12345\r\n", b"what stands before the data"
DATA = np.random.default_rng(5).bytes(1_300_000)
Pair = tuple[HashedSocketConnection, HashedSocketConnection]
pytestmark = pytest.mark.skipif(reply_stream() is None, reason="the native library is not there")


@pytest.fixture
def pair(hashed_tcp: Pair) -> Pair:
    assert hashed_tcp[1].receives_values
    return hashed_tcp


def form(nbytes: int) -> Form:
    return Form(START, len(PREFIX), nbytes)


def blocks(nbytes: int, count: int = 5) -> list[bytes]:
    return [DATA[n : n + nbytes] for n in range(count)]


def as_sent(given: list[bytes]) -> bytes:
    return b"".join(START + PREFIX + data + xxh3_64_digest(data)[::-1] + b"\r\n" for data in given)


def take(
    end: HashedSocketConnection, nbytes: int, count: int, ahead: Ahead, seconds: float = 20
) -> tuple[list[Taken], list[bytearray]]:
    into = [bytearray(nbytes) for _ in range(count)]
    return end.recv_values(
        form(nbytes), [memoryview(view) for view in into], ahead, deadline_in(seconds)
    ), into


def empty() -> Ahead:
    return Ahead(memoryview(bytearray(256)))


def rest(end: HashedSocketConnection, ahead: Ahead, nbytes: int) -> bytes:
    """What comes next, taken ahead or not."""
    there = bytes(ahead.buffer[ahead.at : ahead.end])
    more = bytearray(nbytes - len(there))
    end.recv_into([memoryview(more)], deadline_in(20))
    return there + bytes(more)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def feed(pair: Pair, sent: bytes, each: int) -> None:
    """So many bytes at a time, the next ones when these are taken."""
    unread = array.array("i", [0])
    for at in range(0, len(sent), each):
        pair[0].send([sent[at : at + each]], deadline_in(20))
        until = time.monotonic() + 20
        while len(sent) <= 4000 and time.monotonic() < until:
            fcntl.ioctl(pair[1].fileno(), termios.FIONREAD, unread)
            if not unread[0]:
                break


@pytest.mark.parametrize("each", [1, 7, 1 << 30])
@pytest.mark.parametrize("before", [0, 1, 50, 170])
@pytest.mark.parametrize("nbytes", [1, 100, 600])
def test_they_come_in_pieces_and_some_bytes_were_there_before(
    pair: Pair, pool: ThreadPoolExecutor, nbytes: int, before: int, each: int
) -> None:
    given, ahead = blocks(nbytes), empty()
    sent = as_sent(given)
    ahead.at, ahead.end = 256 - before, 256  # so the next start has to be moved to the front
    ahead.buffer[ahead.at :] = sent[:before]
    fed = pool.submit(feed, pair, sent[before:] + b"+another reply", each)
    taken, into = take(pair[1], nbytes, 5, ahead)
    assert list(map(bytes, into)) == given
    assert all(
        t.prefix == PREFIX and t.hashed == t.sent == xxh3_64_intdigest(d)
        for t, d in zip(taken, given, strict=True)
    )
    assert ahead.moved >= len(sent) - before
    assert rest(pair[1], ahead, 14) == b"+another reply"
    fed.result(20)


@pytest.mark.parametrize("nbytes", [64 << 10, (514 << 10) - 1, 514 << 10, 1_299_000])
def test_large_ones(pair: Pair, pool: ThreadPoolExecutor, nbytes: int) -> None:
    given = blocks(nbytes)
    fed = pool.submit(feed, pair, as_sent(given), 300_001)
    taken, into = take(pair[1], nbytes, 5, empty())
    assert list(map(bytes, into)) == given
    assert [t.sent for t in taken] == [t.hashed for t in taken] == list(map(xxh3_64_intdigest, given))
    fed.result(20)


@pytest.mark.parametrize(
    "other", [b"$-1\r\n", b"-ERR some words of an error\r\n", b"$12\r\nhello, world\r\n", b"$1"]
)
@pytest.mark.parametrize("each", [1, 1 << 30])
def test_what_is_of_another_form_stays(pair: Pair, pool: ThreadPoolExecutor, other: bytes, each: int) -> None:
    given, ahead = blocks(100), empty()
    sent = as_sent(given[:2]) + other + (b"x" if other == b"$1" else as_sent(given[2:]))
    fed = pool.submit(feed, pair, sent, each)
    taken, into = take(pair[1], 100, 5, ahead)
    assert len(taken) == 2
    assert list(map(bytes, into[:2])) == given[:2]
    left = sent[len(as_sent(given[:2])) :]
    assert rest(pair[1], ahead, len(left)) == left
    fed.result(20)


def test_a_checksum_that_is_another_is_told(pair: Pair) -> None:
    sent = bytearray(as_sent(blocks(100, 2)))
    sent[len(START) + len(PREFIX) + 99] ^= 1
    pair[0].send([bytes(sent)], deadline_in(20))
    first, second = take(pair[1], 100, 2, empty())[0]
    assert first.sent == xxh3_64_intdigest(DATA[:100]) != first.hashed
    assert second.sent == second.hashed


@pytest.mark.parametrize("nbytes", [3, 30, 70, 140, 150, 300])
def test_a_peer_that_goes_away_ends_it(pair: Pair, nbytes: int) -> None:
    pair[0].send([as_sent(blocks(100))[:nbytes]], deadline_in(20))
    pair[0].close()
    with pytest.raises(ConnectionClosedError):
        take(pair[1], 100, 5, empty())


@pytest.mark.parametrize("nbytes", [0, 3, 30, 70, 140, 150, 300])
def test_a_peer_that_stops_holds_nobody_beyond_the_deadline(pair: Pair, nbytes: int) -> None:
    pair[0].send([as_sent(blocks(100))[:nbytes]], deadline_in(20))
    began = time.monotonic()
    with pytest.raises(TransferTimeoutError, match=f"{nbytes} of {len(as_sent(blocks(100)))} bytes"):
        take(pair[1], 100, 5, empty(), seconds=0.2)
    assert 0.15 < time.monotonic() - began < 5


def test_it_ends_when_it_is_closed_here(pair: Pair) -> None:
    timer = threading.Timer(0.1, pair[1].abort)
    timer.start()
    with pytest.raises(ConnectionClosedError):
        take(pair[1], 100, 5, empty())
    timer.join()


def test_without_the_library_there_is_no_such_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies_module, "native_call", lambda *_: None)
    assert replies_module.reply_stream() is None
