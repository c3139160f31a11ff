"""What a disk tier holds, in memory: entries by namespace and key, the room they take, who is busy.

One lock over all of it, held for microseconds and never during I/O. An entry takes about 300 bytes with its
key, the policy's links and its share of the dict.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from weakref import WeakValueDictionary

from kvferry.core.block_events import BlockFeed, BlockJournal
from kvferry.core.eviction import Entry, EvictionPolicy, tell_capacity
from kvferry.core.keys import BlockKey
from kvferry.store.disk.entries import DiskEntry, NamespaceIndex
from kvferry.store.disk.removals import Removals
from kvferry.store.encoded_block import Encoding
from kvferry.store.tier import UNKNOWN_PARENT

__all__ = ["DiskIndex"]


_Name = tuple[NamespaceIndex, BlockKey]


def _event(busy: dict[_Name, threading.Event | None], name: _Name) -> threading.Event:
    """Set when what is done to that key has ended."""
    event = busy[name]
    if event is None:
        event = busy[name] = threading.Event()
    return event


class DiskIndex:
    """Entries, room, and what may not be touched now. Thread safe.

    Args:
        capacity_nbytes: The cap. ``used_nbytes`` never exceeds it through what is done here.
        policy: Decides what is evicted.
        tier: Whose it is, in events.
    """

    def __init__(self, capacity_nbytes: int, policy: EvictionPolicy, tier: str = "disk") -> None:
        self.lock = threading.Lock()
        self.capacity_nbytes = capacity_nbytes
        self.used_nbytes = 0
        self.entry_count = 0
        self._policy = policy
        # each as long as somebody has it: a call, an entry, something that is still to be done
        self._namespaces: WeakValueDictionary[tuple[str, bytes], NamespaceIndex] = WeakValueDictionary()
        self._filled: dict[tuple[str, bytes], NamespaceIndex] = {}  # those that have entries
        self._busy: dict[DiskEntry, int] = {}
        self._going: dict[DiskEntry, bool] = {}  # discarded; whether they may be put back
        self._pins: dict[DiskEntry, float] = {}
        # keys that are being written or removed; with an event once somebody waits for the end of it
        self._writing: dict[_Name, threading.Event | None] = {}
        # keys held or not, whose file in some directory is being removed again: nobody writes them
        self._clearing: dict[_Name, threading.Event | None] = {}
        self._unwanted: set[_Name] = set()  # removed while they were evicted
        self._removals = Removals()
        self._journal = BlockJournal(tier)
        self._told_of = ""  # whose blocks it is about
        self._numbers: dict[int, int] = {}  # one int object for equal sizes and positions
        self._encodings: dict[Encoding, Encoding] = {}  # and one for equal encodings

    def resize(self, capacity_nbytes: int) -> None:
        """Another cap from now on; what is above it has to be evicted."""
        with self.lock:
            self.capacity_nbytes = capacity_nbytes
            tell_capacity(self._policy, capacity_nbytes)

    # -- namespaces ------------------------------------------------------------------------------------

    def namespace(self, tenant: str, namespace_id: bytes) -> NamespaceIndex:
        """The namespace, made if it is new; one without blocks that nobody keeps is forgotten."""
        name = (tenant, namespace_id)
        if (filled := self._filled.get(name)) is not None:  # without the lock, which may be held for long
            return filled
        with self.lock:
            found = self._namespaces.get(name)
            if found is None:
                found = self._namespaces[name] = NamespaceIndex(tenant, namespace_id)
            return found

    def namespaces(self) -> list[NamespaceIndex]:
        """All of them."""
        with self.lock:
            return list(self._namespaces.values())

    def listen(self, tenant: str, feed: BlockFeed) -> dict[bytes, list[BlockKey]]:
        """Tell ``feed`` of what comes and goes of one tenant, from the state that is returned on."""
        with self.lock:
            self._told_of = tenant
            self._journal.attach(feed)
            own = [home for home in self._filled.values() if home.tenant == tenant]
            return {home.namespace_id: list(home.entries) for home in own}

    def _note(self, stored: bool, entry: DiskEntry) -> None:
        if entry.index.tenant == self._told_of:
            self._journal.note(stored, entry.index.namespace_id, entry.key)

    # -- entries ---------------------------------------------------------------------------------------

    def contains(self, home: NamespaceIndex, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each key is held. Without the lock: each look-up is atomic."""
        entries = home.entries
        return [key in entries for key in keys]

    def snapshot(self, home: NamespaceIndex) -> list[DiskEntry]:
        """The entries of a namespace as they are now, with those whose eviction may still fail.

        Who removes all that is named here has removed these too: see :meth:`put_back`.
        """
        with self.lock:
            evicted = [entry for entry, may_stay in self._going.items() if may_stay and entry.index is home]
            return [*home.entries.values(), *evicted]

    def load(self, found: Iterable[tuple[NamespaceIndex, BlockKey, int]], root: int) -> list[DiskEntry]:
        """Enter all that was found in a directory: namespace, key, bytes; what was used last comes last.

        Their bytes are counted even when they exceed the capacity. The files of those that were removed
        meanwhile, or are held or being written in another directory, are of no use: they are resisting.

        Returns:
            The entries.
        """
        loaded: list[DiskEntry] = []
        with self.lock:
            removed = self._removals.find(root)
            for home, key, nbytes in found:
                held = home.entries.get(key)
                if held is not None and held.root == root:
                    continue  # written a moment ago
                self.used_nbytes += nbytes
                entry = DiskEntry(home, key, UNKNOWN_PARENT, self._shared(nbytes), root)
                useless = held is not None or (home, key) in self._writing
                if useless or (removed is not None and removed.has(home, key)):
                    self._removals.resisting.append(entry)
                else:
                    self._insert(entry)
                    loaded.append(entry)
        return loaded

    def begin_reads(self, home: NamespaceIndex, keys: Iterable[BlockKey]) -> list[DiskEntry | None]:
        """The entry of each key, kept from eviction until :meth:`end_reads`."""
        with self.lock:
            entries = [home.entries.get(key) for key in keys]
            for entry in entries:
                if entry is not None:
                    self._busy[entry] = self._busy.get(entry, 0) + 1
            return entries

    def end_reads(self, entries: Iterable[DiskEntry | None]) -> None:
        """The files are no longer being read."""
        with self.lock:
            for entry in entries:
                if entry is None:
                    continue
                left = self._busy.pop(entry) - 1
                if left:
                    self._busy[entry] = left
                elif self._holds(entry):
                    self._policy.released(entry)

    def learn(
        self, entry: DiskEntry, parent: BlockKey | None, position: int, encoding: Encoding | None
    ) -> None:
        """The header of ``entry`` was compared; it says this."""
        with self.lock:
            if not entry.verified and self._holds(entry):
                entry.verified = True
                entry.encoding = None if encoding is None else self._encodings.setdefault(encoding, encoding)
                entry.position = self._shared(position)
                entry.index.link(entry, parent)

    def accessed(self, entries: Iterable[DiskEntry]) -> None:
        """The entries were used; given from tail to head, so that the head counts as used last."""
        with self.lock:
            self._policy.accessed(entry for entry in entries if self._holds(entry))

    def discard(self, entry: DiskEntry) -> bool:
        """Forget ``entry`` while its file goes; whether it was held.

        If so, the caller removes the file and calls :meth:`gone` or :meth:`put_back`. Until then its bytes
        count and nobody writes that key.
        """
        with self.lock:
            if not self._holds(entry):
                return False
            self._leave(entry, evicted=False)
            return True

    def resist(self, entry: DiskEntry) -> None:
        """The file of a discarded entry could not be removed: it is tried again, its bytes count."""
        with self.lock:
            self._going.pop(entry, None)
            self._resist(entry)
            self._ended((entry.index, entry.key))

    def abandon(self, entry: DiskEntry) -> None:
        """As :meth:`resist`, for one of :meth:`take` that an exception may have ended halfway."""
        with self.lock:
            if self._holds(entry):
                self._leave(entry, evicted=False)
            if self._going.pop(entry, None) is not None:
                self._writing.setdefault((entry.index, entry.key))
                self._resist(entry)
                self._ended((entry.index, entry.key))

    def left_behind(self, entry: DiskEntry) -> None:
        """As :meth:`resist`, for a file that is nobody's: its bytes are counted from now on."""
        with self.lock:
            self.used_nbytes += entry.nbytes
            self._resist(entry)

    @property
    def resisting_nbytes(self) -> int:
        """Bytes of files that could not be removed and are tried again: nobody's blocks, but on the disk."""
        with self.lock:
            return sum(entry.nbytes for entry in self._removals.resisting)

    def resisting(self) -> list[DiskEntry]:
        """Take all that could not be removed; the caller tries each again: see :meth:`rediscard`."""
        with self.lock:
            found, self._removals.resisting = self._removals.resisting, []
            return found

    def rediscard(self, entry: DiskEntry) -> bool | None:
        """Whether the file of an entry from :meth:`resisting` is to be removed: then :meth:`cleared` follows.

        Returns:
            ``False`` if the key was stored again, which replaced the file and freed its bytes; ``None`` if
            it is just being written: it is resisting again.
        """
        with self.lock:
            name = (entry.index, entry.key)
            if name in self._writing:
                self._resist(entry)
                return None
            held = entry.index.entries.get(entry.key)
            if held is not None and held.root == entry.root:
                self.used_nbytes -= entry.nbytes
                return False
            self._clearing[name] = None
            return True

    def cleared(self, entry: DiskEntry, *, removed: bool) -> None:
        """The file of an entry was tried to be removed again."""
        with self.lock:
            if removed:
                self.used_nbytes -= entry.nbytes
            else:
                self._resist(entry)
            self._ended((entry.index, entry.key), self._clearing)

    def bury(self, entry: DiskEntry) -> None:
        """The directory of a discarded entry is down: the file goes when it is up."""
        with self.lock:
            self._removals.add(entry.root, entry.index, entry.key)

    def forget(self, home: NamespaceIndex) -> None:
        """All of a namespace was removed: what lies in directories that are down goes when they are up."""
        with self.lock:
            self._removals.add_namespace(home)

    def take(self, home: NamespaceIndex, keys: Iterable[BlockKey], taken: deque[DiskEntry]) -> list[bool]:
        """As :meth:`discard`, by key; whether each was held. Holds for directories that are down, too.

        Args:
            home: Whose they are.
            keys: Which.
            taken: Gets the entries, also where an exception ends this call: see :meth:`abandon`.
        """
        found: list[bool] = []
        with self.lock:
            for key in keys:
                self._removals.add_absent(home, key)
                entry = home.entries.get(key)
                if entry is not None:
                    taken.append(entry)
                    self._leave(entry, evicted=False)
                elif (home, key) in self._writing:
                    self._unwanted.add((home, key))
                found.append(entry is not None)
        return found

    def gone(self, entry: DiskEntry, freed: int) -> None:
        """The file of a discarded entry was dealt with, which freed so many bytes."""
        with self.lock:
            self._going.pop(entry, None)
            self.used_nbytes -= freed
            self._ended((entry.index, entry.key))

    def put_back(self, entry: DiskEntry) -> bool:
        """Undo :meth:`discard`: the file could not be removed; ``False`` if the block was removed meanwhile.

        Then it is resisting.
        """
        with self.lock:
            self._going.pop(entry, None)
            back = (entry.index, entry.key) not in self._unwanted and entry.root not in self._removals.absent
            if back:
                self._insert(entry)
            else:
                self._resist(entry)
            self._ended((entry.index, entry.key))
            return back

    def drop_root(self, root: int) -> int:
        """Forget all entries in a directory that is gone, and their bytes; returns how many."""
        with self.lock:
            self.used_nbytes -= self._removals.lose(root)
            gone = [e for home in self._filled.values() for e in home.entries.values() if e.root == root]
            for entry in gone:
                self._forget(entry)
                self.used_nbytes -= entry.nbytes
            return len(gone)

    # -- pins ------------------------------------------------------------------------------------------

    def pin(self, home: NamespaceIndex, keys: Sequence[BlockKey], until: float) -> list[bool]:
        """Keep entries from eviction until then; whether each is held."""
        with self.lock:
            found = [home.entries.get(key) for key in keys]
            for entry in found:
                if entry is not None:
                    self._pins[entry] = max(until, self._pins.get(entry, until))
            return [entry is not None for entry in found]

    def unpin(self, home: NamespaceIndex, keys: Sequence[BlockKey]) -> None:
        """End pins early."""
        with self.lock:
            for key in keys:
                entry = home.entries.get(key)
                if entry is not None and self._pins.pop(entry, None) is not None:
                    self._policy.released(entry)

    # -- writing ---------------------------------------------------------------------------------------

    def begin_writes(self, home: NamespaceIndex, keys: Iterable[BlockKey]) -> list[threading.Event | bool]:
        """For each key ``True``: the caller writes it and calls :meth:`end_writes`; ``False``: it is held.

        An event: it is being written or removed, maybe by this very call if it was given twice; ask again
        when it is set. Whoever waits for it must not have begun any other.
        """
        with self.lock:
            return [self._begin_write(home, key) for key in keys]

    def _begin_write(self, home: NamespaceIndex, key: BlockKey) -> threading.Event | bool:
        if key in home.entries:
            return False
        name = (home, key)
        for busy in (self._writing, self._clearing):
            if name in busy:
                return _event(busy, name)
        self._writing[name] = None
        return True

    def end_writes(self, home: NamespaceIndex, written: Iterable[tuple[BlockKey, DiskEntry | None]]) -> None:
        """Writes are over; what was stored is entered."""
        with self.lock:
            for key, stored in written:
                if stored is not None:
                    stored._nbytes = self._shared(stored.nbytes)
                    stored.position = self._shared(stored.position)
                    above = None if stored.parent is None else home.entries.get(stored.parent)
                    if above is not None:
                        stored.parent = above.key  # one bytes object a key
                    self._insert(stored)
                    self._removals.cancel(home, key)
                self._ended((home, key))

    def writes_running(self) -> list[threading.Event]:
        """One event for each write that is running now."""
        with self.lock:
            return [_event(self._writing, name) for name in self._writing]

    # -- room ------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int, spare: int = 0) -> list[DiskEntry] | None:
        """Take ``nbytes`` of the room, or choose what to evict for it.

        Args:
            nbytes: To be taken.
            spare: Bytes of a discarded entry that become a part of them.

        Returns:
            An empty list if they are taken now; else discarded entries (see :meth:`discard`) whose files
            the caller removes before it asks again; ``None`` if nothing may be evicted.
        """
        with self.lock:
            short = self.used_nbytes - spare + nbytes - self.capacity_nbytes
            if short <= 0:
                self.used_nbytes += nbytes - spare
                return []
            return self._evict(short) if nbytes <= self.capacity_nbytes else None

    def reserve_at_most(self, nbytes: int, least: int = 1) -> int:
        """Take up to ``nbytes`` of the room without evicting; returns how many. :meth:`release` ends it.

        If ``least`` are not there, none are taken.
        """
        with self.lock:
            taken = min(nbytes, self.capacity_nbytes - self.used_nbytes)
            taken = taken if taken >= least else 0
            self.used_nbytes += taken
            return taken

    def evict(self, nbytes: int, root: int | None = None) -> list[DiskEntry] | None:
        """Choose and discard entries of together ``nbytes``, in one directory if ``root`` is given."""
        with self.lock:
            return self._evict(nbytes, root)

    def release(self, nbytes: int) -> None:
        """Give back room, or take more of it for what has turned out larger (negative)."""
        with self.lock:
            self.used_nbytes -= nbytes

    def _evict(self, nbytes: int, root: int | None = None) -> list[DiskEntry] | None:
        now = time.monotonic()
        for expired in [entry for entry, until in self._pins.items() if until <= now]:
            del self._pins[expired]
            self._policy.released(expired)
        elsewhere: list[Entry] = []

        def pinned(entry: Entry) -> bool:
            if isinstance(entry, DiskEntry) and root not in (None, entry.root):
                elsewhere.append(entry)
                return True
            return entry in self._busy or entry in self._pins

        victims: list[DiskEntry] = []
        for victim in self._policy.victims(nbytes, pinned):
            if isinstance(victim, DiskEntry):  # always: no other is inserted
                self._leave(victim, evicted=True)
                victims.append(victim)
        for other in reversed(elsewhere):  # so that the oldest is the next to go again
            self._policy.released(other)
        return victims or None

    # -- with the lock held ----------------------------------------------------------------------------

    def _holds(self, entry: DiskEntry) -> bool:
        return entry.index.entries.get(entry.key) is entry

    def _insert(self, entry: DiskEntry) -> None:
        self._filled[entry.index.name] = entry.index  # first: what is in it is found, wherever this ends
        entry.index.add(entry)
        self.entry_count += 1
        self._policy.inserted(entry)
        if self._journal.feeds:
            self._note(True, entry)

    def _resist(self, entry: DiskEntry) -> None:
        if entry.root in self._removals.absent:  # it went down meanwhile
            self.used_nbytes -= entry.nbytes
            self._removals.add(entry.root, entry.index, entry.key)
        else:
            self._removals.resisting.append(entry)

    def _ended(self, name: _Name, busy: dict[_Name, threading.Event | None] | None = None) -> None:
        event = (self._writing if busy is None else busy).pop(name)
        if busy is None:
            self._unwanted.discard(name)
        if event is not None:
            event.set()

    def _leave(self, entry: DiskEntry, *, evicted: bool) -> None:
        self._going[entry] = evicted  # first: see abandon
        self._writing[entry.index, entry.key] = None
        self._forget(entry)

    def _forget(self, entry: DiskEntry) -> None:
        tail = entry.index.discard(entry)
        if not entry.index.entries:
            self._filled.pop(entry.index.name, None)
        self._pins.pop(entry, None)
        self.entry_count -= 1
        self._policy.removed(entry)
        if tail is not None:
            self._policy.released(tail)
        if self._journal.feeds:
            self._note(False, entry)

    def _shared(self, nbytes: int) -> int:
        if len(self._numbers) > 4096:
            self._numbers.clear()
        return self._numbers.setdefault(nbytes, nbytes)
