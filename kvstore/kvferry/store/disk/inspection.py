"""What a directory of the disk tier holds, whether it is sound, and how to mend it or take a block out.

Reading needs no lock and disturbs no store that uses the directory: what comes or goes meanwhile is passed
over. Mending takes the lock.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from kvferry.codecs.choice import RAW
from kvferry.core.buffers import page_aligned
from kvferry.core.errors import CorruptBlockError, RequestError, StoreError, TierError
from kvferry.core.keys import KEY_NBYTES, BlockKey
from kvferry.store.disk import names
from kvferry.store.disk.blocks import read_header
from kvferry.store.disk.export import write_block
from kvferry.store.disk.files import Files, is_gone, open_quietly, read_parts, reason_of
from kvferry.store.disk.header import BlockHeader, readable
from kvferry.store.disk.lock import has_lock_file, lock_owner
from kvferry.store.disk.options import MAX_CAPACITY_NBYTES, DiskOptions
from kvferry.store.disk.places import open_directory
from kvferry.store.disk.root import Root
from kvferry.store.disk.scan import FoundBlock, Scan, scan_directory
from kvferry.store.problems import Problems

__all__ = [
    "Finding",
    "Inspection",
    "KeySummary",
    "NamespaceSummary",
    "Verification",
    "export_block",
    "inspect",
    "list_keys",
    "repair",
    "verify",
]

Progress = Callable[[int, int], None]
_CHUNK_NBYTES: Final = 4 << 20
_SAMPLED: Final = 64
_HEX_DIGITS: Final = frozenset("0123456789abcdef")
_SILENT: Final = logging.getLogger(f"{__name__}.silent")
_SILENT.disabled = True  # what it would say is in the result


@dataclass(frozen=True, slots=True)
class NamespaceSummary:
    """The blocks of one namespace of one tenant.

    Attributes:
        tenant: Whose they are.
        namespace_id: Of which namespace.
        blocks: How many.
        nbytes: What they take up.
        oldest_s: Seconds since the least recently used was written or read; as well as the file system knows.
        newest_s: Seconds since the last one was.
        header: Of one of them; ``None`` if none could be read.
        codecs: How some of them, spread over all, are encoded: text of the codec, ``raw`` for as they are,
            with the number of those seen.
        lossy: How many of those seen have lost something.
    """

    tenant: str
    namespace_id: bytes
    blocks: int
    nbytes: int
    oldest_s: float
    newest_s: float
    header: BlockHeader | None
    codecs: Mapping[str, int] = field(default_factory=dict)
    lossy: int = 0

    @property
    def ratio(self) -> float:
        """Bytes of the blocks over what they take up; 0 if no header could be read."""
        return (
            self.blocks * self.header.spec.block_nbytes / self.nbytes if self.header and self.nbytes else 0.0
        )


class KeySummary(NamedTuple):
    """One block: whose, under which key, what it takes up, and seconds since it was written or read."""

    tenant: str
    namespace_id: bytes
    key: BlockKey
    nbytes: int
    used_s: float


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a directory holds.

    Attributes:
        directory: Its path.
        used_by: Process that has locked it, if any.
        namespaces: Largest first.
        quarantined: Name and bytes of what was found corrupt, the oldest first.
        temporaries: Files of writes in progress, or left by a crash.
        foreign: What is not the tier's (the first 100).
        foreign_count: How much of that there is.
        overhead_nbytes: What folders and the foreign take up.
        errors: What could not be read.
    """

    directory: str
    used_by: int | None
    namespaces: tuple[NamespaceSummary, ...]
    quarantined: tuple[tuple[str, int], ...]
    temporaries: int
    foreign: tuple[str, ...]
    foreign_count: int
    overhead_nbytes: int
    errors: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """What the directory takes up, as ``du`` counts."""
        parts = (sum(n.nbytes for n in self.namespaces), sum(n for _, n in self.quarantined))
        return sum(parts) + self.overhead_nbytes


@dataclass(frozen=True, slots=True)
class Finding:
    """A block that is not what it should be."""

    tenant: str
    namespace_id: bytes
    key: BlockKey
    reason: str


@dataclass(slots=True)
class Verification:
    """The result of reading every block.

    Attributes:
        blocks: How many were read.
        nbytes: How much data.
        corrupt: What is wrong.
        unreadable: What the medium would not give: maybe sound, maybe not.
        put_away: How many of the corrupt went into quarantine.
        codecs: How the sound ones are encoded, as in :class:`NamespaceSummary`.
        lossy: How many of them have lost something.
    """

    blocks: int = 0
    nbytes: int = 0
    corrupt: list[Finding] = field(default_factory=list)
    unreadable: list[Finding] = field(default_factory=list)
    put_away: int = 0
    codecs: Counter[str] = field(default_factory=Counter)
    lossy: int = 0


def _open(directory: str) -> int:
    try:
        return open_directory(Files(), directory)
    except OSError as error:
        raise RequestError(f"{directory}: {reason_of(error)}; give the directory of a disk tier") from error


def inspect(directory: str) -> Inspection:
    """Walk over names and sizes, and read one header a namespace.

    Raises:
        RequestError: If there is no such directory, or it is none of a disk tier.
    """
    files, root = Files(), _open(directory)
    try:
        scan = scan_directory(files, root, clean=False)
        if not _is_tier(root, scan):
            raise RequestError(f"{directory} is no directory of a disk tier: it has no block, no lock")
        now = time.time_ns()
        namespaces = [_summary(files, root, now, *name, blocks) for name, blocks in scan.blocks.items()]
        used_by = lock_owner(root)
    finally:
        files.close(root)
    return Inspection(
        directory=str(Path(directory).absolute()),
        used_by=used_by,
        namespaces=tuple(sorted(namespaces, key=lambda n: -n.nbytes)),
        quarantined=tuple(scan.quarantined),
        temporaries=scan.temporaries,
        foreign=tuple(scan.foreign),
        foreign_count=scan.foreign_count,
        overhead_nbytes=scan.overhead_nbytes,
        errors=tuple(scan.errors),
    )


def list_keys(directory: str) -> list[KeySummary]:
    """Every block by its name and size, what was used last first; no file is opened.

    Raises:
        RequestError: If there is no such directory.
    """
    files, root = Files(), _open(directory)
    try:
        scan = scan_directory(files, root, clean=False)
    finally:
        files.close(root)
    now = time.time_ns()
    found = [
        KeySummary(tenant, namespace, key, nbytes, max(0, now - used_at) / 1e9)
        for (tenant, namespace), blocks in scan.blocks.items()
        for used_at, key, nbytes in blocks
    ]
    return sorted(found, key=lambda block: block.used_s)


def _summary(
    files: Files, root: int, now: int, tenant: str, namespace: bytes, blocks: list[FoundBlock]
) -> NamespaceSummary:
    step = -(-len(blocks) // _SAMPLED)
    headers = list(_headers(files, root, tenant, namespace, [key for _, key, _ in blocks[::step]]))
    return NamespaceSummary(
        tenant=tenant,
        namespace_id=namespace,
        blocks=len(blocks),
        nbytes=sum(nbytes for _, _, nbytes in blocks),
        oldest_s=max(0, now - min(at for at, _, _ in blocks)) / 1e9,
        newest_s=max(0, now - max(at for at, _, _ in blocks)) / 1e9,
        header=headers[0] if headers else None,
        codecs=Counter(map(_codec_of, headers)),
        lossy=sum(header.lossy for header in headers),
    )


def _codec_of(header: BlockHeader) -> str:
    return RAW if header.encoding is None else header.encoding.codec


def _headers(
    files: Files, root: int, tenant: str, namespace: bytes, keys: list[BlockKey]
) -> Iterator[BlockHeader]:
    for key in keys:
        try:
            with _OpenBlock(files, root, tenant, namespace, key) as block:
                yield read_header(files, block.fd)
        except (OSError, CorruptBlockError):
            continue


class _OpenBlock:
    """The file of a block, opened without following links."""

    def __init__(self, files: Files, root: int, tenant: str, namespace: bytes, key: BlockKey) -> None:
        self._files = files
        folder = os.dup(root)
        try:
            for name in (names.tenant_folder(tenant), namespace.hex(), names.shard_name(key[0])):
                above, folder = folder, files.open_folder(name, folder)
                files.close(above)
            self.fd, self.nbytes = open_quietly(files, names.block_name(key), folder)
        finally:
            files.close(folder)

        self._again = partial(_OpenBlock, files, root, tenant, namespace, key)
        self._inode = files.status(self.fd).st_ino

    def is_there(self) -> bool:
        """Whether the file still has its name."""
        try:
            with self._again() as now:
                return now._inode == self._inode
        except OSError:
            return False

    def __enter__(self) -> _OpenBlock:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close(self.fd)


def _each(scan: Scan) -> Iterator[tuple[str, bytes, BlockKey]]:
    for (tenant, namespace), blocks in scan.blocks.items():
        for _, key, _ in blocks:
            yield tenant, namespace, key


def verify(directory: str, progress: Progress | None = None) -> Verification:
    """Read every block and compare identity, sizes and checksum.

    Args:
        directory: The directory.
        progress: Told of the blocks done and of how many there are.

    Raises:
        RequestError: If there is no such directory.
    """
    files, root = Files(), _open(directory)
    try:
        scan = scan_directory(files, root, clean=False)
        return _verify(files, root, scan, progress)
    finally:
        files.close(root)


def _verify(files: Files, root: int, scan: Scan, progress: Progress | None) -> Verification:
    found, buffer = Verification(), page_aligned(_CHUNK_NBYTES)
    total = sum(len(blocks) for blocks in scan.blocks.values())
    for done, (tenant, namespace, key) in enumerate(_each(scan), 1):
        try:
            with _OpenBlock(files, root, tenant, namespace, key) as block:
                header = _check_current(files, block, tenant, namespace, key, buffer)
            if header is not None:
                found.nbytes += header.data_nbytes
                found.codecs[_codec_of(header)] += 1
                found.lossy += header.lossy
        except CorruptBlockError as error:
            found.corrupt.append(Finding(tenant, namespace, key, str(error)))
        except OSError as error:
            if not is_gone(error):  # evicted meanwhile
                found.unreadable.append(Finding(tenant, namespace, key, reason_of(error)))
        found.blocks += 1
        if progress is not None and (done % 64 == 0 or done == total):
            progress(done, total)
    return found


def _check_current(
    files: Files, block: _OpenBlock, tenant: str, namespace: bytes, key: BlockKey, buffer: memoryview
) -> BlockHeader | None:
    """As :func:`_check`; ``None`` if a store has just evicted the block and written over its file."""
    try:
        return _check(files, block, tenant, namespace, key, buffer)
    except CorruptBlockError:
        if block.is_there():
            raise
        return None


def _check(
    files: Files, block: _OpenBlock, tenant: str, namespace: bytes, key: BlockKey, buffer: memoryview
) -> BlockHeader:
    """Compare one block; returns its header."""
    header = read_header(files, block.fd)
    pairs = (
        ("key", header.key, key),
        ("namespace", header.namespace_id, namespace),
        ("tenant", header.tenant, readable(tenant)),
        ("size of the file", header.file_nbytes, block.nbytes),
    )
    for what, stored, wanted in pairs:
        if stored != wanted:
            raise CorruptBlockError(f"the {what} in the header is not that of the file")
    checksum, nbytes, at = xxhash.xxh3_64(), header.data_nbytes, 0
    while at < nbytes:
        part = buffer[: min(len(buffer), nbytes - at)]
        if read_parts(files, block.fd, [part], header.header_nbytes + at) != len(part):
            raise CorruptBlockError("the file ends in its data")
        checksum.update(part)
        at += len(part)
    if checksum.intdigest() != header.checksum:
        raise CorruptBlockError("the data does not have the checksum in the header")
    return header


def _is_tier(root: int, scan: Scan) -> bool:
    """Whether a disk tier has used a directory; the lock's file is empty where the device was full."""
    return has_lock_file(root) or bool(scan.blocks or scan.quarantined)


def repair(directory: str, progress: Progress | None = None) -> Verification:
    """Verify, put what is corrupt into quarantine, remove temporaries and empty folders.

    Raises:
        RequestError: If there is no such directory, or it is none of a disk tier: then nothing is touched.
        TierError: If a store uses it, or nothing can be written there.
    """
    files = Files()
    fd = _open(directory)
    try:
        if not _is_tier(fd, scan_directory(files, fd, clean=False)):
            raise RequestError(
                f"{directory} is no directory of a disk tier: it has no block, no lock; nothing was changed"
            )
    finally:
        files.close(fd)
    options = DiskOptions((directory,), capacity_nbytes=MAX_CAPACITY_NBYTES)
    root = Root(0, directory, files, Problems("inspect", _SILENT), lambda _: None, options)
    try:
        scan = root.start(make=False)
    except OSError as error:
        raise TierError(f"{directory}: {reason_of(error)}") from error
    try:
        if not root.is_locked:
            raise TierError(f"{directory} cannot be written to; repair it where it can")
        fd = _open(directory)
        try:
            found = _verify(files, fd, scan, progress)
        finally:
            files.close(fd)
        sizes = {(*name, key): nbytes for name, blocks in scan.blocks.items() for _, key, nbytes in blocks}
        for bad in found.corrupt:
            folder = root.folder(bad.tenant, bad.namespace_id, bad.key)
            nbytes = sizes[bad.tenant, bad.namespace_id, bad.key]
            found.put_away += root.quarantine(folder, bad.namespace_id, bad.key, nbytes) > 0
            root.tidy(bad.tenant, bad.namespace_id, bad.key)
        return found
    finally:
        root.stop()


def _not_one(places: list[tuple[str, bytes, BlockKey]], key_hex: str, directory: str) -> str:
    if not places:
        return f"{key_hex[:16]}… is not in {directory}"
    if len({key for _, _, key in places}) > 1:
        return f"{key_hex[:16]}… is the start of {len(places)} keys in {directory}: give more digits"
    where = ", ".join(f"tenant {t} namespace {n.hex()[:16]}…" for t, n, _ in places)
    return f"{key_hex[:16]}… is in {len(places)} places: {where}; choose one with --tenant"


def export_block(directory: str, key_hex: str, target: str, *, tenant: str | None = None) -> BlockHeader:
    """Copy one block, after it was verified, to the new file ``target``: decoded, if it is encoded.

    Args:
        directory: The directory.
        key_hex: The key, or as much of its start as no other has.
        target: The new file.
        tenant: Whose block, if several have one.

    Raises:
        RequestError: If the key is no key, not there, or in several places; the message tells which.
        CorruptBlockError: If it is not sound; nothing is written.
        StoreError: If ``target`` cannot be written, or the block cannot be read.
    """
    start = key_hex.lower()
    if not 0 < len(start) <= 2 * KEY_NBYTES or not set(start) <= _HEX_DIGITS:
        raise RequestError(
            f"{key_hex!r} is no key: give its {2 * KEY_NBYTES} hex digits, or the first of them; "
            "--keys lists all"
        )
    files, root = Files(), _open(directory)
    try:
        scan = scan_directory(files, root, clean=False)
        places = [p for p in _each(scan) if p[2].hex().startswith(start) and tenant in (None, p[0])]
        if len(places) != 1:
            raise RequestError(_not_one(places, key_hex, directory))
        with _OpenBlock(files, root, *places[0]) as block:
            header = _check(files, block, *places[0], page_aligned(_CHUNK_NBYTES))
            write_block(files, block.fd, header, target)
            return header
    except CorruptBlockError as error:
        raise CorruptBlockError(f"{key_hex[:16]}… in {directory}: {error}") from error
    except OSError as error:
        raise StoreError(f"{error.filename or directory}: {reason_of(error)}") from error
    finally:
        files.close(root)
