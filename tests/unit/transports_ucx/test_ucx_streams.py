from __future__ import annotations

import itertools
import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import pytest

from kvferry.core.buffers import ByteArray, page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectionClosedError, TransferTimeoutError, TransportError
from kvferry.testing.threads import Blocked
from kvferry.testing.transports_common import open_descriptors
from kvferry.transports.ucx import outgoing
from kvferry.transports.ucx.connection import UcxConnection
from kvferry.transports.ucx.lane import Lane

Ends: TypeAlias = "tuple[UcxConnection, UcxConnection]"
Meet: TypeAlias = "Callable[[str], AbstractContextManager[Ends]]"

SHM: Final = "tls=posix,cma"
BOTH: Final = pytest.mark.parametrize("options", [SHM, "tls=tcp"])
ALL: Final = pytest.mark.parametrize("options", [SHM, "tls=tcp", "tls=tcp,cma", "spin=0s"])
MIB: Final = 1 << 20


def soon() -> float:
    return deadline_in(30)


def random_bytes(nbytes: int, seed: int = 1) -> ByteArray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def pieces(data: ByteArray, sizes: list[int]) -> list[memoryview]:
    cuts = np.cumsum([0, *sizes])
    assert cuts[-1] == len(data)
    return [data.data[a:b] for a, b in itertools.pairwise(cuts)]


def move(pool: ThreadPoolExecutor, ends: Ends, nbytes: int = MIB) -> None:
    data, received = random_bytes(nbytes), np.zeros(nbytes, np.uint8)
    sending = pool.submit(ends[0].send, [data], soon())
    ends[1].recv_into([received.data], soon())
    sending.result(30)
    assert np.array_equal(data, received)


@BOTH
@pytest.mark.parametrize(
    ("sent", "asked"),
    [
        ([MIB], [MIB]),
        ([5 * MIB + 1, 300_000, 100, 70_000, 1], [1, 3 * MIB, 64, 2 * MIB + 300_000 + 70_037]),
        ([70_000] * 9, [630_000]),
        ([630_000], [70_000] * 9),
        ([100_000, 20_000, 100_000], [110_000, 110_000]),
        ([32, 200, 4 * MIB, 9 * MIB, 8], [32, 200, 4 * MIB, 9 * MIB, 8]),
        ([1000] * 1500, [1_500_000]),
        ([20_000] * 80, [20_000] * 80),
        ([40, *[100_000, 9] * 20], [100_009] * 20 + [40]),
        ([4 * MIB + 65_536, 4 * MIB + 65_537], [4 * MIB + 65_537, 4 * MIB + 65_536]),
    ],
)
def test_parts_arrive_in_views_cut_otherwise(
    pool: ThreadPoolExecutor, meet: Meet, options: str, sent: list[int], asked: list[int]
) -> None:
    data = random_bytes(sum(sent))
    received = np.zeros(len(data) + 128, np.uint8)
    with meet(options) as (one, other):
        for _ in range(2):
            received[:] = 0xA5
            sending = pool.submit(one.send, pieces(data, sent), soon())
            left = pieces(received[64:-64], asked)
            while left:  # one call for some, then one for the rest
                other.recv_into(left[:2], soon())
                left = left[2:]
            sending.result(30)
            assert np.array_equal(received[64:-64], data)
            assert (received[:64] == 0xA5).all()
            assert (received[-64:] == 0xA5).all()


@pytest.mark.parametrize("apart", [True, False])
def test_matching_views_are_filled_without_a_copy(
    pool: ThreadPoolExecutor, meet: Meet, *, apart: bool
) -> None:
    """Views one by one where the parts lie apart, and all at once where these are joined."""
    sizes = [32, 200, 5 * MIB, 70_000, 80_000, 8]
    data, received = random_bytes(sum(sizes)), np.zeros(sum(sizes), np.uint8)
    parts = pieces(data, sizes)
    if apart:
        parts = [np.array(part).data for part in parts]
    with meet(SHM) as (one, other):
        sending = pool.submit(one.send, parts, soon())
        views = pieces(received, sizes)
        for some in [[view] for view in views] if apart else [views]:
            other.recv_into(some, soon())
        sending.result(30)
        incoming: Any = other
        assert len(incoming._in._bounce or b"") < 8192, "only what is small was buffered"
    assert np.array_equal(data, received)


@pytest.mark.parametrize("long", ["_out", "_in", "both"])
def test_the_other_end_does_not_see_which_way_is_taken(
    pool: ThreadPoolExecutor, meet: Meet, monkeypatch: pytest.MonkeyPatch, *, long: str
) -> None:
    def send_all(parts: list[memoryview], most: int) -> None:
        for first in range(0, len(parts), most):
            one.send(parts[first : first + most], soon())

    sizes = [100, 9000, 3000, 5 * MIB, 70_000, *[30_000] * 40, 20_000, 1, 4 * MIB + 65_537, 200]
    asked = [64, 9036, 3000, 5 * MIB + 70_000, *[30_000] * 40, 20_001, 4 * MIB, 65_737]
    data, received = random_bytes(sum(sizes)), np.zeros(sum(sizes), np.uint8)
    with meet(SHM) as (one, other):
        move(pool, (one, other))
        for end, half in ((one, "_out"), (other, "_in")):
            if long in (half, "both"):
                monkeypatch.setattr(getattr(end, half), "_short", None)
        for most in (7, 100):
            received[:] = 0
            left, views = pieces(data, sizes), pieces(received, asked)
            sending = pool.submit(send_all, left, most)
            while views:
                other.recv_into(views[:3], soon())
                views = views[3:]
            sending.result(30)
            assert np.array_equal(received, data)


def test_parts_side_by_side_are_few_messages(
    pool: ThreadPoolExecutor, meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    scatter = Lane.scatter

    def counted(lane: Lane, views: Sequence[memoryview], *args: Any) -> None:
        sent.append(len(views))
        scatter(lane, views, *args)

    data = random_bytes(40 * 65_536)
    received = page_aligned(len(data) + 40 * 64)
    places = [received[i * 65_600 : i * 65_600 + 65_536] for i in range(40)]  # apart
    with meet(SHM) as (one, other):
        move(pool, (one, other))
        monkeypatch.setattr(other._in, "_short", None)  # the long way tells of each message
        monkeypatch.setattr(Lane, "scatter", counted)
        sending = pool.submit(one.send, pieces(data, [65_536] * 40), soon())
        other.recv_into(places, soon())
        sending.result(30)
    assert sent == [16, 16, 8]
    assert b"".join(places) == data.tobytes()


@ALL
def test_random_traffic_both_ways(pool: ThreadPoolExecutor, meet: Meet, options: str) -> None:
    rng = np.random.default_rng(7)
    sizes = [int(2 ** rng.uniform(0, 21)) for _ in range(120)]
    data = random_bytes(sum(sizes))
    cuts = sorted(int(cut) for cut in rng.integers(0, len(data), 40))
    asked = [b - a for a, b in itertools.pairwise([0, *cuts, len(data)])]

    def send(end: UcxConnection) -> None:
        parts = pieces(data, sizes)
        while parts:
            n = min(len(parts), len(parts[0]) % 7 + 1)
            end.send(parts[:n], soon())
            parts = parts[n:]

    def receive(end: UcxConnection) -> bool:
        received = np.zeros(len(data), np.uint8)
        for i, view in enumerate(pieces(received, asked)):
            if i % 3 == 0 and view:
                assert end.wait_readable(soon())
            if i % 5 == 0 and len(view) > 1:
                n = end.recv_at_least(view, len(view) // 2, soon())
                view = view[n:]
            end.recv_into([view], soon())
        return np.array_equal(received, data)

    with meet(options) as ends:
        sending = [pool.submit(send, end) for end in ends]
        receiving = [pool.submit(receive, end) for end in ends]
        assert all(call.result(60) for call in receiving)
        for call in sending:
            call.result(60)


# -- errors leave nothing behind -------------------------------------------------------------------------


@BOTH
def test_bytes_of_a_send_that_gave_up_are_never_taken_for_good(
    pool: ThreadPoolExecutor, meet: Meet, options: str
) -> None:
    """The receiver could read them from the sender's memory at any time after that."""
    buffer = np.ones(2 * MIB, np.uint8)
    received = np.zeros(2 * MIB, np.uint8)
    with meet(options) as (one, other):
        move(pool, (one, other))
        with pytest.raises(TransferTimeoutError):
            one.send([buffer], deadline_in(0.1))
        buffer[:] = 2  # the caller may do that now
        with pytest.raises(ConnectionClosedError):
            other.recv_into([received.data], soon())
        with pytest.raises(ConnectionClosedError, match="sends no more"):
            one.send([b"x"], soon())


def test_close_in_the_middle_of_a_send_retracts_it(pool: ThreadPoolExecutor, meet: Meet) -> None:
    buffer = np.ones(2 * MIB, np.uint8)
    received = np.zeros(2 * MIB, np.uint8)
    with meet(SHM) as (one, other):
        move(pool, (one, other))
        sending = Blocked(pool, lambda: one.send([buffer], soon()))
        one.close()
        sending.assert_ends_with(ConnectionClosedError)
        buffer[:] = 2
        with pytest.raises(ConnectionClosedError):
            other.recv_into([received.data], soon())


@BOTH
def test_nothing_is_written_after_a_receive_gave_up(
    pool: ThreadPoolExecutor, meet: Meet, options: str
) -> None:
    received = np.zeros(2 * MIB, np.uint8)
    with meet(options) as (one, other):
        move(pool, (one, other))
        sending = pool.submit(one.send, [np.ones(MIB, np.uint8)], soon())
        assert other.wait_readable(soon())
        with pytest.raises(TransferTimeoutError, match="1048576 of 2097152 bytes"):
            other.recv_into([received[:MIB].data, received[MIB:].data], deadline_in(1.0))
        sending.result(30)
        received[:] = 3
        with pytest.raises((TransferTimeoutError, ConnectionClosedError)):
            one.send([np.ones(MIB, np.uint8)], deadline_in(0.2))
        with pytest.raises(ConnectionClosedError, match="receives no more"):
            other.recv_into([received.data], soon())
        assert (received == 3).all()


@BOTH
def test_abort_in_the_middle_of_a_receive(pool: ThreadPoolExecutor, meet: Meet, options: str) -> None:
    received = np.zeros(64 * MIB, np.uint8)
    with meet(options) as (one, other):
        move(pool, (one, other))
        receiving = Blocked(pool, lambda: other.recv_into([received.data], soon()))
        sending = pool.submit(one.send, [np.ones(32 * MIB, np.uint8)], soon())
        other.abort()
        receiving.assert_ends_with(ConnectionClosedError)
        received[:] = 3
        assert sending.exception(30) is None or isinstance(sending.exception(), ConnectionClosedError)
        assert (received == 3).all()


@pytest.mark.parametrize("end", ["close", "abort"])
def test_workers_are_given_back(pool: ThreadPoolExecutor, meet: Meet, end: str) -> None:
    def cycle() -> None:
        with meet(SHM) as (one, other):
            move(pool, (one, other))
            move(pool, (other, one))
            getattr(one, end)()

    cycle()
    before = open_descriptors()
    for _ in range(5):
        cycle()
    assert open_descriptors() <= before


IO_ERROR: Final = -3
"""What an operation ends with whose peer's memory is gone."""


def test_an_error_of_a_peer_that_is_gone_is_an_end(pool: ThreadPoolExecutor, meet: Meet) -> None:
    with meet(SHM) as (one, other):
        move(pool, (one, other))
        incoming: Any = other
        lane = incoming._in.lane
        failure = lane.failure(IO_ERROR, "receiving")
        assert not isinstance(failure, ConnectionClosedError)
        assert "Input/output error" in str(failure)
        one.abort()
        failure = lane.failure(IO_ERROR, "receiving")
        assert isinstance(failure, ConnectionClosedError)
        assert "ended by the peer while receiving" in str(failure)


# -- waiting ---------------------------------------------------------------------------------------------


@BOTH
def test_waiting_costs_no_processor_time(pool: ThreadPoolExecutor, meet: Meet, options: str) -> None:
    def wait(call: Callable[[], object]) -> float:
        started = time.thread_time()
        with pytest.raises(TransferTimeoutError):
            call()
        return time.thread_time() - started

    with meet(options) as (one, other):
        move(pool, (one, other))
        view = page_aligned(MIB)
        started = time.thread_time()
        assert not other.wait_readable(deadline_in(0.5))
        used = time.thread_time() - started
        used += wait(lambda: one.send([view], deadline_in(0.5)))
    with meet(options) as (one, other):
        move(pool, (one, other))
        used += wait(lambda: other.recv_into([view], deadline_in(0.5)))
    assert used < 0.1, f"{used:.3f} s of processor time in 1.5 s of waiting"


@BOTH
def test_wait_readable_sees_large_messages(pool: ThreadPoolExecutor, meet: Meet, options: str) -> None:
    received = np.zeros(MIB, np.uint8)
    with meet(options) as (one, other):
        move(pool, (one, other))
        assert not other.wait_readable(deadline_in(0.05))
        waiting = Blocked(pool, lambda: other.wait_readable(soon()))
        sending = pool.submit(one.send, [np.ones(MIB, np.uint8)], soon())
        assert waiting.future.result(30) is True
        assert other.wait_readable(soon()), "still there"
        other.recv_into([received.data], soon())
        sending.result(30)
        assert received.all()
        assert not other.wait_readable(deadline_in(0.05))
        waiting = Blocked(pool, lambda: other.wait_readable(soon()))
        other.close()
        waiting.assert_ends_with(ConnectionClosedError)


def test_answers_need_no_lane(
    pool: ThreadPoolExecutor, meet: Meet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_descriptors(*_: object) -> None:
        raise TransportError("UCX cannot make a worker: too many open files")

    with meet(SHM) as (one, other), caplog.at_level(logging.INFO):
        move(pool, (one, other))
        monkeypatch.setattr(outgoing, "Lane", no_descriptors)
        for _ in range(2):
            other.send([b"an", b"swer"], soon())
            answer = bytearray(6)
            one.recv_into([memoryview(answer)], soon())
            assert answer == b"answer"
        with pytest.raises(TransportError, match="too many open files"):
            other.send([bytes(MIB)], soon())
    assert caplog.text.count("too many open files") == 1


def test_answers_go_by_shared_memory_once_the_peer_received(pool: ThreadPoolExecutor, meet: Meet) -> None:
    with meet(SHM) as (one, other):
        move(pool, (one, other))
        sender: Any = other
        answer = bytearray(9000)

        def answers(i: int) -> None:
            for nbytes in (1, 8000, 9000):
                other.send([bytes([i]) * nbytes], soon())
            for nbytes in (1, 8000, 9000):
                one.recv_into([memoryview(answer)[:nbytes]], soon())
                assert answer[:nbytes] == bytes([i]) * nbytes

        until = soon()
        while sender._out._endpoint is None:  # UCX notices the first message to a worker in its own time
            answers(1)
            assert time.monotonic() < until
        answers(2)
        other.send([b"last"], soon())
        other.close()
        one.recv_into([memoryview(answer)[:4]], soon())
        assert answer[:4] == b"last"
        with pytest.raises(ConnectionClosedError, match="0 of 1 bytes"):
            one.recv_into([memoryview(answer)[:1]], soon())


def test_device_memory_is_refused_by_name(meet: Meet) -> None:
    class OnDevice:
        __cuda_array_interface__: ClassVar = {
            "data": (0, False),
            "shape": (1,),
            "typestr": "|u1",
            "version": 2,
        }

    part: Any = OnDevice()
    with (
        meet(SHM) as (one, _),
        pytest.raises(TypeError, match=r"OnDevice in CUDA memory .* pinned host memory"),
    ):
        one.send([part], soon())


def test_a_signal_during_a_look_is_handled_then(meet: Meet, pool: ThreadPoolExecutor) -> None:
    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    with meet(f"{SHM}&spin=10ms") as ends:
        move(pool, ends)
        before = signal.signal(signal.SIGALRM, interrupt)
        kill = threading.Timer(0.005, signal.pthread_kill, (threading.get_ident(), signal.SIGALRM))
        start = time.monotonic()
        try:
            kill.start()
            with pytest.raises(KeyboardInterrupt):
                ends[1].recv_into([memoryview(bytearray(8))], deadline_in(60))
        finally:
            signal.signal(signal.SIGALRM, before)
            kill.join()
        assert time.monotonic() - start < 30, "the handler ran at the deadline"
