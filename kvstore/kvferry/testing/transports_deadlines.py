"""The part of the transport suite on deadlines: every call comes back at its own, and not much later."""

# ruff: noqa: D102 - the names of the tests say what is required
from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, ConnectError, TransferTimeoutError
from kvferry.testing.threads import Blocked
from kvferry.testing.transports_common import SHORT_S, TransportFixtures, blocking_buffer

__all__ = ["TransportDeadlines"]


class TransportDeadlines(TransportFixtures):
    """Receiving, sending, accepting, waiting, connecting and closing against a peer that does nothing."""

    def test_deadline_of_receive(self) -> None:
        with self.connected() as (one, other):
            self.assert_in_time(lambda deadline: other.recv_into([memoryview(bytearray(2))], deadline))
            one.send([b"x"], self.soon())
            self.assert_in_time(lambda deadline: other.recv_into([memoryview(bytearray(2))], deadline))

    def test_deadline_of_send(self) -> None:
        with self.connected() as (one, _):
            self.assert_in_time(lambda deadline: one.send([blocking_buffer()], deadline))
            one.abort()

    def test_deadline_of_accept(self) -> None:
        with self.listening() as listener:
            self.assert_in_time(listener.accept)

    def test_past_deadline_fails_before_anything_is_moved(self) -> None:
        received = bytearray(1)
        with self.connected() as (one, other):
            with pytest.raises(TransferTimeoutError):
                one.send([b"lost"], deadline_in(-1))
            one.send([b"x"], self.soon())
            assert other.wait_readable(self.soon())
            with pytest.raises(TransferTimeoutError):
                other.recv_into([memoryview(received)], deadline_in(-1))
            other.recv_into([memoryview(received)], self.soon())
        assert received == b"x"

    def test_wait_readable(self, pool: ThreadPoolExecutor) -> None:
        with self.connected() as (one, other):
            started = time.monotonic()
            assert not other.wait_readable(deadline_in(SHORT_S))
            assert time.monotonic() - started >= SHORT_S * 0.9
            assert not other.wait_readable(deadline_in(-1))
            waiting = Blocked(pool, lambda: other.wait_readable(self.soon()))
            one.send([b"x"], self.soon())
            assert waiting.future.result(timeout=5) is True
            assert other.wait_readable(self.soon()), "still there until it is taken"
            other.recv_into([memoryview(bytearray(1))], self.soon())
            assert not other.wait_readable(deadline_in(0.01))
            one.close()
            assert other.wait_readable(self.soon()), "the end of the stream counts"

    def test_close_does_not_wait_for_a_peer_that_does_not_read(self) -> None:
        with self.connected() as (one, _):
            with pytest.raises(TransferTimeoutError):
                one.send([blocking_buffer()], deadline_in(SHORT_S))
            started = time.monotonic()
            one.close()
            assert time.monotonic() - started < self.late_s

    @pytest.mark.parametrize("given", [math.nan, None, "1"], ids=str)
    def test_what_is_no_deadline_is_refused(self, given: float) -> None:
        """NaN is neither past nor to come: a wait for it would never end."""
        view = memoryview(bytearray(2))
        with self.connected() as (one, other):
            for call in (
                lambda: one.send([b"x"], given),
                lambda: one.send([blocking_buffer()], given),
                lambda: other.recv_into([view], given),
                lambda: other.recv_at_least(view, 1, given),
                lambda: other.recv_hashed(b"x", [view], given),
                lambda: other.wait_readable(given),
            ):
                with pytest.raises(ConfigError, match="deadline is"):
                    call()
            one.send([b"ok"], self.soon())
            other.recv_into([view], self.soon())
            assert view.tobytes() == b"ok"
        with self.listening() as listener:
            with pytest.raises(ConfigError, match="deadline is"):
                listener.accept(given)
            with pytest.raises(ConfigError, match="deadline is"):
                self.transport().connect(self.dial_url(listener), given)

    @pytest.mark.parametrize("deadline", [1e18, float("inf")])
    def test_deadline_as_far_as_can_be(self, deadline: float, pool: ThreadPoolExecutor) -> None:
        with self.listening() as listener:
            accepting = pool.submit(listener.accept, deadline)
            with (
                closing(self.transport().connect(self.dial_url(listener), deadline)) as one,
                closing(accepting.result(timeout=self.patience_s)) as other,
            ):
                view = memoryview(bytearray(2))
                receiving = Blocked(pool, lambda: other.recv_into([view], deadline))
                one.send([b"ok"], deadline)
                receiving.future.result(timeout=self.patience_s)
                one.close()
                assert other.wait_readable(deadline)
        assert view.tobytes() == b"ok"

    def test_connect_to_nobody_who_accepts_ends_in_time(self) -> None:
        """Whether or not it is made before it is accepted, it does not wait past its deadline."""
        with self.listening() as listener:
            started = time.monotonic()
            try:
                self.transport().connect(self.dial_url(listener), deadline_in(SHORT_S)).abort()
            except ConnectError as error:
                assert listener.address.partition("?")[0] in str(error)  # noqa: PT017 - may also be made
            assert time.monotonic() - started < SHORT_S + self.late_s
