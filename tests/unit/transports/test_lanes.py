"""Lanes of tcp: assembled from sockets in any order, striped, and ended together."""

from __future__ import annotations

import contextlib
import logging
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.address import parse_url
from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    ConfigError,
    ConnectError,
    ConnectionClosedError,
    TransferTimeoutError,
)
from kvferry.testing.threads import Blocked
from kvferry.transports import connect, lanes, listen, streams
from kvferry.transports.base import Connection, Listener
from kvferry.transports.lanes import STRIPE_NBYTES, LaneConnection, preambles
from kvferry.transports.pacing import Pacer
from kvferry.transports.sockets import SocketConnection
from kvferry.transports.tcp import TcpListener
from kvferry.wire import Channel, ChannelOptions, ChannelServer
from kvferry.wire import messages as m

LONG_S = 30.0
FOUR = "tcp://127.0.0.1:0?lanes=4"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def listener() -> Iterator[Listener]:
    with contextlib.closing(listen(FOUR)) as made:
        yield made


def soon() -> float:
    return deadline_in(LONG_S)


@contextlib.contextmanager
def connected(url: str = FOUR) -> Iterator[tuple[LaneConnection, LaneConnection]]:
    with contextlib.closing(listen(url)) as listener, contextlib.ExitStack() as stack:
        one = stack.enter_context(contextlib.closing(connect(listener.address, soon())))
        other = stack.enter_context(contextlib.closing(listener.accept(soon())))
        assert isinstance(one, LaneConnection)
        assert isinstance(other, LaneConnection)
        yield one, other


def raw(listener: Listener, *chunks: bytes) -> socket.socket:
    address = parse_url(listener.address)
    sock = socket.create_connection((address.host, address.port or 0), timeout=LONG_S)
    for chunk in chunks:
        sock.sendall(chunk)
    return sock


def nobody_until(listener: Listener, condition: Callable[[], bool]) -> None:
    """Accept, which nobody is there for, until what it does besides is done."""
    until = soon()
    while not condition():
        assert time.monotonic() < until
        with pytest.raises(TransferTimeoutError):
            listener.accept(deadline_in(0.05))


def received(end: Connection, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    end.recv_into([memoryview(data)], soon())
    return bytes(data)


def sockets_of(end: LaneConnection) -> list[socket.socket]:
    return [lane._guard.sock for lane in end._lanes]


# -- options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["0", "17", "-1", "four", "1.5", "٤", "100"])
def test_malformed_number_of_lanes(text: str) -> None:
    with pytest.raises(ConfigError, match="from 1 to 16"):
        listen(f"tcp://127.0.0.1:0?lanes={text}")


def test_one_lane_is_an_ordinary_connection() -> None:
    with contextlib.closing(listen("tcp://127.0.0.1:0?lanes=1")) as listener:
        assert listener.address.endswith("?lanes=1")
        with contextlib.closing(connect(listener.address, soon())) as one:
            assert isinstance(one, SocketConnection)
            with contextlib.closing(listener.accept(soon())) as other:
                assert isinstance(other, SocketConnection)


# -- bytes ---------------------------------------------------------------------------------------------


def test_large_payloads_use_every_lane_and_small_ones_one(pool: ThreadPoolExecutor) -> None:
    data = random.Random(1).randbytes(5 * STRIPE_NBYTES + 77)
    with connected() as (one, other):
        one.send([b"x" * 1000], soon())
        assert received(other, 1000) == b"x" * 1000
        assert [position // STRIPE_NBYTES for position in (one.positions[0], other.positions[1])] == [0, 0]
        used = [select.select([s], [], [], 0)[0] for s in sockets_of(other)]
        assert used == [[], [], [], []]
        sending = pool.submit(one.send, [data[:10], data[10:]], soon())
        until = soon()
        while not all(select.select([s], [], [], 0)[0] for s in sockets_of(other)):
            assert time.monotonic() < until, "a lane carries nothing"
        assert received(other, len(data)) == data
        sending.result(LONG_S)


@pytest.mark.parametrize("nbytes", [STRIPE_NBYTES - 1, STRIPE_NBYTES, STRIPE_NBYTES + 1, 4 * STRIPE_NBYTES])
def test_views_that_cross_stripes(pool: ThreadPoolExecutor, nbytes: int) -> None:
    source = random.Random(nbytes)
    with connected("tcp://127.0.0.1:0?lanes=3") as (one, other):
        for _ in range(5):
            data = source.randbytes(nbytes)
            cut = source.randrange(nbytes)
            whole = bytearray(nbytes)
            sending = pool.submit(one.send, [data[:cut], data[cut:]], soon())
            views = [
                memoryview(whole)[:7],
                memoryview(whole)[7 : nbytes // 2],
                memoryview(whole)[nbytes // 2 :],
            ]
            other.recv_into(views, soon())
            sending.result(LONG_S)
            assert whole == data


def test_reading_ahead_stays_within_its_stripe() -> None:
    with connected() as (one, other):
        one.send([bytes(STRIPE_NBYTES - 10)], soon())
        received(other, STRIPE_NBYTES - 10)
        one.send([b"abcdefghijklmnopqrst"], soon())
        room = memoryview(bytearray(64))
        assert other.recv_at_least(room, 4, soon()) == 10
        assert bytes(room[:10]) == b"abcdefghij"
        assert other.recv_at_least(room, 5, soon()) == 5, "no more, where no message begins"
        assert other.recv_at_least(room, 5, soon()) == 5
        for end in (one, other):
            end.begin_sending()
            end.begin_receiving(0)
        one.send([bytes(STRIPE_NBYTES - 3), b"abcdefg"], soon())
        received(other, STRIPE_NBYTES - 3)
        assert other.recv_at_least(room, 7, soon()) == 7, "over the border, if the minimum lies behind it"
        assert bytes(room[:7]) == b"abcdefg"


def test_each_message_begins_on_the_first_lane(pool: ThreadPoolExecutor) -> None:
    with connected() as (one, other):
        for number in range(3):
            one.begin_sending()
            sending = pool.submit(one.send, [bytes([number]) * (2 * STRIPE_NBYTES + 9)], soon())
            other.begin_receiving(0)
            assert received(other, 2 * STRIPE_NBYTES + 9)[-9:] == bytes([number]) * 9
            sending.result(LONG_S)
            one.begin_sending()
            one.send([b"short"], soon())
            one.begin_sending()
            one.send([bytes(STRIPE_NBYTES - 1), b"abc"], soon())
            other.begin_receiving(0)
            assert select.select(sockets_of(other), [], [], LONG_S)[0][0] is sockets_of(other)[0]
            assert received(other, 7) == b"short\0\0"
            other.begin_receiving(2)  # of the next one came behind the last one
            assert received(other, STRIPE_NBYTES)[-3:] == b"abc"


# -- putting sockets together --------------------------------------------------------------------------


def test_sockets_come_in_any_order_and_mixed_with_others(listener: Listener) -> None:
    first, second = preambles(4), preambles(2)
    with contextlib.ExitStack() as stack:
        socks = {}
        for name in ("a3", "b1", "a0", "a2", "b0", "a1"):
            head = (first if name[0] == "a" else second)[int(name[1])]
            socks[name] = stack.enter_context(raw(listener, head[:5]))
            socks[name].sendall(head[5:])
        ends = [stack.enter_context(contextlib.closing(listener.accept(soon()))) for _ in range(2)]
        two, four = ends
        assert isinstance(two, LaneConnection)
        assert isinstance(four, LaneConnection)
        for end, name, lanes_ in ((four, "a", 4), (two, "b", 2)):
            for lane in range(lanes_):
                socks[f"{name}{lane}"].sendall(bytes([lane]) * STRIPE_NBYTES)
                assert received(end, STRIPE_NBYTES) == bytes([lane]) * STRIPE_NBYTES


def test_a_preamble_may_come_in_pieces(listener: Listener) -> None:
    first, second = preambles(2)
    with raw(listener, first[:5]) as slow, raw(listener, second):
        with pytest.raises(TransferTimeoutError):
            listener.accept(deadline_in(0.1))
        slow.sendall(first[5:20])
        with pytest.raises(TransferTimeoutError):
            listener.accept(deadline_in(0.05))
        slow.sendall(first[20:])
        with contextlib.closing(listener.accept(soon())) as other:
            assert isinstance(other, LaneConnection)
            other.send([b"x"], soon())
            assert slow.recv(1) == b"x"


def test_a_plain_client_is_served_by_a_listener_with_lanes(listener: Listener) -> None:
    with raw(listener, b"KVFY and more") as sock, contextlib.closing(listener.accept(soon())) as other:
        assert isinstance(other, SocketConnection)
        assert received(other, 13) == b"KVFY and more"
        other.send([b"yes"], soon())
        assert sock.recv(3) == b"yes"


@pytest.mark.parametrize("said", [b"", b"\x89KV", b"\x89KVLANE\n123"])
def test_who_does_not_say_what_it_is_is_a_plain_client_after_a_while(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(lanes, "_PREAMBLE_S", 0.1)
    with raw(listener, said) as sock, contextlib.closing(listener.accept(soon())) as other:
        assert isinstance(other, SocketConnection)
        other.send([b"hello"], soon())
        assert sock.recv(5) == b"hello"
        sock.sendall(b"!")
        assert received(other, len(said) + 1) == said + b"!"


def test_who_leaves_in_the_middle_of_its_preamble_costs_no_time(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "_PREAMBLE_S", 1000.0)
    raw(listener, b"\x89KVL").close()
    with contextlib.closing(listener.accept(soon())) as other, pytest.raises(ConnectionClosedError):
        received(other, 5)


def test_strangers_cost_only_their_own_slot(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Silent ones and half a group stall nobody; the sockets of the group are closed after a while."""
    monkeypatch.setattr(lanes, "_PREAMBLE_S", 0.3)
    assert isinstance(listener, TcpListener)
    taken: list[socket.socket] = []
    original = lanes._Waiting

    def waiting(sock: socket.socket, sockaddr: Any, until: float) -> object:
        taken.append(sock)
        return original(sock, sockaddr, until + (1000 if len(taken) > 4 else 0))  # who comes later has time

    monkeypatch.setattr(lanes, "_Waiting", waiting)
    caplog.set_level(logging.INFO, "kvferry.transports.lanes")
    assembler = listener._assembler
    assert assembler is not None
    with contextlib.ExitStack() as stack:
        half = [stack.enter_context(raw(listener, head)) for head in preambles(4)[:3]]
        wrong = stack.enter_context(raw(listener, preambles(4)[0][:24] + b"\x09\x00\x04\x00\x02\x00\x00\x00"))
        older = stack.enter_context(raw(listener, preambles(4)[0][:28] + b"\x00\x00\x10\x00"))
        one = stack.enter_context(contextlib.closing(connect(listener.address, soon())))
        other = stack.enter_context(contextlib.closing(listener.accept(soon())))
        one.send([b"x" * 10], soon())
        assert received(other, 10) == b"x" * 10
        assert wrong.recv(1) == b"", "a lane number that cannot be"
        assert older.recv(1) == b"", "dealt by another rule"
        nobody_until(listener, lambda: not assembler._groups)
        assert [sock.recv(1) for sock in half] == [b"", b"", b""]
        assert not assembler._lanes
    assert "only 3 of 4 lanes came" in caplog.text
    assert "lane 9 of 4" in caplog.text
    assert "version 1048576, here 2); update the older end" in caplog.text


def test_a_lane_said_twice_is_closed(listener: Listener) -> None:
    heads = preambles(2)
    with raw(listener, heads[0]) as first, raw(listener, heads[0]) as again:
        nobody_until(listener, lambda: bool(select.select([again], [], [], 0)[0]))
        assert again.recv(1) == b""
        with raw(listener, heads[1]), contextlib.closing(listener.accept(soon())) as other:
            other.send([b"x"], soon())
            assert first.recv(1) == b"x"


def test_waiting_sockets_are_bounded(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_MAX_WAITING", 3)
    monkeypatch.setattr(lanes, "_PREAMBLE_S", 1000.0)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(raw(listener)) for _ in range(4)]
        other = stack.enter_context(contextlib.closing(listener.accept(soon())))
        other.send([b"x"], soon())
        assert silent[0].recv(1) == b"x", "the one that waited longest"


def test_closing_the_listener_closes_what_waits(pool: ThreadPoolExecutor) -> None:
    with contextlib.closing(listen(FOUR)) as listener, raw(listener, preambles(4)[0]) as sock:
        with pytest.raises(TransferTimeoutError):
            listener.accept(deadline_in(0.05))
        accepting = Blocked(pool, lambda: listener.accept(deadline_in(60)))
        listener.close()
        accepting.assert_ends_with(ConnectionClosedError)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""


def test_several_threads_may_accept(listener: Listener, pool: ThreadPoolExecutor) -> None:
    accepting = [pool.submit(listener.accept, soon()) for _ in range(3)]
    dialled = [connect(listener.address, soon()) for _ in range(3)]
    for end in [*dialled, *(future.result(LONG_S) for future in accepting)]:
        end.close()


def test_nobody_there() -> None:
    with contextlib.closing(listen(FOUR)) as listener:
        address = listener.address
    with pytest.raises(ConnectError, match="lanes=4"):
        connect(address, soon())


def test_lanes_that_were_reset_before_they_are_put_together_are_an_ended_connection() -> None:
    with contextlib.closing(listen("tcp://127.0.0.1:0")) as listener:
        made = [connect(listener.address, soon()) for _ in range(2)]
        for _ in made:
            listener.accept(soon()).abort()
    lanes_ = [lane for lane in made if isinstance(lane, SocketConnection) and lane.wait_readable(soon())]
    with contextlib.closing(LaneConnection(lanes_)) as one, pytest.raises(ConnectionClosedError):
        received(one, 1)


def test_a_listener_without_lanes_is_named_as_the_reason(pool: ThreadPoolExecutor) -> None:
    options = ChannelOptions(role="test", session="s")
    with contextlib.closing(listen("tcp://127.0.0.1:0")) as listener:
        dialling = pool.submit(Channel.connect, f"{listener.address}?lanes=2", options, soon())
        with contextlib.closing(listener.accept(soon())) as other, pytest.raises(Exception, match="lanes"):
            Channel.accept(other, options, soon())
        assert isinstance(dialling.exception(LONG_S), ConnectError)


# -- the end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["end", "reset"])
@pytest.mark.parametrize("lane", [0, 2])
def test_the_cut_of_one_lane_ends_the_connection_on_both_sides(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, lane: int, how: str
) -> None:
    monkeypatch.setattr(lanes, "_LOOK_S", 0.05)
    monkeypatch.setattr(lanes, "_LOST_S", 0.1)
    with connected() as (one, other):
        waiting = Blocked(pool, lambda: other.recv_into([memoryview(bytearray(9))], deadline_in(60)))
        theirs = Blocked(pool, lambda: one.recv_into([memoryview(bytearray(9))], deadline_in(60)))
        if how == "end":  # as a link does that something in between cuts: both ends see the end of that lane
            for end in (one, other):
                sockets_of(end)[lane].shutdown(socket.SHUT_WR)
        else:
            one._lanes[lane].abort()
        waiting.assert_ends_with(ConnectionClosedError)
        theirs.assert_ends_with(ConnectionClosedError)
        with pytest.raises(ConnectionClosedError):
            one.send([bytes(4 * STRIPE_NBYTES)] * 8, soon())


def test_wait_readable_ends_with_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_LOOK_S", 0.05)
    monkeypatch.setattr(lanes, "_LOST_S", 0.1)
    with connected() as (one, other):
        assert not other.wait_readable(deadline_in(0.15))
        one._lanes[3].abort()
        assert other.wait_readable(deadline_in(1000)), "the end of the stream counts"
        with pytest.raises(ConnectionClosedError, match="of 4 lanes"):
            received(other, 1)


def test_what_was_sent_before_the_end_arrives(pool: ThreadPoolExecutor) -> None:
    """The end of the other lanes is seen while the last one still delivers."""
    data = random.Random(3).randbytes(20 * STRIPE_NBYTES + 5)
    with connected() as (one, other):

        def send_and_close() -> None:
            one.send([data], soon())
            one.close()

        sending = pool.submit(send_and_close)
        assert received(other, len(data)) == data
        sending.result(LONG_S)
        with pytest.raises(ConnectionClosedError, match="ended by the peer after 0 of 3 bytes"):
            received(other, 3)


# -- rate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4])
def test_rate_holds_for_all_lanes_together(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    slept = 0.0

    def sleep(_: object, seconds: float) -> bool:
        nonlocal slept
        slept += seconds
        return False

    started = time.monotonic()
    monkeypatch.setattr(streams, "time", SimpleNamespace(monotonic=lambda: started + slept))
    monkeypatch.setattr(SocketConnection, "_sleep", sleep)
    monkeypatch.setattr(LaneConnection, "_sleep", sleep)
    with contextlib.closing(listen(f"tcp://127.0.0.1:0?lanes={count}&rate=100MB/s")) as listener:
        one = connect(listener.address, soon())
        other = listener.accept(soon())
        with contextlib.closing(one), contextlib.closing(other):
            receiving = pool.submit(received, other, 20_000_000)
            for _ in range(20):
                one.send([bytes(1_000_000)], soon())
            receiving.result(LONG_S)
    assert slept == pytest.approx(0.2, rel=0.03)


@pytest.mark.soak
@pytest.mark.parametrize("count", [1, 4])
def test_rate_holds_for_all_lanes_together_for_seconds(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Without the time in which nobody read, on a loaded machine: a link does not catch up with that."""
    rate, seconds, credit_s, lost = 100e6, 5, 0.006, 0.0
    nbytes, sent = int(rate * seconds), Pacer.sent

    def counted(self: Pacer, now: float, *, stalled: bool) -> None:
        nonlocal lost
        lost += max(0.0, now - self._free_at - credit_s) if stalled else 0.0
        sent(self, now, stalled=stalled)

    monkeypatch.setattr(Pacer, "sent", counted)
    with contextlib.closing(listen(f"tcp://127.0.0.1:0?lanes={count}&rate=100MB/s")) as listener:
        one = connect(listener.address, soon())
        other = listener.accept(soon())
        with contextlib.closing(one), contextlib.closing(other):
            sink, stop = memoryview(bytearray(1 << 20)), threading.Event()

            def drain() -> float:
                left = nbytes
                while left and not stop.is_set():
                    n = min(left, len(sink))
                    other.recv_into([sink[:n]], soon())
                    left -= n
                return time.monotonic()

            draining = pool.submit(drain)
            block, started = bytes(1_000_000), time.monotonic()
            one.send([block] * (nbytes // len(block)), soon())
            taken = draining.result(LONG_S) - started
    said = f"{nbytes / taken / 1e6:.1f} MB/s, nobody read for {lost:.3f} s"
    assert taken >= seconds * (1 - 0.03) - 0.01, said
    assert taken - lost <= seconds * (1 + 0.03) + 0.05, said


# -- messages ------------------------------------------------------------------------------------------


def test_messages_over_lanes_and_over_one_at_the_same_port() -> None:
    options = ChannelOptions(role="test", session="s")
    got: list[bytes] = []

    def serve(channel: Channel) -> None:
        while True:
            request = channel.receive(soon())
            data = bytearray(request.payload_nbytes)
            request.read_into([memoryview(data)], soon())
            got.append(bytes(data))
            channel.reply(request, m.Pong(at=1.0), deadline=soon())

    with contextlib.closing(ChannelServer(FOUR, options, serve, name="lanes-test")) as server:
        plain = parse_url(server.address)
        for address in (server.address, f"tcp://{plain.host_port}", f"tcp://{plain.host_port}?lanes=2"):
            channel = Channel.connect(address, options, soon())
            for nbytes in (10, 3 * STRIPE_NBYTES, 700_001):
                data = random.Random(nbytes).randbytes(nbytes)
                channel.call(m.PutLayer(layer=0, blocks=(1,)), m.Pong, payload=[data], deadline=soon())
                assert got.pop() == data
            channel.close()
