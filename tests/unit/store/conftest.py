from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvferry.store.level import LevelOptions
from kvferry.store.tier import Tier
from kvferry.store.tiered import StoreOptions, TieredStore
from kvferry.testing.blocks import small_spec

N = small_spec("tiered").block_nbytes
MakeStore = Callable[..., TieredStore]


@pytest.fixture
def make_store() -> Iterator[MakeStore]:
    """Makes stores of so many blocks over tiers, and closes them."""
    made: list[TieredStore] = []

    def make(
        blocks: int, *tiers: Tier | tuple[Tier, LevelOptions], lease_s: float = 30.0, close_s: float = 5.0,
        watermarks: tuple[float, float] | None = None, prefetch_jobs: int = 64,
    ) -> TieredStore:  # fmt: skip
        options = StoreOptions(close_s=close_s, watermarks=watermarks, prefetch_jobs=prefetch_jobs)
        made.append(TieredStore(blocks * N, tiers, lease_s=lease_s, options=options))
        return made[-1]

    yield make
    for store in made:
        for level in store.levels:
            gate = getattr(level.tier, "gate", None)
            if gate is not None:
                gate.set()
        store.close()
