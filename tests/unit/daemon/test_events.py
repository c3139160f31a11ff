"""The stream of block events: a snapshot, numbers without gaps, and what becomes of a slow listener."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec
import pytest

from kvferry.core.block_events import BlockEvent, BlockFeed, BlockJournal
from kvferry.core.clock import deadline_in
from kvferry.core.errors import RequestError
from kvferry.core.keys import BlockKey
from kvferry.daemon.event_stream import EventLine, EventStreams, Snapshot
from kvferry.store.remote.index import Held as RemoteBlock
from kvferry.store.remote.index import RemoteIndex
from kvferry.store.remote.listing import block_of
from kvferry.store.remote.names import Names
from kvferry.store.tier import TierNamespace
from kvferry.testing.blocks import save_blocks, small_spec, wait_until

from .conftest import Running

SPEC = small_spec("events")


Held: TypeAlias = "set[tuple[str, str]]"
"""Tier and key."""


@contextmanager
def listening(running: Running, query: str = "") -> Iterator[Iterator[EventLine]]:
    host, _, port = running.http.url.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("GET", f"/events{query}", headers={"authorization": f"Bearer {running.token}"})
    answer = connection.getresponse()
    assert answer.status == 200
    try:
        yield (msgspec.json.decode(line, type=EventLine) for line in answer)
    finally:
        answer.close()
        connection.close()


class Follower:
    """What a router would know that reads the stream."""

    def __init__(self, lines: Iterator[EventLine]) -> None:
        self.lines, self.seq = lines, 0
        self.held: Held = set()
        self.begin = next(lines)
        for line in lines:
            if line.kind == "end":
                return
            assert (line.kind, line.seq) == ("present", 0)
            self.held.update((line.tier, key) for key in line.keys)

    def until(self, wanted: Held) -> None:
        for line in self.lines:
            named = [(line.tier, key) for key in line.keys]
            if line.kind == "stored":
                self.held.update(named)
            elif line.kind == "removed":
                self.held.difference_update(named)
            self.seq += len(named)
            assert line.seq == self.seq
            if self.held == wanted:
                return
        raise AssertionError(f"it ended before that: {len(self.held)} held")


def held(tier: str, *chains: list[BlockKey]) -> Held:
    return {(tier, key.hex()) for keys in chains for key in keys}


def test_a_snapshot_and_what_came_and_went_since_are_what_is_there_in_every_tier(running: Running) -> None:
    ns = running.client.namespace(SPEC)
    first, second = (ns.keys([token] * 4 * SPEC.block_tokens) for token in (1, 2))
    save_blocks(ns, first)
    assert running.client.flush(deadline=deadline_in(20))
    with listening(running) as lines:
        follower = Follower(lines)
        assert (follower.begin.tenant, follower.begin.tiers) == ("default", ("dram", "disk"))
        assert follower.held == held("dram", first) | held("disk", first)
        save_blocks(ns, second)
        follower.until(held("dram", first, second) | held("disk", first, second))
        running.daemon.store_of("default").evict(1 << 30)
        follower.until(held("disk", first, second))
        ns.remove(first)
        follower.until(held("disk", second))
        with ns.load(second, deadline=deadline_in(20)) as lease:
            assert len(lease) == 4
        follower.until(held("disk", second) | held("dram", second))


def test_what_a_disk_evicts_and_quarantines_is_told(running: Running, tmp_path: Path) -> None:
    ns = running.client.namespace(SPEC)
    first, second = (ns.keys([token] * 4 * SPEC.block_tokens) for token in (1, 2))
    with listening(running, "?tier=disk") as lines:
        follower = Follower(lines)
        assert follower.begin.tiers == ("disk",)
        save_blocks(ns, first)
        assert running.client.flush(deadline=deadline_in(20))
        save_blocks(ns, second)
        follower.until(held("disk", first, second))
        store = running.daemon.store_of("default")
        store.evict(1 << 30)
        next(tmp_path.rglob(f"{first[3].hex()}*")).write_bytes(b"spoilt")
        with ns.load(first, deadline=deadline_in(20)) as lease:
            assert len(lease) == 3
        follower.until(held("disk", first[:3], second))
        store.levels[0].tier.resize(1 << 20)
        usage = store.levels[0].usage()
        store.levels[0].tier.resize(usage.used_nbytes - 1)  # one block is too much
        gone = next(line for line in lines if line.kind == "removed")
        assert (gone.tier, len(gone.keys)) == ("disk", 1)
    with pytest.raises(RequestError, match=r"no tier 'dsk'.*dram, disk"):
        running.port.ask("GET", "/events?tier=dsk", headers={"authorization": f"Bearer {running.token}"})


def test_a_remote_index_tells_of_what_is_known_of_a_tenant() -> None:
    names = Names("kv", None, separator="/", tag=False)
    index, feed = RemoteIndex(4 * 100, "s3"), BlockFeed(100)
    spaces = {tenant: TierNamespace.of(tenant, SPEC) for tenant in ("a", "b")}

    def one(number: int, tenant: str = "a") -> RemoteBlock:
        key = BlockKey(bytes([number]) * 32)
        return RemoteBlock(names.block(names.home(spaces[tenant]), key), 100)

    def told() -> list[tuple[bool, str, int]]:
        return [(event.stored, event.tier, event.key[0]) for event in feed.take(100)]

    index.found(one(1))
    index.found(one(9, "b"))
    present = index.listen(feed, partial(block_of, names, names.tenant("a")))
    assert present == {spaces["a"].namespace_id: [BlockKey(b"\1" * 32)]}
    assert index.reserve(100) == []
    index.stored([one(2)])
    assert index.reserve(100) == []
    index.stored([one(2)])
    assert told() == [(True, "s3", 2)], "once, and nothing that memory knew before"
    assert index.reserve(200) == [one(9, "b")], "the oldest, and another tenant's"
    assert not told()
    victims = index.reserve(100) or []
    assert told() == [(False, "s3", 1)]
    index.put_back(victims)
    index.forget(one(2).name)
    assert told() == [(True, "s3", 1), (False, "s3", 2)]


def test_events_need_the_token(running: Running) -> None:
    with pytest.raises(RequestError, match="401"):
        running.port.ask("GET", "/events")


def test_a_listener_that_is_gone_costs_nothing_more(running: Running) -> None:
    with listening(running) as lines:
        assert next(lines).kind == "begin"
    journal = running.daemon.store_of("default")._pool.journal
    wait_until(lambda: journal.feeds[0].over)
    ns = running.client.namespace(SPEC)
    save_blocks(ns, ns.keys([1] * SPEC.block_tokens))
    assert not journal.feeds


def test_the_daemon_ends_although_somebody_listens(running: Running) -> None:
    with listening(running) as lines:
        assert next(lines).kind == "begin"
        running.http.close()
        assert [line.kind for line in lines][-1:] in ([], ["end"])


def test_one_that_falls_behind_is_told_and_cut() -> None:
    streams, journal = EventStreams(most_waiting=2), BlockJournal("dram")
    feed, other = streams.open(), BlockFeed(10)
    journal.attach(feed)
    journal.attach(other)
    for number in range(3):
        journal.note(True, bytes(32), BlockKey(bytes([number]) * 32))
    assert journal.feeds == [other]
    assert other.take(10) == [
        BlockEvent(True, "dram", bytes(32), BlockKey(bytes([n]) * 32)) for n in range(3)
    ]

    async def read() -> list[EventLine]:
        return [
            msgspec.json.decode(line, type=EventLine)
            async for line in streams.lines(feed, Snapshot(1, "default", {}))
        ]

    assert [line.kind for line in asyncio.run(read())] == ["begin", "end", "cut"]
