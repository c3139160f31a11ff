"""The namespaces of one store: those that were used, and those that only a slower tier knows of."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Final

from kvferry.core.memory_namespace import MemoryNamespace
from kvferry.core.pool import BlockPool
from kvferry.store.level import Level
from kvferry.store.tier import TierNamespace

__all__ = ["Spaces"]

_MOST_IDLE: Final = 1024


class Spaces:
    """Which namespaces the tiers were told of. Thread safe.

    One that somebody has open, or of which memory holds something, is known. Of the others some are, since
    there may be one for each user; the rest is forgotten, and the tiers are told again at the next use.

    Args:
        tenant: Whose store it is.
        levels: Its slower tiers.
        pool: Its memory.
        lock: The store's lock, which no caller holds.

    Attributes:
        by_id: Those that were used, or that an operator has named.
    """

    def __init__(self, tenant: str, levels: Sequence[Level], pool: BlockPool, lock: threading.Lock) -> None:
        self.by_id: dict[bytes, TierNamespace] = {}
        self._tenant = tenant
        self._levels = levels
        self._pool = pool
        self._store_lock = lock
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[MemoryNamespace] = weakref.WeakSet()
        self._adopted: set[bytes] = set()
        self._most = _MOST_IDLE

    def open(self, namespace: MemoryNamespace) -> None:
        """Somebody uses it, for as long as the object lives: all tiers are told, once."""
        name = namespace.namespace_id
        with self._lock:
            self._open.add(namespace)  # first: from here on it is not forgotten
            if name in self.by_id and name not in self._adopted:
                return
        space = TierNamespace(self._tenant, name, namespace.spec, namespace.scope)
        for level in self._levels:
            level.open(space)
        with self._lock:
            self.by_id[name] = space
            self._adopted.discard(name)
        self._forget_idle()

    def found(self) -> list[TierNamespace]:
        """Those that a tier holds blocks of though they are not known here; reads headers.

        Of those that nobody has used since the start the scope has no salt, since none is stored: only what
        goes by their id can be done with them.
        """
        found = (space for level in self._levels for space in level.found_namespaces())
        mine = {space.namespace_id: space for space in found if space.tenant == self._tenant}
        return [space for name, space in mine.items() if name not in self.by_id]

    def adopt(self, namespace: MemoryNamespace) -> None:
        """An operator has named it: tiers are told; those that are other daemons only when it is used."""
        name = namespace.namespace_id
        space = TierNamespace(self._tenant, name, namespace.spec, namespace.scope)
        with self._lock:
            self._open.add(namespace)
            if name in self.by_id:
                return
        for level in self._levels:
            if not level.tier.to_daemons:
                level.open(space)
        with self._lock:
            if name not in self.by_id:
                self.by_id[name] = space
                self._adopted.add(name)
        self._forget_idle()

    def is_adopted(self, namespace: MemoryNamespace) -> bool:
        """Whether only an operator has named it so far."""
        return namespace.namespace_id in self._adopted

    def _forget_idle(self) -> None:
        """Forget the oldest of those that nobody has open and of which memory holds nothing.

        What is saved without an open namespace was reserved in it before, which its write lease shows.
        """
        if len(self.by_id) <= self._most:
            return
        with self._store_lock, self._lock:
            used = self._pool.namespaces().union(one.namespace_id for one in self._open)
            idle = [name for name in self.by_id if name not in used]
            for name in idle[: -_MOST_IDLE // 2]:
                del self.by_id[name]
                self._adopted.discard(name)
            known = len(self.by_id)
            self._most = known + max(_MOST_IDLE // 2, known // 4)  # rarely: it takes a look at all of them
