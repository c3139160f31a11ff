"""Writing one block of a disk tier: room first, then a temporary file, then its name."""

from __future__ import annotations

import errno
import threading
from typing import Final

import xxhash

from kvferry.core.clock import is_past, time_left
from kvferry.core.keys import BlockKey
from kvferry.store.disk import names
from kvferry.store.disk.blocks import is_aligned, write_block
from kvferry.store.disk.files import DIRECT, NO_DIRECT, is_gone, reason_of
from kvferry.store.disk.folders import OpenFolder, disk_nbytes
from kvferry.store.disk.index import DiskEntry, Reservation
from kvferry.store.disk.root import Root, RootDownError
from kvferry.store.disk.state import DiskState, Home
from kvferry.store.tier import BlockWrite, WriteOutcome, WriteResult

__all__ = ["Writes"]

_FOLDER_SLACK: Final = 8 << 10  # a folder grows by a file's name
_NEW_FOLDER_SLACK: Final = 32 << 10  # folders of tenant, namespace and shard, and their parents grow
_FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class Writes:
    """Writes blocks. Thread safe; raises nothing that the medium does."""

    def __init__(self, state: DiskState) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._unsynced: dict[int, OpenFolder] = {}

    def write(self, home: Home, block: BlockWrite, deadline: float) -> tuple[WriteResult, DiskEntry | None]:
        """Write one block; also its entry if it was stored."""
        index = self._state.index
        while True:
            turn = index.begin_write(home.held, block.key)
            if turn is False:
                return WriteResult(WriteOutcome.PRESENT), None
            if turn is True:
                break
            if not turn.wait(time_left(deadline)):
                reason = "another call was still writing or removing it at the deadline"
                return WriteResult(WriteOutcome.FAILED, reason), None
        entry: DiskEntry | None = None
        try:
            result, entry = self._write(home, block, deadline)
        finally:
            index.end_write(home.held, block.key, entry)
        return result, entry

    def sync_folders(self) -> None:
        """Make the names of all files written so far durable.

        Raises:
            OSError: If that fails; what was not done is tried again next time.
        """
        with self._lock:
            folders, self._unsynced = self._unsynced, {}
        try:
            while folders:
                _, folder = folders.popitem()
                try:
                    self._state.files.sync(folder.fd)
                except OSError:
                    folders[folder.fd] = folder
                    raise
        finally:
            with self._lock:
                self._unsynced.update(folders)

    def _write(self, home: Home, block: BlockWrite, deadline: float) -> tuple[WriteResult, DiskEntry | None]:
        state = self._state
        root = self._choose_root(block.key)
        if root is None:
            return WriteResult(WriteOutcome.FAILED, "no directory is up"), None
        if root.is_full:
            return WriteResult(WriteOutcome.FAILED, f"{root.path}: the device is full"), None
        makes_room = root.needs_room
        try:
            folder = self._folder(home, block.key, root)
            may_need_folder = folder is None or state.tidies(home.held)
            slack = _NEW_FOLDER_SLACK if may_need_folder else _FOLDER_SLACK
            room = Reservation(home.template.file_nbytes + slack)
            refused = self._make_room(root, room.left, deadline, first=makes_room)
            if refused is not None:
                return refused, None
            try:
                taken = self._write_file(home, block, root, folder, room)
                room.spend(taken)
            finally:
                state.index.release(room.left)
        except OSError as error:
            return self._failed(root, error, evicted=makes_room), None
        for kind in ("full", "writes fail"):
            state.problems.end(root.path, kind)
        entry = DiskEntry(home.held, block.key, block.parent, taken, root.number)
        return WriteResult(WriteOutcome.STORED), entry

    def _choose_root(self, key: BlockKey) -> Root | None:
        """By the key; another one while that is down, failing or full."""
        roots = self._state.roots
        first = int.from_bytes(key[1:5], "little") % len(roots)
        order = [*roots[first:], *roots[:first]]
        ready = [r for r in order if r.takes_writes and not r.is_full]
        ready = [r for r in ready if not r.needs_room] or ready
        ready = ready or [r for r in order if r.is_up]
        return ready[0] if ready else None

    @staticmethod
    def _folder(home: Home, key: BlockKey, root: Root) -> OpenFolder | None:
        try:
            return root.folder(home.held.tenant, home.held.namespace_id, key)
        except FileNotFoundError:
            return None

    def _make_room(self, root: Root, nbytes: int, deadline: float, *, first: bool) -> WriteResult | None:
        """Take ``nbytes``, evicting as needed, ``first`` at any rate; a result if that cannot be."""
        state = self._state
        short = nbytes if first else 0
        while True:
            if state.options.keep_free_nbytes:
                wanted = state.options.keep_free_nbytes + nbytes
                short = max(short, wanted - root.free_nbytes())
            on_root = short > 0
            victims = state.index.evict(short, root.number) if on_root else state.index.reserve(nbytes)
            if victims is None:
                what = "its device is full" if on_root else f"{nbytes} bytes do not fit"
                return WriteResult(WriteOutcome.REFUSED, f"{what}, and nothing more may be evicted")
            if not victims and not on_root:
                return None
            self._evict(victims)
            short = 0
            if is_past(deadline):
                return WriteResult(WriteOutcome.FAILED, "no room was made by the deadline")

    def _evict(self, victims: list[DiskEntry]) -> None:
        """Remove files; what cannot be removed stays, and ends the write.

        Raises:
            OSError: From the first that cannot be removed.
        """
        state = self._state
        failure: OSError | None = None
        for entry in victims:
            try:
                state.unlink(entry)
            except OSError as error:
                failure = failure or error
                state.index.put_back(entry)
            else:
                state.index.gone(entry, entry.nbytes)
                state.count(("evicted",))
        if failure is not None:
            raise failure

    def _write_file(
        self, home: Home, block: BlockWrite, root: Root, folder: OpenFolder | None, room: Reservation
    ) -> int:
        """Returns the bytes that the file takes up."""
        header = home.template.build(
            block.key, block.parent, block.position, xxhash.xxh3_64_intdigest(block.data)
        )
        direct = root.direct_write and is_aligned(block.data)
        while True:
            try:
                if folder is None:
                    name = (home.held.tenant, home.held.namespace_id, block.key)
                    folder = root.folder(*name, make=room.spend)
                taken = self._create(home, block, header, root, folder, direct=direct)
                root.grown(folder, room.spend)
                return taken
            except OSError as error:
                if direct and error.errno in NO_DIRECT:
                    root.direct_write = direct = False
                elif is_gone(error) and folder is not None and root.is_stale(folder):
                    folder = None
                else:
                    raise

    def _create(
        self, home: Home, block: BlockWrite, header: bytes, root: Root, folder: OpenFolder, *, direct: bool
    ) -> int:
        files, sync = self._state.files, self._state.options.sync
        name = root.temporary_name(block.key)
        fd = files.create(name, folder.fd, DIRECT if direct else 0)
        try:
            try:
                write_block(files, fd, home.template, header, block.data, direct=direct)
                if sync != "none":
                    files.sync_data(fd)
                taken = disk_nbytes(files.status(fd))
            finally:
                files.close(fd)
            files.rename(name, folder.fd, final := names.block_name(block.key), folder.fd)
            name = final
            if sync == "full":
                files.sync(folder.fd)
        except BaseException:
            self._withdraw(name, root, folder, home.template.file_nbytes)
            raise
        if sync == "data":
            with self._lock:
                self._unsynced[folder.fd] = folder
        return taken

    def _withdraw(self, name: str, root: Root, folder: OpenFolder, nbytes: int) -> None:
        try:
            self._state.files.unlink(name, folder.fd)
        except OSError as error:
            if not is_gone(error):
                root.charge(nbytes)  # it lies there until the next start
                self._state.problems.incident("file left behind", f"{name}: {reason_of(error)}")

    def _failed(self, root: Root, error: OSError, *, evicted: bool) -> WriteResult:
        state = self._state
        reason = f"{root.path}: {reason_of(error)}"
        if isinstance(error, RootDownError) or (is_gone(error) and state.check_vanished(root)):
            return WriteResult(WriteOutcome.FAILED, f"{root.path}: the directory is down")
        if error.errno in _FULL:
            root.mark_full(evicted=evicted)
        else:
            root.suspend_writes()
            state.problems.begin(root.path, "writes fail", reason_of(error))
        return WriteResult(WriteOutcome.FAILED, reason)
