"""The part of the transport suite on the end of a stream: close and abort, here and at the peer."""

# ruff: noqa: D102 - the names of the tests say what is required
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvferry.core.errors import ConnectionClosedError
from kvferry.testing.threads import Blocked
from kvferry.testing.transports_common import TransportFixtures, blocking_buffer, random_bytes
from kvferry.transports.base import Connection

__all__ = ["TransportEnds"]


class TransportEnds(TransportFixtures):
    """What was sent arrives, then the end; nobody waits for a connection that is gone."""

    def test_close_delivers_what_was_sent_and_then_the_end(self, pool: ThreadPoolExecutor) -> None:
        data = random_bytes(1_000_000)
        received = np.zeros(len(data), np.uint8)

        def send_and_close(end: Connection) -> None:
            for part in np.array_split(data, 7):
                end.send([part], self.soon())
            end.close()

        with self.connected() as (one, other):
            sending = pool.submit(send_and_close, one)
            other.recv_into([received.data], self.soon())
            sending.result(timeout=self.patience_s)
            with pytest.raises(ConnectionClosedError, match="0 of 1 "):
                other.recv_into([memoryview(bytearray(1))], self.soon())
        assert np.array_equal(received, data)

    def test_last_words_arrive_though_the_peer_was_sending(self, pool: ThreadPoolExecutor) -> None:
        """A refusal that is answered to a payload nobody reads must not be lost with it."""
        answer = bytearray(1000)
        much = [blocking_buffer()] * 8  # more than close() takes from the peer while it waits
        with self.connected() as (one, other):
            sending = pool.submit(one.send, much, self.soon())
            assert other.wait_readable(self.soon())
            other.send([b"!" * 1000], self.soon())
            other.close()
            with pytest.raises(ConnectionClosedError):
                sending.result(timeout=self.patience_s)
            one.recv_into([memoryview(answer)], self.soon())
        assert answer == b"!" * 1000

    def test_stream_that_ends_early_says_after_how_much(self) -> None:
        with self.connected() as (one, other):
            one.send([b"x" * 100], self.soon())
            one.close()
            with pytest.raises(ConnectionClosedError, match="100 of 250 "):
                other.recv_into([memoryview(bytearray(250))], self.soon())

    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_calls_after_the_end_say_so(self, end: str) -> None:
        with self.connected() as (one, _):
            getattr(one, end)()
            for call in (
                lambda: one.send([b"x"], self.soon()),
                lambda: one.recv_into([memoryview(bytearray(1))], self.soon()),
                lambda: one.wait_readable(self.soon()),
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
                other.recv_into([memoryview(bytearray(1))], self.soon())

    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_end_wakes_blocked_threads_on_both_sides(self, pool: ThreadPoolExecutor, end: str) -> None:
        def send_on(connection: Connection) -> None:
            while True:  # closing may take some of it
                connection.send([blocking_buffer()], self.much_later())

        with self.connected() as (one, other):
            blocked = [
                Blocked(pool, lambda: one.send([blocking_buffer()], self.much_later())),
                Blocked(pool, lambda: one.recv_into([memoryview(bytearray(9))], self.much_later())),
                Blocked(pool, lambda: send_on(other)),
            ]
            # what the other end is sending satisfies the receive; the next one has to block for more
            blocked[1].future.result(timeout=self.patience_s)
            getattr(one, end)()
            blocked[0].assert_ends_with(ConnectionClosedError)
            blocked[2].assert_ends_with(ConnectionClosedError)

    @pytest.mark.parametrize("end", ["close", "abort"])
    @pytest.mark.parametrize("call", ["receive", "wait"])
    def test_end_wakes_who_waits_for_bytes(self, pool: ThreadPoolExecutor, end: str, call: str) -> None:
        with self.connected() as (one, other):

            def wait() -> object:
                if call == "wait":
                    return one.wait_readable(self.much_later())
                return one.recv_into([memoryview(bytearray(9))], self.much_later())

            mine = Blocked(pool, wait)
            theirs = Blocked(pool, lambda: other.recv_into([memoryview(bytearray(9))], self.much_later()))
            getattr(one, end)()
            mine.assert_ends_with(ConnectionClosedError)
            theirs.assert_ends_with(ConnectionClosedError)

    def test_sending_to_a_closed_peer_fails_soon(self) -> None:
        with self.connected() as (one, other):
            other.close()
            deadline = self.soon()
            with pytest.raises(ConnectionClosedError):  # noqa: PT012 - the first may still go out
                while True:
                    one.send([b"x" * 1000], deadline)
