"""The way down: which blocks are copied to which slower tier, and when."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from kvferry.core.chains import Block
from kvferry.core.eviction import Leave
from kvferry.core.keys import BlockKey
from kvferry.core.pool import BlockPool
from kvferry.store.level import Level
from kvferry.store.tier import TierNamespace
from kvferry.store.writer import TierWriter

__all__ = ["WayDown"]

_LOG = logging.getLogger(__name__)
_RECHECK_S = 0.5


class WayDown:
    """The writers of all slower tiers, and what each of them gets.

    All methods but :meth:`start` and :meth:`join` are called under the store's lock.

    Args:
        levels: The tiers, fastest first.
        pool: The memory.
        lock: The store's lock.
        cond: On that lock; notified when there is more room or a queue is shorter.
        spaces: The namespaces that the tiers know, by id.

    Attributes:
        writers: One a tier, in the order of ``levels``.
        at_commit: Those whose tiers get blocks when they are saved.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        pool: BlockPool,
        lock: threading.Lock,
        cond: threading.Condition,
        spaces: Mapping[bytes, TierNamespace],
    ) -> None:
        self._pool = pool
        self._cond = cond
        self._spaces = spaces
        self._stopping = False
        self.writers = [TierWriter(level, pool, lock, cond.notify_all) for level in levels]
        self.at_commit = [w for w in self.writers if w.level.options.write.when == "commit"]
        self._at_evict = [w for w in self.writers if w.level.options.write.when == "evict"]
        self._on_use = [w for w in self.writers if w.level.options.admission.asks_on_use]
        if self._at_evict:
            pool.may_leave = self._may_leave

    def start(self) -> None:
        """Start the threads."""
        for writer in self.writers:
            writer.start()

    def stop(self) -> None:
        """Write nothing more; what waits is dropped."""
        self._stopping = True
        self._cond.notify_all()
        for writer in self.writers:
            writer.stop()

    def join(self, deadline: float) -> None:
        """Wait for the threads."""
        for writer in self.writers:
            if not writer.join(deadline):
                _LOG.warning("tier %s does not end its last write; its thread is left", writer.level.name)

    @property
    def idle(self) -> bool:
        """Whether nothing waits or is under way."""
        return all(writer.idle for writer in self.writers)

    @property
    def queued_nbytes(self) -> int:
        """Of what waits or is under way."""
        return sum(writer.queued_nbytes for writer in self.writers)

    @property
    def lost_blocks(self) -> int:
        """Blocks that did not reach a tier, counted for each tier."""
        return sum(writer.lost_blocks for writer in self.writers)

    def cancel(self, namespace_id: bytes, keys: Sequence[BlockKey] | None) -> None:
        """See :meth:`TierWriter.cancel`."""
        for writer in self.writers:
            writer.cancel(namespace_id, keys)

    # ---- what goes down ----------------------------------------------------------------------------

    def stored(self, blocks: Sequence[Block], deadline: float) -> None:
        """Blocks were saved: queue them for the tiers that get them at once; may wait for a place."""
        late: deque[tuple[TierWriter, Block]] = deque()
        try:
            for writer in self.at_commit:  # nothing waits here, so that every block is still there
                level, waits = writer.level, False
                for block in blocks:
                    if not writer.wants(block):
                        continue  # lossy, and none of this tier's; or from a daemon that this tier may be
                    if not level.options.admission.admit(block.index.namespace_id, block.key):
                        continue
                    if not waits and self._put(writer, block):
                        continue
                    if level.options.write.full == "wait" and level.writes.ready:
                        waits = True  # the others too: heads first
                        self._pool.hold(block)
                        late.append((writer, block))
                    else:
                        writer.drop(1, block.nbytes)
            while late:
                self._put_late(*late[0], deadline)
                self._let_go(late)
        finally:  # only where something raised: a signal handler in the wait, or a policy
            while late:
                late[0][0].drop(1, late[0][1].nbytes)
                self._let_go(late)

    def _let_go(self, late: deque[tuple[TierWriter, Block]]) -> None:
        self._pool.drop(late.popleft()[1])
        self._cond.notify_all()

    def used(self, blocks: Sequence[Block]) -> None:
        """Blocks in memory were used, or saved again: tiers that admit on use may want them now."""
        for writer in self._on_use:
            admit = writer.level.options.admission.admit
            for block in blocks:
                unseen = writer.wants(block) and not writer.is_queued(block)
                wanted = unseen and admit(block.index.namespace_id, block.key)
                if wanted and writer in self.at_commit:
                    self._put(writer, block)

    def came_up(self, blocks: Sequence[Block]) -> None:
        """Blocks were read from a slower tier and stay: tiers in between may get them too."""
        for writer in self.at_commit:
            for block in blocks:
                between = writer.level.bit < block.places and writer.wants(block)
                if between and writer.level.options.admission.admit(block.index.namespace_id, block.key):
                    self._put(writer, block)

    def only_here(self, blocks: set[Block], *, soon: bool) -> set[Block]:
        """Those that would be lost if they were evicted; with ``soon``, also after the copies under way.

        None would, where a tier gets what is evicted and takes everything.
        """
        for writer in self._at_evict:
            if writer.level.writes.ready and not writer.level.options.admission.asks_on_use:
                return set()
        queues = self.writers if soon else ()
        return {b for b in blocks if not b.places and not any(w.is_queued(b) for w in queues)}

    def _put(self, writer: TierWriter, block: Block) -> bool:
        if not writer.level.writes.ready or not writer.has_place(block.nbytes):
            return False
        writer.put(self._spaces[block.index.namespace_id], block)
        return True

    def _put_late(self, writer: TierWriter, block: Block, deadline: float) -> None:
        """Queue a held block as soon as there is a place; dropped at the deadline."""
        while block.stored and not self._stopping and writer.level.writes.ready:
            now = time.monotonic()
            if writer.has_place(block.nbytes) or now >= deadline:
                break
            self._cond.wait(min(deadline - now, _RECHECK_S))
        if block.stored and (self._stopping or not self._put(writer, block)):
            writer.drop(1, block.nbytes)

    def _may_leave(self, block: Block) -> Leave:
        """Asked by the pool before it evicts: tiers that get blocks on eviction get it first."""
        chosen: list[TierWriter] = []
        for writer in self._at_evict:
            options = writer.level.options
            if not writer.wants(block):
                continue
            if not writer.level.writes.ready:
                writer.drop(1, block.nbytes)
            elif writer.has_place(block.nbytes):
                if options.admission.admit(block.index.namespace_id, block.key):
                    chosen.append(writer)
            elif options.write.full == "wait":
                return Leave.NOT_YET
            else:
                writer.drop(1, block.nbytes)
        for writer in chosen:
            writer.put(self._spaces[block.index.namespace_id], block, leaving=True)
        return Leave.COPIED_FIRST if chosen else Leave.NOW

    # ---- until all is there ------------------------------------------------------------------------

    def drain(self, deadline: float) -> bool:
        """Wait until all queues are empty, with what is written on eviction; ``False`` at the deadline."""
        todo = [(writer, block) for writer in self._at_evict for block in self._dirty(writer)]
        todo.reverse()
        while True:
            while todo:
                writer, block = todo[-1]
                if block.stored and writer.wants(block) and not writer.is_queued(block):
                    if writer.level.writes.ready and not writer.has_place(block.nbytes):
                        break
                    if not self._put(writer, block):
                        writer.drop(1, block.nbytes)
                todo.pop()
            if not todo and self.idle:
                return True
            now = time.monotonic()
            if now >= deadline:
                return False
            self._cond.wait(min(deadline - now, _RECHECK_S))

    def _dirty(self, writer: TierWriter) -> list[Block]:
        """Blocks in memory that the tier should have and has not, heads first."""
        admit = writer.level.options.admission.admit
        return [
            block
            for index in self._pool.indexes.values()
            for block in index.entries.values()
            if writer.wants(block) and admit(index.namespace_id, block.key)
        ]
