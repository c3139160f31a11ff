"""The paged memory of an engine, registered for the blocks of one namespace."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.client.jobs import Job
from kvferry.client.leases import ClientWriteLease
from kvferry.client.load_job import LoadJob
from kvferry.client.save_job import SaveJob
from kvferry.core.blockstore import Namespace, ReadLease, WriteLease
from kvferry.core.errors import ConfigError, StoreError
from kvferry.core.keys import BlockKey, require_key, require_keys
from kvferry.core.paged_copy import Event, checked_pages, require_event
from kvferry.core.regions import RegionPlan
from kvferry.core.values import require_whole

if TYPE_CHECKING:
    from types import TracebackType

    from kvferry.client.mover import BlockMover

__all__ = ["Registration"]

_ORDERS = ("layer", "block")


class Registration:
    """Regions of paged memory that blocks are loaded into and saved from. Thread safe.

    Two jobs that touch the same block at a time are the engine's to avoid, except loads of different heads
    into it (``shard``).

    Attributes:
        mover: What moves them.
        namespace: Whose blocks.
        plan: How they lie.
    """

    def __init__(self, mover: BlockMover, namespace: Namespace, plan: RegionPlan) -> None:
        self.mover = mover
        self.namespace = namespace
        self.plan = plan
        self._jobs: weakref.WeakSet[Job] = weakref.WeakSet()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Registration of {self.plan.blocks} blocks, {len(self.plan.regions)} regions>"

    def load(
        self, job: str, lease: ReadLease, block_ids: Sequence[int], *, deadline: float, first: int = 0,
        order: str = "layer", after: Event | None = None,
    ) -> LoadJob:  # fmt: skip
        """Load the blocks of a lease into the engine's blocks. Waits for nobody.

        The lease belongs to the job from here on, which renews it while it needs it, and releases it.

        Args:
            job: A name for :meth:`poll`.
            lease: Of the namespace, from its ``load``, or found by its id.
            block_ids: Where each block goes. There may be more than the lease has: those are misses, and
                failed from the start.
            deadline: By when it is over; what is not loaded by then has failed.
            first: Number of the lease's block that goes to ``block_ids[0]``.
            order: ``layer``: all blocks layer by layer, so that the first can be used while the others are
                on their way; ``block``: block by block, so that those that were loaded are whole.
            after: Nothing is written before it is done: the last read of these blocks by somebody else.

        Raises:
            ConfigError: For a block that was not registered, or twice the same, fewer of them than the
                lease has, an unknown order, or what is no read lease of blocks of this spec. The lease stays
                the caller's.
            LeaseExpiredError: If the lease has ended.
            StoreError: If it is closed.
        """
        self._require_open()
        if order not in _ORDERS:
            raise ConfigError(f"order {order!r}: take one of {', '.join(_ORDERS)}")
        self._require_lease(job, lease)
        require_whole("first", first)
        require_event("after", after)
        checked_pages(self.plan, block_ids)
        if len(set(block_ids)) != len(block_ids):
            raise ConfigError(f"load {job!r} names a block twice among {len(block_ids)}")
        if not 0 <= first <= len(lease) or len(lease) - first > len(block_ids):
            raise ConfigError(
                f"load {job!r}: {len(block_ids)} block ids for a lease of {len(lease)} from number {first} on"
            )
        made = LoadJob(self, job, lease, block_ids, first=first, order=order, after=after, deadline=deadline)
        self._take(made)
        return made

    def save(
        self, job: str, keys: Sequence[BlockKey], block_ids: Sequence[int], *, parent: BlockKey | None,
        deadline: float, lossy: bool = False,
    ) -> SaveJob:  # fmt: skip
        """Save the engine's blocks, layer by layer as it says that they are ready. Waits for nobody.

        Args:
            job: A name for :meth:`poll`.
            keys: A run of a key chain, in order, each once.
            block_ids: Where each block is.
            parent: Key of the block before ``keys[0]``, ``None`` if that is the first.
            deadline: By when it is over, stored or not.
            lossy: They were computed behind blocks that have lost something (:attr:`LoadJob.lossy`).

        Raises:
            ConfigError: For a block that was not registered, a key that is none or comes twice, if there
                are not as many of both, or if the engine's blocks have not all heads of those to be stored.
            StoreError: If it is closed.
        """
        self._require_open()
        heads = self.plan.heads
        if heads is not None and not self.plan.whole_blocks:
            raise ConfigError(
                f"save {job!r}: these pages have {heads.count} of the {heads.in_blocks} KV heads of a block, "
                "and only whole blocks are stored; save under the spec of the rank that has the pages"
            )
        keys = require_keys(keys)
        if parent is not None:
            require_key(parent, "parent")
        checked_pages(self.plan, block_ids)
        if len(set(keys)) != len(block_ids) or len(keys) != len(block_ids):
            raise ConfigError(f"save {job!r}: {len(set(keys))} different keys, {len(block_ids)} block ids")
        made = SaveJob(self, job, keys, block_ids, parent=parent, deadline=deadline, lossy=lossy)
        self._take(made)
        made.begin()
        return made

    def commit(self, lease: WriteLease, deadline: float) -> int:
        """Publish what was saved."""
        if isinstance(lease, ClientWriteLease):
            return lease.commit(max(deadline, time.monotonic() + 0.1))
        return lease.commit()

    def close(self) -> None:
        """Cancel all jobs; nothing of this registration touches the regions after that."""
        self._closed = True
        for job in list(self._jobs):
            job.cancel()

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self!r} is closed")

    def _require_lease(self, job: str, lease: object) -> None:
        """Refuse what would end the job once it is under way, or fill pages with the KV of another model."""
        if not all(callable(getattr(lease, name, None)) for name in ("view", "check", "release")):
            raise ConfigError(f"load {job!r} needs a read lease, from load() of the namespace; not {lease!r}")
        spec = getattr(lease, "spec", self.namespace.spec)
        if spec != self.namespace.spec:
            raise ConfigError(
                f"load {job!r}: the lease has blocks of {spec!r}, these pages are for {self.namespace.spec!r}"
            )
        space, own = getattr(lease, "namespace_id", b""), getattr(self.namespace, "namespace_id", b"")
        if space and own and space != own:
            raise ConfigError(
                f"load {job!r}: the lease is of namespace {space.hex()[:16]}…, these pages are for "
                f"{own.hex()[:16]}… (the same spec in another scope)"
            )

    def _take(self, job: Job) -> None:
        self._jobs.add(job)
        self.mover.add(job)
        if self._closed:  # meanwhile
            job.cancel()

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
