"""The tests of connections that pass descriptors of memory; part of ``SharedMemorySuite``."""

# ruff: noqa: D102 - the names of the tests say what is required
from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeAlias

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectionClosedError, ProtocolError, TransferTimeoutError
from kvferry.testing.threads import Blocked
from kvferry.testing.transports_common import TransportFixtures, open_descriptors
from kvferry.transports.base import Connection, SharedMemoryConnection

__all__ = ["SharedMemoryTests"]

_Pair: TypeAlias = "tuple[SharedMemoryConnection, SharedMemoryConnection]"

_CREDENTIALS: Final = """
import os, sys, time
from kvferry.transports import connect
connection = connect(sys.argv[1], time.monotonic() + 30)
connection.send([b"x"], time.monotonic() + 30)
connection.wait_readable(time.monotonic() + 30)
"""


def _shared(connection: Connection) -> SharedMemoryConnection:
    assert isinstance(connection, SharedMemoryConnection)
    return connection


@contextlib.contextmanager
def _memfds(count: int, nbytes: int = mmap.PAGESIZE) -> Iterator[list[int]]:
    """Memory files, each of which starts with its number."""
    files = [os.memfd_create(f"kvferry-suite-{i}") for i in range(count)]
    try:
        for i, fd in enumerate(files):
            os.ftruncate(fd, nbytes)
            os.pwrite(fd, i.to_bytes(4, "little"), 0)
        yield files
    finally:
        _close_all(files)


def _close_all(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)


class SharedMemoryTests(TransportFixtures):
    """Descriptors arrive in their place among the bytes, and none is ever left open."""

    @contextlib.contextmanager
    def _pair(self) -> Iterator[_Pair]:
        with self.connected() as (one, other):
            yield _shared(one), _shared(other)

    def _take(self, connection: SharedMemoryConnection, count: int) -> list[int]:
        """Receive ``count`` memory files; their numbers."""
        descriptors = connection.recv_descriptors(count, self.soon())
        try:
            assert len(descriptors) == len(set(descriptors)) == count
            return [int.from_bytes(os.pread(fd, 4, 0), "little") for fd in descriptors]
        finally:
            _close_all(descriptors)

    def test_both_sides_see_the_same_memory(self) -> None:
        nbytes = 1 << 20
        with self._pair() as (one, other), _memfds(1, nbytes) as (fd,):
            one.send_descriptors([fd], self.soon())
            (received,) = other.recv_descriptors(1, self.soon())
            try:
                with mmap.mmap(fd, nbytes) as mine, mmap.mmap(received, nbytes) as theirs:
                    mine[4096:4100] = b"mine"
                    assert theirs[4096:4100] == b"mine"
                    theirs[-6:] = b"theirs"
                    assert mine[-6:] == b"theirs"
            finally:
                os.close(received)

    def test_descriptors_lie_in_order_among_the_bytes(self) -> None:
        with self._pair() as pair, _memfds(6) as fds:
            for one, other in (pair, pair[::-1]):
                self.send(one, b"a" * 1000)
                one.send_descriptors(fds[:1], self.soon())
                one.send_descriptors(fds[1:3], self.soon())
                self.send(one, b"b")
                one.send_descriptors(fds[3:], self.soon())
                self.send(one, b"c" * 70_000)
                assert self.receive(other, 1000) == b"a" * 1000
                assert self._take(other, 1) == [0]
                assert self._take(other, 2) == [1, 2]
                assert self.receive(other, 1) == b"b"
                assert self._take(other, 3) == [3, 4, 5]
                assert self.receive(other, 70_000) == b"c" * 70_000

    def test_more_descriptors_than_one_call_of_the_kernel_takes(self, pool: ThreadPoolExecutor) -> None:
        with self._pair() as (one, other), _memfds(300) as fds:
            sending = pool.submit(one.send_descriptors, fds, self.soon())
            assert self._take(other, 300) == list(range(300))
            sending.result(timeout=self.patience_s)
            self.assert_works((one, other))

    def test_sent_descriptors_may_be_closed_at_once(self) -> None:
        with self._pair() as (one, other):
            with _memfds(2) as fds:
                one.send_descriptors(fds, self.soon())
            assert self._take(other, 2) == [0, 1]

    def test_received_descriptors_are_closed_on_exec(self) -> None:
        with self._pair() as (one, other), _memfds(1) as fds:
            one.send_descriptors(fds, self.soon())
            received = other.recv_descriptors(1, self.soon())
            try:
                assert fcntl.fcntl(received[0], fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            finally:
                _close_all(received)

    @pytest.mark.parametrize(("sent", "asked"), [(3, 1), (1, 3), (0, 1)])
    def test_another_number_than_announced_is_refused(self, sent: int, asked: int) -> None:
        before = open_descriptors()
        with self._pair() as (one, other), _memfds(3) as fds:
            if sent:
                one.send_descriptors(fds[:sent], self.soon())
            self.send(one, b"bytes in their place" * 10)
            with pytest.raises(ProtocolError) as caught:
                other.recv_descriptors(asked, self.soon())
            assert caught.value.remote
        assert open_descriptors() <= before, "descriptors were left open"

    def test_deadline_of_receiving_descriptors(self) -> None:
        before = open_descriptors()
        with self._pair() as (_, other):
            self.assert_in_time(lambda deadline: other.recv_descriptors(1, deadline))
        assert open_descriptors() <= before

    def test_past_deadline_fails_before_a_descriptor_is_moved(self) -> None:
        with self._pair() as (one, other), _memfds(2) as fds:
            with pytest.raises(TransferTimeoutError):
                one.send_descriptors(fds, deadline_in(-1))
            one.send_descriptors(fds[1:], self.soon())
            with pytest.raises(TransferTimeoutError):
                other.recv_descriptors(1, deadline_in(-1))
            assert self._take(other, 1) == [1]

    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_end_wakes_who_waits_for_descriptors(self, pool: ThreadPoolExecutor, end: str) -> None:
        with self._pair() as (one, other):
            mine = Blocked(pool, lambda: one.recv_descriptors(1, self.much_later()))
            theirs = Blocked(pool, lambda: other.recv_descriptors(1, self.much_later()))
            getattr(one, end)()
            mine.assert_ends_with(ConnectionClosedError)
            theirs.assert_ends_with(ConnectionClosedError)

    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_calls_with_descriptors_after_the_end_say_so(self, end: str) -> None:
        with self._pair() as (one, _), _memfds(1) as fds:
            getattr(one, end)()
            with pytest.raises(ConnectionClosedError):
                one.send_descriptors(fds, self.soon())
            with pytest.raises(ConnectionClosedError):
                one.recv_descriptors(1, self.soon())

    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_descriptors_that_nobody_took_are_not_left_open(self, end: str) -> None:
        before = open_descriptors()
        for _ in range(20):
            with self._pair() as (one, other), _memfds(4) as fds:
                one.send_descriptors(fds, self.soon())
                self.send(one, b"x")
                assert other.wait_readable(deadline_in(self.patience_s))
                getattr(other, end)()
        assert open_descriptors() <= before, "descriptors were left open"

    def test_deadline_of_sending_descriptors(self) -> None:
        def send_on(connection: SharedMemoryConnection, deadline: float) -> None:
            while True:  # until its buffers are full
                connection.send_descriptors(fds, deadline)

        with self._pair() as (one, _), _memfds(1) as fds:
            self.assert_in_time(lambda deadline: send_on(one, deadline))
            one.abort()

    def test_credentials_are_those_of_the_kernel(self) -> None:
        mine = (os.getpid(), os.getuid(), os.getgid())
        with self._pair() as (one, other):
            assert one.peer_credentials == other.peer_credentials == mine
        with (
            self.listening() as listener,
            self.child(_CREDENTIALS, self.dial_url(listener)) as child,
            contextlib.closing(self.accept(listener)) as connection,
        ):
            assert self.receive(connection, 1) == b"x"
            assert _shared(connection).peer_credentials == (child.pid, *mine[1:])

    def test_descriptors_of_a_killed_peer_stay_good(self) -> None:
        """Memory lives as long as somebody holds it, and what was sent before the end arrives."""
        with self._pair() as (one, other), _memfds(2) as fds:
            one.send_descriptors(fds, self.soon())
            one.close()
            assert self._take(other, 2) == [0, 1]
            with pytest.raises(ConnectionClosedError):
                other.recv_descriptors(1, self.soon())
