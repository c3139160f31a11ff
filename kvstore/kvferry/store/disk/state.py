"""What the verbs of a disk tier share: directories, index, counters, and how files are put out of the way."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from kvferry.core.keys import BlockKey
from kvferry.store.disk import names
from kvferry.store.disk.blocks import BlockReader
from kvferry.store.disk.entries import DiskEntry, NamespaceIndex
from kvferry.store.disk.files import Files, is_gone, reason_of
from kvferry.store.disk.header import HeaderTemplate
from kvferry.store.disk.index import DiskIndex
from kvferry.store.disk.obstacles import IN_THE_WAY
from kvferry.store.disk.options import DiskOptions
from kvferry.store.disk.root import Root, RootDownError
from kvferry.store.disk.runs import file_runs
from kvferry.store.disk.templates import Templates
from kvferry.store.encoding import TierCodec
from kvferry.store.problems import Problems
from kvferry.store.tier import TierNamespace

__all__ = ["DiskState", "Home"]


def _nothing() -> None:
    """Nobody is there to be woken yet."""


_SMALL: Final = 4 * names.FANOUT
_MAX_OBSTRUCTED: Final = 64  # others are met again when they are written


class Home(NamedTuple):
    """A namespace that the tier was told of, with what is made from it for reads and writes."""

    namespace: TierNamespace
    held: NamespaceIndex
    template: HeaderTemplate
    reader: BlockReader


class DiskState:
    """Shared by the verbs. Thread safe.

    Args:
        options: Of the tier.
        files: System calls.
        index: What is held.
        roots: The directories.
        problems: Where what goes wrong is told.
        codec: Between blocks and files.

    Attributes:
        templates: Of headers.
        runs: Writes and reads several files at once; ``None``: that is done one system call at a time.
        is_shrinking: The capacity was changed: what is above it is still to be evicted.
        wake: Called when there is something to look after in the background.
        shrunk: Called when what was above a lowered capacity has gone.
    """

    def __init__(
        self,
        options: DiskOptions,
        files: Files,
        index: DiskIndex,
        roots: list[Root],
        problems: Problems,
        codec: TierCodec,
    ) -> None:
        self.codec = codec
        self.options = options
        self.files = files
        self.index = index
        self.roots = roots
        self.problems = problems
        self.templates = Templates()
        self.runs = file_runs() if type(files) is Files else None  # others want to see each call
        self.is_shrinking = False
        self.wake: Callable[[], None] = _nothing
        self.shrunk: Callable[[], None] = _nothing
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._obstructed: set[tuple[Root, NamespaceIndex, BlockKey]] = set()

    def count(self, names_: Iterable[str]) -> None:
        """Add one to each of the counters."""
        with self._lock:
            self._counters.update(names_)

    def counters(self) -> dict[str, float]:
        """A snapshot of the counters."""
        with self._lock:
            return dict(self._counters)

    def check_vanished(self, root: Root) -> bool:
        """Take a directory down that is no longer at its path, or is another store's; whether it is down."""
        lost = root.what_is_lost()
        if not lost:
            return False
        if root.is_up:
            self.problems.begin(root.path, "down", lost)
            root.stop()
            self.index.drop_root(root.number)
            self.wake()
        return True

    def is_lost(self, root: Root) -> bool:
        """As :meth:`check_vanished`, once in a while: cheap enough for every write."""
        return root.is_due() and self.check_vanished(root)

    def quarantine(self, entry: DiskEntry, reason: str) -> bool:
        """Forget a corrupt block and put its file out of the way; whether it was held until now."""
        if not self.index.discard(entry):
            return False
        root, freed = self.roots[entry.root], 0
        try:
            folder = root.folder(entry.index.tenant, entry.index.namespace_id, entry.key)
            freed = root.quarantine(folder, entry.index.namespace_id, entry.key, entry.nbytes)
            if freed and self.tidies(entry.index):
                root.tidy(entry.index.tenant, entry.index.namespace_id, entry.key)
        except OSError as error:
            freed = entry.nbytes if is_gone(error) or self._was_in_the_way(entry, error) else 0
        finally:
            if freed:
                self.index.gone(entry, freed)
            else:
                self.index.resist(entry)
                self.wake()
        self.count(("corrupt",))
        self.problems.incident("corrupt block", f"{entry.key.hex()[:16]}… in {root.path}: {reason}")
        return True

    def unlink(self, entry: DiskEntry) -> None:
        """Remove the file of a discarded entry; it is fine if there is none, or its directory is down.

        Raises:
            OSError: If it is still there.
        """
        root = self.roots[entry.root]
        try:
            folder = root.folder(entry.index.tenant, entry.index.namespace_id, entry.key)
            self.files.unlink(names.block_name(entry.key), folder.fd)
        except RootDownError:
            self.index.bury(entry)
            return
        except OSError as error:
            if not is_gone(error) and not self._was_in_the_way(entry, error):
                raise
        if self.tidies(entry.index):
            root.tidy(entry.index.tenant, entry.index.namespace_id, entry.key)

    def _was_in_the_way(self, entry: DiskEntry, error: OSError) -> bool:
        """Whether the file of an entry was not to be had since something was in its place, which is gone."""
        root = self.roots[entry.root]
        return error.errno in IN_THE_WAY and self.clear_way(root, entry.index, entry.key)

    def clear_way(self, root: Root, home: NamespaceIndex, key: BlockKey) -> bool:
        """Move away what is in the place of a block or of its folders; whether something was, and is not now.

        What cannot be moved makes the tier unhealthy, and is tried again.
        """
        try:
            moved = root.clear_way(home.tenant, home.namespace_id, key)
        except OSError as error:
            with self._lock:
                if len(self._obstructed) < _MAX_OBSTRUCTED:
                    self._obstructed.add((root, home, key))
            self.problems.begin(root.path, "in the way", reason_of(error))
            self.wake()
            return False
        if moved:
            self.count(("obstacles",))
            self.problems.incident("in the way of blocks", f"{root.path}: {moved}")
        return bool(moved)

    def retry_obstacles(self, root: Root) -> bool:
        """Try again to move what is in the way; whether something is left. One thread's own."""
        with self._lock:
            mine = [name for name in self._obstructed if name[0] is root]
            self._obstructed.difference_update(mine)
        for _, home, key in mine if root.is_up else ():
            self.clear_way(root, home, key)
        left = any(name[0] is root for name in list(self._obstructed))
        if not left:
            self.problems.end(root.path, "in the way")
        return left

    @staticmethod
    def tidies(held: NamespaceIndex) -> bool:
        """Whether folders of the namespace may fall empty: a large one has something in each."""
        return len(held.entries) < _SMALL

    def remove(self, entry: DiskEntry) -> None:
        """Remove the file of a discarded entry, later if it cannot be done now: nobody reads it any more."""
        try:
            self.unlink(entry)
        except OSError as error:
            reason = f"{names.block_name(entry.key)} in {self.roots[entry.root].path}: {reason_of(error)}"
            self.problems.incident("removal failed, tried again later", reason)
            self.index.resist(entry)
            self.wake()
        else:
            self.index.gone(entry, entry.nbytes)

    def shrink(self) -> int:
        """Evict what is above the capacity, which was lowered; bytes above it that may not go now."""
        index = self.index
        for root in self.roots:  # before blocks
            root.limit_quarantine(self.options.quarantine_bound_nbytes)
        while (above := index.used_nbytes - index.resisting_nbytes - index.capacity_nbytes) > 0:
            victims = index.evict(-(-above // 8))  # not all at once: folders that fall empty count, too
            if victims is None:
                break
            for entry in victims:
                self.remove(entry)
        return max(0, index.used_nbytes - index.capacity_nbytes)

    def go_on_shrinking(self) -> bool:
        """After a change of the capacity; whether something is left that was in use."""
        if self.is_shrinking:
            self.is_shrinking = False  # first: another change may come
            if self.shrink() > 0:
                self.is_shrinking = True
            else:
                self.shrunk()
        return self.is_shrinking

    def remove_first(self, going: deque[DiskEntry]) -> None:
        """Remove the file of the first of some discarded entries; one of several threads may get each."""
        try:
            entry = going.popleft()
        except IndexError:  # its call was given up
            return
        self.remove(entry)

    def abandon(self, going: deque[DiskEntry]) -> None:
        """An exception ended a removal: what no other thread has begun is done in the background."""
        try:
            while True:
                self.index.abandon(going.popleft())
        except IndexError:  # that was the last
            self.wake()

    def drop(self, entry: DiskEntry) -> None:
        """Forget a sound block that is of no use, so that it can be written anew, and remove its file."""
        if self.index.discard(entry):
            self.remove(entry)
            self.count(("useless",))

    def put_back(self, entry: DiskEntry) -> None:
        """Hold an evicted entry again whose file could not be removed, unless the block was removed."""
        if not self.index.put_back(entry):
            self.wake()

    def retry_removals(self) -> bool:
        """Try again what could not be removed; whether something is left. One thread's own."""
        left = False
        for entry in self.index.resisting():
            discarded = self.index.rediscard(entry)
            left |= discarded is None
            if not discarded:
                continue
            removed = False
            try:
                self.unlink(entry)
                removed = True
            except OSError:
                left = True
            finally:
                self.index.cleared(entry, removed=removed)
        return left
