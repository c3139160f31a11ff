from __future__ import annotations

from kvferry.core.clock import deadline_in
from kvferry.daemon.sessions import EngineSession
from kvferry.store.tiered import TieredStore
from kvferry.testing.blocks import small_spec


def test_leases_that_nobody_knows_are_asked_for_once() -> None:
    """Sessions of a name share the list of those before: a number that none has is no endless question."""
    store = TieredStore(1 << 20)
    left: list[EngineSession] = []
    older, old, now = (EngineSession("default", "engine", store) for _ in range(3))
    for session in (older, old, now):
        session.left_behind = left
    left += [older, old]
    namespace = older.store.namespace(small_spec())
    lease = namespace.reserve(namespace.keys([1] * 4), parent=None, deadline=deadline_in(20))
    older.add(7, lease)
    assert now.end([5, 6]) == 0
    assert now.end([7]) == 1
    assert store.stats().leases == 0
    store.close()
