"""The ``BlockStore`` protocol: what every store of blocks offers, whether in memory, tiered or remote.

Batch first, blocking, thread safe, buffers owned by the caller. **A miss is a value, never an
exception.** A deadline is an absolute ``time.monotonic()`` value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, runtime_checkable

from kvferry.core.buffers import Buf
from kvferry.core.keys import BlockKey, Media, Tokens
from kvferry.core.spec import KeyScope, KVSpec

__all__ = [
    "BlockStore",
    "Completion",
    "Hit",
    "Lease",
    "Namespace",
    "ReadLease",
    "Stats",
    "WriteLease",
]


@dataclass(frozen=True, slots=True)
class Hit:
    """Answer to a lookup: the tier that holds each asked key, or ``None``."""

    tiers: tuple[str | None, ...]

    @property
    def prefix(self) -> int:
        """Length, in blocks, of the longest stored prefix of the asked keys."""
        for index, tier in enumerate(self.tiers):
            if tier is None:
                return index
        return len(self.tiers)


@dataclass(frozen=True, slots=True)
class Completion:
    """Something that ended in the background, reported once by ``poll``."""

    job: str
    kind: str
    ok: bool
    nbytes: int
    seconds: float
    failed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of counters and gauges; counters only grow."""

    entries: int = 0
    used_nbytes: int = 0
    capacity_nbytes: int = 0
    pinned_nbytes: int = 0
    quarantined_nbytes: int = 0
    leases: int = 0
    lookups: int = 0
    lookup_blocks: int = 0
    hit_blocks: int = 0
    saved_blocks: int = 0
    evicted_blocks: int = 0
    expired_leases: int = 0
    per_tier: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class Lease(Protocol):
    """A session's right to some named slots until ``expires_at``. Views die with the lease."""

    @property
    def lease_id(self) -> str:
        """Identity that can be pickled and resolved by another process of the session."""
        ...

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        """Keys of the slots, in the order asked."""
        ...

    @property
    def expires_at(self) -> float:
        """Deadline of the lease."""
        ...

    def __len__(self) -> int:
        """Number of blocks."""
        ...

    def view(self, index: int) -> memoryview:
        """The bytes of block ``index``: page-aligned; read-only for a :class:`ReadLease`."""
        ...

    def layer(self, index: int, layer: int) -> memoryview:
        """The layer slice ``layer`` of block ``index``."""
        ...

    def renew(self) -> None:
        """Move the deadline to a whole lease length from now: for work that shows that it goes on.

        Raises:
            LeaseExpiredError: If the lease is past its deadline or has ended; it can't be revived.
        """
        ...


class ReadLease(Lease, Protocol):
    """Blocks that stay in place while they are read.

    What is read is tentative until :meth:`check` (also done by :meth:`release`) has returned, after
    the last read. As a context manager it releases at the end.
    """

    @property
    def lossy(self) -> frozenset[int]:
        """Numbers of the blocks that are not what was computed; only where the namespace takes such."""
        ...

    def check(self) -> None:
        """Confirm that all that was read so far is right.

        Raises:
            LeaseExpiredError: If the lease is past its deadline or a slot's generation moved on.
        """
        ...

    def release(self) -> None:
        """Check, then give the blocks back.

        Raises:
            LeaseExpiredError: As :meth:`check`; the blocks are given back all the same. Also on a
                second release, which changes nothing.
        """
        ...

    def __enter__(self) -> ReadLease: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class WriteLease(Lease, Protocol):
    """Reserved slots to be filled by the holder. ``keys`` names only blocks that were not stored yet.

    Its holder ends it: what is neither committed nor aborted may be out of use for as long as the session.
    """

    def writing(self) -> AbstractContextManager[None]:
        """Held around a write by somebody else's hand (a socket, a copy engine) into the slots.

        While one is open an :meth:`abort` or the lease's end only quarantines the slots; they are
        used again when the last one is closed.
        """
        ...

    def mark_lossy(self, indexes: Iterable[int]) -> None:
        """Say, before :meth:`commit`, which blocks are not what was computed from the tokens alone.

        That is: a lossy codec brought them, or they were computed behind a block that has lost something.
        Stored they stay marked: they reach no reader and no tier that takes no loss. The others take the
        place of stored blocks of their keys that have lost something.

        Args:
            indexes: Numbers of blocks of this lease.

        Raises:
            IndexError: If it has no such block.
        """
        ...

    def commit(self) -> int:
        """Publish all blocks at once and end the lease.

        Returns:
            Blocks newly stored; one that somebody else stored meanwhile is dropped here.

        Raises:
            LeaseExpiredError: If the lease is past its deadline or has ended; nothing is published.
        """
        ...

    def publish(self) -> tuple[int, ReadLease]:
        """Commit and go on holding the same memory for reading, without a gap in between.

        Returns:
            Blocks newly stored, as :meth:`commit`, and a read lease on all blocks of this one, in the
            same slots: also of a block that somebody else stored meanwhile, whose copy here lives until
            that lease ends. So views that were handed out before stay right.

        Raises:
            LeaseExpiredError: As :meth:`commit`; nothing is published.
        """
        ...

    def abort(self) -> None:
        """Publish nothing and give the slots back; without effect on a lease that has ended."""
        ...

    def __enter__(self) -> WriteLease: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...  # aborts unless committed


class Namespace(Protocol):
    """The blocks of one spec and scope, for one tenant. Thread safe.

    One that does not take lossy blocks (:attr:`takes_lossy`, the default) finds only what was computed
    exactly: for every verb but ``remove``, ``clear`` and ``unpin`` a block that has lost something is not
    stored, and a save of its key replaces it.

    Every verb that takes keys raises ``ConfigError`` if one of them is not 32 bytes.
    """

    @property
    def spec(self) -> KVSpec:
        """Shape and identity of the blocks."""
        ...

    @property
    def scope(self) -> KeyScope:
        """Adapter and salt."""
        ...

    @property
    def takes_lossy(self) -> bool:
        """Whether blocks that have lost something are found. What is saved behind one has lost, too."""
        ...

    def keys(self, tokens: Tokens, *, media: Sequence[Media] = ()) -> list[BlockKey]:
        """Keys of the full blocks of ``tokens``."""
        ...

    def foreign_keys(self, engine_hashes: Iterable[bytes]) -> list[BlockKey]:
        """An engine's own 32-byte hash chain as keys."""
        ...

    def lookup(self, keys: Sequence[BlockKey]) -> Hit:
        """Which tier holds each key. No side effect: nothing is pinned, no order of use is changed."""
        ...

    def load(self, keys: Sequence[BlockKey], *, deadline: float) -> ReadLease:
        """Lease the longest stored prefix of ``keys``, which may be shorter than asked, or empty.

        ``keys`` is a run of a key chain, in order: what is read from a slower tier must have been stored
        with the key before it as its parent, or it is put away as wrong.
        """
        ...

    def reserve(self, keys: Sequence[BlockKey], *, parent: BlockKey | None, deadline: float) -> WriteLease:
        """Reserve slots for those of ``keys`` that are not stored.

        Args:
            keys: A run of a key chain, in order.
            parent: Key of the block before ``keys[0]``, ``None`` if that is the first block.
            deadline: By when room must be found.

        Raises:
            CapacityError: If there is no room by the deadline; nothing stays reserved.
        """
        ...

    def save(
        self,
        blocks: Sequence[tuple[BlockKey, Buf]],
        *,
        parent: BlockKey | None,
        deadline: float,
    ) -> int:
        """Reserve, copy and commit.

        Returns:
            Blocks newly stored.

        Raises:
            CapacityError: As :meth:`reserve`.
            ConfigError: If a buffer is not ``spec.block_nbytes`` long; nothing is stored.
        """
        ...

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """Bring blocks up from slower tiers in the background."""
        ...

    def pin(self, keys: Sequence[BlockKey], *, ttl: float) -> int:
        """Keep stored blocks from eviction for ``ttl`` seconds; returns how many are stored."""
        ...

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        """End :meth:`pin` early."""
        ...

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """Forget blocks; returns how many were stored. Leased slots are reused only after the lease."""
        ...

    def clear(self) -> int:
        """Forget all blocks of the namespace; returns how many."""
        ...


@runtime_checkable
class BlockStore(Protocol):
    """A store of KV blocks. Thread safe; ``close`` waits for its threads."""

    def namespace(
        self,
        spec: KVSpec,
        scope: KeyScope = KeyScope(),  # noqa: B008
        *,
        takes_lossy: bool = False,
    ) -> Namespace:
        """The namespace of ``spec`` and ``scope``; cheap, the same blocks each time.

        Args:
            spec: Shape and identity of the blocks.
            scope: Adapter and salt.
            takes_lossy: Whether blocks that have lost something are found too: answers may differ.
        """
        ...

    def poll(self) -> list[Completion]:
        """What ended since the last call; near-free when idle."""
        ...

    def flush(self, *, deadline: float) -> bool:
        """Wait until everything committed has reached its slower tiers; ``False`` at the deadline."""
        ...

    def stats(self) -> Stats:
        """Counters and gauges."""
        ...

    def close(self) -> None:
        """End all leases and free the memory; a second call does nothing."""
        ...
