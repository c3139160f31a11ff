from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, ConnectError, ConnectionClosedError, TransferTimeoutError
from kvferry.testing.threads import Blocked
from kvferry.transports import connect, listen
from kvferry.transports.base import Connection

URL = "inproc://unit"
LONG_S = 30.0


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    with contextlib.closing(listen(URL)) as listener:
        one = connect(URL, deadline_in(LONG_S))
        other = listener.accept(deadline_in(LONG_S))
        with contextlib.closing(one), contextlib.closing(other):
            yield one, other


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


@pytest.mark.parametrize("nbytes", [10_000, 1 << 18])
def test_buffering_is_bounded(ends: tuple[Connection, Connection], nbytes: int) -> None:
    part, accepted = bytes(nbytes), 0
    with pytest.raises(TransferTimeoutError):  # noqa: PT012 - one of them
        for _ in range(1000):
            ends[0].send([part], deadline_in(0.5))
            accepted += nbytes
    assert 1 << 19 < accepted <= 1 << 20


def test_large_message_is_not_copied_into_the_pipe(
    ends: tuple[Connection, Connection], pool: ThreadPoolExecutor
) -> None:
    nbytes = 32 << 20
    data, received = bytes(nbytes), bytearray(nbytes)
    tracemalloc.start()
    try:
        sending = pool.submit(ends[0].send, [data], deadline_in(LONG_S))
        ends[1].recv_into([memoryview(received)], deadline_in(LONG_S))
        sending.result(timeout=LONG_S)
        assert tracemalloc.get_traced_memory()[1] < nbytes / 8
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("end", ["deadline", "close", "abort"])
def test_lent_buffers_are_the_callers_again(
    ends: tuple[Connection, Connection], pool: ThreadPoolExecutor, end: str
) -> None:
    one, other = ends
    data = bytes(1 << 20)
    if end == "deadline":
        with pytest.raises(TransferTimeoutError):
            one.send([data], deadline_in(0.05))
    else:
        sending = Blocked(pool, lambda: one.send([data], deadline_in(LONG_S)))
        other.recv_into([memoryview(bytearray(100))], deadline_in(LONG_S))
        getattr(one, end)()
        sending.assert_ends_with(ConnectionClosedError)
    if end == "deadline":
        assert not other.wait_readable(deadline_in(0.01)), "still reads from what was lent"
        one.close()
    with pytest.raises(ConnectionClosedError):
        other.recv_into([memoryview(bytearray(1))], deadline_in(LONG_S))


def test_order_of_copied_and_lent(ends: tuple[Connection, Connection], pool: ThreadPoolExecutor) -> None:
    messages = [bytes([i]) * n for i, n in enumerate([10, 1 << 19, 1, 1 << 18, (1 << 18) + 1, 5, 1 << 20])]

    def send() -> None:
        for message in messages:
            ends[0].send([message], deadline_in(LONG_S))

    sending = pool.submit(send)
    received = bytearray(sum(map(len, messages)))
    ends[1].recv_into([memoryview(received)], deadline_in(LONG_S))
    sending.result(timeout=LONG_S)
    assert received == b"".join(messages)


def test_waiting_for_room_ends_with_the_peer(
    ends: tuple[Connection, Connection], pool: ThreadPoolExecutor
) -> None:
    def fill() -> None:
        while True:
            ends[0].send([bytes(100_000)], deadline_in(LONG_S))

    filling = Blocked(pool, fill)
    ends[1].close()
    filling.assert_ends_with(ConnectionClosedError)


def test_room_comes_back_as_the_reader_takes(
    ends: tuple[Connection, Connection], pool: ThreadPoolExecutor
) -> None:
    def send() -> None:
        for _ in range(100):
            ends[0].send([bytes(100_000)], deadline_in(LONG_S))

    sending = pool.submit(send)
    ends[1].recv_into([memoryview(bytearray(10_000_000))], deadline_in(LONG_S))
    sending.result(timeout=LONG_S)


def test_full_queue_of_a_listener(pool: ThreadPoolExecutor) -> None:
    with contextlib.closing(listen(URL)) as listener, contextlib.ExitStack() as stack:
        for _ in range(128):
            stack.callback(connect(URL, deadline_in(LONG_S)).close)
        with pytest.raises(ConnectError, match="its queue of 128 was full"):
            connect(URL, deadline_in(0.2))
        waiting = Blocked(pool, lambda: connect(URL, deadline_in(LONG_S)))
        listener.accept(deadline_in(LONG_S)).close()
        made = waiting.future.result(timeout=20)
        assert isinstance(made, Connection)
        made.close()
        closed = Blocked(pool, lambda: connect(URL, deadline_in(LONG_S)))
        listener.close()
        closed.assert_ends_with(ConnectError)


def test_name_taken() -> None:
    with contextlib.closing(listen(URL)), pytest.raises(ConnectError, match=f"{URL}: the name is taken"):
        listen(URL)


def test_it_has_no_rate() -> None:
    with pytest.raises(ConfigError, match="'rate' is not an option of inproc"):
        listen(f"{URL}?rate=1GB/s")
