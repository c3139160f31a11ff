from kvferry.core.memory import MemoryStore
from kvferry.core.sessions import Session
from kvferry.testing.blockstore import BlockStoreSuite


class TestMemoryStore(BlockStoreSuite):
    def make_store(self, capacity_nbytes: int, *, lease_s: float = 30.0) -> MemoryStore:
        return MemoryStore(capacity_nbytes, lease_s=lease_s)


class TestGivenSession(BlockStoreSuite):
    def make_store(self, capacity_nbytes: int, *, lease_s: float = 30.0) -> MemoryStore:
        return MemoryStore(capacity_nbytes, lease_s=lease_s, session=Session("engine"))
