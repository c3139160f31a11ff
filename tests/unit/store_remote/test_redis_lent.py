"""Large blocks are lent to the server: whoever gave them keeps them until it has let go."""

from __future__ import annotations

import pytest

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.native import native
from kvferry.store.remote.redis.backend import RedisBackend
from kvferry.store.remote.redis.server import Server
from kvferry.store.tier import BlockWrite, ReadOutcome, TierNamespace, WriteOutcome
from kvferry.testing.blocks import block_bytes, small_spec, wait_until
from kvferry.testing.redis_server import RedisServer
from kvferry.testing.tiers_common import HIT, PRESENT, STORED, chain, opened, outcomes, read, write
from kvferry.testing.tiers_common import write_outcomes as written
from kvferry.transports.ways import Ways

from .conftest import MakeTier, Opened

LARGE = small_spec("lent", pages=256)  # 1 MiB
pytestmark = pytest.mark.skipif(native().library is None, reason="nothing is lent without the native library")


def large(it: Opened) -> TierNamespace:
    """A namespace of large blocks, one of which is stored: so there is a connection."""
    space = opened(it.tier, LARGE)
    stored = write(it.tier, space, chain(space, 9, 1))
    assert written(stored) == [STORED], stored
    return space


def the_server(it: Opened) -> Server:
    assert isinstance(it.tier.backend, RedisBackend)
    server = it.tier.backend._servers.only
    assert server is not None
    return server


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call that could lend, whether it did."""
    calls: list[bool] = []
    found = vars(Server)["lends"]
    assert isinstance(found, property)

    def lends(server: Server) -> bool:
        calls.append(found.__get__(server))
        return calls[-1]

    monkeypatch.setattr(Server, "lends", property(lends))
    return calls


@pytest.mark.parametrize("ttl_s", [0.0, 60.0])
def test_large_blocks_are_lent_and_stored_as_any(
    server: RedisServer, make: MakeTier, lent: list[bool], ttl_s: float
) -> None:
    it = make(server.url, ttl_s=ttl_s)
    space = large(it)
    keys = chain(space, 1, 9)
    assert written(write(it.tier, space, keys)) == [STORED] * 9
    assert written(write(it.tier, space, keys[:2])) == [PRESENT] * 2
    assert lent == [True] * 3
    assert outcomes(read(it.tier, space, keys)) == [HIT] * 9
    left = server.call("TTL", it.tier.names.block(it.tier.names.home(space), keys[0]))
    assert left == -1 if not ttl_s else left in range(50, 61)


def test_small_blocks_are_copied(server: RedisServer, make: MakeTier, lent: list[bool]) -> None:
    it = make(server.url)
    assert written(write(it.tier, it.space, it.keys)) == [STORED] * 4
    assert lent == []


def test_a_server_that_hangs_keeps_what_it_was_lent_until_it_has_let_go(
    make: MakeTier, lent: list[bool]
) -> None:
    """It reads what is in that memory when it goes on: so it must be the same bytes still."""
    with RedisServer() as server:
        it = make(server.url, timeout_s=1.0, server_errors=1000)
        space = large(it)
        keys = chain(space, 1, 2)
        with server.hanging():
            results = write(it.tier, space, keys, seconds=10)
            flying = [r.in_flight for r in results if r.in_flight is not None]
            assert written(results) == [WriteOutcome.FAILED] * 2
            assert len(flying) == 2
            assert lent == [True, True]
            assert not any(event.is_set() or event.wait(0.05) for event in flying)
            assert not the_server(it).lends  # so that what it holds is bounded
        assert all(event.wait(20) for event in flying)
        wait_until(lambda: set(written(write(it.tier, space, keys))) <= {STORED, PRESENT}, 20)
        assert outcomes(read(it.tier, space, keys)) == [HIT] * 2
        assert lent[-1] is True


def test_a_server_that_dies_holds_nothing(make: MakeTier) -> None:
    with RedisServer() as server:
        it = make(server.url, timeout_s=1.0, server_errors=1000)
        space = large(it)
        with server.hanging():
            flying = [r.in_flight for r in write(it.tier, space, chain(space, 1, 2), seconds=10)]
            server.process.kill()
            assert all(event is not None and event.wait(20) for event in flying)
        assert [r.in_flight for r in write(it.tier, space, chain(space, 1, 2), seconds=10)] == [None] * 2


def test_what_changes_under_way_is_no_block(make: MakeTier) -> None:
    """Who does not keep it as it is, against the contract, stores what no reader takes."""
    with RedisServer() as server:
        it = make(server.url, timeout_s=1.0, server_errors=1000)
        space = large(it)
        (key,) = chain(space, 1, 1)
        data = page_aligned(space.spec.block_nbytes)
        data[:] = block_bytes(key, len(data))
        with server.hanging():
            (result,) = it.tier.write(space, [BlockWrite(key, data, None, 0)], deadline=deadline_in(10))
            assert result.in_flight is not None
            data[:] = bytes(len(data))
        assert result.in_flight.wait(20)
        assert outcomes(read(it.tier, space, [key])) in ([ReadOutcome.MISS], [ReadOutcome.CORRUPT])


def test_closing_the_tier_leaves_lent_memory_alone(make: MakeTier) -> None:
    with RedisServer() as server:
        it = make(server.url, timeout_s=1.0, server_errors=1000)
        space = large(it)
        with server.hanging():
            flying = [r.in_flight for r in write(it.tier, space, chain(space, 1, 2), seconds=10)]
            it.tier.close()
            assert all(event is not None and not event.is_set() for event in flying)
        assert all(event is not None and event.wait(20) for event in flying)


def test_where_copies_are_faster_blocks_are_copied(
    server: RedisServer, make: MakeTier, lent: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ways, "next", lambda _, nbytes: int(nbytes > 0))
    it = make(server.url)
    space = large(it)
    keys = chain(space, 1, 3)
    assert written(write(it.tier, space, keys)) == [STORED] * 3
    assert outcomes(read(it.tier, space, keys)) == [HIT] * 3
    assert lent == []


@pytest.mark.parametrize("faster", [0, 1])
def test_the_faster_way_is_found_and_kept(faster: int) -> None:
    ways = Ways()
    taken: list[int] = []
    for _ in range(100):
        taken.append(ways.next(1 << 20))
        ways.took(1 << 20, 100_000 if taken[-1] == faster else 200_000)
    assert set(taken) == {0, 1}
    assert taken.count(faster) > 75
