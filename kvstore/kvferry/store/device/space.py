"""The published blocks of one namespace in a pool; see :class:`PoolSpace`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.core.blockstore import Namespace, ReadLease
from kvferry.core.chains import ChainIndex
from kvferry.core.errors import (
    ConfigError,
    DeviceError,
    KVFerryError,
    OverloadedError,
    RequestCancelledError,
    StoreError,
    TransferTimeoutError,
)
from kvferry.core.keys import BlockKey
from kvferry.device.base import Event, Stream
from kvferry.store.device.table import PoolBlock, pending
from kvferry.store.tier import TierNamespace

if TYPE_CHECKING:
    from kvferry.store.device.pool import DevicePool

__all__ = ["PoolSpace", "Restored", "SpaceBlock"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """A prefix that is in place.

    Attributes:
        pages: Of its blocks, in order; held by the caller.
        shared_blocks: How many of them were in the pool; the others came from the store below.
        lossy: Numbers of blocks that have lost something: their pages are the caller's alone.
    """

    pages: list[int]
    shared_blocks: int
    lossy: frozenset[int] = frozenset()


class SpaceBlock(PoolBlock):
    """A published block, in one page.

    Attributes:
        space: Where it is published.
    """

    __slots__ = ("space",)

    def __init__(self, space: PoolSpace, key: BlockKey, parent: BlockKey | None, page: int) -> None:
        super().__init__(space.index(), key, parent, (page,))
        self.space = space


class PoolSpace:
    """Blocks of one tenant and scope, by key. Thread safe; made by :meth:`DevicePool.space`.

    Attributes:
        name: Tenant, namespace and spec.
        below: Where blocks go when their pages are needed; ``None``: nowhere.
    """

    def __init__(self, pool: DevicePool, name: TierNamespace) -> None:
        self.name = name
        self.below: Namespace | None = None
        self._pool = pool

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Length, in blocks, of the longest prefix of ``keys`` in the pool. No side effect."""
        with self._pool.lock:
            return len(self._prefix(keys))

    def acquire(self, keys: Sequence[BlockKey], *, stream: Stream | None = None) -> list[int]:
        """Hold the longest prefix of ``keys`` in the pool; returns its pages, which are not to be written.

        Args:
            keys: A run of a chain.
            stream: Of the kernels that will read them, the current one if not given: it waits there for
                the kernels that write them.

        Raises:
            ConfigError: If a key is given twice.
            DeviceError: If the device has failed, or the pool is closed.
        """
        _require_run(keys)
        pool = self._pool
        with pool.lock:
            pool.require_open()
            blocks = self._prefix(keys)
            for block in blocks:
                pool.table.hold(block)
            pool.table.touch(blocks)
            written = dict.fromkeys(block.written for block in blocks if block.written is not None)
            events = pending(written)
            for block in blocks:
                if block.written not in events:
                    block.written = None
        pool.order(stream, events)
        return [block.pages[0] for block in blocks]

    def restore(self, keys: Sequence[BlockKey], *, deadline: float, stream: Stream | None = None) -> Restored:
        """Hold the longest prefix that the pool or the store below has, all of it in pages of the pool.

        What the store below does not give by the deadline is left out.

        Args:
            keys: A run of a chain from its head.
            deadline: By when blocks from below must be there.
            stream: See :meth:`acquire`.

        Raises:
            CapacityError: If there are not enough pages; none is held.
            ConfigError: If a key is given twice.
            DeviceError: If the device has failed, or the pool is closed.
        """
        shared = self.acquire(keys, stream=stream)
        rest = keys[len(shared) :]
        if not rest or self.below is None:
            return Restored(shared, len(shared))
        try:
            parent = keys[len(shared) - 1] if shared else None
            pages, lossy = self._promote(self.below, rest, parent, deadline)
        except BaseException:
            self._pool.release(shared)
            raise
        return Restored([*shared, *pages], len(shared), frozenset(len(shared) + n for n in lossy))

    def publish(
        self,
        keys: Sequence[BlockKey],
        pages: Sequence[int],
        *,
        parent: BlockKey | None,
        event: Event | None = None,
        saved: bool = False,
    ) -> int:
        """Let others share complete blocks. The pages stay held by the caller, who writes them no more.

        A key that is in the pool already is passed over: its page stays the caller's own.

        Args:
            keys: A run of a chain.
            pages: Of each; allocated by the caller.
            parent: Key of the block before the first.
            event: Recorded behind the kernels that write them; if not given, one is recorded here on the
                thread's current stream.
            saved: Whether the store below has them.

        Returns:
            Blocks newly in the pool.

        Raises:
            ConfigError: If a page is not the caller's to publish or is given twice, or the keys are no run
                behind ``parent``; nothing is published.
            DeviceError: If the device has failed, or the pool is closed.
        """
        _require_run(keys if parent is None else [parent, *keys])
        if len(keys) != len(pages):
            raise ConfigError(f"{len(keys)} keys are to be published, in {len(pages)} pages")
        if len(set(pages)) < len(pages):
            raise ConfigError(f"pages {list(pages)} are to be published: one of them under two keys")
        pool = self._pool
        if event is None:
            event = pool.record()
        return len(self._enter(keys, pages, parent, event, saved=saved))

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """Forget blocks of the pool; those that are held stay where they are until they are released.

        Returns:
            How many were there.
        """
        pool = self._pool
        with pool.lock:
            entries = self.index().entries
            found = [block for key in dict.fromkeys(keys) if (block := entries.get(key)) is not None]
            for block in found:
                pool.table.forget(block)
            pool.changed.notify_all()
        return len(found)

    # ---- under the pool's lock ----------------------------------------------------------------------

    def index(self) -> ChainIndex[PoolBlock]:
        """Of the blocks."""
        return self._pool.table.index(self.name, self.name.namespace_id)

    def blocks(self) -> list[SpaceBlock]:
        """All published blocks, in the order in which they came."""
        return [block for block in self.index().entries.values() if isinstance(block, SpaceBlock)]

    def _prefix(self, keys: Sequence[BlockKey]) -> list[PoolBlock]:
        entries, found = self.index().entries, list[PoolBlock]()
        for key in keys:
            block = entries.get(key)
            if block is None:
                break
            found.append(block)
        return found

    # ---- without it ---------------------------------------------------------------------------------

    def _enter(
        self,
        keys: Sequence[BlockKey],
        pages: Sequence[int],
        parent: BlockKey | None,
        event: Event | None,
        *,
        saved: bool,
    ) -> list[SpaceBlock]:
        pool, parents = self._pool, [parent, *keys][: len(keys)]
        with pool.lock:
            pool.require_open()
            table, index = pool.table, self.index()
            new = [
                SpaceBlock(self, key, above, page)
                for key, above, page in zip(keys, parents, pages, strict=True)
                if key not in index.entries
            ]
            for block in new:
                try:
                    taken = table.block_of(block.pages[0]) is not None
                except KeyError:
                    taken = True
                if taken:
                    raise ConfigError(f"page {block.pages[0]} is not the caller's to publish")
            for block in reversed(new):
                block.holds, block.written, block.saved = 1, event, saved
                table.store(block)
            if not saved and self.below is not None and pool.options.write == "commit":
                for block in new:
                    pool.demotion.put(block, leaving=False)
        return new

    def _promote(
        self, below: Namespace, keys: Sequence[BlockKey], parent: BlockKey | None, deadline: float
    ) -> tuple[list[int], frozenset[int]]:
        """Bring blocks up; their pages, held by the caller, and the numbers of those that lost something."""
        try:
            prefix = below.lookup(keys).prefix
            if prefix == 0:
                return [], frozenset()
            lease = below.load(keys[:prefix], deadline=deadline)
        except KVFerryError as error:
            _LOG.warning("blocks of the store below could not be used: %s", error)
            return [], frozenset()
        count, lossy = len(lease), frozenset(n for n in lease.lossy if n < len(lease))
        try:
            pages = self._fill(lease, count, deadline)
        except BaseException:
            _let_go(lease)
            raise
        if not pages:
            _let_go(lease)
            return [], frozenset()
        if not _let_go(lease):  # the end of the lease has checked what was copied
            self._pool.release(pages)
            return [], frozenset()
        whole = min(lossy, default=count)  # what is behind a block that has lost something saw it
        self._enter(keys[:whole], pages[:whole], parent, None, saved=True)
        with self._pool.lock:
            self._pool.promoted_blocks += count
        return pages, lossy

    def _fill(self, lease: ReadLease, count: int, deadline: float) -> list[int]:
        """Copy a lease's blocks into new pages; none, if that was not to be done by the deadline."""
        pool = self._pool
        if count == 0:
            return []
        pages, events = pool.take(count, deadline=deadline)
        try:
            views = [lease.view(number) for number in range(count)]
            copying = pool.start_copy(pages, views, events, to_pages=True)
        except OverloadedError as error:
            _LOG.warning("%s: blocks of the store below are left there: %s", pool.device.name, error)
            pool.unused(pages, events)
            return []
        except BaseException:
            pool.unused(pages, events)
            raise
        try:
            if copying is not None:
                copying.wait(deadline)
        except TransferTimeoutError as error:
            assert copying is not None
            _LOG.warning("%s: blocks of the store below came too late: %s", pool.device.name, error)
            copying.cancel()
            pool.strand(copying, pages, events)
            return []
        except DeviceError as error:
            pool.fail(error)  # the pages stay taken: the device may still write them
            raise
        except RequestCancelledError:  # the engine is closed
            pool.unused(pages, events)
            raise
        return pages


def _require_run(keys: Sequence[BlockKey]) -> None:
    """Blocks of a ring have no head: they would never be copied down."""
    if len(set(keys)) < len(keys):
        again = next(key for number, key in enumerate(keys) if key in keys[:number])
        raise ConfigError(
            f"key {again[:8].hex()}… is given twice: a run of a chain has each once, and its parent is the "
            "key before the first, None at the head"
        )


def _let_go(lease: ReadLease) -> bool:
    """Release it; whether what was read through it is right."""
    try:
        lease.release()
    except StoreError as error:
        _LOG.warning("blocks of the store below could not be used: %s", error)
        return False
    return True
