"""Watermarks: memory is evicted in the background, so that a save finds room at once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvferry.core.chains import Block
from kvferry.core.clock import time_left
from kvferry.core.condition import QuietCondition
from kvferry.core.eviction import Entry
from kvferry.core.pool import BlockPool

__all__ = ["RoomKeeper", "evict_some"]

_LOG = logging.getLogger(__name__)
_BATCH = 64  # evictions between which others get the lock
_PAUSE_S = 0.05  # when nothing may be evicted now, or copies have to be made first


def _held(entry: Entry) -> bool:
    assert isinstance(entry, Block)
    return entry.holds > 0


class RoomKeeper:
    """One thread that evicts from the high watermark down to the low one.

    Args:
        pool: The memory.
        lock: The store's lock.
        changed: Called under the lock when there is more room.
        watermarks: (low, high) shares of the capacity.
    """

    def __init__(
        self,
        pool: BlockPool,
        lock: threading.Lock,
        changed: Callable[[], None],
        watermarks: tuple[float, float],
    ) -> None:
        self._pool = pool
        self._changed = changed
        self._low_share, self._high_share = watermarks
        self._lock = lock
        self._work = QuietCondition(lock)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvferry-room", daemon=True)

    @property
    def _low(self) -> float:
        return self._low_share * self._pool.arena.capacity_nbytes

    @property
    def _high(self) -> float:
        return self._high_share * self._pool.arena.capacity_nbytes

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def look(self) -> None:
        """Memory has filled up further; under the lock."""
        if self._pool.arena.used_nbytes > self._high:
            self._work.notify()

    def close(self, deadline: float) -> None:
        """End the thread; without the lock."""
        with self._lock:
            self._stopping = True
            self._work.notify()
        self._thread.join(time_left(deadline))

    def _run(self) -> None:
        try:
            with self._lock:
                while not self._stopping:
                    if self._pool.arena.used_nbytes > self._high:
                        self._lower()
                    else:
                        self._work.wait(3600.0)
        except Exception:  # noqa: BLE001 - root of a thread: it must not end unseen
            _LOG.exception("memory is not evicted in the background any more")

    def _lower(self) -> None:
        """Evict down to the low mark, giving up the lock now and then; waits if nothing can go now."""
        while not self._stopping and self._excess() > 0:
            before = self._excess()
            steps = self._pool.evictions(_held)
            for _ in range(_BATCH):
                if self._excess() <= 0 or not next(steps, False):
                    break
            steps.close()
            self._changed()
            self._work.wait(0.0 if self._excess() < before else _PAUSE_S)
        deadline = time.monotonic() + _PAUSE_S
        while not self._stopping and self._pool.leaving_nbytes and time.monotonic() < deadline:
            self._work.wait(_PAUSE_S)

    def _excess(self) -> float:
        return self._pool.arena.used_nbytes - self._pool.leaving_nbytes - self._low


def evict_some(
    pool: BlockPool, lock: threading.Lock, changed: Callable[[], None], nbytes: int
) -> tuple[int, int]:
    """Evict, or begin to, until ``nbytes`` have gone or nothing more can; gives up the lock now and then.

    Returns:
        Blocks and bytes.
    """
    blocks = gone = 0
    while gone < nbytes:
        with lock:
            before, steps = _staying(pool), pool.evictions(_held)
            taken = 0
            while taken < _BATCH and before - _staying(pool) < nbytes - gone and next(steps, False):
                taken += 1
            steps.close()
            gone += before - _staying(pool)
            blocks += taken
            changed()
        if not taken:
            break
    return blocks, gone


def _staying(pool: BlockPool) -> int:
    return pool.arena.used_nbytes - pool.leaving_nbytes
