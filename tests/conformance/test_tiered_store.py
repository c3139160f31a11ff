from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvferry.core.chains import Block
from kvferry.core.memory import DRAM
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.level import LevelOptions
from kvferry.store.policies import LRUPolicy, OnEvict, WriteBack, WriteThrough
from kvferry.store.tier import Tier
from kvferry.store.tiered import TieredStore
from kvferry.testing.blockstore import BlockStoreSuite
from kvferry.testing.fake_tier import FakeTier


class SettledStore(TieredStore):
    """Waits for its writers at each save: a block that is being copied is not evicted, so that the order
    of eviction would depend on time."""

    def _stored(self, blocks: Sequence[Block], deadline: float) -> None:
        super()._stored(blocks, deadline)

        while not all(writer.idle for writer in self._down.at_commit):
            assert self._cond.wait(10)


class TestMemoryOnly(BlockStoreSuite):
    def make_store(self, capacity_nbytes: int, *, lease_s: float = 30.0) -> TieredStore:
        return TieredStore(capacity_nbytes, lease_s=lease_s)


class _OverFake(BlockStoreSuite):
    memory_tier = DRAM
    write: type[WriteThrough | OnEvict] = WriteThrough

    def make_tiers(self) -> list[tuple[Tier, LevelOptions]]:
        return [(FakeTier(), LevelOptions(write=self.write()))]

    def make_store(self, capacity_nbytes: int, *, lease_s: float = 30.0) -> TieredStore:
        return SettledStore(capacity_nbytes, self.make_tiers(), lease_s=lease_s, eviction=LRUPolicy)


class TestWriteThrough(_OverFake):
    pass


class TestOnEvict(_OverFake):
    write = OnEvict


class TestTwoTiers(_OverFake):
    def make_tiers(self) -> list[tuple[Tier, LevelOptions]]:
        return [
            (FakeTier("near", 20 * 8192), LevelOptions(write=OnEvict())),
            (FakeTier("far"), LevelOptions(write=WriteBack())),
        ]


class TestOverDisk(BlockStoreSuite):
    """Write-through to real files; blocks that are evicted live on there."""

    memory_tier = DRAM

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folders = (tmp_path / str(number) for number in itertools.count())

    def make_store(self, capacity_nbytes: int, *, lease_s: float = 30.0) -> TieredStore:
        options = DiskOptions((str(next(self.folders)),), 64 << 20)
        return SettledStore(capacity_nbytes, [DiskTier("disk", options)], lease_s=lease_s)
