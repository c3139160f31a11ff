"""The way of a save through the store in memory: slots, their bytes, publish.

Without a lease: nobody learns of the slots before their blocks are whole, so there is nothing that another
process could hold, and no deadline by which it must be done. What is in the index meanwhile may be evicted,
removed and saved by others as ever; the slots are in no index and are this call's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvferry.core.errors import LeaseExpiredError
from kvferry.core.keys import BlockKey
from kvferry.core.segments import Slot

if TYPE_CHECKING:
    from kvferry.core.memory import MemoryStore
    from kvferry.core.memory_namespace import MemoryNamespace

__all__ = ["save"]


def save(
    store: MemoryStore,
    namespace: MemoryNamespace,
    parents: dict[BlockKey, BlockKey | None],
    deadline: float,
    fill: Callable[[Mapping[BlockKey, BlockKey | None], Sequence[Slot]], None],
) -> int:
    """Store those of the blocks that are not stored; all of them become visible at once, or none.

    Args:
        store: Where to.
        namespace: Whose blocks; its session pays for the slots while they are filled.
        parents: The keys with the key before each, from head to tail.
        deadline: By when there must be room.
        fill: Given those that are not stored and a slot for each, writes the bytes of all before it returns;
            not called if there are none. No lock is held. What it raises ends the save, nothing is stored.

    Returns:
        The blocks newly stored.

    Raises:
        CapacityError: If there is no room by the deadline.
        LeaseExpiredError: If the session or the store ended meanwhile.
        StoreError: If either had ended before.
    """
    asked = store._below(namespace, parents, deadline)
    slots: list[Slot] = []
    charged = 0
    try:
        with store._lock:
            missing, slots, _ = store._take_slots(namespace, parents, asked, deadline)
            if not missing:
                return 0
            charged = _charge(store, namespace, len(slots))
        fill(missing, slots)
    except BaseException:
        _give_back(store, namespace, slots, charged)
        raise
    with store._lock:
        if not (store._closed or namespace.session.ended):
            return _publish(store, namespace, missing, slots, charged, deadline)
    _give_back(store, namespace, slots, charged)
    raise LeaseExpiredError(
        f"session {namespace.session.name} ended, or the store closed, during a save; nothing of it is kept"
    )


def _charge(store: MemoryStore, namespace: MemoryNamespace, slots: int) -> int:
    """Count slots without a lease against the session's quota, if that is less than there is anyway.

    Returns:
        The bytes counted, which are to be given back: by then the quota may be another.
    """
    if store.write_quota_nbytes >= store.arena.capacity_nbytes:
        return 0
    nbytes = slots * namespace.slot_nbytes
    store._pool.writes.charge(namespace.session.session_id, nbytes)
    return nbytes


def _publish(
    store: MemoryStore,
    namespace: MemoryNamespace,
    missing: Mapping[BlockKey, BlockKey | None],
    slots: Sequence[Slot],
    charged: int,
    deadline: float,
) -> int:
    """Make the filled slots blocks that others see, under the lock; how many are new."""
    store._pool.writes.charge(namespace.session.session_id, -charged)
    stored = store._pool.publish_new(
        namespace.namespace_id, namespace.slot_nbytes, missing, slots, takes_lossy=namespace.takes_lossy
    )
    store._cond.notify_all()
    store._stored(stored, deadline)
    return len(stored)


def _give_back(store: MemoryStore, namespace: MemoryNamespace, slots: Sequence[Slot], charged: int) -> None:
    with store._lock:
        store._pool.writes.charge(namespace.session.session_id, -charged)
        for slot in slots:
            store.arena.free(slot)
        store._cond.notify_all()
