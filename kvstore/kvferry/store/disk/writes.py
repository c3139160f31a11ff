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

__all__ = ["Writes", "least_room"]

_FOLDER_SLACK: Final = 8 << 10  # a folder grows by a file's name
_NEW_FOLDER_SLACK: Final = 32 << 10  # folders of tenant, namespace and shard, and their parents grow
_MAX_ROUNDS: Final = 4
_FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
# Something else is in the place of this file, or of its folder: others can be written.
_IN_THE_WAY: Final = frozenset((errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EEXIST, errno.ENOTEMPTY))


def least_room(file_nbytes: int) -> int:
    """Bytes of the capacity that the first block of a namespace needs, with its folders."""
    return file_nbytes + _NEW_FOLDER_SLACK


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
        nbytes = home.template.file_nbytes
        root = self._choose_root(block.key, nbytes)
        if root is None:
            return WriteResult(WriteOutcome.FAILED, "no directory is up"), None
        if state.is_lost(root):
            return WriteResult(WriteOutcome.FAILED, f"{root.path}: the directory is down"), None
        if why := root.why_no_writes:
            return WriteResult(WriteOutcome.FAILED, f"{root.path}: {why}"), None
        if root.is_full_for(nbytes):
            return WriteResult(WriteOutcome.FAILED, f"{root.path}: the device is full"), None
        looks = root.is_tight or state.options.keep_free_nbytes > 0
        try:
            folder = self._folder(home, block.key, root)
            may_need_folder = folder is None or state.tidies(home.held)
            slack = _NEW_FOLDER_SLACK if may_need_folder else _FOLDER_SLACK
            room = Reservation(nbytes + slack)
            try:
                refused = self._make_room(home, root, room, deadline, looks=looks)
                if refused is not None:
                    return refused, None
                try:
                    taken = self._write_file(home, block, root, folder, room)
                    room.spend(taken)
                finally:
                    self._drop_spare(room)
                    state.index.release(room.left)
            finally:
                root.release_room(room.claimed)
        except OSError as error:
            return self._failed(root, error, nbytes, looked=looks), None
        root.took_write()
        entry = DiskEntry(home.held, block.key, block.parent, taken, root.number)
        return WriteResult(WriteOutcome.STORED), entry

    def _choose_root(self, key: BlockKey, nbytes: int) -> Root | None:
        """By the key; another one while that is down, failing or full."""
        roots = self._state.roots
        if len(roots) == 1:
            return roots[0] if roots[0].is_up else None
        first = int.from_bytes(key[1:5], "little") % len(roots)
        order = [*roots[first:], *roots[:first]]
        ready = [r for r in order if r.takes_writes and not r.is_full_for(nbytes)]
        ready = [r for r in ready if not r.is_tight] or ready
        ready = ready or [r for r in order if r.is_up]
        return ready[0] if ready else None

    @staticmethod
    def _folder(home: Home, key: BlockKey, root: Root) -> OpenFolder | None:
        try:
            return root.folder(home.held.tenant, home.held.namespace_id, key)
        except FileNotFoundError:
            return None

    def _make_room(
        self, home: Home, root: Root, room: Reservation, deadline: float, *, looks: bool
    ) -> WriteResult | None:
        """Take the room, evicting as needed; a result if that cannot be. ``looks`` at the device too."""
        index, rounds = self._state.index, 0
        spare: DiskEntry | None = None
        try:
            while True:
                on_root = self._short(home, root, room, rounds) if looks and not room.claimed else 0
                if on_root > 0:
                    victims = index.evict(on_root, root.number)
                    rounds += 1
                else:
                    victims = index.reserve(room.left, spare.nbytes if spare is not None else 0)
                if victims is None:
                    if on_root > 0 and root.free_nbytes() >= self._state.options.keep_free_nbytes + room.left:
                        looks = False  # others claim it, or there is a quota: try
                        continue
                    return self._refuse(root, room, on_root)
                if not victims:
                    room.spare, spare = spare, None
                    return None
                if spare is None and on_root <= 0:
                    spare = self._choose_spare(home, root, victims)
                self._evict(victims)
                if is_past(deadline):
                    return WriteResult(WriteOutcome.FAILED, "no room was made by the deadline")
        finally:
            if spare is not None:
                self._state.put_back(spare)

    def _short(self, home: Home, root: Root, room: Reservation, rounds: int) -> int:
        """Bytes that must go on the device before a write, after ``rounds`` of eviction."""
        keep = self._state.options.keep_free_nbytes
        if not keep and rounds >= _MAX_ROUNDS:
            return 0  # some file systems tell late of what was freed: all would go for one block
        if root.has_quota and not rounds:
            return home.template.file_nbytes
        short = root.claim_room(room.left, keep)
        room.claimed = 0 if short else room.left
        return short

    def _refuse(self, root: Root, room: Reservation, on_root: int) -> WriteResult:
        what = f"{room.left} bytes do not fit"
        if on_root > 0:
            what = "its device is full"
            root.begin_full(room.left)
            self._state.wake()  # to see when it has room again
        return WriteResult(WriteOutcome.REFUSED, f"{what}, and nothing more may be evicted")

    @staticmethod
    def _choose_spare(home: Home, root: Root, victims: list[DiskEntry]) -> DiskEntry | None:
        """Take one out of ``victims`` whose file may be written over: as large, in the same directory.

        Making and removing files is what costs most when blocks are small, on file systems that must
        find, and journal, an inode and its blocks each time.
        """
        for number, entry in enumerate(victims):
            if entry.root == root.number and entry.nbytes == home.template.file_nbytes:
                return victims.pop(number)
        return None

    def _drop_spare(self, room: Reservation) -> None:
        """Remove a spare file that was not used after all; one that cannot be removed is held again."""
        entry, room.spare = room.spare, None
        if entry is None:
            return
        try:
            self._state.unlink(entry)
        except OSError:
            self._state.index.release(-entry.nbytes)
            self._state.put_back(entry)
        else:
            self._state.index.gone(entry, 0)
            self._state.count(("evicted",))

    def _reuse_spare(self, room: Reservation, root: Root, name: str, folder: OpenFolder) -> bool:
        """Give the spare file, if there is one, the name ``name``; whether it has it."""
        entry = room.spare
        if entry is None:
            return False
        state, home = self._state, entry.index
        try:
            source = root.folder(home.tenant, home.namespace_id, entry.key)
            state.files.rename(names.block_name(entry.key), source.fd, name, folder.fd)
        except OSError as error:
            if not is_gone(error) or root.is_stale(folder):
                raise
            room.spare = None  # somebody has removed it
            state.index.gone(entry, 0)
            return False
        room.spare = None
        state.index.gone(entry, 0)
        state.count(("evicted",))
        if state.tidies(home):
            root.tidy(home.tenant, home.namespace_id, entry.key)
        return True

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
                state.put_back(entry)
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
                    where = (home.held.tenant, home.held.namespace_id, block.key)
                    folder = root.folder(*where, make=room.spend)
                name = root.temporary_name(block.key)
                fd = self._open(name, root, folder, room, home.template.file_nbytes, DIRECT if direct else 0)
                taken = self._fill(fd, name, home, block, header, root, folder, direct=direct)
                root.grown(folder, room.spend)
                return taken
            except OSError as error:
                if direct and error.errno in NO_DIRECT:
                    root.direct_write = direct = False
                elif is_gone(error) and folder is not None and root.is_stale(folder):
                    folder = None
                else:
                    raise

    def _open(
        self, name: str, root: Root, folder: OpenFolder, room: Reservation, nbytes: int, flags: int
    ) -> int:
        """A file of that name to write to: an evicted one, or a new one."""
        files = self._state.files
        if not self._reuse_spare(room, root, name, folder):
            return files.create(name, folder.fd, flags)
        try:
            fd = files.open_write(name, folder.fd, flags)
            found = files.status(fd)
            if found.st_nlink == 1 and found.st_size == nbytes:
                return fd
            files.close(fd)  # somebody keeps it by another name, or has changed it
        except OSError:
            self._withdraw(name, root, folder, nbytes)
            raise
        files.unlink(name, folder.fd)
        return files.create(name, folder.fd, flags)

    def _fill(
        self,
        fd: int,
        name: str,
        home: Home,
        block: BlockWrite,
        header: bytes,
        root: Root,
        folder: OpenFolder,
        *,
        direct: bool,
    ) -> int:
        """Write the file, sync it, and give it its name; returns the bytes that it takes up."""
        files, sync = self._state.files, self._state.options.sync
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
            nbytes = home.template.file_nbytes
            named = name == names.block_name(block.key)  # a whole file, which must not be found later
            entry = DiskEntry(home.held, block.key, block.parent, nbytes, root.number) if named else None
            self._withdraw(name, root, folder, nbytes, entry)
            raise
        if sync == "data":
            with self._lock:
                self._unsynced[folder.fd] = folder
        return taken

    def _withdraw(
        self, name: str, root: Root, folder: OpenFolder, nbytes: int, entry: DiskEntry | None = None
    ) -> None:
        try:
            self._state.files.unlink(name, folder.fd)
        except OSError as error:
            if not is_gone(error):
                if entry is None:
                    root.charge(nbytes)  # it lies there until the next start
                else:
                    self._state.index.left_behind(entry)
                    self._state.wake()
                self._state.problems.incident("file left behind", f"{name}: {reason_of(error)}")

    def _failed(self, root: Root, error: OSError, nbytes: int, *, looked: bool) -> WriteResult:
        state = self._state
        reason = f"{root.path}: {reason_of(error)}"
        if isinstance(error, RootDownError) or (is_gone(error) and state.check_vanished(root)):
            return WriteResult(WriteOutcome.FAILED, f"{root.path}: the directory is down")
        if error.errno in _FULL:
            root.mark_full(error, nbytes, looked=looked)
            root.write_failed(error)
            state.wake()  # to see when it has room again
        elif error.errno in _IN_THE_WAY:
            state.problems.incident("something is in the way of a block", reason)
        else:
            root.write_failed(error)
            state.wake()  # to see when it works again
        return WriteResult(WriteOutcome.FAILED, reason)
