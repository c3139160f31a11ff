"""The way down from a pool: blocks are copied to the store below, and give their pages to others then."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvferry.core.blockstore import Namespace, WriteLease
from kvferry.core.clock import deadline_in, time_left
from kvferry.core.errors import DeviceError, KVFerryError, TransferTimeoutError
from kvferry.core.keys import BlockKey
from kvferry.device.block_copier import DeviceCopying
from kvferry.store.device.space import PoolSpace, SpaceBlock

if TYPE_CHECKING:
    from kvferry.store.device.pool import DevicePool

__all__ = ["Demotion"]

_LOG = logging.getLogger(__name__)
_LOOK_S: Final = 1.0


@dataclass(eq=False)
class _Job:
    """One block to copy down; held, or leaving, until it is over."""

    block: SpaceBlock
    leaving: bool
    saved: bool = False


@dataclass
class _Flight:
    """Copies of a run of blocks into the slots of one write lease."""

    jobs: list[_Job]
    lease: WriteLease
    writing: ExitStack
    copying: DeviceCopying | None
    views: list[memoryview] = field(default_factory=list)


class Demotion:
    """The queue of a pool and the thread that empties it. Methods without a remark hold the pool's lock.

    Attributes:
        demoted_blocks: Copies made.
        lost_blocks: Blocks that the store below did not take.
    """

    def __init__(self, pool: DevicePool) -> None:
        self.demoted_blocks = self.lost_blocks = 0
        self._pool = pool
        self._work = threading.Condition(pool.lock)
        self._queue: deque[_Job] = deque()
        self._busy = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._stranded: list[_Flight] = []  # a dead device may still write into these slots: never given up

    @property
    def idle(self) -> bool:
        """Whether nothing waits or is under way."""
        return not self._queue and not self._busy

    def start(self) -> None:
        """Start the thread, once."""
        if self._thread is None:
            name = f"kvferry-demote-{self._pool.device.name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def put(self, block: SpaceBlock, *, leaving: bool) -> None:
        """Queue a stored block; one that is not leaving is held meanwhile."""
        if not leaving:
            self._pool.table.hold(block)
        self._queue.append(_Job(block, leaving))
        self._work.notify()

    def put_all(self, space: PoolSpace) -> None:
        """Queue all blocks of a space that the store below lacks, heads first."""
        for block in space.blocks():
            if not block.saved and not block.leaving:
                self.put(block, leaving=False)

    def look(self) -> None:
        """Pages were taken, or blocks became idle: more pages may have to be made free."""
        if self._wants_room():
            self._work.notify()

    def stop(self) -> None:
        """Copy nothing more; what waits is dropped."""
        self._stopping = True
        self._work.notify()

    def join(self, deadline: float) -> None:
        """Wait for the thread; without the lock."""
        if self._thread is None:
            return
        self._thread.join(time_left(deadline))
        if self._thread.is_alive():
            _LOG.error(
                "%s: the store below does not let go of the copies that it was asked for; they are left to "
                "themselves", self._pool.device.name,
            )  # fmt: skip

    def _wants_room(self) -> bool:
        table = self._pool.table
        spare = self._pool.options.spare_blocks
        return bool(table.idle_pages) and table.free_pages + table.leaving_pages < spare

    # ---- the thread, without the lock ---------------------------------------------------------------

    def _run(self) -> None:
        pool = self._pool
        while True:
            with pool.lock:
                self._busy = False
                pool.changed.notify_all()
                while not (self._queue or self._stopping or self._wants_room()):
                    self._work.wait()
                if self._stopping:
                    return
                before = pool.table.free_pages
                pool.make_spare()
                batch = self._batch()
                if not batch and pool.table.free_pages == before:  # the policy gives nothing just now
                    self._work.wait(_LOOK_S)
                    continue
                self._busy = True
            try:
                self._copy(batch)
            except Exception:  # noqa: BLE001 - a thread root: it goes on, the blocks of the batch are lost
                _LOG.exception("%s: %d blocks could not be copied down", pool.device.name, len(batch))
            finally:
                self._finish(batch)

    def _batch(self) -> list[_Job]:
        """The next jobs of one space."""
        batch: list[_Job] = []
        while self._queue and len(batch) < self._pool.options.batch_blocks:
            if batch and self._queue[0].block.space is not batch[0].block.space:
                break
            batch.append(self._queue.popleft())
        return batch

    def _copy(self, batch: Sequence[_Job]) -> None:
        with self._pool.lock:  # those removed meanwhile are wanted nowhere
            live = [job for job in batch if job.block.stored]
        if not live:
            return
        below = live[0].block.space.below
        assert below is not None
        flights: list[_Flight] = []
        try:
            for run in _runs(live):
                flight = self._begin(below, run)
                if flight is not None:
                    flights.append(flight)
        finally:
            for flight in flights:
                self._end_surely(flight)

    def _end_surely(self, flight: _Flight) -> None:
        """Whatever happens, pages and slots of copies that may be in flight are not used again."""
        try:
            self._end(flight)
        except Exception:  # noqa: BLE001 - see _run; the other flights have to be waited for
            _LOG.exception("%s: %d blocks are left as they are", self._pool.device.name, len(flight.jobs))
            self._stranded.append(flight)

    def _begin(self, below: Namespace, run: Sequence[_Job]) -> _Flight | None:
        """Reserve slots below and start the copies; ``None`` if there is nothing to copy, or no room."""
        pool = self._pool
        blocks = {job.block.key: job for job in run}
        try:
            until = deadline_in(pool.options.copy_wait_s)
            lease = below.reserve(list(blocks), parent=run[0].block.parent, deadline=until)
        except KVFerryError as error:
            _LOG.warning("%s: %d blocks are lost, the store below: %s", pool.device.name, len(run), error)
            return None
        wanted = set(lease.keys)
        for key, job in blocks.items():
            job.saved = key not in wanted
        if not wanted:
            lease.abort()
            return None
        jobs = [blocks[key] for key in lease.keys]
        writing = ExitStack()
        try:
            writing.enter_context(lease.writing())
            views = [lease.view(number) for number in range(len(jobs))]
            events = [job.block.written for job in jobs if job.block.written is not None]
            pages = [job.block.pages[0] for job in jobs]
            copying = pool.start_copy(pages, views, events, to_pages=False)
        except KVFerryError as error:
            writing.close()
            lease.abort()
            _LOG.warning("%s: %d blocks are lost: %s", pool.device.name, len(jobs), error)
            return None
        return _Flight(jobs, lease, writing, copying, views)

    def _end(self, flight: _Flight) -> None:
        """Wait for the copies, then publish them below. Never gives a slot back that may still be written."""
        while flight.copying is not None:
            try:
                flight.copying.wait(deadline_in(_LOOK_S))
            except TransferTimeoutError:
                continue  # the engine's own end, or the device's, settles it
            except KVFerryError as error:
                if isinstance(error, DeviceError):
                    self._stranded.append(flight)
                    self._pool.fail(error)
                    return
                flight.writing.close()
                flight.lease.abort()
                return
            break
        flight.views.clear()
        flight.writing.close()
        try:
            flight.lease.commit()
        except KVFerryError as error:
            _LOG.warning("%s: %d blocks are lost: %s", self._pool.device.name, len(flight.jobs), error)
            return
        for job in flight.jobs:
            job.saved = True
        with self._pool.lock:
            self.demoted_blocks += len(flight.jobs)

    def _finish(self, batch: Sequence[_Job]) -> None:
        pool = self._pool
        with pool.lock:
            dead = {id(job) for flight in self._stranded for job in flight.jobs}
            for job in batch:
                if id(job) in dead:
                    continue  # its pages may still be read: they stay as they are
                block = job.block
                block.saved = block.saved or job.saved
                self.lost_blocks += block.stored and not job.saved
                if job.leaving:
                    pool.table.left(block)
                else:
                    pool.table.drop(block)
            pool.changed.notify_all()


def _runs(jobs: Sequence[_Job]) -> list[list[_Job]]:
    """As runs of chains, each from head to tail."""
    by_key: dict[BlockKey, _Job] = {job.block.key: job for job in jobs}
    below: dict[BlockKey, BlockKey] = {}
    heads: list[_Job] = []
    for job in by_key.values():
        parent = job.block.parent
        if parent is None or parent not in by_key or parent in below:
            heads.append(job)
        else:
            below[parent] = job.block.key
    runs: list[list[_Job]] = []
    for head in heads:
        run, key = [head], below.get(head.block.key)
        while key is not None and by_key[key] is not head:
            run.append(by_key[key])
            key = below.get(key)
        runs.append(run)
    return runs
