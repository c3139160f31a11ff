"""The stream of block events: a snapshot, numbers without gaps, and what becomes of a slow listener."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from kvferry.core.block_events import BlockEvent, BlockFeed, BlockJournal
from kvferry.core.errors import RequestError
from kvferry.core.keys import BlockKey
from kvferry.daemon.event_stream import EventLine, EventStreams, Snapshot
from kvferry.testing.blocks import save_blocks, small_spec, wait_until

from .conftest import Running

SPEC = small_spec("events")


@contextmanager
def listening(running: Running) -> Iterator[Iterator[EventLine]]:
    host, _, port = running.http.url.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("GET", "/events", headers={"authorization": f"Bearer {running.token}"})
    answer = connection.getresponse()
    assert answer.status == 200
    try:
        yield (msgspec.json.decode(line, type=EventLine) for line in answer)
    finally:
        answer.close()
        connection.close()


def test_a_snapshot_and_what_came_and_went_since_are_what_is_there(running: Running) -> None:
    ns = running.client.namespace(SPEC)
    first, second = (ns.keys([token] * 4 * SPEC.block_tokens) for token in (1, 2))
    save_blocks(ns, first)
    with listening(running) as lines:
        begin = next(lines)
        assert (begin.kind, begin.tenant) == ("begin", "default")
        there = set[str]()
        for line in lines:
            if line.kind == "end":
                break
            there.update(line.keys)
        assert there == {key.hex() for key in first}
        save_blocks(ns, second)
        ns.remove(first)
        seq, wanted = begin.seq, {key.hex() for key in second}
        for line in lines:
            if line.kind == "stored":
                there.update(line.keys)
            elif line.kind == "removed":
                there.difference_update(line.keys)
            seq += len(line.keys)
            assert line.seq == seq
            if there == wanted:
                break
        assert seq == begin.seq + 8


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
    streams, journal = EventStreams(most_waiting=2), BlockJournal()
    feed, other = streams.open(), BlockFeed(10)
    journal.attach(feed)
    journal.attach(other)
    for number in range(3):
        journal.note(True, bytes(32), BlockKey(bytes([number]) * 32))
    assert journal.feeds == [other]
    assert other.take(10) == [BlockEvent(n + 1, True, bytes(32), BlockKey(bytes([n]) * 32)) for n in range(3)]

    async def read() -> list[EventLine]:
        return [
            msgspec.json.decode(line, type=EventLine)
            async for line in streams.lines(feed, Snapshot(1, "default", 0, {}))
        ]

    assert [line.kind for line in asyncio.run(read())] == ["begin", "end", "cut"]
