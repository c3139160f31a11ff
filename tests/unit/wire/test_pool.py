from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError, ConnectError, ConnectionClosedError
from kvferry.wire import Channel, ChannelOptions, ChannelPool, ChannelServer
from kvferry.wire import messages as m

OPTIONS = ChannelOptions(role="test", session="s")


class Server:
    """Answers pings, raises on anything else, and remembers its channels."""

    def __init__(self, url: str) -> None:
        self.accepted: list[Channel] = []
        self.server = ChannelServer(url, OPTIONS, self.handle, name="pool-test")

    def handle(self, channel: Channel) -> None:
        self.accepted.append(channel)
        while True:
            request = channel.receive(deadline_in(60))
            if not isinstance(request.message, m.Ping):
                raise CapacityError("full")
            channel.reply(request, m.Pong(at=0.0), deadline=deadline_in(20))


@pytest.fixture(params=["tcp://127.0.0.1:0", "inproc://pool-test"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(request.param)
    yield made
    made.server.close()


@pytest.fixture
def pool(server: Server) -> Iterator[ChannelPool]:
    made = ChannelPool(server.server.address, OPTIONS, max_idle=2)
    yield made
    made.close()


def ping(channel: Channel) -> None:
    channel.call(m.Ping(), m.Pong, deadline=deadline_in(20))


def test_a_released_channel_is_used_again(pool: ChannelPool, server: Server) -> None:
    with pool.channel(deadline_in(20)) as first:
        ping(first)
    with pool.channel(deadline_in(20)) as second:
        ping(second)
    assert first is second
    assert len(server.accepted) == 1
    assert pool.idle == 1


def test_channels_in_use_are_not_shared(pool: ChannelPool) -> None:
    first, second = pool.acquire(deadline_in(20)), pool.acquire(deadline_in(20))
    assert first is not second
    pool.release(first)
    pool.release(second)
    assert pool.idle == 2
    last = pool.acquire(deadline_in(20))
    assert last is second  # the one that was used last
    pool.discard(last)


def test_idle_channels_are_bounded(pool: ChannelPool) -> None:
    channels = [pool.acquire(deadline_in(20)) for _ in range(4)]
    for channel in channels:
        pool.release(channel)
    assert pool.idle == 2
    assert [c.closed for c in channels] == [False, False, True, True]


def test_a_channel_that_the_peer_closed_is_replaced_unseen(
    pool: ChannelPool, server: Server, until: Any
) -> None:
    channels = [pool.acquire(deadline_in(20)) for _ in range(2)]
    for channel in channels:
        ping(channel)
        pool.release(channel)
    for accepted in list(server.accepted):
        accepted.abort()
    until(lambda: server.server.connections == 0)
    until(lambda: all(c.readable() for c in channels))
    with pool.channel(deadline_in(20)) as fresh:
        ping(fresh)
    assert fresh not in channels
    assert all(c.closed for c in channels)
    assert len(server.accepted) == 3


def test_unexpected_bytes_make_an_idle_channel_stale(pool: ChannelPool, server: Server, until: Any) -> None:
    with pool.channel(deadline_in(20)) as first:
        ping(first)
    server.accepted[0].send(m.Ping(), deadline=deadline_in(20))
    until(first.readable)
    with pool.channel(deadline_in(20)) as second:
        ping(second)
    assert second is not first


def test_a_channel_with_a_failure_or_an_error_is_not_kept(pool: ChannelPool) -> None:
    channel = pool.acquire(deadline_in(20))
    with pytest.raises(CapacityError):
        channel.call(m.Describe(), m.Description, deadline=deadline_in(20))
    pool.release(channel)
    assert channel.closed
    kept = pool.channel(deadline_in(20))
    other = kept.__enter__()
    assert kept.__exit__(ZeroDivisionError, ZeroDivisionError(), None) is False
    assert other.closed
    assert pool.idle == 0


def test_old_idle_channels_are_closed_when_the_pool_is_used(server: Server, until: Any) -> None:
    pool = ChannelPool(server.server.address, OPTIONS, idle_timeout_s=0.05)
    first, second = pool.acquire(deadline_in(20)), pool.acquire(deadline_in(20))
    pool.release(first)

    def closed() -> bool:
        pool.close_idle()
        return first.closed

    until(closed)
    assert pool.idle == 0
    pool.release(second)
    pool.close()
    assert second.closed


def test_a_closed_pool_gives_and_keeps_nothing(pool: ChannelPool) -> None:
    used, idle = pool.acquire(deadline_in(20)), pool.acquire(deadline_in(20))
    pool.release(idle)
    pool.close()
    assert idle.closed
    pool.release(used)
    assert used.closed
    with pytest.raises(ConnectionClosedError, match=r"the pool of channels to .* is closed"):
        pool.acquire(deadline_in(20))


def test_nobody_there_is_a_connect_error_in_time(server: Server) -> None:
    server.server.close()
    pool = ChannelPool(server.server.address, OPTIONS)
    with pytest.raises(ConnectError):
        pool.acquire(deadline_in(2))


def test_many_threads_share_a_pool(pool: ChannelPool, server: Server) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                with pool.channel(deadline_in(20)) as channel:
                    ping(channel)
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert pool.idle <= 2
