"""Room for a save: what need not be saved, what must stay meanwhile, and why there may be none."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvferry.core.chains import Block
from kvferry.core.keys import BlockKey
from kvferry.core.pool import BlockPool

if TYPE_CHECKING:
    from kvferry.core.memory_namespace import MemoryNamespace

__all__ = ["NOTHING_BELOW", "Below", "extended_chain", "quota_shortage", "room_shortage"]


class Below(NamedTuple):
    """What slower tiers were asked before a save.

    Attributes:
        held: Keys that they hold.
        keys: Keys that they were asked for; ``None`` if there is nothing to ask.
    """

    held: Collection[BlockKey]
    keys: frozenset[BlockKey] | None


NOTHING_BELOW = Below((), None)


def extended_chain(
    pool: BlockPool, namespace_id: bytes, parents: Mapping[BlockKey, BlockKey | None]
) -> set[Block]:
    """Stored blocks of the chain that a save extends, up to its head."""
    index = pool.indexes.get(namespace_id)
    if index is None or not parents:
        return set()
    found = {b for k in parents if (b := index.entries.get(k)) is not None}
    return found.union(index.chain(next(iter(parents.values()))))


def quota_shortage(
    pool: BlockPool, namespace: MemoryNamespace, count: int, quota_nbytes: int
) -> tuple[str, bool] | None:
    """Why the session may not have so many slots, and whether the end of a write lease could change that."""
    needed = count * namespace.slot_nbytes
    held = pool.writes.session_nbytes(namespace.session)
    if not count or held + needed <= quota_nbytes:  # none: a lowered quota does not refuse what is stored
        return None
    if namespace.slot_nbytes > pool.arena.capacity_nbytes:
        message = (
            f"a block takes {namespace.slot_nbytes} bytes, memory has {pool.arena.capacity_nbytes} in all: "
            "none can be saved; raise its capacity (store.dram_capacity)"
        )
        return message, False
    message = (
        f"session {namespace.session.name} asked for {needed} bytes of slots and has {held} bytes "
        f"reserved or in quarantine; its write quota is {quota_nbytes} bytes; save fewer blocks at once, "
        "commit or abort first, or raise the quota (store.write_quota)"
    )
    return message, needed <= quota_nbytes


def room_shortage(
    pool: BlockPool, namespace: MemoryNamespace, count: int, chain: Iterable[Block]
) -> tuple[str, bool]:
    """Why there is no room, and whether the end of some lease, pin or copy could change that.

    Args:
        pool: The memory.
        namespace: Whose blocks.
        count: How many blocks.
        chain: Blocks that must stay, since the save extends their chain and they are nowhere else.
    """
    arena, chain = pool.arena, list(chain)
    needed = count * namespace.slot_nbytes
    chain_nbytes = len(chain) * namespace.slot_nbytes
    chain_held = sum(b.nbytes for b in chain if b.holds)
    others_held = pool.pinned_nbytes + pool.quarantined_nbytes - chain_held
    mapped = arena.mapped_nbytes
    remedy = "release leases, save fewer blocks at once, or raise the capacity (store.dram_capacity)"
    free = f"{arena.free_nbytes} of {arena.capacity_nbytes} bytes free, "
    if arena.refusal:
        free = (
            f"memory has {mapped} of {arena.capacity_nbytes} bytes, {mapped - arena.used_nbytes} of them "
            f"free; {arena.refusal}; "
        )
        remedy = "end what is in the way of the segment, or release leases"
    message = (
        f"no room for {count} blocks of {namespace.spec.block_nbytes} bytes, asked {needed} bytes in "
        f"whole pages: {free}"
        f"{pool.pinned_nbytes} pinned by leases, pins and reservations, "
        f"{pool.quarantined_nbytes} in quarantine, {chain_nbytes} of the chain that is being "
        f"extended and nowhere else; {remedy}"
    )
    return message, needed + chain_nbytes <= arena.capacity_nbytes and others_held > 0
