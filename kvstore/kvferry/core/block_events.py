"""What was stored in memory and removed from it, told to listeners that may fall behind."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvferry.core.keys import BlockKey

__all__ = ["BlockEvent", "BlockFeed", "BlockJournal"]


class BlockEvent(NamedTuple):
    """One block came or went."""

    seq: int
    """Runs on without gaps while somebody listens."""
    stored: bool
    namespace_id: bytes
    key: BlockKey


class BlockFeed:
    """The events of one listener, bounded; filled under the store's lock, taken without.

    Args:
        limit: Events that may wait; one more cuts it off.

    Attributes:
        over: Nothing more comes: it fell behind, or it was ended.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: deque[BlockEvent] = deque()
        self.over = False

    def put(self, event: BlockEvent) -> None:
        """Called by the journal."""
        if len(self._events) < self._limit:
            self._events.append(event)
        else:
            self.over = True

    def take(self, most: int) -> list[BlockEvent]:
        """What waits, in order."""
        events = self._events
        return [events.popleft() for _ in range(min(most, len(events)))]

    def end(self) -> None:
        """Its listener is gone."""
        self.over = True


class BlockJournal:
    """Numbers the events of one store for its feeds. All methods are called under the store's lock.

    Attributes:
        seq: Number of the last event.
        feeds: Who listens; those that are over are dropped with the next event.
    """

    def __init__(self) -> None:
        self.seq = 0
        self.feeds: list[BlockFeed] = []

    def note(self, stored: bool, namespace_id: bytes, key: BlockKey) -> None:
        """A block came or went; called only where somebody listens."""
        self.seq += 1
        event = BlockEvent(self.seq, stored, namespace_id, key)
        for feed in self.feeds:
            feed.put(event)
        if any(feed.over for feed in self.feeds):
            self.feeds = [feed for feed in self.feeds if not feed.over]

    def attach(self, feed: BlockFeed) -> None:
        """Tell it of all events from now on."""
        self.feeds = [*(feed for feed in self.feeds if not feed.over), feed]
