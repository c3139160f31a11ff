"""One directory of a disk tier: its descriptors, its lock, its quarantine, and whether it works.

A directory that fails is *down*: what asks for it fails at once, and the tier tries to open it again from
time to time. It is never made anew where it has vanished: an empty mount point must not be filled in the
place of the disk that was mounted there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from kvferry.core.errors import TierError
from kvferry.core.keys import BlockKey
from kvferry.store.disk import names
from kvferry.store.disk.files import Files, is_gone, reason_of
from kvferry.store.disk.folders import Folders, OpenFolder, disk_nbytes
from kvferry.store.disk.options import DiskOptions
from kvferry.store.disk.probe import probe_direct
from kvferry.store.disk.problems import Problems
from kvferry.store.disk.scan import Scan, scan_directory

__all__ = ["Root", "RootDownError", "take_lock"]

_FULL_PAUSES: Final = 10
_READ_ONLY: Final = frozenset((errno.EROFS, errno.EACCES, errno.EPERM))


class RootDownError(OSError):
    """The directory cannot be used now; a tier's own, never leaves it."""


def take_lock(root: int, path: str) -> int | None:
    """Lock a directory against other stores; the descriptor holds the lock until it is closed.

    Returns:
        ``None`` where nothing can be written: then nobody can do harm either.

    Raises:
        TierError: If another process holds it; the message has its pid.
    """
    try:
        # read-only: a descriptor for writing would keep the file system from being remounted read-only
        fd = os.open(names.LOCK_NAME, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=root)
    except OSError as error:
        if error.errno in _READ_ONLY:
            return None
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        if error.errno != errno.EWOULDBLOCK:
            raise
        raise TierError(
            f"{path} is used by another process (pid {owner}); give each its own directory"
        ) from error
    with contextlib.suppress(OSError):  # a full disk: the lock holds without the pid
        _write_pid(root)
    return fd


def _write_pid(root: int) -> None:
    fd = os.open(names.LOCK_NAME, os.O_WRONLY | os.O_NOFOLLOW, dir_fd=root)
    try:
        os.pwrite(fd, f"{os.getpid():<15}\n".encode(), 0)
    finally:
        os.close(fd)


class Root:
    """One directory. Thread safe but for :meth:`start`, which one thread calls while it is down.

    Args:
        number: Its place in the list of directories.
        path: As configured.
        files: System calls.
        problems: Where what goes wrong is told.
        charge: Told of bytes taken up beside the blocks (negative: given back).
        options: Of the tier.

    Attributes:
        direct_read: Whether reads go past the page cache.
        direct_write: Whether writes do.
        direct_text: Why, for people.
        quarantined_nbytes: What the quarantine takes up.
    """

    def __init__(
        self,
        number: int,
        path: str,
        files: Files,
        problems: Problems,
        charge: Callable[[int], None],
        options: DiskOptions,
    ) -> None:
        self.number = number
        self.path = str(Path(path).absolute())
        self.direct_read = False
        self.direct_write = False
        self.direct_text = ""
        self.quarantined_nbytes = 0
        self._files = files
        self._problems = problems
        self._tell = charge
        self._max_quarantine = min(options.quarantine_nbytes, options.capacity_nbytes // 8)
        self._durable = options.sync != "none"
        self._retry_s = options.retry_s
        self._no_writes_until = 0.0
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._lock_fd: int | None = None
        self._folders: Folders | None = None
        self._device: int | None = None
        self._overhead = 0
        self._quarantined: deque[tuple[str, int]] = deque()
        self._full_until = 0.0
        self._free_again_nbytes: int | None = None
        self._claimed = 0
        self._tight_until = 0.0
        self._quota_until = 0.0
        self._serial = time.time_ns()

    # -- life ------------------------------------------------------------------------------------------

    def start(self, *, make: bool) -> Scan:
        """Open, lock and scan the directory; afterwards it is up and its overhead is charged.

        Args:
            make: Make it if it is not there: at the start of the tier only.

        Raises:
            OSError: If it cannot be used; it stays down.
            TierError: If another process uses it.
        """
        if make:
            Path(self.path).mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = self._files.open_root(self.path)
        lock_fd = None
        try:
            device = self._files.status(fd).st_dev
            self._require_same_device(fd, device)
            lock_fd = take_lock(fd, self.path)
            scan = scan_directory(self._files, fd, clean=lock_fd is not None)
        except BaseException:
            self._files.close(fd)
            if lock_fd is not None:
                os.close(lock_fd)
            raise
        with self._lock:
            self._fd, self._lock_fd, self._device = fd, lock_fd, device
            self._folders = Folders(self._files, fd, self.charge, durable=self._durable)
            self._quarantined = deque(scan.quarantined)
            self.quarantined_nbytes = sum(nbytes for _, nbytes in scan.quarantined)
        self.charge(scan.overhead_nbytes + self.quarantined_nbytes)
        self._problems.end(self.path, "down")
        return scan

    def _require_same_device(self, fd: int, device: int) -> None:
        if self._device in (None, device):
            return
        try:
            self._files.close(self._files.open_read(names.LOCK_NAME, fd)[0])
        except OSError as error:
            raise RootDownError(
                errno.ENODEV, "another file system is mounted there, and it was never used by a disk tier"
            ) from error

    def stop(self) -> None:
        """Close everything and give the lock back."""
        with self._lock:
            fd, lock_fd, folders = self._fd, self._lock_fd, self._folders
            self._fd = self._lock_fd = self._folders = None
            overhead, self._overhead = self._overhead, 0
            self.quarantined_nbytes = 0
            self._quarantined.clear()
        if folders is not None:
            folders.forget()
        for each in (fd, lock_fd):
            if each is not None:
                os.close(each)
        self._tell(-overhead)

    @property
    def is_up(self) -> bool:
        """Whether it is open."""
        return self._fd is not None

    @property
    def is_locked(self) -> bool:
        """Whether it is up and locked: else nothing can be written there."""
        return self._lock_fd is not None

    def has_vanished(self) -> bool:
        """Whether what is at the path now is not what was opened."""
        with self._lock:
            if self._fd is None:
                return True
            ours = self._files.status(self._fd)
        try:
            found = Path(self.path).stat()
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != (ours.st_dev, ours.st_ino)

    def free_nbytes(self) -> int:
        """Bytes that may still be written to its file system."""
        with self._lock:
            return self._files.free_nbytes(self._require_up())

    def probe(self) -> str:
        """Measure whether O_DIRECT pays and use it where it does; returns what was found, for people."""
        with self._lock:
            fd = self._require_up()
        found = probe_direct(self._files, fd)
        self.direct_read, self.direct_write = found.read, found.write
        return found.text

    def _require_up(self) -> int:
        if self._fd is None:
            raise RootDownError(errno.ENODEV, "the directory is down")
        return self._fd

    # -- a full device ---------------------------------------------------------------------------------

    def mark_full(self, error: OSError, nbytes: int, *, looked: bool) -> None:
        """The device took no more when ``nbytes`` were to be written, although it was ``looked`` for room.

        For a while :meth:`free_nbytes` is looked at before each write, and blocks go as long as it says that
        there is no room. A quota does not show there: then one goes for each that comes.
        """
        self._stay_tight()
        if error.errno == errno.EDQUOT:
            self._quota_until = self._tight_until
        if looked:  # somebody else fills it
            self._full_until = self._tight_until
        self.begin_full(nbytes, error)

    def begin_full(self, nbytes: int, error: OSError | None = None) -> None:
        """Tell that there is no room for ``nbytes``, by an ``error`` or since nothing may be evicted.

        It is over with the next write that succeeds, or when so many more are free than now.
        """
        text = "the device is full"
        with contextlib.suppress(OSError):
            free = self.free_nbytes()
            self._free_again_nbytes = free + nbytes
            if error is not None and free >= nbytes:
                text = f"a write failed as on a full device, which has {free} bytes free: {reason_of(error)}"
        self._problems.begin(self.path, "full", text)

    def claim_room(self, nbytes: int, keep: int = 0) -> int:
        """Take so many of the free bytes, for as long as a write runs, and leave ``keep`` free.

        Returns:
            How many are missing: then none are taken. Else 0, and :meth:`release_room` gives them back.
        """
        with self._lock:
            short = keep + self._claimed + nbytes - self._files.free_nbytes(self._require_up())
            if short <= 0:
                self._claimed += nbytes
                return 0
        self._stay_tight()
        return short

    def release_room(self, nbytes: int) -> None:
        """A write is over that had claimed so many bytes."""
        with self._lock:
            self._claimed -= nbytes

    def _stay_tight(self) -> None:
        self._tight_until = time.monotonic() + _FULL_PAUSES * self._retry_s

    def took_write(self) -> None:
        """A write went well: whatever was in its way is over."""
        self._full_until = 0.0
        for kind in ("full", "writes fail"):
            self._problems.end(self.path, kind)

    def is_still_full(self) -> bool:
        """Look whether a full device has room again; ``False`` also if it was not full.

        What ran out may be inodes or a quota, of which free bytes tell nothing: hence only more than there
        were count.
        """
        wanted = self._free_again_nbytes
        if wanted is None:
            return False
        if not self._problems.has(self.path, "full"):  # a write has found out
            self._free_again_nbytes = None
            return False
        try:
            if self.free_nbytes() < wanted:
                return True
        except OSError:
            return True
        self._free_again_nbytes = None
        self._full_until = 0.0
        self._problems.end(self.path, "full")
        return False

    @property
    def is_tight(self) -> bool:
        """Whether there was too little room a short while ago."""
        return time.monotonic() < self._tight_until

    @property
    def has_quota(self) -> bool:
        """Whether it was a quota that ended a write a short while ago."""
        return time.monotonic() < self._quota_until

    def is_full_for(self, nbytes: int) -> bool:
        """Whether making room did not help a short while ago, and there is still none for ``nbytes``."""
        if time.monotonic() >= self._full_until:
            return False
        try:
            return self.has_quota or self.free_nbytes() < nbytes
        except OSError:  # what is wrong with it is found out by those who use it
            return True

    def suspend_writes(self) -> None:
        """A write failed: other directories are asked for a moment."""
        self._no_writes_until = time.monotonic() + self._retry_s

    @property
    def takes_writes(self) -> bool:
        """Whether it is up and no write has failed a moment ago."""
        return self._fd is not None and time.monotonic() >= self._no_writes_until

    # -- folders and files -----------------------------------------------------------------------------

    def folder(
        self, tenant: str, namespace_id: bytes, key: BlockKey, *, make: Callable[[int], None] | None = None
    ) -> OpenFolder:
        """The folder of a key; ``make``: make it if need be, its bytes are spent by this.

        Raises:
            OSError: :class:`RootDownError` if the directory is down.
        """
        folders = self._folders
        if folders is None:
            raise RootDownError(errno.ENODEV, "the directory is down")
        spend = None if make is None else partial(self.charge, spend=make)
        return folders.open(tenant, namespace_id, key[0], make=spend)

    def tidy(self, tenant: str, namespace_id: bytes, key: BlockKey) -> None:
        """Remove the folder of a key if nothing is left in it."""
        folders = self._folders
        if folders is not None:
            folders.remove_if_empty(tenant, namespace_id, key[0])

    def grown(self, folder: OpenFolder, spend: Callable[[int], None]) -> None:
        """A file was made in ``folder``, by which it may have grown."""
        grown = folder.growth()
        if grown > 0:
            self.charge(grown, spend=spend)

    def is_stale(self, folder: OpenFolder) -> bool:
        """Whether ``folder`` was removed by somebody; a second try opens it anew."""
        folders = self._folders
        return folders is not None and folders.is_removed(folder)

    def temporary_name(self, key: BlockKey) -> str:
        """A name for a file that is being written; never the same twice."""
        with self._lock:
            self._serial += 1
            return names.temporary_name(key, self._serial)

    def quarantine(self, folder: OpenFolder, namespace_id: bytes, key: BlockKey, nbytes: int) -> int:
        """Put a corrupt file out of the way: into the quarantine, or away if it cannot hold it.

        Args:
            folder: Where it lies.
            namespace_id: Of which namespace.
            key: Its key.
            nbytes: What is counted for it.

        Returns:
            The bytes that the caller need not count any more; 0 if the file could not be moved or removed.
        """
        name = names.block_name(key)
        with self._lock:
            self._serial += 1
            target = f"{key.hex()}.{namespace_id.hex()[:16]}.{self._serial:x}.bad"
        try:
            now = disk_nbytes(self._files.status_of(name, folder.fd))  # it may have been tampered with
            if now <= self._max_quarantine:
                self._move(folder, name, target)
        except OSError as error:
            if is_gone(error):
                return nbytes
            now = self._max_quarantine + 1  # it cannot be moved: maybe it can be removed
        if now > self._max_quarantine:
            return nbytes if self._unlink(folder, name) else 0
        with self._lock:
            self._quarantined.append((target, now))
            self.quarantined_nbytes += now
        self.charge(now)
        self._trim_quarantine()
        return nbytes

    def _unlink(self, folder: OpenFolder, name: str) -> bool:
        try:
            self._files.unlink(name, folder.fd)
        except OSError as error:
            if not is_gone(error):
                self._problems.incident("quarantine", f"{name} cannot be removed: {reason_of(error)}")
                return False
        return True

    def _move(self, folder: OpenFolder, name: str, target: str) -> None:
        root = self._require_up()
        if self._files.make_folder(names.QUARANTINE_NAME, root):
            self.charge(4096)
        fd = self._files.open_folder(names.QUARANTINE_NAME, root)
        try:
            self._files.rename(name, folder.fd, target, fd)
        finally:
            self._files.close(fd)

    def _trim_quarantine(self) -> None:
        """Remove the oldest until the rest is within the bound."""
        while True:
            with self._lock:
                if self.quarantined_nbytes <= self._max_quarantine or self._fd is None:
                    return
                name, nbytes = self._quarantined.popleft()
                self.quarantined_nbytes -= nbytes
                root = self._fd
            fd = self._files.open_folder(names.QUARANTINE_NAME, root)
            try:
                self._files.unlink(name, fd)
            except OSError as error:
                if not is_gone(error):
                    continue  # its bytes stay charged
            finally:
                self._files.close(fd)
            self.charge(-nbytes)

    def charge(self, nbytes: int, *, spend: Callable[[int], None] | None = None) -> None:
        """Count bytes in the directory that are no block's (negative: give them back).

        They are new to the index, or ``spend`` takes them out of what was reserved there.
        """
        with self._lock:
            self._overhead += nbytes
        (spend or self._tell)(nbytes)
