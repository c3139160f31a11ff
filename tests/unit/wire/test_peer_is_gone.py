"""Whether a peer whose request was received still waits for the answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectionClosedError
from kvferry.wire import messages as m

from .conftest import Pair

Until = Callable[[Callable[[], bool]], None]
KINDS = ["tcp", "lanes", "auto", "unix", "inproc"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["abort", "close"])
def test_one_that_has_ended_the_stream_is_gone(pair: Pair, until: Until, kind: str, end: str) -> None:
    client, server = pair(kind)
    client.send(m.Ping(), deadline=deadline_in(20), request_id=1)
    assert isinstance(server.receive(deadline_in(20)).message, m.Ping)
    assert not server.peer_is_gone()
    getattr(client, end)()
    until(server.peer_is_gone)
    with pytest.raises(ConnectionClosedError):
        server.receive(deadline_in(20))


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_behind_the_one_that_is_served_is_kept(pair: Pair, kind: str) -> None:
    client, server = pair(kind)
    for number in range(1, 4):
        client.send(m.Pong(at=float(number)), deadline=deadline_in(20), request_id=number)
    for number in range(1, 4):
        incoming = server.receive(deadline_in(20))
        assert (incoming.message, incoming.request_id) == (m.Pong(at=float(number)), number)
        assert not server.peer_is_gone()
    server.send(m.Ping(), deadline=deadline_in(20))
    assert isinstance(client.receive(deadline_in(20)).message, m.Ping)
    client.send(m.Ping(), deadline=deadline_in(20))
    assert isinstance(server.receive(deadline_in(20)).message, m.Ping)
