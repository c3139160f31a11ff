"""Reading blocks of a disk tier: what can go wrong, and what is made of it."""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvferry.core.buffers import address_of
from kvferry.core.clock import is_past
from kvferry.core.errors import CorruptBlockError
from kvferry.store.disk import names
from kvferry.store.disk.blocks import Scratch
from kvferry.store.disk.encoded import Stored, may_be_encoded
from kvferry.store.disk.entries import DiskEntry
from kvferry.store.disk.files import DIRECT, NO_DIRECT, is_gone, reason_of
from kvferry.store.disk.folders import OpenFolder
from kvferry.store.disk.header import ALIGNMENT
from kvferry.store.disk.root import Root, RootDownError
from kvferry.store.disk.state import DiskState, Home
from kvferry.store.encoding import Decoded
from kvferry.store.tier import UNKNOWN_PARENT, BlockRead, ReadOutcome, ReadResult

__all__ = ["LATE", "read_blocks"]

LATE: Final = "not begun by the deadline"

# What is wrong with this one file, not with the tier: a bad sector, a link planted in its place, its rights.
_BAD_FILE: Final = frozenset(
    (errno.EIO, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EISDIR, errno.ENOTDIR)
)


def read_blocks(
    state: DiskState, home: Home, blocks: Sequence[BlockRead], deadline: float
) -> list[tuple[ReadResult, DiskEntry | None]]:
    """Read a few blocks, one after another; also the entry of each after a hit.

    In steps over all of them, since what costs most of a small block is Python that was out of the
    processor's caches while it waited for the device. Thread safe; raises nothing that the medium does.
    """
    entries = state.index.begin_reads(home.held, [block.key for block in blocks])
    try:
        own = home.reader.scratch(len(blocks))
        fetch = _fetch if state.runs is None else _fetch_together
        plain = [None if may_be_encoded(entry, home.template) else entry for entry in entries]
        began = time.monotonic()
        checksums = fetch(state, home, blocks, plain, own, deadline)
        state.codec.carried(
            "read",
            home.template.file_nbytes * sum(checksum is not None for checksum in checksums),
            time.monotonic() - began,
        )
        results: list[tuple[ReadResult, DiskEntry | None]] = []
        for block, entry, page, checksum in zip(blocks, entries, own.pages, checksums, strict=False):
            if entry is None:
                results.append((ReadResult(ReadOutcome.MISS), None))
            else:
                results.append(_judge(state, home, block, entry, page, checksum, deadline))
    finally:
        state.index.end_reads(entries)
    late = len(blocks) - len(results)
    return results + [(ReadResult(ReadOutcome.FAILED, LATE), None)] * late


def _fetch(
    state: DiskState,
    home: Home,
    blocks: Sequence[BlockRead],
    entries: Sequence[DiskEntry | None],
    own: Scratch,
    deadline: float,
) -> list[int | None]:
    """Read all files that are as this release writes them; ``None`` for one that needs another look.

    Returns:
        Their checksums, fewer than there are blocks if the deadline came.
    """
    files, fetch = state.files, home.reader.fetch
    places = [None if e is None else _place(state, b, e) for b, e in zip(blocks, entries, strict=True)]
    checksums: list[int | None] = []
    for block, place, page, last in zip(blocks, places, own.pages, own.tails, strict=False):
        if is_past(deadline):
            break
        checksum = None
        if place is not None:
            root, folder, name, flags, _ = place
            try:
                fd = files.open_file(name, folder.fd, flags)
                try:
                    checksum = fetch(fd, block.into, page, last, direct=bool(flags))
                finally:
                    files.close(fd)
            except OSError as error:
                _failed_direct(root, flags, error.errno)
        checksums.append(checksum)
    return checksums


def _fetch_together(
    state: DiskState,
    home: Home,
    blocks: Sequence[BlockRead],
    entries: Sequence[DiskEntry | None],
    own: Scratch,
    deadline: float,
) -> list[int | None]:
    """As :func:`_fetch`, by one call into the native library."""
    assert state.runs is not None
    run = state.runs.begin(home.template, len(blocks))
    places = [None if e is None else _place(state, b, e) for b, e in zip(blocks, entries, strict=True)]
    for place, page, tail in zip(places, own.page_addresses, own.tail_addresses, strict=False):
        if place is not None:
            _, folder, name, flags, into = place
            run.add_read(folder.fd, flags, (page, into, tail), name)
    found = iter(state.runs.read(run, deadline))
    checksums: list[int | None] = []
    wanted = home.template.file_nbytes
    for block, place, last in zip(blocks, places, own.tails, strict=False):
        if place is None:
            checksums.append(None)
            continue
        result = next(found, None)
        if result is None:  # not begun
            break
        _, error, _, nbytes, _, _, _, checksum = result
        if error or nbytes != wanted:
            _failed_direct(place.root, place.flags, error)
            checksums.append(None)
            continue
        home.reader.join(block.into, last)
        checksums.append(checksum)
    return checksums


def _failed_direct(root: Root, flags: int, error: int | None) -> None:
    """A read failed; maybe since the file system has no O_DIRECT."""
    if flags and error in NO_DIRECT:
        root.direct_read = False


class _Place(NamedTuple):
    """Where a block lies, the flags to open it with, and the address that it goes to."""

    root: Root
    folder: OpenFolder
    name: str
    flags: int
    into: int


def _place(state: DiskState, block: BlockRead, entry: DiskEntry) -> _Place | None:
    """``None`` if it is not so simple."""
    root, into = state.roots[entry.root], address_of(block.into)
    try:
        folder = root.folder(entry.index.tenant, entry.index.namespace_id, block.key)
    except OSError:
        return None
    flags = DIRECT if root.direct_read and into % ALIGNMENT == 0 else 0
    return _Place(root, folder, names.block_name(block.key), flags, into)


def _judge(
    state: DiskState,
    home: Home,
    block: BlockRead,
    entry: DiskEntry,
    page: memoryview,
    checksum: int | None,
    deadline: float,
) -> tuple[ReadResult, DiskEntry | None]:
    root = state.roots[entry.root]
    try:
        stored = None if checksum is None else home.reader.check(page, block.key, checksum)
        if stored is None:
            found = _read_file(state, home, block, root, deadline)
            if isinstance(found, Decoded):
                return _useless(state, entry, found), None
            stored = found
        _compare_places(block, entry, stored)
        if not entry.verified:
            state.index.learn(entry, stored.parent, stored.position, stored.encoding)
    except CorruptBlockError as error:
        return _corrupt(state, entry, str(error)), None
    except OSError as error:
        return _failed(state, entry, root, error), None
    lossy = stored.encoding is not None and stored.encoding.lossy
    return ReadResult(ReadOutcome.HIT, "", stored.parent, stored.position, lossy=lossy), entry


def _useless(state: DiskState, entry: DiskEntry, found: Decoded) -> ReadResult:
    """A sound block that cannot be given: now, or by this tier."""
    if found.outcome is ReadOutcome.MISS:
        state.drop(entry)
    return ReadResult(found.outcome, found.reason)


def _read_file(
    state: DiskState, home: Home, block: BlockRead, root: Root, deadline: float
) -> Stored | Decoded:
    """Read a file that is not as expected, or was not where it was expected, step by step."""
    index, files = home.held, state.files
    name = names.block_name(block.key)
    folder: OpenFolder | None
    while True:
        folder = None
        try:
            folder = root.folder(index.tenant, index.namespace_id, block.key)
            fd, nbytes = files.open_read(name, folder.fd)
            try:
                return home.reader.read(fd, nbytes, block.key, block.into, deadline)
            finally:
                files.close(fd)
        except OSError as error:
            if not (is_gone(error) and folder is not None and root.is_stale(folder)):
                raise


def _compare_places(block: BlockRead, entry: DiskEntry, stored: Stored) -> None:
    if UNKNOWN_PARENT != block.parent != stored.parent:
        raise CorruptBlockError("the parent in the header is not the one asked for")
    if entry.verified and entry.parent != stored.parent:
        raise CorruptBlockError("the parent in the header is not the one that it was stored with")
    if entry.verified and entry.position != stored.position:
        raise CorruptBlockError(
            f"the position in the header is {stored.position}, it was stored with {entry.position}"
        )


def _corrupt(state: DiskState, entry: DiskEntry, reason: str) -> ReadResult:
    if state.quarantine(entry, reason):
        return ReadResult(ReadOutcome.CORRUPT, reason)
    # removed meanwhile, and what was read may be of the block written since; or another reader was first
    return ReadResult(ReadOutcome.MISS, "the block was removed while it was read")


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
