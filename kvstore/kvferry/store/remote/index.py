"""What this process knows to lie in a remote store, and the bound that it keeps itself to there."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvferry.core.block_events import BlockFeed, BlockJournal
from kvferry.core.keys import BlockKey

__all__ = ["NAME_NBYTES", "Held", "RemoteIndex"]

NAME_NBYTES: Final = 256
"""What the name of a value is counted with."""

_MOST_UNBOUNDED: Final = 100_000


class Held(NamedTuple):
    """One block.

    Attributes:
        name: Of its manifest.
        nbytes: What it is counted with.
        parts: Names of its other values; ``None``: not known, its manifest tells.
    """

    name: str
    nbytes: int
    parts: tuple[str, ...] | None = ()


class RemoteIndex:
    """Blocks by name, the least recently used first. Thread safe.

    ``used_nbytes`` counts what is held and what writes under way have reserved, and never exceeds the
    capacity. Without a capacity no more than 100,000 blocks are remembered; others are there all the same.

    Args:
        capacity_nbytes: The bound; 0: none.
        tier: Whose it is, in events.
    """

    def __init__(self, capacity_nbytes: int, tier: str = "remote") -> None:
        self.capacity_nbytes = capacity_nbytes
        self._lock = threading.Lock()
        self._held: OrderedDict[str, Held] = OrderedDict()
        self._used = 0
        self.evicted = 0
        self._journal = BlockJournal(tier)
        self._parse: Callable[[str], tuple[bytes, BlockKey] | None] = lambda _name: None

    def listen(
        self, feed: BlockFeed, parse: Callable[[str], tuple[bytes, BlockKey] | None]
    ) -> dict[bytes, list[BlockKey]]:
        """Tell ``feed`` of what comes and goes, from the state that is returned on.

        ``parse`` gives namespace and key of a name that the listener may hear of, the same for all of them.
        """
        present: dict[bytes, list[BlockKey]] = {}
        with self._lock:
            self._parse = parse
            self._journal.attach(feed)
            names = list(self._held)
        for found in filter(None, map(parse, names)):
            present.setdefault(found[0], []).append(found[1])
        return present

    def _note(self, stored: bool, name: str) -> None:
        if self._journal.feeds and (found := self._parse(name)) is not None:
            self._journal.note(stored, *found)

    def reserve(self, nbytes: int) -> list[Held] | None:
        """Take room; the caller removes the blocks returned, which had it. ``None``: there is none."""
        with self._lock:
            if 0 < self.capacity_nbytes < nbytes:
                return None
            victims: list[Held] = []
            while self.capacity_nbytes and self._used + nbytes > self.capacity_nbytes:
                if not self._held:
                    self._put_back(victims)
                    return None
                _, held = self._held.popitem(last=False)
                self._used -= held.nbytes
                victims.append(held)
                self._note(False, held.name)
            self._used += nbytes
            self.evicted += len(victims)
            return victims

    def _put_back(self, victims: Sequence[Held]) -> None:
        for held in reversed(victims):
            self._add(held)
            self._held.move_to_end(held.name, last=False)

    def put_back(self, victims: Sequence[Held]) -> None:
        """They could not be removed: they are there still, and count."""
        with self._lock:
            self.evicted -= len(victims)
            self._put_back(victims)

    def stored(self, blocks: Sequence[Held]) -> None:
        """Writes have ended: what each had reserved, just its size, is now this block."""
        with self._lock:
            for held in blocks:
                old = self._held.pop(held.name, None)
                self._held[held.name] = held
                if old is None:
                    self._note(True, held.name)
                else:
                    self._used -= old.nbytes
            while not self.capacity_nbytes and len(self._held) > _MOST_UNBOUNDED:
                _, old = self._held.popitem(last=False)
                self._used -= old.nbytes
                self._note(False, old.name)  # from here on nobody would tell of its end

    def release(self, reserved_nbytes: int) -> None:
        """A write has ended without a block."""
        with self._lock:
            self._used -= reserved_nbytes

    def found(self, held: Held) -> None:
        """A block was found there at the start: it counts as used longest ago."""
        with self._lock:
            if held.name not in self._held:
                self._add(held)
                self._held.move_to_end(held.name, last=False)

    def _add(self, held: Held) -> None:
        old = self._held.pop(held.name, None)
        self._used += held.nbytes - (0 if old is None else old.nbytes)
        self._held[held.name] = held
        if old is None:
            self._note(True, held.name)

    def used(self, names: Sequence[str]) -> None:
        """They were read."""
        with self._lock:
            for name in names:
                if name in self._held:
                    self._held.move_to_end(name)

    def forget(self, name: str) -> Held | None:
        """It is not there any more, or is about to go; what was known of it."""
        with self._lock:
            held = self._held.pop(name, None)
            if held is not None:
                self._used -= held.nbytes
                self._note(False, name)
            return held

    def nbytes_of(self, name: str) -> int:
        """What a block is counted with; 0 if it is not known."""
        held = self._held.get(name)
        return 0 if held is None else held.nbytes

    def all(self) -> list[Held]:
        """What is held now."""
        with self._lock:
            return list(self._held.values())

    def excess(self, most: int) -> list[Held]:
        """What has to go, as more was found at the start than may be there; ``most`` at a time."""
        with self._lock:
            victims: list[Held] = []
            while self.capacity_nbytes and self._used > self.capacity_nbytes and self._held:
                if len(victims) == most:
                    break
                _, held = self._held.popitem(last=False)
                self._used -= held.nbytes
                victims.append(held)
                self._note(False, held.name)
            self.evicted += len(victims)
            return victims

    def usage(self) -> tuple[int, int]:
        """Blocks and bytes."""
        with self._lock:
            return len(self._held), self._used
