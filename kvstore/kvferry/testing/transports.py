"""Conformance suite of the transport contract; see :class:`TransportSuite`."""

# ruff: noqa: D102 - the names of the tests say what is required
from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Final, TypeAlias

import numpy as np
import pytest

from kvferry.core.buffers import Buf, ByteArray
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, ConnectError, ConnectionClosedError, TransferTimeoutError
from kvferry.testing.threads import Blocked
from kvferry.transports.base import Connection, Listener, Transport

__all__ = ["LARGEST", "SIZES", "TransportSuite"]

LARGEST: Final = -1
"""Stands for :attr:`TransportSuite.largest_nbytes` among the sizes."""
SIZES: Final = (
    0,
    1,
    2,
    63,
    64,
    65,
    511,
    512,
    513,
    4095,
    4096,
    4097,
    65535,
    65536,
    65537,
    (1 << 20) + 1,
    LARGEST,
)

_Ends: TypeAlias = "tuple[Connection, Connection]"
_GUARD: Final = 0xA5
_GUARD_NBYTES: Final = 64
_LONG_S: Final = 30.0  # what nothing here should need
_SHORT_S: Final = 0.15  # a deadline that is meant to pass
_BLOCKING_NBYTES: Final = 96 << 20  # more than the buffers of any transport hold

_CHILD: Final = """
import sys, time
from kvferry.transports import connect
connection = connect(sys.argv[1], time.monotonic() + 30)
connection.send([bytes(100)], time.monotonic() + 30)
connection.recv_into([memoryview(bytearray(1 << 30))], time.monotonic() + 60)
"""


def _random(nbytes: int, seed: int = 1) -> ByteArray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def _blocking_buffer() -> memoryview:
    """Zeros that need no memory until they are written."""
    return memoryview(mmap.mmap(-1, _BLOCKING_NBYTES))


def _fds() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only counted


class TransportSuite(ABC):
    """What every transport must do: inherit it in a test class, with its two abstract methods.

    Attributes:
        crosses_processes: Whether another process can dial it; ``False`` leaves out the tests that kill one.
        largest_nbytes: The largest message; lower it where a run has to be short.
        connect_cycles: Connections made and closed before descriptors are counted.
    """

    crosses_processes: ClassVar[bool] = True
    largest_nbytes: ClassVar[int] = 64 << 20
    connect_cycles: ClassVar[int] = 200

    @abstractmethod
    def transport(self) -> Transport:
        """The transport under test."""

    @abstractmethod
    def listen_url(self) -> str:
        """Where to listen; free each time it is asked for, and again once a listener is closed."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[Listener]:
        """A listener for the length of a test."""
        with contextlib.closing(self.transport().listen(self.listen_url())) as listener:
            yield listener

    @contextlib.contextmanager
    def connected(self) -> Iterator[_Ends]:
        """Both ends of a connection for the length of a test."""
        with self.listening() as listener:
            dialled = self.transport().connect(listener.address, deadline_in(_LONG_S))
            with contextlib.closing(dialled), contextlib.closing(self._accept(listener)) as accepted:
                yield dialled, accepted

    def _accept(self, listener: Listener) -> Connection:
        return listener.accept(deadline_in(_LONG_S))

    @pytest.fixture
    def pool(self) -> Iterator[ThreadPoolExecutor]:
        """Threads for the other ends of a test."""
        with ThreadPoolExecutor(4) as pool:
            yield pool

    def _transfer(
        self, pool: ThreadPoolExecutor, ends: _Ends, parts: list[ByteArray], targets: list[memoryview]
    ) -> None:
        sending = pool.submit(ends[0].send, parts, deadline_in(_LONG_S))
        ends[1].recv_into(targets, deadline_in(_LONG_S))
        sending.result(timeout=_LONG_S)

    # -- bytes arrive ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_bytes_arrive_and_nothing_else_is_touched(self, pool: ThreadPoolExecutor, nbytes: int) -> None:
        data = _random(nbytes := self.largest_nbytes if nbytes == LARGEST else nbytes)
        whole = np.full(nbytes + 2 * _GUARD_NBYTES, _GUARD, np.uint8)
        target = whole.data[_GUARD_NBYTES : _GUARD_NBYTES + nbytes]
        with self.connected() as ends:
            self._transfer(pool, ends, [data], [target])
            self._transfer(pool, (ends[1], ends[0]), [data[:1]], [memoryview(bytearray(min(1, nbytes)))])
        assert np.array_equal(whole[_GUARD_NBYTES:-_GUARD_NBYTES], data)
        assert (whole[:_GUARD_NBYTES] == _GUARD).all()
        assert (whole[-_GUARD_NBYTES:] == _GUARD).all()

    def test_parts_and_views_need_not_match(self, pool: ThreadPoolExecutor) -> None:
        sizes_out = [0, 1, 300_000, 0, 7, 64, 4096, 100_000, 0]
        sizes_in = [5, 0, 200_000, 150_000, 0, 64, 50_000, 4096 + 3]
        data = _random(sum(sizes_out))
        sizes_in.append(len(data) - sum(sizes_in))
        cuts = np.cumsum([0, *sizes_out])
        parts = [data[a:b] for a, b in itertools.pairwise(cuts)]
        whole = np.full(len(data) + (len(sizes_in) + 1) * _GUARD_NBYTES, _GUARD, np.uint8)
        targets, position = [], _GUARD_NBYTES
        for size in sizes_in:
            targets.append(whole.data[position : position + size])
            position += size + _GUARD_NBYTES
        with self.connected() as ends:
            self._transfer(pool, ends, parts, targets)
        assert b"".join(targets) == data.tobytes()
        for target in targets:
            target[:] = bytes([_GUARD]) * len(target)
        assert (whole == _GUARD).all(), "wrote outside its views"

    def test_more_parts_than_one_call_takes(self, pool: ThreadPoolExecutor) -> None:
        parts = [_random(i % 8, seed=i) for i in range(3000)]
        data = b"".join(part.tobytes() for part in parts)
        received = bytearray(len(data))
        targets = [memoryview(received)[i : i + 3] for i in range(0, len(data), 3)]
        assert len(targets) > 2048
        with self.connected() as ends:
            self._transfer(pool, ends, parts, targets)
        assert received == data

    def test_parts_of_any_type_and_shape(self) -> None:
        numbers = np.arange(6, dtype=np.int32).reshape(2, 3)
        parts: list[Buf] = [b"bytes", bytearray(b"array"), memoryview(b"view"), numbers]
        received = bytearray(14 + 24)
        with self.connected() as (one, other):
            one.send(parts, deadline_in(_LONG_S))
            other.recv_into([memoryview(received)], deadline_in(_LONG_S))
        assert received == b"bytesarrayview" + numbers.tobytes()

    def test_sent_buffers_may_be_reused_at_once(self, pool: ThreadPoolExecutor) -> None:
        rounds, nbytes = 20, 500_000
        buffer = bytearray(nbytes)
        received = np.zeros((rounds, nbytes), np.uint8)
        with self.connected() as (one, other):
            receiving = pool.submit(other.recv_into, [received.data.cast("B")], deadline_in(_LONG_S))
            for i in range(rounds):
                buffer[:] = bytes([i + 1]) * nbytes
                one.send([buffer], deadline_in(_LONG_S))
                buffer[:] = bytes(nbytes)
            receiving.result(timeout=_LONG_S)
        assert (received == np.arange(1, rounds + 1, dtype=np.uint8)[:, None]).all()

    def test_both_directions_at_once(self, pool: ThreadPoolExecutor) -> None:
        nbytes = min(self.largest_nbytes, 16 << 20)
        with self.connected() as ends:
            data = [_random(nbytes, seed) for seed in (1, 2)]
            received = [np.zeros(nbytes, np.uint8) for _ in ends]
            calls = [
                *(
                    pool.submit(end.send, [d], deadline_in(_LONG_S))
                    for end, d in zip(ends, data, strict=True)
                ),
                *(
                    pool.submit(end.recv_into, [r.data], deadline_in(_LONG_S))
                    for end, r in zip(ends, received, strict=True)
                ),
            ]
            for call in calls:
                call.result(timeout=_LONG_S)
        assert np.array_equal(received[0], data[1])
        assert np.array_equal(received[1], data[0])

    def test_small_messages_both_ways_before_either_is_read(self) -> None:
        answers = [bytearray(4096), bytearray(4096)]
        with self.connected() as ends:
            for end in ends:
                end.send([b"x" * 4096], deadline_in(_LONG_S))
            for end, answer in zip(ends, answers, strict=True):
                end.recv_into([memoryview(answer)], deadline_in(_LONG_S))
        assert all(answer == b"x" * 4096 for answer in answers)

    # -- deadlines -------------------------------------------------------------------------------------

    def _assert_in_time(self, call: Callable[[float], object]) -> None:
        started = time.monotonic()
        with pytest.raises(TransferTimeoutError):
            call(deadline_in(_SHORT_S))
        taken = time.monotonic() - started
        assert _SHORT_S * 0.9 <= taken < _SHORT_S + 3, f"came back after {taken:.2f} s"

    def test_deadline_of_receive(self) -> None:
        with self.connected() as (one, other):
            self._assert_in_time(lambda deadline: other.recv_into([memoryview(bytearray(2))], deadline))
            one.send([b"x"], deadline_in(_LONG_S))
            self._assert_in_time(lambda deadline: other.recv_into([memoryview(bytearray(2))], deadline))

    def test_deadline_of_send(self) -> None:
        with self.connected() as (one, _):
            self._assert_in_time(lambda deadline: one.send([_blocking_buffer()], deadline))
            one.abort()

    def test_deadline_of_accept(self) -> None:
        with self.listening() as listener:
            self._assert_in_time(listener.accept)

    def test_past_deadline_fails_before_anything_is_moved(self) -> None:
        received = bytearray(1)
        with self.connected() as (one, other):
            with pytest.raises(TransferTimeoutError):
                one.send([b"lost"], deadline_in(-1))
            one.send([b"x"], deadline_in(_LONG_S))
            assert other.wait_readable(deadline_in(_LONG_S))
            with pytest.raises(TransferTimeoutError):
                other.recv_into([memoryview(received)], deadline_in(-1))
            other.recv_into([memoryview(received)], deadline_in(_LONG_S))
        assert received == b"x"

    def test_wait_readable(self, pool: ThreadPoolExecutor) -> None:
        with self.connected() as (one, other):
            started = time.monotonic()
            assert not other.wait_readable(deadline_in(_SHORT_S))
            assert time.monotonic() - started >= _SHORT_S * 0.9
            assert not other.wait_readable(deadline_in(-1))
            waiting = Blocked(pool, lambda: other.wait_readable(deadline_in(_LONG_S)))
            one.send([b"x"], deadline_in(_LONG_S))
            assert waiting.future.result(timeout=5) is True
            assert other.wait_readable(deadline_in(_LONG_S)), "still there until it is taken"
            other.recv_into([memoryview(bytearray(1))], deadline_in(_LONG_S))
            assert not other.wait_readable(deadline_in(0.01))
            one.close()
            assert other.wait_readable(deadline_in(_LONG_S)), "the end of the stream counts"

    # -- the end ---------------------------------------------------------------------------------------

    def test_close_delivers_what_was_sent_and_then_the_end(self, pool: ThreadPoolExecutor) -> None:
        data = _random(1_000_000)
        received = np.zeros(len(data), np.uint8)

        def send_and_close(end: Connection) -> None:
            for part in np.array_split(data, 7):
                end.send([part], deadline_in(_LONG_S))
            end.close()

        with self.connected() as (one, other):
            sending = pool.submit(send_and_close, one)
            other.recv_into([received.data], deadline_in(_LONG_S))
            sending.result(timeout=_LONG_S)
            with pytest.raises(ConnectionClosedError, match="0 of 1 "):
                other.recv_into([memoryview(bytearray(1))], deadline_in(_LONG_S))
        assert np.array_equal(received, data)

    def test_last_words_arrive_though_the_peer_was_sending(self, pool: ThreadPoolExecutor) -> None:
        """A refusal that is answered to a payload nobody reads must not be lost with it."""
        answer = bytearray(1000)
        with self.connected() as (one, other):
            sending = pool.submit(one.send, [_blocking_buffer()], deadline_in(_LONG_S))
            assert other.wait_readable(deadline_in(_LONG_S))
            other.send([b"!" * 1000], deadline_in(_LONG_S))
            other.close()
            with pytest.raises(ConnectionClosedError):
                sending.result(timeout=_LONG_S)
            one.recv_into([memoryview(answer)], deadline_in(_LONG_S))
        assert answer == b"!" * 1000

    def test_stream_that_ends_early_says_after_how_much(self) -> None:
        with self.connected() as (one, other):
            one.send([b"x" * 100], deadline_in(_LONG_S))
            one.close()
            with pytest.raises(ConnectionClosedError, match="100 of 250 "):
                other.recv_into([memoryview(bytearray(250))], deadline_in(_LONG_S))

    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_calls_after_the_end_say_so(self, end: str) -> None:
        with self.connected() as (one, _):
            getattr(one, end)()
            for call in (
                lambda: one.send([b"x"], deadline_in(_LONG_S)),
                lambda: one.recv_into([memoryview(bytearray(1))], deadline_in(_LONG_S)),
                lambda: one.wait_readable(deadline_in(_LONG_S)),
            ):
                with pytest.raises(ConnectionClosedError):
                    call()

    @pytest.mark.parametrize(
        "ends", [("close", "close"), ("abort", "abort"), ("close", "abort"), ("abort", "close")]
    )
    def test_ending_twice_is_nothing_new(self, ends: tuple[str, str]) -> None:
        with self.connected() as (one, other):
            for end in ends:
                getattr(one, end)()
            with pytest.raises(ConnectionClosedError):
                other.recv_into([memoryview(bytearray(1))], deadline_in(_LONG_S))

    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_end_wakes_blocked_threads_on_both_sides(self, pool: ThreadPoolExecutor, end: str) -> None:
        def send_on(connection: Connection) -> None:
            while True:  # closing may take some of it
                connection.send([_blocking_buffer()], deadline_in(60))

        with self.connected() as (one, other):
            blocked = [
                Blocked(pool, lambda: one.send([_blocking_buffer()], deadline_in(60))),
                Blocked(pool, lambda: one.recv_into([memoryview(bytearray(9))], deadline_in(60))),
                Blocked(pool, lambda: send_on(other)),
            ]
            # what the other end is sending satisfies the receive; the next one has to block for more
            blocked[1].future.result(timeout=_LONG_S)
            getattr(one, end)()
            blocked[0].assert_ends_with(ConnectionClosedError)
            blocked[2].assert_ends_with(ConnectionClosedError)

    @pytest.mark.parametrize("end", ["close", "abort"])
    @pytest.mark.parametrize("call", ["receive", "wait"])
    def test_end_wakes_who_waits_for_bytes(self, pool: ThreadPoolExecutor, end: str, call: str) -> None:
        with self.connected() as (one, other):

            def wait() -> object:
                if call == "wait":
                    return one.wait_readable(deadline_in(60))
                return one.recv_into([memoryview(bytearray(9))], deadline_in(60))

            mine = Blocked(pool, wait)
            theirs = Blocked(pool, lambda: other.recv_into([memoryview(bytearray(9))], deadline_in(60)))
            getattr(one, end)()
            mine.assert_ends_with(ConnectionClosedError)
            theirs.assert_ends_with(ConnectionClosedError)

    def test_sending_to_a_closed_peer_fails_soon(self) -> None:
        with self.connected() as (one, other):
            other.close()
            deadline = deadline_in(_LONG_S)
            with pytest.raises(ConnectionClosedError):  # noqa: PT012 - the first may still go out
                while True:
                    one.send([b"x" * 1000], deadline)

    @pytest.mark.parametrize("call", ["receive", "send"])
    def test_peer_process_is_killed(self, call: str) -> None:
        if not self.crosses_processes:
            pytest.skip("this transport stays within a process")
        with self.listening() as listener:
            env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            child = subprocess.Popen([sys.executable, "-c", _CHILD, listener.address], env=env)
            try:
                with contextlib.closing(self._accept(listener)) as connection:
                    connection.recv_into([memoryview(bytearray(40))], deadline_in(_LONG_S))
                    child.kill()
                    with pytest.raises(ConnectionClosedError):  # noqa: PT012 - some may still be taken
                        if call == "receive":
                            connection.recv_into([memoryview(bytearray(200))], deadline_in(_LONG_S))
                        while True:
                            connection.send([bytes(100_000)], deadline_in(_LONG_S))
            finally:
                child.kill()
                child.wait(timeout=_LONG_S)

    # -- listening and dialling ------------------------------------------------------------------------

    def test_addresses_are_urls_that_can_be_dialled(self) -> None:
        transport = self.transport()
        with self.listening() as listener:
            assert listener.address.startswith(f"{transport.scheme}://")
            with contextlib.closing(transport.connect(listener.address, deadline_in(_LONG_S))) as one:
                other = self._accept(listener)
                other.close()
                assert one.peer_address == listener.address
                assert other.peer_address == one.local_address != one.peer_address
                for end in (one, other):
                    assert end.local_address in repr(end)
                    assert end.peer_address in repr(end)
            assert listener.address in repr(listener)

    def test_connections_are_accepted_in_order(self) -> None:
        with self.listening() as listener, contextlib.ExitStack() as stack:
            for i in range(5):
                one = self.transport().connect(listener.address, deadline_in(_LONG_S))
                stack.callback(one.close)
                one.send([bytes([i])], deadline_in(_LONG_S))
            for i in range(5):
                other = self._accept(listener)
                stack.callback(other.close)
                received = bytearray(1)
                other.recv_into([memoryview(received)], deadline_in(_LONG_S))
                assert received[0] == i

    def test_nobody_listens(self) -> None:
        with self.listening() as listener:
            address = listener.address
        with pytest.raises(ConnectError) as caught:
            self.transport().connect(address, deadline_in(_LONG_S))
        assert address in str(caught.value)

    def test_address_in_use_and_free_again(self) -> None:
        with self.listening() as listener:
            with pytest.raises(ConnectError) as caught:
                self.transport().listen(listener.address)
            assert listener.address in str(caught.value)
            assert "choose another" in str(caught.value)
        self.transport().listen(listener.address).close()

    def test_connect_past_its_deadline(self) -> None:
        with self.listening() as listener, pytest.raises(ConnectError, match="deadline"):
            self.transport().connect(listener.address, deadline_in(-1))

    def test_unknown_option_is_refused(self) -> None:
        url = f"{self.listen_url().partition('?')[0]}?no_such_option=1"
        for call in (self.transport().listen, lambda u: self.transport().connect(u, deadline_in(_LONG_S))):
            with pytest.raises(ConfigError, match="no_such_option"):
                call(url)

    def test_address_of_another_scheme_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="other://"):
            self.transport().listen("other://127.0.0.1:9")

    def test_listener_closed_while_accepting(self, pool: ThreadPoolExecutor) -> None:
        with self.listening() as listener:
            accepting = Blocked(pool, lambda: listener.accept(deadline_in(60)))
            listener.close()
            accepting.assert_ends_with(ConnectionClosedError)
            listener.close()
            with pytest.raises(ConnectionClosedError):
                self._accept(listener)

    def test_connections_outlive_their_listener(self) -> None:
        received = bytearray(1)
        with self.listening() as listener:
            one = self.transport().connect(listener.address, deadline_in(_LONG_S))
            other = self._accept(listener)
        with contextlib.closing(one), contextlib.closing(other):
            one.send([b"x"], deadline_in(_LONG_S))
            other.recv_into([memoryview(received)], deadline_in(_LONG_S))
        assert received == b"x"

    def test_connection_that_was_never_accepted_ends_with_the_listener(self) -> None:
        with self.listening() as listener:
            one = self.transport().connect(listener.address, deadline_in(_LONG_S))
        with contextlib.closing(one), pytest.raises(ConnectionClosedError):
            one.recv_into([memoryview(bytearray(1))], deadline_in(_LONG_S))

    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_descriptors_are_given_back(self, end: str) -> None:
        def cycle(listener: Listener) -> None:
            one = self.transport().connect(listener.address, deadline_in(_LONG_S))
            other = self._accept(listener)
            one.send([b"x"], deadline_in(_LONG_S))
            other.recv_into([memoryview(bytearray(1))], deadline_in(_LONG_S))
            getattr(one, end)()
            with pytest.raises(ConnectionClosedError):
                other.recv_into([memoryview(bytearray(1))], deadline_in(_LONG_S))
            getattr(other, end)()

        before = _fds()
        with self.listening() as listener:
            for _ in range(self.connect_cycles):
                cycle(listener)
        assert _fds() <= before, "descriptors were left open"
