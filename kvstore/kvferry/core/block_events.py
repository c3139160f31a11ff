"""What comes into a place that keeps blocks and goes from it, told to listeners that may fall behind."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvferry.core.keys import BlockKey

__all__ = ["BlockEvent", "BlockFeed", "BlockJournal"]


class BlockEvent(NamedTuple):
    """One block came or went."""

    stored: bool
    tier: str
    namespace_id: bytes
    key: BlockKey


class BlockFeed:
    """The events of one listener, bounded; filled by several journals, each under a lock of its own.

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
        """Called by a journal. Appending is atomic, so the events of each journal stay in their order."""
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
    """Tells feeds of the events of one tier. All methods are called under the lock of what it is about.

    Args:
        tier: Its name.

    Attributes:
        feeds: Who listens; those that are over are dropped with the next event.
    """

    def __init__(self, tier: str) -> None:
        self.feeds: list[BlockFeed] = []
        self._tier = tier

    def note(self, stored: bool, namespace_id: bytes, key: BlockKey) -> None:
        """A block came or went; called only where somebody listens."""
        event = BlockEvent(stored, self._tier, namespace_id, key)
        for feed in self.feeds:
            feed.put(event)
        if any(feed.over for feed in self.feeds):
            self.feeds = [feed for feed in self.feeds if not feed.over]

    def attach(self, feed: BlockFeed) -> None:
        """Tell it of all events from now on."""
        self.feeds = [*(feed for feed in self.feeds if not feed.over), feed]
