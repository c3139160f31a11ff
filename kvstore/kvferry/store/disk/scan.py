"""What lies in a directory: one walk over names and sizes, which opens no file but one with holes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvferry.core.errors import CorruptBlockError
from kvferry.core.keys import BlockKey
from kvferry.store.disk import names
from kvferry.store.disk.blocks import read_header
from kvferry.store.disk.files import Files, open_quietly
from kvferry.store.disk.folders import allocated_nbytes, disk_nbytes
from kvferry.store.disk.leftovers import Leftover
from kvferry.store.disk.lock import is_in_use

__all__ = ["FoundBlock", "Scan", "scan_directory"]

FoundBlock = tuple[int, BlockKey, int]
"""Time of last use in ns, key, bytes on disk."""

_OWN: Final = frozenset((names.LOCK_NAME, names.QUARANTINE_NAME))
_MAX_NAMED: Final = 100
_MAX_OBSTACLES: Final = 10_000
_Entry = os.DirEntry[str]


@dataclass
class Scan:
    """The result of a walk.

    Attributes:
        blocks: By tenant and namespace id.
        overhead_nbytes: What folders, the lock, and what is not ours take up; without the quarantine.
        quarantined: Name and bytes of what was put away as corrupt, the oldest first.
        foreign: Paths of what is not ours, relative to the directory; the first 100.
        foreign_count: How many there are.
        nested: Paths of other disk tiers' directories that are in use, relative to the directory.
        temporaries: How many were found, and removed if asked.
        obstacles: Paths of what is in the place of a block or a folder; a part of the foreign.
        left: Of the temporaries those that are still there.
        errors: What could not be read or removed.
    """

    blocks: dict[tuple[str, bytes], list[FoundBlock]] = field(default_factory=dict)
    overhead_nbytes: int = 0
    quarantined: list[tuple[str, int]] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    foreign_count: int = 0
    nested: list[str] = field(default_factory=list)
    temporaries: int = 0
    obstacles: set[str] = field(default_factory=set)
    left: list[Leftover] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def remarks(self) -> str:
        """What is worth a line of the log; empty if nothing."""
        found = []
        if self.temporaries:
            found.append(f"{self.temporaries} files that a crash left half written were removed")
        if self.foreign_count:
            named = ", ".join(self.foreign[:3])
            found.append(f"{self.foreign_count} entries are not the tier's and stay as they are: {named}")
        if self.errors:
            found.append(f"{len(self.errors)} could not be read: {', '.join(self.errors[:3])}")
        return "; ".join(found)


def scan_directory(files: Files, root: int, *, clean: bool) -> Scan:
    """Walk a directory; with ``clean`` temporaries and empty folders are removed.

    Only the owner of the lock may clean. Links are not followed. What comes or goes meanwhile may be missed.

    Raises:
        OSError: If the directory itself cannot be read.
    """
    walk = _Walk(files, clean)
    walk.found.overhead_nbytes = disk_nbytes(files.status(root))
    walk.top(root)
    return walk.found


class _Walk:
    def __init__(self, files: Files, clean: bool) -> None:
        self.files = files
        self.clean = clean
        self.found = Scan()
        self.sizes: dict[int, int] = {}  # one int object for all blocks of a size
        self.right_sizes: set[int] = set()  # of files with holes, as their headers say

    def top(self, fd: int) -> None:
        with os.scandir(fd) as entries:
            for entry in entries:
                tenant = names.tenant_of_folder(entry.name)
                if entry.name == names.QUARANTINE_NAME:
                    self.below(fd, entry, "", self.quarantine)
                elif tenant is not None and entry.is_dir(follow_symlinks=False):
                    self.below(fd, entry, "", partial(self.tenant, tenant=tenant))
                else:
                    self.top_file(fd, entry, in_place=tenant is not None)

    def top_file(self, fd: int, entry: _Entry, *, in_place: bool) -> None:
        if entry.name == names.PROBE_NAME and entry.is_file(follow_symlinks=False):
            self.temporary(fd, entry, "")
        else:
            self.other(fd, entry, "", ours=entry.name in _OWN, in_place=in_place)

    def tenant(self, fd: int, path: str, tenant: str) -> int:
        with os.scandir(fd) as entries:
            for entry in entries:
                namespace = names.namespace_of_folder(entry.name)
                if namespace is None or not entry.is_dir(follow_symlinks=False):
                    self.other(fd, entry, path, in_place=namespace is not None)
                    continue
                blocks: list[FoundBlock] = []
                self.below(fd, entry, path, partial(self.namespace, blocks=blocks))
                if blocks:
                    self.found.blocks[tenant, namespace] = blocks
        return 1

    def namespace(self, fd: int, path: str, blocks: list[FoundBlock]) -> int:
        with os.scandir(fd) as entries:
            for entry in entries:
                shard = names.shard_of_folder(entry.name)
                if shard is None or not entry.is_dir(follow_symlinks=False):
                    self.other(fd, entry, path, in_place=shard is not None)
                else:
                    self.below(fd, entry, path, partial(self.shard, shard=shard, blocks=blocks))
        return len(blocks)

    def shard(self, fd: int, path: str, shard: int, blocks: list[FoundBlock]) -> int:
        """The inner loop: some microseconds a block."""
        seen = 0
        with os.scandir(fd) as entries:
            for entry in entries:
                key = names.key_of_name(entry.name, shard)
                seen += 1
                if key is not None and entry.is_file(follow_symlinks=False):
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except OSError:  # just gone, or the medium fails: the first read will tell
                        continue
                    used_at = max(status.st_mtime_ns, status.st_atime_ns)
                    nbytes = self.block_nbytes(fd, entry.name, status)
                    blocks.append((used_at, key, self.sizes.setdefault(nbytes, nbytes)))
                elif names.is_temporary(entry.name) and entry.is_file(follow_symlinks=False):
                    seen -= self.temporary(fd, entry, path)
                else:
                    self.other(fd, entry, path, in_place=key is not None)
        return seen

    def block_nbytes(self, fd: int, name: str, status: os.stat_result) -> int:
        """What to count for a block's file: not a size that somebody has only stretched it to."""
        nbytes, taken = disk_nbytes(status), allocated_nbytes(status)
        if taken >= status.st_size or status.st_size in self.right_sizes:
            return nbytes
        try:
            file, size = open_quietly(self.files, name, fd)
            try:
                if read_header(self.files, file).file_nbytes == size:  # a file system that packs, say
                    self.right_sizes.add(size)
                    return nbytes
            finally:
                self.files.close(file)
        except (CorruptBlockError, OSError):  # quarantined when it is verified or read
            pass
        return max(taken, 4096)

    def temporary(self, fd: int, entry: _Entry, path: str) -> bool:
        """Left by a crash; removed, or counted if that fails."""
        self.found.temporaries += 1
        try:
            if self.clean:
                self.files.unlink(entry.name, fd)
                return True
        except OSError as error:
            self.found.errors.append(f"{path}/{entry.name}: {error.strerror}")
        nbytes = _size(entry)
        self.found.overhead_nbytes += nbytes
        self.found.left.append((path, entry.name, nbytes))
        return False

    def quarantine(self, fd: int, path: str) -> int:
        sizes: list[tuple[int, str, int]] = []
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):  # was in the way of a block
                    self.other(fd, entry, path)
                else:
                    sizes.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name, _size(entry)))
        sizes.sort()
        self.found.quarantined = [(name, nbytes) for _, name, nbytes in sizes]
        return 1

    def below(self, parent: int, entry: _Entry, path: str, visit: Callable[[int, str], int]) -> None:
        """Open a folder and visit it; an empty one (``visit`` returned 0) is removed when cleaning."""
        path = f"{path}/{entry.name}" if path else entry.name
        try:
            fd = self.files.open_folder(entry.name, parent)
            try:
                nbytes = disk_nbytes(self.files.status(fd))
                self.found.overhead_nbytes += nbytes
                if not visit(fd, path) and self.clean and self.files.remove_folder(entry.name, parent):
                    self.found.overhead_nbytes -= nbytes
            finally:
                self.files.close(fd)
        except OSError as error:
            self.found.errors.append(f"{path}: {error.strerror}")

    def other(
        self, parent: int, entry: _Entry, path: str, *, ours: bool = False, in_place: bool = False
    ) -> None:
        """Count what is no block, a folder with all that is in it, a link as itself."""
        is_folder = entry.is_dir(follow_symlinks=False)
        self.found.overhead_nbytes += 0 if is_folder else _size(entry)
        if not ours:
            where = f"{path}/{entry.name}" if path else entry.name
            self.found.foreign_count += 1
            if in_place and len(self.found.obstacles) < _MAX_OBSTACLES:
                self.found.obstacles.add(where)
            if len(self.found.foreign) < _MAX_NAMED:
                self.found.foreign.append(where)
        if is_folder:
            self.below(parent, entry, path, self.foreign_tree)
        elif entry.name == names.LOCK_NAME and path and is_in_use(parent):
            self.found.nested.append(path)

    def foreign_tree(self, fd: int, path: str) -> int:
        for below, folders, others, folder in os.fwalk(dir_fd=fd):
            if names.LOCK_NAME in others and is_in_use(folder):
                self.found.nested.append(os.path.normpath(f"{path}/{below}"))
            for name in (*folders, *others):
                try:
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                except OSError:
                    continue
                self.found.overhead_nbytes += allocated_nbytes(status)
        return 1


def _size(entry: _Entry) -> int:
    """Of what is no block: what it takes up, however far somebody has stretched it."""
    try:
        return allocated_nbytes(entry.stat(follow_symlinks=False))
    except OSError:
        return 0
