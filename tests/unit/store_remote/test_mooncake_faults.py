"""What the mooncake tier makes of a pool that is away, hangs, is full or forgets; and what it registers."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvferry.core.arena import Arena
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError
from kvferry.core.keys import BlockKey
from kvferry.store.remote.mooncake import MooncakeOptions, MooncakeTier
from kvferry.store.remote.mooncake.client import give_client_back, take_client
from kvferry.store.tier import BlockRead, BlockWrite, ReadOutcome, TierNamespace, WriteOutcome
from kvferry.testing.blocks import block_bytes, small_spec, stop_process, wait_until
from kvferry.testing.mooncake_pool import MooncakePool
from kvferry.testing.redis_server import free_ports
from kvferry.testing.tiers_common import (
    HIT,
    MISS,
    PRESENT,
    SPEC,
    STORED,
    chain,
    closing,
    opened,
    outcomes,
    read,
    write,
)
from kvferry.testing.tiers_common import write_outcomes as written
from kvferry.transports.mooncake import unavailable
from kvferry.transports.mooncake.admission import listening

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())
FAILED = ReadOutcome.FAILED
BIG = small_spec("mooncake-big", pages=256)


@pytest.fixture(scope="module")
def pool() -> Iterator[MooncakePool]:
    with MooncakePool(32 << 20, lease_s=60) as pool:
        take_client(options_of(pool))  # ending one takes a second: all tests have the same
        yield pool
        give_client_back(options_of(pool), ended=True)


def options_of(pool: MooncakePool, **more: object) -> MooncakeOptions:
    given: dict[str, object] = {
        "master": pool.address, "timeout_s": 0.6, "server_pause_s": 0.05, **more,
    }  # fmt: skip
    return MooncakeOptions(**given)  # type: ignore[arg-type]


Make = Callable[..., tuple[MooncakeTier, TierNamespace, list[BlockKey]]]


@pytest.fixture
def make(pool: MooncakePool, request: pytest.FixtureRequest) -> Iterator[Make]:
    with ExitStack() as stack:

        def make(**more: object) -> tuple[MooncakeTier, TierNamespace, list[BlockKey]]:
            options = options_of(pool, **{"prefix": f"t{abs(id(request.node))}", **more})
            tier = stack.enter_context(closing(MooncakeTier("mooncake", options)))
            assert isinstance(tier, MooncakeTier)
            space = opened(tier, SPEC)
            return tier, space, chain(space, 1, 4)

        yield make
        for namespace_tier, space, _ in [make()]:
            namespace_tier.forget(space)


def test_what_another_process_stored_is_found_and_forgotten(make: Make) -> None:
    one, space, keys = make()
    other, _, _ = make()
    assert written(write(one, space, keys)) == [STORED] * 4
    assert outcomes(read(other, space, keys)) == [HIT] * 4
    assert written(write(other, space, keys)) == [PRESENT] * 4
    stranger = make(prefix="another")
    assert outcomes(read(stranger[0], space, keys)) == [MISS] * 4
    assert [entry.key for entry in one.scan()] == keys[::-1]
    other.forget(space)
    assert outcomes(read(one, space, keys)) == [MISS] * 4
    assert one.usage().entries == 0


def test_blocks_of_an_arena_are_registered_once_and_as_long_as_it_lives(make: Make) -> None:
    tier, space, keys = make(register="always")
    arena = Arena(1 << 20, segment_nbytes=1 << 20)
    slots = arena.allocate_many(8, SPEC.block_nbytes)
    assert slots is not None
    views = [arena.view(slot) for slot in slots]
    for n, key in enumerate(keys):
        views[n][:] = block_bytes(key, SPEC.block_nbytes)
    blocks = [BlockWrite(k, v, None, -1) for k, v in zip(keys, views, strict=False)]
    assert written(tier.write(space, blocks, deadline=deadline_in(20))) == [STORED] * 4
    reads = [BlockRead(k, v) for k, v in zip(keys, views[4:], strict=True)]
    assert outcomes(tier.read_into(space, reads, deadline=deadline_in(20))) == [HIT] * 4
    assert [bytes(v) for v in views[4:]] == [bytes(v) for v in views[:4]]
    registered = tier.backend._client.registered  # type: ignore[attr-defined]
    assert len(registered._segments) == 1
    assert not registered._users
    del blocks, reads, views
    arena.close()
    wait_until(lambda: not registered._segments)


def test_its_ports_are_reached_from_this_host_alone(pool: MooncakePool, make: Make) -> None:
    """Another address of this host stands for another host."""
    before = listening()
    tier, space, keys = make(host="127.0.0.2", trusted_peers=("127.0.0.3",))
    assert written(write(tier, space, keys)) == [STORED] * 4
    ports = [port for inode, port in listening().items() if inode not in before]
    assert ports
    for port in ports:
        for source in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            socket.create_connection(("127.0.0.2", port), 5, (source, 0)).close()
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.2", port), 0.2, ("127.0.0.4", 0)).close()
    assert pool.master.poll() is None


def test_a_full_pool_refuses_and_is_not_held_to_fail(make: Make) -> None:
    tier, _, _ = make()
    space = opened(tier, BIG)
    first = chain(space, 1, 10)
    assert written(write(tier, space, first)) == [STORED] * 10
    assert outcomes(read(tier, space, first)) == [HIT] * 10  # for a minute the pool evicts none of these
    results = write(tier, space, chain(space, 2, 2 * (32 << 20) // BIG.block_nbytes))
    refused = [r for r in results if r.outcome is WriteOutcome.REFUSED]
    assert refused
    assert {r.outcome for r in results} <= {STORED, WriteOutcome.REFUSED}
    assert "no room" in refused[0].reason
    assert tier.usage().healthy
    assert outcomes(read(tier, space, first)) == [HIT] * 10
    tier.forget(space)


def test_an_absent_master_costs_no_time_and_is_told_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the first connection: the library's own start would halt all threads for seconds."""
    caplog.set_level(logging.INFO)
    (port,) = free_ports(1)
    tier, space, keys = make(master=f"127.0.0.1:{port}", server_pause_s=30.0)
    began = time.monotonic()
    for _ in range(20):
        assert set(outcomes(read(tier, space, keys, seconds=2))) == {FAILED}
    assert set(written(write(tier, space, keys, seconds=2))) == {WriteOutcome.FAILED}
    assert tier.contains(space, keys, deadline=deadline_in(2)) == [False] * 4
    assert time.monotonic() - began < 10
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == 1
    assert f"master 127.0.0.1:{port} cannot be reached" in told[0]
    usage = tier.usage()
    assert not usage.healthy
    assert usage.status[f"master 127.0.0.1:{port}"].startswith("master")


def test_a_master_that_hangs_is_left_in_time_and_heals(pool: MooncakePool, make: Make) -> None:
    tier, space, keys = make()
    assert written(write(tier, space, keys)) == [STORED] * 4
    stop_process(pool.master.pid)
    try:
        began = time.monotonic()
        results = read(tier, space, keys, seconds=0.2)
        assert time.monotonic() - began < 5
        assert outcomes(results) == [FAILED] * 4
        flying = [r.in_flight for r in results]
    finally:
        os.kill(pool.master.pid, signal.SIGCONT)
    assert all(event is None or event.wait(20) for event in flying)
    wait_until(lambda: outcomes(read(tier, space, keys)) == [HIT] * 4, 20)
    assert tier.usage().healthy


def test_the_memory_of_a_read_that_hangs_is_in_flight_until_it_ends(pool: MooncakePool, make: Make) -> None:
    """The client that holds the bytes stands still: ours may still write into the buffers."""
    tier, space, keys = make()
    assert written(write(tier, space, keys)) == [STORED] * 4
    stop_process(pool.holder.pid)
    try:
        results = read(tier, space, keys, seconds=0.2)
        assert outcomes(results) == [FAILED] * 4
        flying = [r.in_flight for r in results if r.in_flight is not None]
        assert flying
    finally:
        os.kill(pool.holder.pid, signal.SIGCONT)
    assert all(event.wait(20) for event in flying)
    wait_until(lambda: set(outcomes(read(tier, space, keys))) <= {HIT, MISS}, 20)


def test_a_master_that_was_restarted_has_forgotten_all(pool: MooncakePool, make: Make) -> None:
    tier, space, keys = make()
    assert written(write(tier, space, keys)) == [STORED] * 4
    pool.restart_master()
    wait_until(lambda: outcomes(read(tier, space, keys)) == [MISS] * 4, 30)
    wait_until(lambda: set(written(write(tier, space, keys))) <= {STORED, PRESENT}, 60)
    assert outcomes(read(tier, space, keys)) == [HIT] * 4


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "master must be given"),
        ({"master": "udp://a:1"}, "must be host:port"),
        ({"master": "a", "host": "a:1"}, "a host without a port"),
        ({"master": "a", "wire": "ucx"}, "one of tcp, rdma"),
        ({"master": "a", "contribute": "1MiB"}, "at least 16 MiB"),
        ({"master": "a", "trusted_peers": "b.c"}, "write addresses or networks"),
        ({"master": "a", "mastre": "b"}, "did you mean master"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        MooncakeTier.describe_options("mooncake", options)
