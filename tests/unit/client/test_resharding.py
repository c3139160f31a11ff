"""Jobs between blocks that one tensor-parallel group stored and the pages of another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from kvferry.client import BlockMover, Registration
from kvferry.core.blockstore import Namespace
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError
from kvferry.core.head_shards import HeadShard
from kvferry.core.keys import BlockKey
from kvferry.core.memory import MemoryStore
from kvferry.core.regions import Region
from kvferry.testing.resharding import HostPlace, ShardedKV

KV = ShardedKV(4)
IDS = [2, 0, 3]  # where the pages of KV have its blocks
GET = HostPlace().get


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with closing(MemoryStore(1 << 20)) as made:
        yield made


@pytest.fixture
def mover() -> Iterator[BlockMover]:
    with BlockMover() as made:
        yield made


def keys(namespace: Namespace) -> list[BlockKey]:
    return namespace.keys(range(len(IDS) * namespace.spec.block_tokens))


def save(pages: Registration) -> None:
    job = pages.save("s", keys(pages.namespace), IDS, parent=None, deadline=deadline_in(20))
    job.all_layers()
    assert job.wait(deadline=deadline_in(20))
    assert job.stored == len(IDS), job.error


def load(mover: BlockMover, namespace: Namespace, regions: list[Region], shard: HeadShard) -> None:
    pages = mover.register(namespace, regions, shard=shard)
    lease = namespace.load(keys(namespace), deadline=deadline_in(20))
    job = pages.load("l", lease, IDS, deadline=deadline_in(20))
    assert job.wait(deadline=deadline_in(20))
    assert job.ok


@pytest.mark.parametrize(("stored", "size"), [(4, 2), (2, 4), (2, 1), (1, 8), (8, 1)])
def test_another_group_loads_what_one_has_saved(
    store: MemoryStore, mover: BlockMover, stored: int, size: int
) -> None:
    """Ranks save as they are; who comes with another size loads from each rank that has heads of its own."""
    for rank in range(stored):
        namespace = store.namespace(KV.spec(rank, stored))
        save(mover.register(namespace, KV.pages(rank, stored, "stacked_nhd", filled=True)))
    for rank in range(size):
        shard = HeadShard(kv_heads=4, tp_rank=rank, tp_size=size)
        regions = KV.pages(rank, size, "hnd", filled=False)
        for spec in shard.sources(KV.spec(0, size), stored):
            load(mover, store.namespace(spec), regions, shard)
        due = KV.pages(rank, size, "hnd", filled=True)
        assert [GET(region) for region in regions] == [GET(region) for region in due]


def test_only_pages_with_all_heads_of_a_block_save_it(store: MemoryStore, mover: BlockMover) -> None:
    """One rank saves for each of four; none of four for the one, whose other heads would be anything."""
    one = HeadShard(kv_heads=4, tp_rank=0, tp_size=1)
    for rank in range(4):
        namespace = store.namespace(KV.spec(rank, 4))
        save(mover.register(namespace, KV.pages(0, 1, "nhd", filled=True), shard=one))
        with namespace.load(keys(namespace), deadline=deadline_in(20)) as lease:
            assert [bytes(lease.view(n)) for n in range(len(IDS))] == KV.blocks(rank, 4)
    whole = store.namespace(KV.spec(0, 1))
    pages = mover.register(
        whole,
        KV.pages(3, 4, "nhd", filled=True),
        shard=HeadShard(kv_heads=4, tp_rank=3, tp_size=4),
    )
    with pytest.raises(ConfigError, match="these pages have 1 of the 4 KV heads of a block"):
        pages.save("s", keys(whole), IDS, parent=None, deadline=deadline_in(20))
