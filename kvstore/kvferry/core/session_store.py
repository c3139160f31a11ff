"""A store in memory as one session sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.core.blockstore import Completion, Stats
from kvferry.core.leases import SlotReadLease
from kvferry.core.memory_namespace import MemoryNamespace
from kvferry.core.sessions import Session
from kvferry.core.spec import KeyScope, KVSpec
from kvferry.core.values import require_bool
from kvferry.core.write_leases import SlotWriteLease

if TYPE_CHECKING:
    from kvferry.core.memory import MemoryStore

__all__ = ["SessionStore"]

_DEFAULT_SCOPE = KeyScope()


class SessionStore:
    """A :class:`MemoryStore` as one session sees it: the same blocks, its own leases. Thread safe."""

    def __init__(self, store: MemoryStore, session: Session) -> None:
        self.store = store
        self.session = session

    def namespace(
        self, spec: KVSpec, scope: KeyScope = _DEFAULT_SCOPE, *, takes_lossy: bool = False
    ) -> MemoryNamespace:
        """The namespace of ``spec`` and ``scope``, with leases that belong to the session.

        Raises:
            ConfigError: If one of them is of another type.
        """
        require_bool("takes_lossy", takes_lossy)
        namespace = self.store._namespace(self.session, spec, scope)
        namespace.takes_lossy = takes_lossy
        return namespace

    def find_lease(self, lease_id: str) -> SlotReadLease | SlotWriteLease | None:
        """The lease of that id, if it holds blocks for this session."""
        return self.store.find_lease(lease_id, self.session)

    def poll(self) -> list[Completion]:
        """What ended in the background for this session since the last call."""
        return self.session.take_completions()

    def flush(self, *, deadline: float) -> bool:
        """See :meth:`MemoryStore.flush`."""
        return self.store.flush(deadline=deadline)

    def stats(self) -> Stats:
        """Figures of the whole store."""
        return self.store.stats()

    def close(self) -> None:
        """End the session and with it its leases; the store and its blocks stay."""
        self.session.end()
