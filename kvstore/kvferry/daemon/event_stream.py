"""The stream of block events over HTTP: a snapshot, then what comes and goes, one JSON object a line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Final, Literal, NamedTuple

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvferry.core.block_events import BlockEvent, BlockFeed
from kvferry.core.errors import OverloadedError
from kvferry.core.keys import BlockKey

__all__ = ["EventLine", "EventStreams", "Snapshot"]

_MOST_LISTENERS: Final = 16
_MOST_WAITING: Final = 65536
_MOST_IN_LINE: Final = 512
_PAUSE_S: Final = 0.05
_BEAT_S: Final = 5.0


class EventLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the stream.

    Attributes:
        kind: ``begin`` of a snapshot, ``present`` blocks of it, its ``end``; ``stored`` and ``removed``
            blocks since; ``beat`` if nothing happens for a while; ``cut`` if the listener has fallen behind:
            it is the last line, and whoever reads it begins anew.
        seq: Number of the last event that is told by this line or before: that of the line before plus its
            own keys, from 0 in ``begin``; blocks of the snapshot are no events.
        epoch: In ``begin``: another one means that the daemon was started anew.
        tenant: In ``begin``.
        tiers: In ``begin``: those of which is told.
        tier: In which the blocks are, came or went.
        namespace: Of the keys, 64 hexadecimal digits.
        keys: 64 hexadecimal digits each.
    """

    kind: Literal["begin", "present", "end", "stored", "removed", "beat", "cut"]
    seq: int
    epoch: str = ""
    tenant: str = ""
    tiers: tuple[str, ...] = ()
    tier: str = ""
    namespace: str = ""
    keys: tuple[str, ...] = ()


class Snapshot(NamedTuple):
    """What was there when a listener came."""

    epoch: object
    tenant: str
    present: dict[str, dict[bytes, list[BlockKey]]]


class EventStreams:
    """The listeners of one daemon; for the event loop, :meth:`close` for any thread.

    Args:
        most_waiting: Events that may wait for one listener.
    """

    def __init__(self, most_waiting: int = _MOST_WAITING) -> None:
        self._most_waiting = most_waiting
        self._feeds: set[BlockFeed] = set()
        self._closed = False

    def open(self) -> BlockFeed:
        """A feed for a new listener; see :meth:`end`.

        Raises:
            OverloadedError: If there are as many as may be.
        """
        if len(self._feeds) >= _MOST_LISTENERS:
            raise OverloadedError(f"{len(self._feeds)} listen to events already, the most that may")
        feed = BlockFeed(self._most_waiting)
        self._feeds.add(feed)
        return feed

    def end(self, feed: BlockFeed) -> None:
        """Its listener is gone."""
        feed.end()
        self._feeds.discard(feed)

    def close(self) -> None:
        """All streams end."""
        self._closed = True

    def response(self, feed: BlockFeed, snapshot: Snapshot, may_go_on: Callable[[], bool]) -> Response:
        """The stream as an answer; it ends the feed."""
        return _Stream(self, feed, self.lines(feed, snapshot, may_go_on))

    async def lines(
        self, feed: BlockFeed, snapshot: Snapshot, may_go_on: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[bytes]:
        """The stream, in pieces of whole lines, as long as its listener may have it."""
        seq, quiet = 0, 0.0
        for line in _snapshot_lines(snapshot):
            yield _encoded(line)
        while not self._closed and may_go_on():
            over = feed.over  # before what waits is taken: it may be over only after that
            events = [] if over else feed.take(_MOST_IN_LINE)
            if over:
                yield _encoded(EventLine(kind="cut", seq=seq))
                return
            if events:
                yield b"".join(map(_encoded, _event_lines(events, seq)))
                seq, quiet = seq + len(events), 0.0
                continue
            await asyncio.sleep(_PAUSE_S)
            quiet += _PAUSE_S
            if quiet >= _BEAT_S:
                quiet = 0.0
                yield _encoded(EventLine(kind="beat", seq=seq))


class _Stream(Response):
    """An answer that ends its feed however it ends, also if it never begins."""

    def __init__(self, streams: EventStreams, feed: BlockFeed, lines: AsyncIterator[bytes]) -> None:
        super().__init__()
        self._streams, self._feed = streams, feed
        self._inner = StreamingResponse(
            lines,
            media_type="application/x-ndjson",
            headers={"cache-control": "no-store", "x-content-type-options": "nosniff"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._inner(scope, receive, send)
        finally:
            self._streams.end(self._feed)


def _encoded(line: EventLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _snapshot_lines(snapshot: Snapshot) -> Iterator[EventLine]:
    tiers = tuple(snapshot.present)
    yield EventLine(kind="begin", seq=0, epoch=str(snapshot.epoch), tenant=snapshot.tenant, tiers=tiers)
    for tier, spaces in snapshot.present.items():
        for namespace_id, keys in spaces.items():
            for start in range(0, len(keys), _MOST_IN_LINE):
                part = tuple(key.hex() for key in keys[start : start + _MOST_IN_LINE])
                yield EventLine(kind="present", seq=0, tier=tier, namespace=namespace_id.hex(), keys=part)
    yield EventLine(kind="end", seq=0)


def _event_lines(events: list[BlockEvent], seq: int) -> Iterator[EventLine]:
    for (stored, tier, namespace_id), group in groupby(events, itemgetter(0, 1, 2)):
        keys = tuple(event.key.hex() for event in group)
        seq += len(keys)
        kind: Literal["stored", "removed"] = "stored" if stored else "removed"
        yield EventLine(kind=kind, seq=seq, tier=tier, namespace=namespace_id.hex(), keys=keys)
