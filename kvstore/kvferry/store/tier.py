"""The ``Tier`` contract: one place that keeps blocks, below the memory that blocks are handed out from.

Batch first, blocking, thread safe, buffers owned by the caller, one result a key. **Neither a miss nor a
failing device is an exception**: a tier that cannot answer says so in the result of each key, and the store
goes on with its other tiers. ``docs/tiers.md`` tells how to write one, ``kvferry.testing.tiers.TierSuite``
checks it.
"""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple

from kvferry.core.block_events import BlockFeed
from kvferry.core.keys import BlockKey
from kvferry.core.spec import KeyScope, KVSpec, namespace_id
from kvferry.core.tier_plugins import TierOption

__all__ = [
    "UNKNOWN_PARENT",
    "BlockRead",
    "BlockWrite",
    "ReadOutcome",
    "ReadResult",
    "Tier",
    "TierEntry",
    "TierNamespace",
    "TierOption",
    "TierUsage",
    "WriteOutcome",
    "WriteResult",
]

UNKNOWN_PARENT: Final = BlockKey(b"")
"""Says that a parent is not known, where ``None`` says that there is none (the first block of a chain)."""


@dataclass(frozen=True, slots=True)
class TierNamespace:
    """Whose blocks, and of what shape. Compared by tenant and id; made once, by :meth:`of`.

    Attributes:
        tenant: Id of the tenant; a part of every stored name.
        namespace_id: The 32 bytes that name spec and scope.
        spec: Shape and identity of the blocks.
        scope: Adapter and salt. The salt is a secret: it is part of the id and is never stored.
    """

    tenant: str
    namespace_id: bytes
    spec: KVSpec = field(compare=False)
    scope: KeyScope = field(compare=False)

    @classmethod
    def of(cls, tenant: str, spec: KVSpec, scope: KeyScope = KeyScope()) -> TierNamespace:  # noqa: B008
        """The namespace of ``spec`` and ``scope`` for ``tenant``."""
        return cls(tenant, namespace_id(spec, scope), spec, scope)


class ReadOutcome(enum.Enum):
    """What became of one read. Only after ``HIT`` do the bytes of the buffer mean anything."""

    HIT = "hit"
    """The buffer holds the block; key, fingerprint, parent and checksum were compared."""
    MISS = "miss"
    """The tier does not hold the block, or does not any more."""
    CORRUPT = "corrupt"
    """What was stored is not the block. The tier has put it out of the way: the next read is a miss."""
    FAILED = "failed"
    """The tier cannot say now; the block may be there later. Counts for the breaker of the store."""


class WriteOutcome(enum.Enum):
    """What became of one write."""

    STORED = "stored"
    """The block is there: a read from now on is a hit. Durable after :meth:`Tier.flush`."""
    PRESENT = "present"
    """It was there already; nothing was written. One that is known to have lost something is replaced by one
    that has not, where the tier would store that exactly."""
    REFUSED = "refused"
    """No room: it is larger than the tier, or nothing may be evicted. Not a fault of the tier."""
    FAILED = "failed"
    """The tier cannot write now; nothing is left of the block. Counts for the breaker of the store."""


class ReadResult(NamedTuple):
    """The result of one read.

    Attributes:
        outcome: See :class:`ReadOutcome`.
        reason: For people, what was wrong; empty for a hit or a plain miss.
        parent: After a hit the stored key of the block before; ``None`` for the first of a chain.
        position: After a hit the number of the block in its chain, -1 if it is not known.
        in_flight: Only after ``FAILED`` at the deadline: the tier's hand could not be taken off the buffer
            (a device that hangs). Until the event is set the tier may still write into it; the caller
            must keep the buffer to itself until then.
        lossy: Only after ``HIT``: the bytes are not those that were saved, but within the bound of a codec.
    """

    outcome: ReadOutcome
    reason: str = ""
    parent: BlockKey | None = UNKNOWN_PARENT
    position: int = -1
    in_flight: threading.Event | None = None
    lossy: bool = False


class WriteResult(NamedTuple):
    """The result of one write.

    Attributes:
        outcome: See :class:`WriteOutcome`.
        reason: For people, what was wrong; empty otherwise.
        in_flight: Only after ``FAILED`` at the deadline: until the event is set the tier may still read
            the source, which must stay in place and unchanged until then. Whether the block is there
            after all, :meth:`Tier.contains` says.
    """

    outcome: WriteOutcome
    reason: str = ""
    in_flight: threading.Event | None = None


class BlockRead(NamedTuple):
    """One block to read.

    Attributes:
        key: Its key.
        into: Writable, exactly ``spec.block_nbytes`` long; page-aligned, or it is slow.
        parent: The key that must be stored as its parent; ``UNKNOWN_PARENT``: not compared.
        takes_lossy: If not, a block that has lost something is of no use: it may be a ``MISS`` unread.
    """

    key: BlockKey
    into: memoryview
    parent: BlockKey | None = UNKNOWN_PARENT
    takes_lossy: bool = True


class BlockWrite(NamedTuple):
    """One block to write.

    Attributes:
        key: Its key.
        data: Exactly ``spec.block_nbytes`` bytes; page-aligned, or it is slow. Unchanged until the result.
        parent: Key of the block before it, ``None`` for the first of a chain.
        position: Number of the block in its chain, from 0; -1 if it is not known.
        lossy: It has lost something in another tier. Only a tier that ``takes_lossy`` gets such a block; it
            must store that, and give it back with the block.
    """

    key: BlockKey
    data: memoryview
    parent: BlockKey | None
    position: int = -1
    lossy: bool = False


class TierEntry(NamedTuple):
    """A stored block, as :meth:`Tier.scan` tells of it.

    Attributes:
        tenant: Whose it is.
        namespace_id: Of which namespace; the tier may not know its spec yet.
        key: Its key.
        nbytes: What it takes up of the tier's capacity.
        parent: ``UNKNOWN_PARENT`` until the entry has been verified.
        position: -1 if it is not known.
        verified: Whether the stored identity has been read and compared since the start.
        codec: By what it is encoded, as text; empty if it is not, or until the entry has been verified.
        lossy: Whether that has lost something, if it is known.
    """

    tenant: str
    namespace_id: bytes
    key: BlockKey
    nbytes: int
    parent: BlockKey | None
    position: int
    verified: bool
    codec: str = ""
    lossy: bool = False


@dataclass(frozen=True, slots=True)
class TierUsage:
    """A snapshot of a tier. ``used_nbytes <= capacity_nbytes`` at every moment, also while writes run.

    Attributes:
        entries: Blocks held.
        used_nbytes: Bytes taken up as the medium counts them (``du``): headers, rounding and what is
            quarantined included, and what writes in progress have reserved.
        capacity_nbytes: The cap, 0 if the tier has none of its own.
        quarantined_nbytes: Bytes of what was found corrupt and is kept for a look; part of ``used_nbytes``.
        healthy: ``False`` while the tier is known not to work.
        counters: Counts that only grow, by name (``hits``, ``misses``, ``corrupt``, ``failed``,
            ``stored``, ``evicted``, …).
        status: Facts for people, by name: modes chosen, progress, the last problem.
        problems: What does not work now, and why, by what it is about; the tier has logged it.
    """

    entries: int = 0
    used_nbytes: int = 0
    capacity_nbytes: int = 0
    quarantined_nbytes: int = 0
    healthy: bool = True
    counters: Mapping[str, float] = field(default_factory=dict)
    status: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)


class Tier(ABC):
    """One place that keeps blocks.

    **Thread safety.** Every verb may be called from any thread at any time, :meth:`close` included.

    **Deadlines** are absolute ``time.monotonic()`` values by which the call returns. What was not done by
    then is ``FAILED`` with a reason that says so.

    **Buffers** belong to the caller. When a verb has returned, the tier's hand is off them, except where a
    result carries ``in_flight``.

    **Trust.** The tier compares key, fingerprint, parent and a checksum of the data on every read; the
    store serves what a tier calls a hit. A block is there whole or not at all, also after a crash.

    **Room.** The tier keeps to its own capacity and evicts by itself, never a block that is being read,
    nor a pinned one.

    **Errors.** Wrong use raises :class:`~kvferry.core.errors.ConfigError` (a buffer of a wrong size, a key
    that is not 32 bytes). What the medium does wrong is a result. After :meth:`close` reads and writes are
    ``FAILED``, ``contains`` is ``False``.

    Attributes:
        name: Under which the store, its metrics and :class:`~kvferry.core.blockstore.Hit` speak of it.
        persistent: Whether entries outlive the process.
        indexed: Whether :meth:`contains` and :meth:`scan` answer from memory, without waiting for the medium.
        option_names: Names of all options that :meth:`from_options` takes; ``None``: not told, and then not
            checked before the tier is built.
        to_daemons: Whether it is other daemons: it takes no part in what a daemon asks or stores.
        takes_lossy: Whether it stores and gives blocks that have lost something: :attr:`BlockWrite.lossy`.
    """

    option_names: ClassVar[tuple[str, ...] | None] = None

    name: str
    persistent: bool = False
    indexed: bool = True
    takes_lossy: bool = False
    to_daemons: bool = False

    @classmethod
    @abstractmethod
    def from_options(cls, name: str, options: Mapping[str, object]) -> Tier:
        """Build the tier called ``name`` from its table in the configuration.

        Raises:
            ConfigError: For an option that is unknown, missing or has a wrong value.
        """

    @classmethod
    def describe_options(cls, name: str, options: Mapping[str, object]) -> list[TierOption]:
        """Check options as :meth:`from_options` does, and tell all that there are, with the values that hold.

        Called when the configuration is read: nothing is opened or made. A tier that leaves this method as
        it is has its options checked when it is built.

        Raises:
            ConfigError: As :meth:`from_options`.
        """
        del name
        return [TierOption(key, value, True, str(value)) for key, value in options.items()]

    @abstractmethod
    def open(self, namespace: TierNamespace) -> None:
        """Tell the tier of a namespace, before its first use in any other verb; again has no effect.

        There may be one for each user: what a tier keeps of one without blocks it should forget in time, and
        make again at the next use in whatever verb, before which it may not be told again.
        """

    @abstractmethod
    def contains(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, deadline: float) -> list[bool]:
        """Whether each key is held. No side effect: no order of use changes. A guess where it fails."""

    def only_lossy(self, namespace: TierNamespace, keys: Sequence[BlockKey]) -> list[bool]:
        """Which keys it is known to hold as blocks that have lost something, and not otherwise.

        From memory, never waits. For readers who take no loss such a block is not there, and :meth:`write`
        of an exact one must replace it. A tier of which no block loses anything leaves this method as it is.
        """
        del namespace
        return [False] * len(keys)

    @abstractmethod
    def read_into(
        self, namespace: TierNamespace, blocks: Sequence[BlockRead], *, deadline: float
    ) -> list[ReadResult]:
        """Read blocks into the caller's buffers; counts as a use of those that hit. One result a block."""

    @abstractmethod
    def write(
        self, namespace: TierNamespace, blocks: Sequence[BlockWrite], *, deadline: float
    ) -> list[WriteResult]:
        """Store blocks, making room by eviction. One result a block; each is stored on its own.

        The store names no key twice in one call.
        """

    @abstractmethod
    def remove(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, deadline: float) -> list[bool]:
        """Forget blocks; whether each was held. One that is being read goes when the read is done."""

    def forget(self, namespace: TierNamespace) -> None:
        """All blocks of the namespace are being removed, those too that :meth:`scan` cannot name now.

        Called before the others are named and removed. A tier of which no part can be out of reach for a
        while leaves this method as it is.
        """
        del namespace

    def pin(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, until: float) -> list[bool]:
        """Keep held blocks from eviction until ``until`` (monotonic); whether each is held and kept.

        A tier that cannot do that leaves this method as it is.
        """
        del namespace, until
        return [False] * len(keys)

    def unpin(self, namespace: TierNamespace, keys: Sequence[BlockKey]) -> None:
        """End :meth:`pin` early."""
        del namespace, keys

    @abstractmethod
    def usage(self) -> TierUsage:
        """What is held and how it goes; from memory, never waits."""

    @abstractmethod
    def scan(self) -> Iterator[TierEntry]:
        """Every entry known now: right after the start those found there, later also those written since.

        A snapshot a namespace: entries that come or go meanwhile may be missing or be there. One that is on
        its way out and would be held again if that failed is there: who removes all that is named here must
        not see it come back.
        """

    def resize(self, capacity_nbytes: int) -> None:  # noqa: B027
        """Another capacity from now on; what is above goes in the background. The options were checked.

        Asked of tiers that tenants share out, which are the disks. One that cannot leaves it as it is.
        """

    def listen(self, tenant: str, feed: BlockFeed) -> dict[bytes, list[BlockKey]] | None:
        """Tell ``feed`` of every block of ``tenant`` that comes or goes, until it is over.

        By a :class:`~kvferry.core.block_events.BlockJournal` under the lock of the tier's own index.

        Returns:
            What is held at the moment from which on it is told, by namespace; ``None``: the tier cannot tell.
        """
        del tenant, feed
        return None

    def found_namespaces(self) -> list[TierNamespace]:
        """Namespaces of which it holds blocks; those at least from before, of which nobody has told it.

        The scopes of these have no salt. May read from the medium; for operators. A tier of which nothing
        outlives the process, or that only knows what it is asked for, leaves this method as it is.
        """
        return []

    @abstractmethod
    def flush(self, *, deadline: float) -> bool:
        """Make all that was ``STORED`` before the call durable, as far as configured; ``False`` if not."""

    @abstractmethod
    def close(self) -> None:
        """Stop the threads and give everything back; a second call has no effect. Ends within seconds."""
