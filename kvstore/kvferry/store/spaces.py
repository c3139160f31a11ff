"""The namespaces of one store: those that were used, and those that only a slower tier knows of."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvferry.core.memory_namespace import MemoryNamespace
from kvferry.store.level import Level
from kvferry.store.tier import TierNamespace

__all__ = ["Spaces"]


class Spaces:
    """Which namespaces the tiers were told of. Thread safe.

    Args:
        tenant: Whose store it is.
        levels: Its slower tiers.

    Attributes:
        by_id: Those that were used, or that an operator has named; only ever grows.
    """

    def __init__(self, tenant: str, levels: Sequence[Level]) -> None:
        self.by_id: dict[bytes, TierNamespace] = {}
        self._tenant = tenant
        self._levels = levels
        self._lock = threading.Lock()
        self._adopted: set[bytes] = set()

    def open(self, namespace: MemoryNamespace) -> None:
        """Somebody uses it: all tiers are told, once."""
        name = namespace.namespace_id
        if name in self.by_id and name not in self._adopted:
            return
        space = TierNamespace.of(self._tenant, namespace.spec, namespace.scope)
        for level in self._levels:
            level.open(space)
        with self._lock:
            self.by_id[name] = space
            self._adopted.discard(name)

    def found(self) -> list[TierNamespace]:
        """Those that a tier holds blocks of though nobody has used them since the start; reads headers.

        Their scope has no salt, since none is stored: only what goes by their id can be done with them.
        """
        found = (space for level in self._levels for space in level.found_namespaces())
        mine = {space.namespace_id: space for space in found if space.tenant == self._tenant}
        return [space for name, space in mine.items() if name not in self.by_id]

    def adopt(self, space: TierNamespace) -> TierNamespace:
        """Tell the tiers of one of :meth:`found`; those that are other daemons only when it is used."""
        for level in self._levels:
            if not level.tier.to_daemons:
                level.open(space)
        with self._lock:
            if space.namespace_id not in self.by_id:
                self.by_id[space.namespace_id] = space
                self._adopted.add(space.namespace_id)
            return self.by_id[space.namespace_id]

    def is_adopted(self, space: TierNamespace) -> bool:
        """Whether only an operator has named it so far."""
        return space.namespace_id in self._adopted
