"""The number of a block in its chain reaches the tiers, and comes back from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.core.blockstore import Namespace
from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.disk.header import parse_header
from kvferry.store.tier import BlockWrite
from kvferry.store.tiered import TieredStore
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec
from kvferry.testing.fake_tier import FakeTier
from kvferry.testing.store_calls import chain, loaded, settle
from kvferry.testing.tiers_common import SPEC as TIER_SPEC
from kvferry.testing.tiers_common import chain as tier_chain
from kvferry.testing.tiers_common import opened, read

SPEC = small_spec("tiered")


@pytest.fixture
def disk(tmp_path: Path) -> DiskTier:
    return DiskTier("disk", DiskOptions((str(tmp_path),), 4 << 20, direct="off"))


@pytest.fixture
def store(disk: DiskTier) -> Iterator[TieredStore]:
    made = TieredStore(64 * SPEC.block_nbytes, [disk])
    yield made
    made.close()


def stored(folder: Path, keys: list[BlockKey]) -> list[int]:
    """The positions in the files."""
    found = []
    for key in keys:
        (path,) = folder.rglob(f"{key.hex()}.safetensors")
        data = path.read_bytes()
        header = parse_header(data[: 8 + int.from_bytes(data[:8], "little")])
        assert header.key == key
        found.append(header.position)
    return found


def save(ns: Namespace, keys: list[BlockKey], first: int, count: int) -> None:
    parent = keys[first - 1] if first else None
    save_blocks(ns, keys[first : first + count], parent=parent)


def test_every_block_of_a_chain_has_its_number(store: TieredStore, tmp_path: Path) -> None:
    """In one call and in several, head first or tail first."""
    ns = store.namespace(SPEC)
    one, two = chain(ns, 1, 12), chain(ns, 2, 6)
    save(ns, one, 0, 5)
    save(ns, one, 5, 7)
    settle(store)
    assert stored(tmp_path, one) == list(range(12))
    for first in (4, 2, 0):
        save(ns, two, first, 2)
    settle(store)
    assert stored(tmp_path, two)[:2] == [0, 1]


def test_the_number_goes_on_from_what_is_on_disk(disk: DiskTier, tmp_path: Path) -> None:
    """After a start, from a parent that was loaded, and from one that only the disk has."""
    first = TieredStore(64 * SPEC.block_nbytes, [disk])
    ns = first.namespace(SPEC)
    keys = chain(ns, 1, 9)
    save(ns, keys, 0, 4)
    first.close()
    again = DiskTier("disk", disk.options)
    store = TieredStore(64 * SPEC.block_nbytes, [again])
    try:
        ns = store.namespace(SPEC)
        assert loaded(ns, keys[:4]) == 4
        save(ns, keys, 4, 3)
        settle(store)
        assert stored(tmp_path, keys[:7]) == list(range(7))
        for block in list(store._pool.indexes[ns.namespace_id].entries.values()):  # as eviction does
            store._pool.forget(block)
        save(ns, keys, 7, 2)
        settle(store)
        assert stored(tmp_path, keys) == list(range(9))
    finally:
        store.close()


def test_an_unknown_parent_is_no_lie(store: TieredStore, tmp_path: Path) -> None:
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 8)
    save(ns, keys, 3, 2)
    settle(store)
    assert stored(tmp_path, keys[3:5]) == [-1, -1]
    assert loaded(ns, keys[3:5]) == 2


def test_a_ring_of_parents_ends(store: TieredStore, tmp_path: Path) -> None:
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 3)
    save_blocks(ns, keys, parent=keys[2])
    settle(store)
    assert stored(tmp_path, keys) == [-1] * 3


def test_a_tier_below_gets_it_too() -> None:
    below = FakeTier("below")
    store = TieredStore(8 * SPEC.block_nbytes, [below])
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 6)
    save(ns, keys, 0, 6)
    settle(store)
    assert sorted(entry.position for entry in below.scan()) == list(range(6))
    store.close()


def test_scan_tells_positions(disk: DiskTier) -> None:
    namespace = opened(disk, TIER_SPEC)
    keys = tier_chain(namespace, 1, 5)
    blocks = []
    for key, parent in zip(keys, [None, *keys], strict=False):
        data = page_aligned(TIER_SPEC.block_nbytes)
        data[:] = block_bytes(key, len(data))
        blocks.append(BlockWrite(key, data, parent))
    disk.write(namespace, blocks[:3], deadline=deadline_in(20))
    disk.write(namespace, blocks[3:], deadline=deadline_in(20))
    assert {e.key: e.position for e in disk.scan()} == {key: n for n, key in enumerate(keys)}
    disk.close()
    again = DiskTier("disk", disk.options)
    opened(again, TIER_SPEC)
    assert [r.position for r in read(again, namespace, keys)] == list(range(5))
    assert {e.key: e.position for e in again.scan()} == {key: n for n, key in enumerate(keys)}
    again.close()
