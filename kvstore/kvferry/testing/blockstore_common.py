"""What the parts of the ``BlockStore`` suite share: the fixtures and a few short calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import pytest

from kvferry.core.blockstore import BlockStore, Hit, Namespace, ReadLease, WriteLease
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError, LeaseExpiredError, UnavailableError
from kvferry.core.keys import BlockKey
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, wait_until

__all__ = [
    "BIG",
    "BLOCKS",
    "OTHER",
    "SHORT_S",
    "SPEC",
    "StoreFixtures",
    "assert_stored",
    "chain",
    "fill_lease",
    "gauges",
    "load",
    "no_room",
    "reserve",
    "save_surely",
]

BLOCKS = 8  # capacity of the stores under test, in blocks of SPEC
SPEC = small_spec("suite")
OTHER = small_spec("other")
BIG = small_spec("big", pages=6)
SHORT_S = 0.05


def chain(namespace: Namespace, number: int, blocks: int) -> list[BlockKey]:
    """Keys of a chain that shares no block with a chain of another number."""
    return namespace.keys([number] * (blocks * namespace.spec.block_tokens))


def load(namespace: Namespace, keys: list[BlockKey]) -> ReadLease:
    """Lease ``keys`` for reading."""
    return namespace.load(keys, deadline=deadline_in(20))


def reserve(
    namespace: Namespace, keys: list[BlockKey], *, parent: BlockKey | None = None, seconds: float = 20.0
) -> WriteLease:
    """Reserve ``keys``."""
    return namespace.reserve(keys, parent=parent, deadline=deadline_in(seconds))


def no_room(namespace: Namespace, keys: list[BlockKey]) -> str:
    """Why ``keys`` cannot be reserved soon. An answer that came too late says nothing: it is asked again."""
    said: list[str] = []

    def refused() -> bool:
        try:
            reserve(namespace, keys, seconds=0.5).abort()
        except UnavailableError:
            return False
        except CapacityError as error:
            said.append(str(error))
        else:
            raise AssertionError("there was room")
        return True

    wait_until(refused)
    return said[0]


def save_surely(namespace: Namespace, keys: list[BlockKey]) -> None:
    """Save where leases are short: one that was over before its blocks were copied is taken again."""

    def saved() -> bool:
        try:
            save_blocks(namespace, keys)
        except LeaseExpiredError:
            return False
        return True

    wait_until(saved)


def fill_lease(lease: WriteLease) -> None:
    """Write the known bytes into every slot of ``lease``."""
    for index, key in enumerate(lease.keys):
        view = lease.view(index)
        view[:] = block_bytes(key, len(view))


def assert_stored(namespace: Namespace, keys: list[BlockKey]) -> None:
    """All of ``keys`` are stored with the right bytes."""
    with load(namespace, keys) as lease:
        assert lease.keys == tuple(keys)
        for index, key in enumerate(keys):
            assert lease.view(index) == block_bytes(key, namespace.spec.block_nbytes)


def gauges(store: BlockStore) -> tuple[int, ...]:
    """Entries, used, pinned, quarantined bytes and leases: all zero when nothing is kept or under way."""
    store.flush(deadline=deadline_in(60))
    stats = store.stats()
    return (stats.entries, stats.used_nbytes, stats.pinned_nbytes, stats.quarantined_nbytes, stats.leases)


class StoreFixtures(ABC):
    """Stores for the tests; :meth:`make_store` is what a plug-in gives.

    Attributes:
        memory_tier: For a store with slower tiers, in which evicted blocks live on: what lookups call the
            tier that is filled and evicted from in these tests. Copies may not be under way there when a
            save returns.
    """

    memory_tier: str | None = None

    @abstractmethod
    def make_store(self, capacity_nbytes: int, *, lease_s: float = 30.0) -> BlockStore:
        """An empty store with room for exactly ``capacity_nbytes`` of page-aligned blocks.

        Whatever must be undone beside ``close`` is the test class's own to undo.
        """

    def kept(self, namespace: Namespace, keys: list[BlockKey]) -> Hit:
        """A lookup that does not see blocks which have been evicted to a slower tier."""
        tiers = namespace.lookup(keys).tiers
        return Hit(tuple(None if self.memory_tier not in (None, t) else t for t in tiers))

    @pytest.fixture
    def store(self) -> Iterator[BlockStore]:
        """A store of :data:`BLOCKS` blocks."""
        store = self.make_store(BLOCKS * SPEC.block_nbytes)
        yield store
        store.close()

    @pytest.fixture
    def short_store(self) -> Iterator[BlockStore]:
        """The same with leases that last 50 ms."""
        store = self.make_store(BLOCKS * SPEC.block_nbytes, lease_s=SHORT_S)
        yield store
        store.close()

    @pytest.fixture
    def ns(self, store: BlockStore) -> Namespace:
        """A namespace of ``store``."""
        return store.namespace(SPEC)
