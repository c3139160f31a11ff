"""One directory of a disk tier: its descriptors, its lock, its quarantine, and whether it works.

A directory that fails is *down*: what asks for it fails at once, and the tier tries to open it again from
time to time. It is never made anew where it has vanished: an empty mount point must not be filled in the
place of the disk that was mounted there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from kvferry.core.errors import TierError
from kvferry.core.keys import BlockKey
from kvferry.store.disk import names
from kvferry.store.disk.files import Files, reason_of
from kvferry.store.disk.folders import Folders, OpenFolder, disk_nbytes
from kvferry.store.disk.leftovers import Leftovers
from kvferry.store.disk.lock import DirectoryLock, take_lock
from kvferry.store.disk.obstacles import Obstacles
from kvferry.store.disk.options import DiskOptions
from kvferry.store.disk.places import RootDownError, make_directory, open_directory, require_outside
from kvferry.store.disk.probe import probe_direct, probe_writes
from kvferry.store.disk.quarantine import Quarantine
from kvferry.store.disk.scan import Scan, scan_directory
from kvferry.store.problems import Problems

__all__ = ["Root", "RootDownError"]

_FULL_PAUSES: Final = 10
_NO_RIGHT: Final = "nothing can be written in the directory: it is read-only, or this user lacks the right"
_LOOK_S: Final = 1.0
_SOON: Final = 0.9  # of a pause: who comes after one finds that it is over
_PROBE_MIN_NBYTES: Final = 4 << 10
_PROBE_MAX_NBYTES: Final = 8 << 20
_FAILURES: Final = 8  # in a row, before a directory is left alone that may work again at any time
_FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
# Will not be over with the next try.
_LASTING: Final = frozenset((errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTCONN, errno.ESHUTDOWN))


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
        leftovers: What could not be removed from it.
        ended_address: Of 32 bits that are not 0 while it is down, for those who have no time to ask.
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
        self._ended = ctypes.c_int32(1)
        self.ended_address = ctypes.addressof(self._ended)
        self._files = files
        self._problems = problems
        self._tell = charge
        self.leftovers = Leftovers(files, self.charge)
        bound = options.quarantine_bound_nbytes
        self._quarantine = Quarantine(files, problems, self.charge, bound, self.leftovers)
        self._obstacles = Obstacles(files, self._quarantine, self.charge)
        self._durable = options.sync != "none"
        self._retry_s = options.retry_s
        self._keep_free_nbytes = options.keep_free_nbytes
        self._lock = threading.Lock()
        self._top: OpenFolder | None = None
        self._held: DirectoryLock | None = None
        self._looking = threading.Lock()
        self._look_at = 0.0
        self._folders: Folders | None = None
        self._device: int | None = None
        self._overhead = 0
        self._full_until = self._tight_until = self._quota_until = self._avoid_until = 0.0
        self._wanted_nbytes = 0
        self._claimed = 0
        self._try_at = 0.0
        self._no_writes_until = 0.0
        self._failures = 0
        self._serials = itertools.count(time.time_ns())

    # -- life ------------------------------------------------------------------------------------------

    def start(self, *, make: bool) -> Scan:
        """Open, lock and scan the directory; afterwards it is up and its overhead is charged.

        Args:
            make: Make it if it is not there: at the start of the tier only.

        Raises:
            OSError: If it cannot be used; it stays down.
            TierError: If another store uses it, or one that lies inside of it or around it.
        """
        if make:
            make_directory(self.path)
        top = OpenFolder(self._files, open_directory(self._files, self.path))
        device = self._files.status(top.fd).st_dev
        self._require_same_device(top.fd, device)
        require_outside(self.path)
        held = take_lock(top.fd, self.path)
        try:
            scan = scan_directory(self._files, top.fd, clean=held is not None)
            if scan.nested:
                raise TierError(
                    f"{self.path} has the directory of another disk tier inside, {scan.nested[0]}, which is "
                    "in use; give each a directory of its own"
                )
            folders = Folders(self._files, top.fd, self.charge, durable=self._durable)
        except BaseException:
            if held is not None:
                held.release()
            raise
        with self._lock:
            self._top, self._held, self._device, self._folders = top, held, device, folders
            self._quarantine.reset(scan.quarantined)
            self._obstacles.known = scan.obstacles
            self.leftovers.reset(scan.left)
            self._look_at = time.monotonic() + _LOOK_S
            self._ended.value = 0
        self.charge(scan.overhead_nbytes + self._quarantine.nbytes)
        if held is None or not self._files.may_write(top.fd):
            self._begin("writes fail", _NO_RIGHT)
            self._pause_writes()
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
            held, folders = self._held, self._folders
            self._ended.value = 1
            self._top = self._held = self._folders = None  # the descriptor goes with the last who uses it
            overhead, self._overhead = self._overhead, 0
            self._quarantine.reset([])
            self.leftovers.reset()
        if folders is not None:
            folders.forget()
        if held is not None:
            held.release()
        self._tell(-overhead)

    @property
    def is_up(self) -> bool:
        """Whether it is open."""
        return self._top is not None

    @property
    def is_locked(self) -> bool:
        """Whether it is up and locked: else nothing may be written there."""
        return self._held is not None

    def is_due(self) -> bool:
        """Whether to look again, now and then, if it is still there: see :meth:`what_is_lost`."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + _LOOK_S
        return True

    def what_is_lost(self) -> str:
        """Why it is not ours any more, if so: what is at the path now is not what was opened and locked."""
        with self._looking:
            top, held = self._top, self._held
            if top is None:
                return "it is down"
            ours = self._files.status(top.fd)
            try:
                found = Path(self.path).stat()
            except OSError:
                return "the directory has vanished"
            if (found.st_dev, found.st_ino) != (ours.st_dev, ours.st_ino):
                return "the directory has vanished: another one is in its place"
            try:
                if held is not None and not held.is_whole(top.fd):
                    held.mend(top.fd, self.path)
            except TierError as error:
                return str(error)
            except OSError as error:
                self._problems.incident("lock", f"{self.path} cannot be locked anew: {reason_of(error)}")
            return ""

    def free_nbytes(self) -> int:
        """Bytes that may still be written to its file system."""
        top = self._require_up()
        return self._files.free_nbytes(top.fd)

    def size_nbytes(self) -> int:
        """Bytes of its file system in all, for ordinary processes."""
        top = self._require_up()
        found = os.fstatvfs(top.fd)  # some file systems say 0
        return (found.f_blocks - found.f_bfree + found.f_bavail) * found.f_frsize

    def probe(self) -> str:
        """Measure whether O_DIRECT pays and use it where it does; returns what was found, for people."""
        top = self._require_up()
        found = probe_direct(self._files, top.fd)
        self.direct_read, self.direct_write = found.read, found.write
        return found.text

    def _require_up(self) -> OpenFolder:
        """The directory, if it is up; kept while its descriptor is used, since :meth:`stop` may come."""
        top = self._top
        if top is None:
            raise RootDownError(errno.ENODEV, "the directory is down")
        return top

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

        It is over with the next write that succeeds, or when :meth:`try_writes` finds room.
        """
        text = "the device is full"
        with contextlib.suppress(OSError):
            free = self.free_nbytes()
            if error is not None and error.errno == errno.EDQUOT:
                text = f"a quota is used up: {reason_of(error)}; the device has {free} bytes free"
            elif error is not None and free >= nbytes:
                text = f"a write failed as on a full device, which has {free} bytes free: {reason_of(error)}"
        self._wanted_nbytes = nbytes
        self._begin("full", text)

    def _begin(self, kind: str, text: str) -> None:
        if not self._problems.has(self.path, kind):
            self._try_at = time.monotonic() + _SOON * self._retry_s
        self._problems.begin(self.path, kind, text)

    def claim_room(self, nbytes: int, keep: int = 0) -> int:
        """Take so many of the free bytes, for as long as a write runs, and leave ``keep`` free.

        Returns:
            How many are missing: then none are taken. Else 0, and :meth:`release_room` gives them back.
        """
        with self._lock:
            short = keep + self._claimed + nbytes - self.free_nbytes()
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
        self._full_until = self._avoid_until = self._no_writes_until = 0.0
        self._failures = 0
        for kind in ("full", "writes fail"):
            self._problems.end(self.path, kind)

    def try_writes(self, take: Callable[[int], int]) -> bool:
        """Find out by a file of the tier's own whether writes that failed go well again.

        Free bytes alone do not tell: what ran out may be inodes or a quota.

        Args:
            take: Takes up to so many bytes of the capacity and returns how many; this gives them back.

        Returns:
            Whether to try again later. ``False`` also if nothing had failed.
        """
        is_full = self._problems.has(self.path, "full")
        if not is_full and not self._problems.has(self.path, "writes fail"):
            return False
        taken = 0
        try:
            top = self._require_up()
            if is_full and self._files.free_nbytes(top.fd) < self._wanted_nbytes + self._keep_free_nbytes:
                return True
            if time.monotonic() < self._try_at:
                return True
            self._try_at = time.monotonic() + _SOON * self._retry_s
            if self._held is None and not self._lock_late(top):
                return True
            taken = take(min(max(self._wanted_nbytes, _PROBE_MIN_NBYTES), _PROBE_MAX_NBYTES))
            probe_writes(self._files, top.fd, taken, durable=self._durable)
        except (OSError, TierError) as error:
            if not is_full:  # else our own may go for those that come
                self._pause_writes()
                reason = reason_of(error) if isinstance(error, OSError) else str(error)
                self._problems.begin(self.path, "writes fail", reason)
            return True
        finally:
            self._tell(-taken)
        self.took_write()
        return False

    def _lock_late(self, top: OpenFolder) -> bool:
        """Lock a directory in which nothing could be written when it was opened; whether that is done."""
        held = take_lock(top.fd, self.path)
        with self._lock:
            if self._top is top:
                self._held, held = held, None
        if held is not None:
            held.release()
        return self._held is not None

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

    def write_failed(self, error: OSError) -> None:
        """A write failed: other directories are asked for a moment, this one later if it is bound to fail.

        A directory of a device that is full, or says so, is passed over by what :meth:`mark_full` remembers.
        """
        self._failures += 1
        if error.errno not in _FULL:
            self._avoid_until = time.monotonic() + self._retry_s
            self._begin("writes fail", reason_of(error))
        if error.errno in _LASTING or self._failures >= _FAILURES:
            self._pause_writes()

    def _pause_writes(self) -> None:
        self._no_writes_until = time.monotonic() + 2 * self._retry_s  # :meth:`try_writes` is sooner

    @property
    def why_no_writes(self) -> str:
        """Why writes are refused, if so: for a while, or until :meth:`try_writes` finds that they go well."""
        if self._held is None:
            return _NO_RIGHT
        if time.monotonic() < self._no_writes_until:
            return "writes have failed, and are tried again in a moment"
        return ""

    @property
    def takes_writes(self) -> bool:
        """Whether it is up and no write has failed a moment ago."""
        return self._held is not None and time.monotonic() >= max(self._avoid_until, self._no_writes_until)

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

    def grown(self, folder: OpenFolder, spend: Callable[[int], None], nbytes: int | None = None) -> None:
        """A file was made in ``folder``, by which it may have grown: to ``nbytes``, if that was looked at."""
        grown = folder.growth(nbytes)
        if grown > 0:
            self.charge(grown, spend=spend)

    def is_stale(self, folder: OpenFolder) -> bool:
        """Whether ``folder`` was removed by somebody; a second try opens it anew."""
        folders = self._folders
        return folders is not None and folders.is_removed(folder)

    def clear_way(self, tenant: str, namespace_id: bytes, key: BlockKey) -> str:
        """Move into the quarantine what is in the place of a block or of one of its folders.

        Returns:
            What was moved where, for people; empty if nothing is in the way.

        Raises:
            OSError: If something is, and cannot be moved.
        """
        folder_names = (names.tenant_folder(tenant), namespace_id.hex(), names.shard_name(key[0]))
        top = self._require_up()
        moved = self._obstacles.clear(top.fd, (*folder_names, names.block_name(key)))
        if moved and self._folders is not None:
            self._folders.forget()
        return moved

    def leave_behind(self, folder: OpenFolder, name: str, nbytes: int) -> None:
        """A file in ``folder`` that is nobody's could not be removed: it counts, and is tried again."""
        with contextlib.suppress(OSError):
            nbytes = disk_nbytes(self._files.status_of(name, folder.fd))
        self.charge(nbytes)
        self.leftovers.add(folder.path, name, nbytes)

    def retry_leftovers(self) -> bool:
        """Try again what could not be removed; whether something is left that may go soon."""
        top = self._top
        if top is None or self._held is None or not len(self.leftovers):
            return False
        return self.leftovers.retry(top.fd)

    def temporary_name(self, key: BlockKey) -> str:
        """A name for a file that is being written; never the same twice."""
        return names.temporary_name(key, next(self._serials))

    def quarantine(self, folder: OpenFolder, namespace_id: bytes, key: BlockKey, nbytes: int) -> int:
        """Put a corrupt file out of the way: see :meth:`Quarantine.put`."""
        top = self._require_up()
        return self._quarantine.put(top.fd, folder, namespace_id, key, nbytes)

    def limit_quarantine(self, nbytes: int) -> None:
        """Another bound: see :meth:`Quarantine.limit`."""
        top = self._top if self._held is not None else None
        self._quarantine.limit(nbytes, None if top is None else top.fd)

    @property
    def quarantined_nbytes(self) -> int:
        """What the quarantine takes up."""
        return self._quarantine.nbytes if self.is_up else 0

    @property
    def overhead_nbytes(self) -> int:
        """What is in the directory that is no block's: folders, the quarantine, and what is not ours."""
        return self._overhead

    def charge(self, nbytes: int, *, spend: Callable[[int], None] | None = None) -> None:
        """Count bytes in the directory that are no block's (negative: give them back).

        They are new to the index, or ``spend`` takes them out of what was reserved there.
        """
        with self._lock:
            self._overhead += nbytes
        (spend or self._tell)(nbytes)
