"""Writing blocks of a disk tier: room first, then a temporary file, then its name."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import xxhash

from kvferry.core.buffers import address_of
from kvferry.core.clock import is_past, time_left
from kvferry.store.disk import names
from kvferry.store.disk.blocks import lay_out, scratch, write_whole
from kvferry.store.disk.encoded import encode_job, lay_out_encoded
from kvferry.store.disk.entries import DiskEntry, Reservation
from kvferry.store.disk.files import DIRECT, NO_DIRECT, is_gone, reason_of
from kvferry.store.disk.folders import BLOCK_NBYTES, OpenFolder, disk_nbytes, file_nbytes
from kvferry.store.disk.header import ALIGNMENT
from kvferry.store.disk.obstacles import IN_THE_WAY
from kvferry.store.disk.reads import LATE
from kvferry.store.disk.room import NEW_FOLDER_SLACK, NOT_YET, Rooms
from kvferry.store.disk.root import Root, RootDownError
from kvferry.store.disk.runs import DONE, SYNC_FOLDER, WRITE, Written
from kvferry.store.disk.state import DiskState, Home
from kvferry.store.disk.write_job import WriteJob
from kvferry.store.tier import BlockWrite, WriteOutcome, WriteResult

__all__ = ["Writes", "least_room"]

_FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))

_STORED: Final = WriteResult(WriteOutcome.STORED)
_LATE: Final = WriteResult(WriteOutcome.FAILED, LATE)


def least_room(file_nbytes: int) -> int:
    """Bytes of the capacity that the first block of a namespace needs, with its folders."""
    return file_nbytes + NEW_FOLDER_SLACK


class Writes:
    """Writes blocks. Thread safe; raises nothing that the medium does."""

    def __init__(self, state: DiskState) -> None:
        self._state = state
        self._rooms = Rooms(state)
        self._turns = None if state.runs is None else state.runs.turns(state.options.write_threads)
        self._lock = threading.Lock()
        self._unsynced: dict[int, OpenFolder] = {}

    def write(
        self, home: Home, blocks: Sequence[BlockWrite], deadline: float
    ) -> list[tuple[WriteResult, DiskEntry | None]]:
        """Write a few blocks, one after another; also the entry of each that was stored.

        In steps over all of them: see :func:`~kvferry.store.disk.reads.read_blocks`.
        """
        turns = self._state.index.begin_writes(home.held, [block.key for block in blocks])
        jobs = [WriteJob(block, home.template.file_nbytes) for block in blocks]
        begun = [job for job, turn in zip(jobs, turns, strict=True) if turn is True]
        self._write_begun(home, begun, deadline)
        for job, turn in zip(jobs, turns, strict=True):
            if turn is not True:
                self._write_after(home, job, turn, deadline)
        return [(job.result or _LATE, job.entry) for job in jobs]

    def _write_after(self, home: Home, job: WriteJob, turn: threading.Event | bool, deadline: float) -> None:
        """Write a block if it is not there when others are done with it."""
        while turn is not True:
            if turn is False:
                job.result = WriteResult(WriteOutcome.PRESENT)
                return
            if not turn.wait(time_left(deadline)):
                reason = "another call was still writing or removing it at the deadline"
                job.result = WriteResult(WriteOutcome.FAILED, reason)
                return
            (turn,) = self._state.index.begin_writes(home.held, [job.block.key])
        self._write_begun(home, [job], deadline)

    def _write_begun(self, home: Home, jobs: Sequence[WriteJob], deadline: float) -> None:
        """Write blocks whose keys were begun, and end them."""
        left = deque(jobs)
        try:
            while left:
                ready = self._prepare_some(home, left, deadline)
                self._carry_out(home, ready, deadline)
                # after a failure things are looked at anew: it may have told that the device is full
                left.extendleft(job for job in reversed(ready) if job.result is None)
        finally:
            if unended := [job for job in jobs if not job.ended]:
                self._end(home, unended)

    def _end(self, home: Home, jobs: Sequence[WriteJob]) -> None:
        """Give back what was taken for the jobs, and end their keys."""
        nbytes = 0
        try:
            for job in jobs:
                room = job.room
                if room is None or room.spare is not None or room.claimed or not job.has_room:
                    self._settle(job)
                else:  # as usual: all together
                    nbytes += room.left
                    job.room, job.has_room = None, False
        finally:
            for job in jobs:
                job.ended = True
            self._state.index.release(nbytes)
            self._state.index.end_writes(home.held, [(job.block.key, job.entry) for job in jobs])

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

    def _prepare_some(self, home: Home, left: deque[WriteJob], deadline: float) -> list[WriteJob]:
        """Take jobs out of ``left`` as long as there is room for them together; returns those to be done."""
        if len(ready := self._rooms.make_together(home, left, deadline)) > 0:
            left.clear()
            return ready
        fine: set[Root] = set()
        while left and self._prepare(home, left[0], deadline, fine, alone=not ready):
            job = left.popleft()
            if job.result is None:
                ready.append(job)
                # where room is tight, nobody takes more than he uses at once; a thread encodes into one place
                if job.looks or job.encoded is not None:
                    break
        return ready

    def _prepare(self, home: Home, job: WriteJob, deadline: float, fine: set[Root], *, alone: bool) -> bool:
        """Choose where a block goes and take the room, or give it its result.

        ``fine`` are the directories that need not be asked again whether they take it.

        Returns:
            ``False`` if there is no room but in what other jobs have taken; never if it is ``alone``.
        """
        state, key = self._state, job.block.key
        if not job.asked and (state.codec.is_on or job.block.lossy) and not is_past(deadline):
            job.result = encode_job(state.codec, home.namespace, home.template, job, deadline)
            if job.result is not None:
                return True
        nbytes = job.nbytes
        root = None if is_past(deadline) else self._rooms.choose_root(key, nbytes)
        if root is None:
            late = is_past(deadline)
            job.result = _LATE if late else WriteResult(WriteOutcome.FAILED, "no directory is up")
            return True
        if root not in fine and (why := self._rooms.why_not(root, nbytes)):
            job.result = WriteResult(WriteOutcome.FAILED, f"{root.path}: {why}")
            return True
        fine.add(root)
        job.root = root
        job.looks = root.is_tight or state.options.keep_free_nbytes > 0
        try:
            job.folder = self._rooms.folder(home, key, root)
            job.room = self._rooms.reservation(home, job)
            refused = self._rooms.make(nbytes, root, job.room, deadline, looks=job.looks, alone=alone)
            if refused is NOT_YET:
                self._settle(job)
                return False
            job.result = refused
            job.has_room = refused is None
        except OSError as error:
            self._settle(job)
            job.result = self._failed(home, job, root, error)
        return True

    def _carry_out(self, home: Home, jobs: Sequence[WriteJob], deadline: float) -> None:
        """Write the files, up to the first that fails; those after it have no result then."""
        self._lay_out(home, jobs)
        done, began = list[WriteJob](), time.monotonic()
        for number, job in enumerate(jobs):
            done.append(job)
            if not job.taken and is_past(deadline):
                job.result = _LATE
                continue
            try:
                if not job.taken:
                    self._write_together(home, jobs[number:], deadline)
                if not job.taken:
                    job.taken = self._write_file(home, job)
            except OSError as error:
                self._settle(job)
                if job.root is not None:
                    job.result = self._failed(home, job, job.root, error)
                break
            job.result = _STORED
        if stored := [job for job in done if job.result is _STORED]:
            self._state.codec.carried("write", sum(job.nbytes for job in stored), time.monotonic() - began)
        for root in {job.root for job in stored}:
            if root is not None:
                root.took_write()
        for job in done:
            self._stored(home, job)
        for job in jobs[len(done) :]:
            self._settle(job)
        self._end(home, done)

    def _lay_out(self, home: Home, jobs: Sequence[WriteJob]) -> None:
        """Make the names and the contents of files."""
        template, together = home.template, self._state.runs is not None
        own = scratch(template, len(jobs))
        for number, job in enumerate(jobs):
            if job.root is None:
                continue
            key, data, parent, position, _ = job.block
            if job.encoded is not None:
                job.temporary = job.root.temporary_name(key)
                job.flags = DIRECT if job.root.direct_write else 0
                lay_out_encoded(job, direct=job.root.direct_write)
                continue
            if not job.header:
                checksum = 0 if together else xxhash.xxh3_64_intdigest(data)  # the library puts it in
                job.header = template.build(key, parent, position, checksum)
                job.name = names.block_name(key)
            job.temporary = job.root.temporary_name(key)
            at = address_of(data)
            direct = job.root.direct_write and at % ALIGNMENT == 0
            job.flags = DIRECT if direct else 0
            page, last = own.pages[number], own.tails[number]
            job.parts = lay_out(template, job.header, data, page, last, direct=direct or together)
            job.addresses = own.page_addresses[number], at, own.tail_addresses[number]

    def _write_together(self, home: Home, jobs: Sequence[WriteJob], deadline: float) -> None:
        """Write files by one call into the native library, as far as all is as usual.

        A job that has neither ``taken`` nor ``failure`` then is to be written by itself.
        """
        state, folders = self._state, list[OpenFolder]()
        if state.runs is None or self._turns is None:
            return
        run = state.runs.begin(home.template, len(jobs))
        for job in jobs:
            root, room, folder = job.root, job.room, job.folder
            if root is None or room is None or folder is None or job.encoded is not None:
                break
            names_ = job.name, job.temporary, root.ended_address
            sum_at = home.template.checksum_at(job.block.parent)
            if (entry := room.spare) is None:
                run.add_write(folder.fd, job.flags, job.addresses, sum_at, *names_)
                continue
            try:
                source = root.folder(entry.index.tenant, entry.index.namespace_id, entry.key)
            except OSError:
                break
            folders.append(source)  # it stays open
            spare = names.block_name(entry.key)
            run.add_write(folder.fd, job.flags, job.addresses, sum_at, *names_, source.fd, spare)
        if run.count:
            written = state.runs.write(run, state.options.sync, deadline, self._turns)
            for job, found in zip(jobs, written, strict=False):
                self._written(home, job, found)

    def _written(self, home: Home, job: WriteJob, found: Written) -> None:
        """Account for what became of a file in the native library."""
        step, error, reused, _, size, blocks, folder_blocks, _ = found
        root, room, folder = job.root, job.room, job.folder
        assert root is not None  # else it would not have been begun
        assert room is not None
        assert folder is not None
        if reused:
            self._used_spare(room, root)
        if step == DONE:
            job.taken = file_nbytes(size, blocks)
            job.folder_nbytes = folder_blocks * BLOCK_NBYTES
            self._sync_later(folder)
        elif step >= WRITE:
            job.failure = OSError(error, os.strerror(error))
            self._withdraw_file(home, job, root, folder, "" if step == SYNC_FOLDER else job.temporary)
            job.temporary = ""

    def _stored(self, home: Home, job: WriteJob) -> None:
        """Account for a file that was written, if it was."""
        root, room, folder, block = job.root, job.room, job.folder, job.block
        if job.result is not _STORED or root is None or room is None:
            return
        room.spend(job.taken)
        if folder is not None and (job.folder_nbytes is None or job.folder_nbytes > folder.nbytes):
            with contextlib.suppress(OSError):  # the block is there, whatever the folder says
                root.grown(folder, room.spend, job.folder_nbytes)
        job.entry = DiskEntry(home.held, block.key, block.parent, job.taken, root.number, block.position)
        job.entry.encoding = job.encoding

    def _settle(self, job: WriteJob) -> None:
        """Give back the room of a job that is left."""
        root, room, has_room = job.root, job.room, job.has_room
        job.room, job.has_room = None, False
        if room is None or root is None:
            return
        try:
            if has_room:
                self._rooms.drop_spare(room)
        finally:
            if has_room:
                self._state.index.release(room.left)
            if room.claimed:
                root.release_room(room.claimed)

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
        self._used_spare(room, root)
        return True

    def _used_spare(self, room: Reservation, root: Root) -> None:
        """Account for a spare file that has got another name."""
        entry, room.spare = room.spare, None
        if entry is not None:
            state, home = self._state, entry.index
            state.index.gone(entry, 0)
            state.count(("evicted",))
            if state.tidies(home):
                root.tidy(home.tenant, home.namespace_id, entry.key)

    def _write_file(self, home: Home, job: WriteJob) -> int:
        """Returns the bytes that the file takes up."""
        block, root, room, folder = job.block, job.root, job.room, job.folder
        assert root is not None  # it was prepared
        assert room is not None
        if not root.is_up:  # maybe closed since: nothing is written beside the next owner
            raise RootDownError(errno.ENODEV, "the directory is down")
        alone = self._state.runs is None or job.encoded is not None
        if not alone and job.failure is None:  # else that has, or would have, done it
            key, data, parent, position, _ = block
            job.parts[0][:] = home.template.build(key, parent, position, xxhash.xxh3_64_intdigest(data))
        while True:
            try:
                if job.failure is not None:
                    raise job.take_failure()  # as if it had been met here
                if folder is None:
                    where = (home.held.tenant, home.held.namespace_id, block.key)
                    job.folder = folder = root.folder(*where, make=room.spend)
                name, job.temporary = job.temporary or root.temporary_name(block.key), ""
                fd = self._open(name, root, folder, room, job.nbytes, job.flags)
                return self._fill(fd, name, home, job, root, folder)
            except OSError as error:
                if job.flags and error.errno in NO_DIRECT:
                    root.direct_write = False
                    job.flags = 0
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
            files.unlink(name, folder.fd)
        except OSError:
            self._withdraw(name, root, folder, nbytes)
            raise
        return files.create(name, folder.fd, flags)

    def _fill(self, fd: int, name: str, home: Home, job: WriteJob, root: Root, folder: OpenFolder) -> int:
        """Write the file, sync it, and give it its name; returns the bytes that it takes up."""
        files, sync, nbytes = self._state.files, self._state.options.sync, job.nbytes
        named = False
        try:
            try:
                write_whole(files, fd, job.parts, nbytes)
                if sync != "none":
                    files.sync_data(fd)
                taken = disk_nbytes(files.status(fd))
            finally:
                files.close(fd)
            files.rename(name, folder.fd, job.name, folder.fd)
            named = True  # a whole file, which must not be found later if what follows fails
            if sync == "full":
                files.sync(folder.fd)
        except BaseException:
            self._withdraw_file(home, job, root, folder, "" if named else name)
            raise
        self._sync_later(folder)
        return taken

    def _sync_later(self, folder: OpenFolder) -> None:
        """A file was made in ``folder``; its name is made durable by the next flush, if that is asked."""
        if self._state.options.sync == "data":
            with self._lock:
                self._unsynced[folder.fd] = folder

    def _withdraw_file(
        self, home: Home, job: WriteJob, root: Root, folder: OpenFolder, temporary: str
    ) -> None:
        """Remove a file that failed: under its name already, if there is no temporary one."""
        block, nbytes, entry = job.block, job.nbytes, None
        if not temporary:
            entry = DiskEntry(home.held, block.key, block.parent, nbytes, root.number)
        self._withdraw(temporary or job.name, root, folder, nbytes, entry)

    def _withdraw(
        self, name: str, root: Root, folder: OpenFolder, nbytes: int, entry: DiskEntry | None = None
    ) -> None:
        try:
            self._state.files.unlink(name, folder.fd)
        except OSError as error:
            if not is_gone(error):
                if entry is None:
                    root.leave_behind(folder, name, nbytes)
                else:
                    self._state.index.left_behind(entry)
                self._state.wake()  # to try again
                self._state.problems.incident("file left behind", f"{name}: {reason_of(error)}")

    def _failed(self, home: Home, job: WriteJob, root: Root, error: OSError) -> WriteResult:
        state = self._state
        reason = f"{root.path}: {reason_of(error)}"
        if isinstance(error, RootDownError) or (is_gone(error) and state.check_vanished(root)):
            return WriteResult(WriteOutcome.FAILED, f"{root.path}: the directory is down")
        if error.errno in _FULL:
            root.mark_full(error, job.nbytes, looked=job.looks)
            root.write_failed(error)
            state.wake()  # to see when it has room again
        elif error.errno in IN_THE_WAY:
            if state.clear_way(root, home.held, job.block.key):
                reason += "; that was moved away, the next write finds the place free"
        else:
            root.write_failed(error)
            state.wake()  # to see when it works again
        return WriteResult(WriteOutcome.FAILED, reason)
