"""What a daemon is asked by another: blocks of any chains, answered from its own tiers alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in, is_past
from kvferry.core.errors import ProtocolError
from kvferry.core.keys import BlockKey, split_keys
from kvferry.core.leases import SlotReadLease
from kvferry.core.memory_namespace import MemoryNamespace
from kvferry.wire import daemon_messages as d
from kvferry.wire.incoming import Incoming

__all__ = ["MOST_NBYTES", "Found", "has_blocks", "read_blocks", "remove_blocks", "write_blocks"]

MOST_NBYTES: Final = 32 << 20
"""Of a write or an answer; a single block may be larger."""


class Found(NamedTuple):
    """The answer to a read, and the leases that hold it in place until it is sent."""

    message: d.PeerBlocks
    payload: list[memoryview]
    leases: list[SlotReadLease]


def has_blocks(namespace: MemoryNamespace, keys: Sequence[BlockKey]) -> d.PeerMarks:
    """Which of the keys are held."""
    return d.PeerMarks(marks=bytes(tier is not None for tier in namespace.lookup(keys).tiers))


def remove_blocks(namespace: MemoryNamespace, keys: Sequence[BlockKey]) -> d.PeerMarks:
    """Forget blocks; which of them were held."""
    held = has_blocks(namespace, keys)
    namespace.remove(keys)
    return held


def read_blocks(namespace: MemoryNamespace, request: d.AskPeer, most_nbytes: int) -> Found:
    """Those of the keys that are held, as many as one answer takes."""
    deadline = deadline_in(request.timeout_s)
    most = max(1, min(MOST_NBYTES, most_nbytes) // max(1, namespace.block_nbytes))
    asked = split_keys(request.keys)[:most]
    left = asked
    found: list[SlotReadLease] = []
    while left:
        lease = namespace.load(left, deadline=deadline)
        if lease.keys:
            found.append(lease)
        left = left[len(lease) :]
        if not left or is_past(deadline):
            break
        held = namespace.lookup(left[1:]).tiers  # the first one is not there: what follows it may be
        left = [key for key, tier in zip(left[1:], held, strict=True) if tier is not None]
    facts = [fact for lease in found for fact in namespace.facts(lease)]
    keys = [key for lease in found for key in lease.keys]
    if len(facts) < len(keys):  # one has ended already: nothing can be said of any
        facts, keys, found = [], [], _ended(found)
    message = d.PeerBlocks(
        asked=len(asked),
        keys=b"".join(keys),
        parents=tuple([parent for parent, _, _ in facts]),
        positions=tuple([position for _, position, _ in facts]),
        lossy=bytes(lossy for _, _, lossy in facts),
        expires_at=min((lease.expires_at for lease in found), default=0.0),
    )
    return Found(message, [lease.view(index) for lease in found for index in range(len(lease))], found)


def _ended(leases: list[SlotReadLease]) -> list[SlotReadLease]:
    for lease in leases:
        lease.__exit__(RuntimeError, None, None)
    return []


def write_blocks(
    namespace: MemoryNamespace, message: d.WritePeer, incoming: Incoming, address: str
) -> d.PeerMarks:
    """Store blocks, all or none; which of them are new.

    Raises:
        ProtocolError: If what came does not fit together.
        CapacityError: If there is no room.
    """
    keys = split_keys(message.keys)
    count, nbytes = len(keys), namespace.block_nbytes
    fits = {count} == {len(set(keys)), len(message.parents), len(message.positions), len(message.lossy)}
    if not fits or incoming.payload_nbytes != count * nbytes or (count > 1 and count * nbytes > MOST_NBYTES):
        raise ProtocolError(
            f"{address}: {incoming.payload_nbytes} bytes for {count} blocks of {nbytes} bytes from a peer",
            remote=True,
        )
    deadline = deadline_in(message.timeout_s)
    parents = {k: None if p is None else BlockKey(p) for k, p in zip(keys, message.parents, strict=True)}
    facts = {
        key: (position, bool(lossy))
        for key, position, lossy in zip(keys, message.positions, message.lossy, strict=True)
    }
    with namespace.reserve_each(parents, facts=facts, deadline=deadline) as lease:
        slots = {key: lease.view(index) for index, key in enumerate(lease.keys)}
        nowhere = page_aligned((count - len(slots)) * nbytes) if len(slots) < count else memoryview(b"")
        ends = iter(accumulate([nbytes] * (count - len(slots))))
        places = [slots[k] if k in slots else nowhere[(end := next(ends)) - nbytes : end] for k in keys]
        with lease.writing():
            incoming.read_into(places, deadline)
        lease.commit()
    return d.PeerMarks(marks=bytes(key in slots for key in keys))
