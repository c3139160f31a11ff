"""Values with their checksums over a socket, copied and lent to the kernel: the same bytes, in time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
from xxhash import xxh3_64_digest

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectionClosedError, KVFerryError, TransferTimeoutError
from kvferry.transports import values as values_module
from kvferry.transports.hashed_socket import HashedSocketConnection
from kvferry.transports.values import Value, value_stream

SIZES = (1, 300, 64 << 10, (64 << 10) + 1, 256 << 10, 600_001, 3_000_000)
DATA = page_aligned(SIZES[-1])
DATA[:] = np.random.default_rng(5).bytes(len(DATA))
END = b"\r\n$2\r\nNX\r\n"
Pair = tuple[HashedSocketConnection, HashedSocketConnection]
pytestmark = pytest.mark.skipif(value_stream() is None, reason="the native library is not there")


@pytest.fixture
def pair(hashed_tcp: Pair) -> Pair:
    assert hashed_tcp[0].sends_values
    return hashed_tcp


def received(connection: HashedSocketConnection, nbytes: int) -> Future[bytes]:
    """What comes, taken by another thread."""
    found: Future[bytes] = Future()

    def run() -> None:
        into = bytearray(nbytes)
        try:
            connection.recv_into([memoryview(into)], deadline_in(20))
            found.set_result(bytes(into))
        except KVFerryError as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found


def as_sent(values: list[Value], end: bytes = END) -> bytes:
    return b"".join(v.head + bytes(v.data) + xxh3_64_digest(v.data)[::-1] + end for v in values)


@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("nbytes", SIZES)
def test_each_value_is_its_head_its_data_its_checksum_and_an_end(
    pair: Pair, nbytes: int, lends: bool
) -> None:
    values = [Value(b"head %d of some bytes" % n, DATA[n : nbytes + n % 2]) for n in range(5)]
    wanted = as_sent(values)
    found = received(pair[1], len(wanted))
    lent = pair[0].send_values(values, END, deadline_in(20), lends=lends)
    assert found.result(20) == wanted
    assert lent == (sum(len(v.data) for v in values if len(v.data) >= 64 << 10) if lends else 0)


@pytest.mark.parametrize("lends", [False, True])
def test_sizes_are_mixed_and_a_call_follows_on_another(pair: Pair, lends: bool) -> None:
    for turn in range(3):
        values = [
            Value(b"%d" % turn * n, DATA[:nbytes]) for n, nbytes in enumerate((*SIZES, *SIZES[::-1]), 1)
        ]
        wanted = as_sent(values, b"\r\n")
        found = received(pair[1], len(wanted))
        pair[0].send_values(values, b"\r\n", deadline_in(20), lends=lends)
        assert found.result(20) == wanted


def test_memory_that_may_only_be_read_is_lent_too(pair: Pair) -> None:
    values = [Value(b"head", memoryview(bytes(DATA)))]
    wanted = as_sent(values)
    found = received(pair[1], len(wanted))
    pair[0].send_values(values, END, deadline_in(20), lends=True)
    assert found.result(20) == wanted


def test_without_a_pipe_it_is_copied(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pipe() -> tuple[int, int]:
        raise OSError(24, "too many open files")

    monkeypatch.setattr("kvferry.transports.values.os.pipe", no_pipe)
    values = [Value(b"head", DATA)]
    wanted = as_sent(values)
    found = received(pair[1], len(wanted))
    assert pair[0].send_values(values, END, deadline_in(20), lends=True) == 0
    assert found.result(20) == wanted


@pytest.mark.parametrize("lends", [False, True])
def test_a_peer_that_takes_nothing_holds_nobody_beyond_the_deadline(pair: Pair, lends: bool) -> None:
    values = [Value(b"head", DATA)] * 200
    began = time.monotonic()
    with pytest.raises(TransferTimeoutError, match="of 60000"):
        pair[0].send_values(values, END, deadline_in(0.6), lends=lends)
    assert 0.5 < time.monotonic() - began < 1.0


@pytest.mark.parametrize("lends", [False, True])
def test_a_peer_that_goes_away_ends_it_without_a_signal(pair: Pair, lends: bool) -> None:
    pair[1].abort()
    with pytest.raises(ConnectionClosedError):
        pair[0].send_values([Value(b"head", DATA)] * 20, END, deadline_in(5), lends=lends)


def test_it_ends_when_it_is_closed_here(pair: Pair) -> None:
    timer = threading.Timer(0.2, pair[0].abort)
    timer.start()
    with pytest.raises(ConnectionClosedError):
        pair[0].send_values([Value(b"head", DATA)] * 20, END, deadline_in(20), lends=True)
    timer.join()


def test_without_the_library_there_is_no_such_way(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    monkeypatch.setattr(values_module, "native_call", lambda *_: None)
    assert values_module.value_stream() is None
