"""Room for writes to a disk tier: taken from the cap and from the device, by eviction if need be."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from kvferry.core.clock import is_past
from kvferry.core.keys import BlockKey
from kvferry.store.disk.entries import DiskEntry, Reservation
from kvferry.store.disk.folders import OpenFolder
from kvferry.store.disk.root import Root
from kvferry.store.disk.state import DiskState, Home
from kvferry.store.disk.write_job import WriteJob
from kvferry.store.tier import WriteOutcome, WriteResult

__all__ = ["NEW_FOLDER_SLACK", "NOT_YET", "Rooms"]

NOT_YET: Final = WriteResult(WriteOutcome.REFUSED, "room is in use by other writes")
_MAX_ROUNDS: Final = 4
_FOLDER_SLACK: Final = 8 << 10  # a folder grows by a file's name
NEW_FOLDER_SLACK: Final = 32 << 10
"""Folders of tenant, namespace and shard, and by how much their parents may grow."""


class Rooms:
    """Takes room and gives it back. Thread safe."""

    def __init__(self, state: DiskState) -> None:
        self._state = state

    def choose_root(self, key: BlockKey, nbytes: int) -> Root | None:
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

    def why_not(self, root: Root, nbytes: int) -> str:
        """Why nothing is written to a directory now; empty if something may be."""
        if self._state.is_lost(root):
            return "the directory is down"
        return root.why_no_writes or ("the device is full" if root.is_full_for(nbytes) else "")

    @staticmethod
    def folder(home: Home, key: BlockKey, root: Root) -> OpenFolder | None:
        """Of a key, if it is there."""
        try:
            return root.folder(home.held.tenant, home.held.namespace_id, key)
        except FileNotFoundError:
            return None

    def reservation(self, home: Home, job: WriteJob) -> Reservation:
        """What is to be taken for a job whose folder was looked for."""
        may_need_folder = job.folder is None or self._state.tidies(home.held)
        return Reservation(job.nbytes + (NEW_FOLDER_SLACK if may_need_folder else _FOLDER_SLACK))

    def make_together(self, home: Home, jobs: Collection[WriteJob], deadline: float) -> list[WriteJob]:
        """Choose directories and take the room for all jobs at once, if nothing is in the way of any.

        Returns:
            All of them; none if they are to be looked at one by one.
        """
        state = self._state
        if is_past(deadline) or state.options.keep_free_nbytes > 0:
            return []
        if state.codec.is_on or any(job.block.lossy for job in jobs):
            return []  # their sizes are not known yet
        total, roots = 0, set[Root]()
        try:
            for job in jobs:
                job.root = root = self.choose_root(job.block.key, job.nbytes)
                if root is None:
                    return []
                job.folder = self.folder(home, job.block.key, root)
                job.room = self.reservation(home, job)
                total += job.room.left
                roots.add(root)
        except OSError:
            return []  # met again
        most = max(job.nbytes for job in jobs)
        if any(root.is_tight or self.why_not(root, most) for root in roots):
            return []
        if not state.index.reserve_at_most(total, least=total):
            return []
        for job in jobs:
            job.has_room, job.looks = True, False
        return list(jobs)

    def make(
        self, nbytes: int, root: Root, room: Reservation, deadline: float, *, looks: bool, alone: bool
    ) -> WriteResult | None:
        """Take the room of a file of ``nbytes``, evicting as needed; a result if that cannot be.

        ``looks`` at the device too.

        Unless it is ``alone``, what other jobs of this thread have taken may be room for it later.
        """
        index, rounds = self._state.index, 0
        spare: DiskEntry | None = None
        try:
            while True:
                on_root = self._short(nbytes, root, room, rounds) if looks and not room.claimed else 0
                if on_root > 0:
                    victims = index.evict(on_root, root.number)
                    rounds += 1
                else:
                    victims = index.reserve(room.left, spare.nbytes if spare is not None else 0)
                if victims is None:
                    if on_root > 0 and root.free_nbytes() >= self._state.options.keep_free_nbytes + room.left:
                        looks = False  # others claim it, or there is a quota: try
                        continue
                    return self._refuse(root, room, on_root) if alone else NOT_YET
                if not victims:
                    room.spare, spare = spare, None
                    return None
                if spare is None and on_root <= 0:
                    spare = self._choose_spare(nbytes, root, victims)
                self._evict(victims)
                if is_past(deadline):
                    return WriteResult(WriteOutcome.FAILED, "no room was made by the deadline")
        finally:
            if spare is not None:
                self._state.put_back(spare)

    def _short(self, nbytes: int, root: Root, room: Reservation, rounds: int) -> int:
        """Bytes that must go on the device before a write, after ``rounds`` of eviction."""
        keep = self._state.options.keep_free_nbytes
        if not keep and rounds >= _MAX_ROUNDS:
            return 0  # some file systems tell late of what was freed: all would go for one block
        if root.has_quota and not rounds:
            return nbytes
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
    def _choose_spare(nbytes: int, root: Root, victims: list[DiskEntry]) -> DiskEntry | None:
        """Take one out of ``victims`` whose file may be written over: as large, in the same directory.

        Making and removing files is what costs most when blocks are small, on file systems that must
        find, and journal, an inode and its blocks each time.
        """
        for number, entry in enumerate(victims):
            if entry.root == root.number and entry.nbytes == nbytes:
                return victims.pop(number)
        return None

    def drop_spare(self, room: Reservation) -> None:
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
