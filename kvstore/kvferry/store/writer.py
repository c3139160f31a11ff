"""Copies from memory to one slower tier, in the background, bounded in bytes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvferry.core.chains import Block
from kvferry.core.condition import QuietCondition
from kvferry.core.keys import BlockKey
from kvferry.core.pool import BlockPool
from kvferry.store.hands import UNKNOWN, drop_frames, lend, over_when, trace_of
from kvferry.store.level import Level
from kvferry.store.tier import BlockWrite, TierNamespace, WriteOutcome, WriteResult

__all__ = ["TierWriter", "WriteJob"]

_LOG = logging.getLogger(__name__)
_BATCH_BLOCKS = 32
_BATCH_NBYTES = 64 << 20
_LIMBO_PAUSE_S = 0.05
_RECOVERY_S = 1.0
_REMOVE_BATCH = 1024
_DONE = frozenset({WriteOutcome.STORED, WriteOutcome.PRESENT})


class WriteJob:
    """One block on its way to the tier; it holds the block.

    Attributes:
        namespace: Whose block it is.
        block: The block.
        leaving: Memory waits for the copy to give the room to others.
        cancelled: The block was removed meanwhile.
        again: Its key was removed from the tier while it was written, for what was stored before.
    """

    __slots__ = ("again", "block", "cancelled", "leaving", "namespace", "reference")

    def __init__(self, namespace: TierNamespace, block: Block, *, leaving: bool) -> None:
        self.namespace = namespace
        self.block = block
        self.leaving = leaving
        self.cancelled = False
        self.again = False
        self.reference: Callable[[], object] | None = None  # to the source, as it was lent to the tier


class _Removal(NamedTuple):
    """Blocks that are to go from the tier, at their place among the writes."""

    namespace: TierNamespace
    keys: Sequence[BlockKey]


class _Limbo(NamedTuple):
    """A write that was given up while the tier's hand was still on the block."""

    over: Callable[[], bool]
    job: WriteJob


class TierWriter:
    """The queue of one tier and the one thread that empties it.

    One thread, so that the writes and removals of a key happen in their order; a batch is written by as
    many hands as the tier has. All methods but :meth:`start` and :meth:`join` are called under the
    store's lock.

    Args:
        level: The tier.
        pool: The memory that is copied from.
        lock: The store's lock.
        changed: Called under the lock when room or the queue's length has changed.

    Attributes:
        queued_nbytes: Of jobs that wait or are under way.
        lost_blocks: Blocks that did not reach the tier: dropped, refused, or the write failed.
    """

    def __init__(
        self, level: Level, pool: BlockPool, lock: threading.Lock, changed: Callable[[], None]
    ) -> None:
        self.level = level
        self.queued_nbytes = 0
        self.lost_blocks = 0
        self._pool = pool
        self._lock = lock
        self._work = QuietCondition(lock)
        self._changed = changed
        self._queue: deque[WriteJob | _Removal] = deque()
        self._removals = 0  # waiting or under way
        self._jobs: dict[tuple[bytes, BlockKey], WriteJob] = {}  # waiting or under way, newest of a key
        self._limbo: list[_Limbo] = []
        self._busy: list[WriteJob] = []  # in the thread's hands: neither queued nor in limbo
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"kvferry-write-{level.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    # ---- the queue ---------------------------------------------------------------------------------

    def has_place(self, nbytes: int) -> bool:
        """Whether a block of that size may be queued."""
        return self.queued_nbytes == 0 or self.queued_nbytes + nbytes <= self.level.options.queue_nbytes

    def wants(self, block: Block) -> bool:
        """Whether the tier lacks the block and takes it: one that has lost something not everywhere."""
        return not block.places & self.level.bit and (not block.lossy or self.level.tier.takes_lossy)

    def is_queued(self, block: Block) -> bool:
        """Whether the block waits or is under way."""
        job = self._jobs.get((block.index.namespace_id, block.key))
        return job is not None and job.block is block

    def put(self, namespace: TierNamespace, block: Block, *, leaving: bool = False) -> None:
        """Queue a stored block; the caller asked :meth:`has_place`."""
        self._keep_late(namespace.namespace_id, block.key)
        job = WriteJob(namespace, block, leaving=leaving)
        if leaving:
            self._pool.leave(block)
        else:
            self._pool.hold(block)
        self.queued_nbytes += block.nbytes
        self._jobs[namespace.namespace_id, block.key] = job
        self._queue.append(job)
        self._work.notify()

    def _keep_late(self, namespace_id: bytes, key: BlockKey) -> None:
        """A removed block is wanted again: a late write of it is not undone when it ends at last."""
        for late in self._limbo:
            job = late.job
            if job.cancelled and (job.namespace.namespace_id, job.block.key) == (namespace_id, key):
                job.cancelled = False
                self.level.hidden.unmask(namespace_id, [key])

    def drop(self, count: int, nbytes: int) -> None:
        """Count blocks that are not written, since the queue has no place or the tier does not work."""
        self.lost_blocks += count
        self.level.count("write_dropped", count)
        self.level.count("write_dropped_nbytes", nbytes)

    def cancel(self, namespace_id: bytes, keys: Sequence[BlockKey] | None) -> None:
        """Blocks, or all of a namespace, were removed: not written, or removed again if under way."""
        if keys is None:
            jobs = [job for (ns, _), job in self._jobs.items() if ns == namespace_id]
        else:
            jobs = [job for key in keys if (job := self._jobs.get((namespace_id, key))) is not None]
        older = [*self._busy, *(late.job for late in self._limbo)]
        if (
            older
        ):  # of the same names: lossy ones whose place was taken, late ones, which were to stay until now
            gone = None if keys is None else set(keys)
            jobs += [
                job
                for job in older
                if job.namespace.namespace_id == namespace_id and (gone is None or job.block.key in gone)
            ]
        for job in jobs:
            if not job.cancelled:
                job.cancelled = True
                self.level.hidden.mask(namespace_id, [job.block.key])

    def remove_later(self, namespace: TierNamespace, keys: Sequence[BlockKey]) -> None:
        """Remove blocks from the tier after what is queued, and before what will be; hidden until then."""
        for start in range(0, len(keys), _REMOVE_BATCH):
            batch = keys[start : start + _REMOVE_BATCH]
            self.level.hidden.mask(namespace.namespace_id, batch)
            self._queue.append(_Removal(namespace, batch))
            self._removals += 1
        self._work.notify()

    def removed(self, namespace: TierNamespace, keys: Sequence[BlockKey]) -> None:
        """The tier was told to remove ``keys``: the copies of what was saved meanwhile may have gone, too."""
        index = self._pool.indexes.get(namespace.namespace_id)
        if index is None:
            return
        busy = {_name(job): job for job in self._busy if job.block.stored}
        for key in keys:
            block = index.entries.get(key)
            if block is None:
                continue
            job = busy.get((namespace.namespace_id, key))
            if job is not None:
                job.again = True
            if block.places & self.level.bit:
                block.places &= ~self.level.bit
                self._put_again(namespace, block)

    def _put_again(self, namespace: TierNamespace, block: Block) -> None:
        if block.stored and not self.is_queued(block):
            if self._stopping or not self.has_place(block.nbytes):
                self.drop(1, block.nbytes)
            else:
                self.put(namespace, block)

    @property
    def idle(self) -> bool:
        """Whether nothing waits or is under way."""
        return self.queued_nbytes == 0 and not self._removals

    def stop(self) -> None:
        """Write nothing more; what waits is dropped."""
        self._stopping = True
        self._work.notify()

    def join(self, deadline: float) -> bool:
        """Wait for the thread; ``False`` if the tier keeps it beyond ``deadline``."""
        if self._thread.is_alive():
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    # ---- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                with self._lock:
                    over, batch = self._next()
                    self._busy = [*over, *batch]
                    removal = self._first_removal() if not over and not batch else None
                if over:
                    self._end_late(over)
                elif removal is not None:
                    self._remove(removal)
                elif batch:
                    self._write(batch)
                else:
                    return
            except BaseException as error:  # noqa: BLE001 - root of a thread: it goes on, and frees what it holds
                self._recover(error)

    def _recover(self, error: BaseException) -> None:
        """After what should not happen: the jobs under way are lost, those that wait are not."""
        _LOG.error("the writer of tier %s failed, and goes on:\n%s", self.level.name, trace_of(error))
        drop_frames(error)
        self.level.count("faults", 1)
        gone = [job for job in self._busy if job.cancelled]
        for job in gone:  # it must not come back when nobody hides it any more
            self.level.remove(job.namespace, [job.block.key])
        with self._lock:
            for job in list(self._busy):
                late = over_when(UNKNOWN, job.reference)
                self._count_loss(job)
                if late is None:
                    self._end(job)
                else:
                    self._limbo.append(_Limbo(late, job))
                    self._stay(job)
            self._busy = []
            self._changed()
            if not self._stopping:
                self._work.wait(_RECOVERY_S)  # not as fast as it can

    def _next(self) -> tuple[list[WriteJob], list[WriteJob]]:
        """Late jobs that the tier let go of, or the next jobs of one namespace; neither at the end."""
        while True:
            over = [limbo.job for limbo in self._limbo if limbo.over()]
            if over:
                self._limbo = [limbo for limbo in self._limbo if limbo.job not in over]
                return over, []
            if self._stopping:
                self._drop_all()
                return [], []
            if self._queue:
                return [], self._batch()  # empty if a removal comes first
            self._work.wait(_LIMBO_PAUSE_S if self._limbo else 3600.0)

    def _first_removal(self) -> _Removal | None:
        first = self._queue[0] if self._queue else None
        if isinstance(first, _Removal):
            self._queue.popleft()
            return first
        return None

    def _remove(self, removal: _Removal) -> None:
        try:
            self.level.remove(removal.namespace, removal.keys)
        finally:
            with self._lock:
                self.level.hidden.unmask(removal.namespace.namespace_id, removal.keys)
                self.removed(removal.namespace, removal.keys)
                self._removals -= 1
                self._changed()

    def _batch(self) -> list[WriteJob]:
        """The next jobs of one namespace, each key once: an exact block follows the lossy one it replaces."""
        first = self._queue[0]
        batch: list[WriteJob] = []
        keys: set[BlockKey] = set()
        nbytes = 0
        while self._queue and len(batch) < _BATCH_BLOCKS and nbytes < _BATCH_NBYTES:
            job = self._queue[0]
            if isinstance(job, _Removal) or job.namespace != first.namespace or job.block.key in keys:
                break
            keys.add(job.block.key)
            self._queue.popleft()
            nbytes += job.block.nbytes
            batch.append(job)
        return batch

    def _write(self, batch: list[WriteJob]) -> None:
        with self._lock:
            live = [
                job for job in batch if not job.cancelled and job.block.stored
            ]  # else its place was taken
            writes = [self._lent(job) for job in live]
        namespace = batch[0].namespace
        results = self.level.write(namespace, writes) if writes else []
        del writes  # the views
        outcome = dict(zip(live, results, strict=True))
        with self._lock:
            gone = [job for job in live if job.cancelled]
            for job in batch:
                if not job.cancelled or job not in outcome:
                    self._finish(job, outcome.get(job))
            self._changed()
        if gone:
            self._remove_again(gone, outcome)

    def _lent(self, job: WriteJob) -> BlockWrite:
        block = job.block
        view, job.reference = lend(self._pool.arena.view(block.slot))
        return BlockWrite(block.key, view, block.parent, block.find_position(), block.lossy)

    def _remove_again(self, gone: list[WriteJob], outcome: dict[WriteJob, WriteResult]) -> None:
        """What was removed while it was written: out of the tier, and only then out of sight of nobody."""
        self.level.remove(gone[0].namespace, [job.block.key for job in gone])
        with self._lock:
            for job in gone:
                self._finish(job, outcome[job])
            self._changed()

    def _finish(self, job: WriteJob, result: WriteResult | None) -> None:
        """End a job; ``result`` is ``None`` for one that was never handed to the tier."""
        late = None if result is None else over_when(result.in_flight, job.reference)
        if late is not None:
            self._busy.remove(job)
            self._limbo.append(_Limbo(late, job))
            if job.cancelled and not self._is_newest(job):  # saved again meanwhile: see _keep_late
                job.cancelled = False
                self.level.hidden.unmask(job.namespace.namespace_id, [job.block.key])
            self._stay(job)
            self._count_loss(job)
            return
        if result is not None and result.outcome in _DONE and not job.cancelled:
            self.level.hidden.stored(job.namespace.namespace_id, [job.block.key])
            if job.again:
                self._stay(job)
                self._end(job)
                self._put_again(job.namespace, job.block)
                return
            job.block.places |= self.level.bit
        elif result is not None and result.outcome not in _DONE:
            self._count_loss(job)
        self._end(job)

    def _stay(self, job: WriteJob) -> None:
        """The tier's hand stays on the block: nobody should wait for its room any more."""
        if job.leaving:
            job.leaving = False
            self._pool.stay(job.block)

    def _is_newest(self, job: WriteJob) -> bool:
        return self._jobs.get(_name(job), job) is job

    def _count_loss(self, job: WriteJob) -> None:
        if not job.cancelled:
            self.lost_blocks += 1

    def _end(self, job: WriteJob) -> None:
        if job in self._busy:
            self._busy.remove(job)
        if job.cancelled:
            self.level.hidden.unmask(job.namespace.namespace_id, [job.block.key])
        if self._jobs.get(_name(job)) is job:
            del self._jobs[_name(job)]
        self.queued_nbytes -= job.block.nbytes
        if job.leaving:
            self._pool.left(job.block)
        else:
            self._pool.drop(job.block)

    def _end_late(self, over: list[WriteJob]) -> None:
        for job in over:
            if job.cancelled:  # the tier may have it after all
                self.level.remove(job.namespace, [job.block.key])
        with self._lock:
            for job in over:
                self._end(job)
            self._changed()

    def _drop_all(self) -> None:
        removals: deque[WriteJob | _Removal] = deque()
        for job in self._queue:
            if isinstance(job, _Removal):
                removals.append(job)  # they are done all the same
                continue
            if not job.cancelled:
                self.drop(1, job.block.nbytes)
            self._end(job)
        self._queue = removals
        self._changed()


def _name(job: WriteJob) -> tuple[bytes, BlockKey]:
    return job.namespace.namespace_id, job.block.key
