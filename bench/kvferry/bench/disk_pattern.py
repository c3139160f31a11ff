"""``disk_pattern``: the files, bytes and syncs of a disk tier, written and read with system calls alone."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from kvferry.bench.results import Sample
from kvferry.core.buffers import page_aligned
from kvferry.core.errors import KVFerryError

__all__ = ["DiskPattern", "FileShape", "drop_page_cache", "files_below", "filesystem_of"]

_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class FileShape:
    """How a tier uses files.

    Attributes:
        header_nbytes: Bytes before the data; whole pages.
        data_nbytes: Bytes of the block.
        sync: As :attr:`kvferry.store.disk.DiskOptions.sync`.
        direct_read: O_DIRECT for reads.
        direct_write: O_DIRECT for writes.
        read_threads: Files read at once.
        write_threads: Files written at once.
        batch: Files of one call.
    """

    header_nbytes: int
    data_nbytes: int
    sync: str
    direct_read: bool
    direct_write: bool
    read_threads: int
    write_threads: int
    batch: int


class DiskPattern:
    """One file a block: temporary name, header page and data in one call, sync, rename; read whole.

    Files lie in folders as those of the tier do, by the first two digits of their names.

    Args:
        directory: Where; it and its folders are made when first needed. Give that of the tier itself: what a
            file costs depends much on its folder, since file systems place both near each other.
        shape: See :class:`FileShape`.
        names: Of the files, by their number; names of its own, made from a hash, without it.
    """

    def __init__(self, directory: Path, shape: FileShape, names: Sequence[str] = ()) -> None:
        self.directory = directory
        self._names = names
        self._shape = shape
        self.directory.mkdir(parents=True, exist_ok=True)
        self._folders: dict[str, int] = {}
        self._lock = threading.Lock()
        self._header = page_aligned(shape.header_nbytes)
        self._pages = [page_aligned(shape.header_nbytes) for _ in range(shape.read_threads)]
        self._pool = ThreadPoolExecutor(max(shape.read_threads, shape.write_threads))
        self._unsynced: set[int] = set()

    def write(self, first: int, views: Sequence[memoryview]) -> Sample:
        """Write files ``first`` and following, one a view."""
        return self._timed(
            self._shape.write_threads,
            len(views),
            lambda _, index: self._write(first + index, views[index]),
            last=self._sync_folders,
        )

    def read(self, numbers: Sequence[int], views: Sequence[memoryview]) -> Sample:
        """Read the files ``numbers``, each into its view."""
        return self._timed(
            self._shape.read_threads,
            len(views),
            lambda thread, index: self._read(thread, numbers[index], views[index]),
        )

    def close(self) -> None:
        """End the threads; the files stay."""
        self._pool.shutdown()
        for fd in self._folders.values():
            os.close(fd)

    def _place(self, number: int) -> tuple[int, str]:
        """Folder and name of a file."""
        if self._names:
            name = self._names[number]
        else:
            name = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).hexdigest()
        shard = name[:2]
        folder = self._folders.get(shard)
        if folder is None:
            with self._lock:
                folder = self._folders.get(shard)
                if folder is None:
                    path = self.directory / shard
                    path.mkdir(exist_ok=True)
                    folder = self._folders[shard] = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        return folder, name

    def _timed(
        self,
        threads: int,
        files: int,
        one: Callable[[int, int], None],
        last: Callable[[], None] = lambda: None,
    ) -> Sample:
        batch = self._shape.batch
        latencies: list[float] = []
        cpu, start = time.process_time(), time.perf_counter()
        for at in range(0, files, batch):
            begin = time.perf_counter()
            self._batch(threads, range(at, min(at + batch, files)), one)
            latencies.append(time.perf_counter() - begin)
        last()
        seconds = time.perf_counter() - start
        cpu = time.process_time() - cpu
        return Sample(seconds, files * self._shape.data_nbytes, cpu, tuple(latencies))

    def _batch(self, threads: int, numbers: range, one: Callable[[int, int], None]) -> None:
        turns = count(numbers.start)

        def work(thread: int) -> None:
            while (index := next(turns)) < numbers.stop:
                one(thread, index)

        for done in [self._pool.submit(work, n) for n in range(min(threads, len(numbers)))]:
            done.result()

    def _write(self, number: int, view: memoryview) -> None:
        shape, (folder, name) = self._shape, self._place(number)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if shape.direct_write else 0)
        temporary = f".{name}.{number:x}.tmp"
        fd = os.open(temporary, flags, 0o600, dir_fd=folder)
        try:
            _require_whole(os.pwritev(fd, [self._header, view], 0), shape, name)
            if shape.sync != "none":
                os.fdatasync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        if shape.sync == "full":
            os.fsync(folder)
        elif shape.sync == "data":
            self._unsynced.add(folder)

    def _sync_folders(self) -> None:
        while self._unsynced:
            os.fsync(self._unsynced.pop())

    def _read(self, thread: int, number: int, view: memoryview) -> None:
        folder, name = self._place(number)
        flags = os.O_RDONLY | (os.O_DIRECT if self._shape.direct_read else 0)
        fd = os.open(name, flags, dir_fd=folder)
        try:
            _require_whole(os.preadv(fd, [self._pages[thread], view], 0), self._shape, name)
        finally:
            os.close(fd)


def _require_whole(done: int, shape: FileShape, name: str) -> None:
    wanted = shape.header_nbytes + shape.data_nbytes
    if done != wanted:
        raise KVFerryError(f"the baseline's file {name}: {done} of {wanted} bytes; is the disk full?")


def files_below(directory: Path) -> Iterator[str]:
    """Paths of all files below."""
    for folder, _, names in os.walk(directory):
        for name in names:
            yield f"{folder}/{name}"


def drop_page_cache(directory: Path) -> None:
    """Drop what the page cache holds of all files below; what is not yet on the device stays."""
    for path in files_below(directory):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def filesystem_of(path: Path) -> str:
    """Type of the file system that ``path`` lies on, as ``ext4``; empty if the system does not say."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        mount, _, rest = line.partition(" - ")
        if mount.split()[2] == wanted:
            return rest.split()[0]
    return ""
