"""Reading one block of a disk tier: what can go wrong, and what is made of it."""

from __future__ import annotations

import errno
from typing import Final

from kvferry.core.errors import CorruptBlockError
from kvferry.store.disk import names
from kvferry.store.disk.blocks import Stored, is_aligned
from kvferry.store.disk.files import DIRECT, NO_DIRECT, is_gone, reason_of
from kvferry.store.disk.folders import OpenFolder
from kvferry.store.disk.index import DiskEntry
from kvferry.store.disk.root import Root, RootDownError
from kvferry.store.disk.state import DiskState, Home
from kvferry.store.tier import UNKNOWN_PARENT, BlockRead, ReadOutcome, ReadResult

__all__ = ["read_block"]

# What is wrong with this one file, not with the tier: a bad sector, a link planted in its place, its rights.
_BAD_FILE: Final = frozenset(
    (errno.EIO, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EISDIR, errno.ENOTDIR)
)


def read_block(state: DiskState, home: Home, block: BlockRead) -> tuple[ReadResult, DiskEntry | None]:
    """Read one block; also its entry after a hit. Thread safe; raises nothing that the medium does."""
    entry = state.index.begin_read(home.held, block.key)
    if entry is None:
        return ReadResult(ReadOutcome.MISS), None
    root = state.roots[entry.root]
    try:
        stored = _read_file(state, home, block, root)
        _compare_parents(block, entry, stored)
        if not entry.verified:
            state.index.learn(entry, stored.parent)
    except CorruptBlockError as error:
        return _corrupt(state, entry, str(error)), None
    except OSError as error:
        return _failed(state, entry, root, error), None
    finally:
        state.index.end_read(entry)
    return ReadResult(ReadOutcome.HIT, "", stored.parent, stored.position), entry


def _read_file(state: DiskState, home: Home, block: BlockRead, root: Root) -> Stored:
    index, files = home.held, state.files
    name = names.block_name(block.key)
    direct = root.direct_read and is_aligned(block.into)
    folder: OpenFolder | None
    while True:
        folder = None
        try:
            folder = root.folder(index.tenant, index.namespace_id, block.key)
            fd, nbytes = files.open_read(name, folder.fd, DIRECT if direct else 0)
            try:
                return home.reader.read(fd, nbytes, block.key, block.into, direct=direct)
            finally:
                files.close(fd)
        except OSError as error:
            if direct and error.errno in NO_DIRECT:
                root.direct_read = direct = False
            elif not (is_gone(error) and folder is not None and root.is_stale(folder)):
                raise


def _compare_parents(block: BlockRead, entry: DiskEntry, stored: Stored) -> None:
    if UNKNOWN_PARENT != block.parent != stored.parent:
        raise CorruptBlockError("the parent in the header is not the one asked for")
    if entry.verified and entry.parent != stored.parent:
        raise CorruptBlockError("the parent in the header is not the one that it was stored with")


def _corrupt(state: DiskState, entry: DiskEntry, reason: str) -> ReadResult:
    state.quarantine(entry, reason)
    return ReadResult(ReadOutcome.CORRUPT, reason)


def _failed(state: DiskState, entry: DiskEntry, root: Root, error: OSError) -> ReadResult:
    reason = f"{root.path}: {reason_of(error)}"
    if isinstance(error, RootDownError) or (is_gone(error) and state.check_vanished(root)):
        return ReadResult(ReadOutcome.FAILED, reason)
    if is_gone(error):
        if state.index.discard(entry):
            state.index.gone(entry, entry.nbytes)
            state.count(("vanished",))
            if state.tidies(entry.index):
                root.tidy(entry.index.tenant, entry.index.namespace_id, entry.key)
        return ReadResult(ReadOutcome.MISS, "the file was removed by somebody else")
    if error.errno in _BAD_FILE:
        return _corrupt(state, entry, reason_of(error))
    state.problems.incident("read failed", reason)
    return ReadResult(ReadOutcome.FAILED, reason)
