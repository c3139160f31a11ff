"""The part of the transport suite on listening and dialling."""

# ruff: noqa: D102 - the names of the tests say what is required
from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    ConfigError,
    ConnectError,
    ConnectionClosedError,
    TransportError,
)
from kvferry.testing.threads import Blocked
from kvferry.testing.transports_common import TransportFixtures, open_descriptors, resident_nbytes
from kvferry.transports.base import Listener

__all__ = ["TransportListening"]

_GROWTH_NBYTES: Final = 16 << 20


class TransportListening(TransportFixtures):
    """Addresses, refusals, and that nothing is left of many connections."""

    def test_addresses_are_urls_that_can_be_dialled(self) -> None:
        transport = self.transport()
        with self.listening() as listener:
            assert listener.address.startswith(f"{transport.scheme}://")
            one, other = self.meet(listener)
            with contextlib.closing(one):
                other.close()
                assert one.peer_address == self.dial_url(listener)
                assert other.peer_address == one.local_address != one.peer_address
                for end in (one, other):
                    assert end.local_address in repr(end)
                    assert end.peer_address in repr(end)
            assert listener.address in repr(listener)

    def test_connections_are_accepted_in_order(self) -> None:
        with self.listening() as listener, contextlib.ExitStack() as stack:
            dialled, accepted = [], []
            for i in range(5):
                if self.connect_needs_accept:
                    one, other = self.meet(listener)
                    accepted.append(other)
                else:
                    one = self.dial(listener)
                dialled.append(one)
                stack.callback(one.close)
                self.send(one, bytes([i]))
            for i in range(5):
                other = accepted[i] if self.connect_needs_accept else self.accept(listener)
                stack.callback(other.close)
                assert self.receive(other, 1) == bytes([i])

    def test_nobody_listens(self) -> None:
        with self.listening() as listener:
            address, url = listener.address, self.dial_url(listener)
        with pytest.raises(ConnectError) as caught:
            self.transport().connect(url, self.soon())
        assert address.partition("?")[0] in str(caught.value)

    def test_address_in_use_and_free_again(self) -> None:
        with self.listening() as listener:
            again = self.listen_again_url(listener)
            with pytest.raises(ConnectError) as caught:
                self.transport().listen(again)
            assert listener.address.partition("?")[0] in str(caught.value)
            assert "choose another" in str(caught.value)
        self.transport().listen(again).close()

    def test_connect_past_its_deadline(self) -> None:
        with self.listening() as listener, pytest.raises(ConnectError, match="deadline"):
            self.transport().connect(self.dial_url(listener), deadline_in(-1))

    def test_unknown_option_is_refused(self) -> None:
        url = f"{self.listen_url().partition('?')[0]}?no_such_option=1"
        for call in (self.transport().listen, lambda u: self.transport().connect(u, self.soon())):
            with pytest.raises(ConfigError, match="no_such_option"):
                call(url)

    def test_address_of_another_scheme_is_refused(self) -> None:
        for call in (self.transport().listen, lambda u: self.transport().connect(u, self.soon())):
            with pytest.raises(ConfigError, match="other://"):
                call("other://127.0.0.1:9")

    def test_listener_closed_while_accepting(self, pool: ThreadPoolExecutor) -> None:
        with self.listening() as listener:
            accepting = Blocked(pool, lambda: listener.accept(self.much_later()))
            listener.close()
            accepting.assert_ends_with(ConnectionClosedError)
            listener.close()
            with pytest.raises(ConnectionClosedError):
                self.accept(listener)

    def test_connections_outlive_their_listener(self) -> None:
        with self.listening() as listener:
            one, other = self.meet(listener)
        with contextlib.closing(one), contextlib.closing(other):
            self.assert_works((one, other))

    def test_connection_that_was_never_accepted_ends_with_the_listener(self) -> None:
        if self.connect_needs_accept:
            pytest.skip("connect does not come back before accept")
        with self.listening() as listener:
            one = self.dial(listener)
        with contextlib.closing(one):
            self.assert_ended(one)

    def test_one_ends_and_the_others_go_on(self) -> None:
        with self.listening() as listener, contextlib.ExitStack() as stack:
            pairs = [self.meet(listener) for _ in range(4)]
            for pair in pairs:
                for end in pair:
                    stack.callback(end.close)
            pairs[0][0].abort()
            pairs[1][1].close()
            for pair in pairs[2:]:
                self.assert_works(pair)
            self.assert_ended(pairs[0][1])
            self.assert_ended(pairs[1][0])

    # -- many connections ------------------------------------------------------------------------------

    def _cycle(self, listener: Listener, end: str) -> None:
        one, other = self.meet(listener)
        self.send(one, b"x")
        assert self.receive(other, 1) == b"x"
        getattr(one, end)()
        self.assert_ended(other)
        getattr(other, end)()

    def _give_up(self, listener: Listener) -> None:
        """Dial and end at once; whatever the listener makes of that, the next connection is good."""
        self.dial(listener).abort()
        one = self.dial(listener)
        self.send(one, b"x")
        for _ in range(4):
            with contextlib.suppress(TransportError), contextlib.closing(self.accept(listener)) as other:
                if self.receive(other, 1) == b"x":
                    break
        else:
            pytest.fail("a connection was lost behind one that ended before it was accepted")
        one.close()

    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_descriptors_are_given_back(self, end: str) -> None:
        with self.listening() as listener:  # what the first connection sets up may stay
            self._cycle(listener, end)
        before = open_descriptors()
        with self.listening() as listener:
            for _ in range(self.connect_cycles):
                self._cycle(listener, end)
        assert open_descriptors() <= before, "descriptors were left open"

    def test_dialling_and_going_away_harms_nobody(self) -> None:
        if self.connect_needs_accept:
            pytest.skip("connect does not come back before accept")
        with self.listening() as listener:
            self._give_up(listener)
        before = open_descriptors()
        with self.listening() as listener:
            for _ in range(max(2, self.connect_cycles // 10)):
                self._give_up(listener)
        assert open_descriptors() <= before, "descriptors were left open"

    @pytest.mark.soak
    def test_nothing_is_left_of_thousands_of_connections(self) -> None:
        with self.listening() as listener:
            for _ in range(self.soak_cycles // 10):
                self._cycle(listener, "close")
            before, memory = open_descriptors(), resident_nbytes()
            for i in range(self.soak_cycles):
                self._cycle(listener, "abort" if i % 2 else "close")
                if i % 10 == 0 and not self.connect_needs_accept:
                    self._give_up(listener)
            assert open_descriptors() <= before, "descriptors were left open"
            assert resident_nbytes() - memory < _GROWTH_NBYTES, "memory was left behind"
