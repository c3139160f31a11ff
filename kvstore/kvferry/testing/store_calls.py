"""Short calls on stores whose blocks have known bytes, for tests of tiers."""

from __future__ import annotations

from kvferry.core.blockstore import BlockStore, Namespace
from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.testing.blocks import block_bytes

__all__ = ["chain", "loaded", "settle"]


def chain(ns: Namespace, number: int, blocks: int) -> list[BlockKey]:
    """Keys of a chain that shares no block with a chain of another number."""
    return ns.keys([number] * (blocks * ns.spec.block_tokens))


def loaded(ns: Namespace, keys: list[BlockKey], seconds: float = 10.0) -> int:
    """How many blocks a load gives; every byte is compared."""
    with ns.load(keys, deadline=deadline_in(seconds)) as lease:
        assert lease.keys == tuple(keys[: len(lease)])
        for index, key in enumerate(lease.keys):
            assert lease.view(index) == block_bytes(key, ns.spec.block_nbytes)
        return len(lease)


def settle(store: BlockStore) -> bool:
    """Wait until nothing is on its way down any more; whether nothing was lost."""
    return store.flush(deadline=deadline_in(20))
