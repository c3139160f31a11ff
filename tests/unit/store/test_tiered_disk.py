"""The tiered store over real files, and what it makes of a disk that fails."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from safetensors import safe_open

from kvferry.core.clock import deadline_in
from kvferry.core.config_sources import load_config
from kvferry.core.memory import DRAM
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.store import open_store
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.level import LevelOptions
from kvferry.store.tiered import TieredStore
from kvferry.testing.blocks import save_blocks, small_spec, wait_until
from kvferry.testing.disk_usage import stored_files
from kvferry.testing.fake_tier import FakeTier
from kvferry.testing.faulty_files import FaultyFiles
from kvferry.testing.store_calls import chain, loaded, settle

SPEC = small_spec("tiered")
N = SPEC.block_nbytes
MakeStore = Callable[..., TieredStore]


def disk(folder: Path, files: FaultyFiles | None = None) -> DiskTier:
    return DiskTier("disk", DiskOptions((str(folder),), 64 << 20, direct="off", retry_s=0.05), files=files)


def test_c053_twenty_blocks_are_hits_after_a_restart(tmp_path: Path) -> None:
    config = load_config(assignments=[
        "store.dram_capacity=1MiB", f"store.tiers=disk:{tmp_path}?capacity=16MiB&write=on_evict",
    ]).config.store  # fmt: skip
    store = open_store(config)
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 20)
    assert save_blocks(ns, keys) == 20
    store.close()
    again = open_store(config)
    ns = again.namespace(SPEC)
    assert ns.lookup(keys).tiers == ("disk",) * 20
    assert loaded(ns, keys) == 20
    assert ns.lookup(keys).tiers == (DRAM,) * 20
    assert save_blocks(ns, keys) == 0
    again.close()


@pytest.mark.parametrize("direct", ["off", "on"])
@pytest.mark.parametrize(
    "layers", [(), (LayerSpec(()),), (LayerSpec((TensorSpec("k", (4, 0), DType.INT8),)),)]
)
def test_c096_blocks_of_no_bytes_go_through_every_tier(
    tmp_path: Path, layers: tuple[LayerSpec, ...], direct: Literal["off", "on"]
) -> None:
    """Tensors of a size of 0, layers without tensors, and a spec without layers."""
    spec = KVSpec(model="empty", revision="", layers=layers, block_tokens=4)
    for started in range(2):
        tier = DiskTier("disk", DiskOptions((str(tmp_path),), 8 << 20, direct=direct))
        store = TieredStore(2 * 4096, [FakeTier("near", 4 * 4096), tier])
        ns = store.namespace(spec)
        for number in range(4):
            keys = ns.keys([number] * 8)
            blocks = [(key, b"") for key in keys]
            assert ns.save(blocks, parent=None, deadline=deadline_in(10)) == (0 if started else 2)
            settle(store)
        assert None not in ns.lookup(ns.keys([0] * 8)).tiers
        for number in range(4):
            with ns.load(ns.keys([number] * 8), deadline=deadline_in(10)) as lease:
                assert len(lease) == 2
                assert lease.view(1).nbytes == 0
        assert tier.usage().entries == 8
        assert tier.wait_verified(deadline=deadline_in(10))
        assert not tier.usage().counters.get("corrupt")
        store.close()
    with safe_open(stored_files(tmp_path)[0], "np") as file:
        assert list(file.keys()) == ["layers.0.k"] * bool(layers and layers[0].tensors)


@pytest.mark.parametrize("damage", ["empty", "half", "short", "flipped", "gone"])
def test_c050_a_damaged_file_is_a_miss_and_the_rest_is_served(
    tmp_path: Path, make_store: MakeStore, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    store = make_store(4, disk(tmp_path))
    ns = store.namespace(SPEC)
    keys = chain(ns, 1, 4)
    save_blocks(ns, keys)
    assert settle(store)
    store.close()
    path = next(p for p in stored_files(tmp_path) if keys[2].hex() in p.name)
    size = path.stat().st_size
    if damage == "gone":
        path.unlink()
    elif damage == "flipped":
        with path.open("r+b") as file:
            file.seek(size - 100)
            byte = file.read(1)
            file.seek(size - 100)
            file.write(bytes([byte[0] ^ 1]))
    else:
        os.truncate(path, {"empty": 0, "half": size // 2, "short": size - 1}[damage])
    store = make_store(4, disk(tmp_path))
    ns = store.namespace(SPEC)
    with caplog.at_level(logging.INFO, "kvferry.store"):
        assert loaded(ns, keys) == 2
        assert loaded(ns, keys[3:]) == 1
    assert not any("not asked" in record.message for record in caplog.records)
    assert save_blocks(ns, keys) == 1
    assert settle(store)
    assert loaded(ns, keys) == 4


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_c050_blocks_that_cannot_be_read_are_misses_and_can_be_saved_again(
    tmp_path: Path, make_store: MakeStore, code: int
) -> None:
    files = FaultyFiles()
    store = make_store(4, (disk(tmp_path, files), LevelOptions(pause_s=0.05)))
    ns = store.namespace(SPEC)
    first, second = chain(ns, 1, 4), chain(ns, 2, 4)
    save_blocks(ns, first)
    assert settle(store)
    save_blocks(ns, second)
    assert settle(store)
    assert ns.lookup(first).tiers == ("disk",) * 4
    with files.failing("open_read", error=code):
        assert loaded(ns, first[:2]) == 0
        assert loaded(ns, second[:2]) == 2, "memory goes on"
    assert loaded(ns, first[2:]) == 2, "the next blocks are served"
    save_blocks(ns, first)
    assert settle(store)
    assert loaded(ns, first) == 4


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_c049_a_disk_that_cannot_be_written_leaves_the_other_tiers_going(
    tmp_path: Path, make_store: MakeStore, code: int
) -> None:
    files, far = FaultyFiles(), FakeTier("far")
    store = make_store(4, (disk(tmp_path, files), LevelOptions(pause_s=0.05)), far)
    ns = store.namespace(SPEC)
    files.write_limit = N // 2
    with files.failing("pwritev", error=code):
        for number in range(4):
            assert save_blocks(ns, chain(ns, number, 4)) == 4
            store.flush(deadline=deadline_in(10))
    assert not stored_files(tmp_path)
    assert [p for p in tmp_path.rglob("*") if "tmp" in p.name and p.is_file()] == []
    for number in range(4):
        assert loaded(ns, chain(ns, number, 4)) == 4
    assert far.usage().entries == 16
    files.write_limit = None
    numbers = iter(range(100, 100_000))

    def works() -> bool:
        keys = chain(ns, next(numbers), 1)
        save_blocks(ns, keys)
        return settle(store) and len(stored_files(tmp_path)) > 0

    wait_until(works)


def test_three_tiers_hold_more_than_each(tmp_path: Path, make_store: MakeStore) -> None:
    near = DiskTier("disk", DiskOptions((str(tmp_path),), 256 << 10, direct="off"))
    far = FakeTier("far")
    store = make_store(4, near, far)
    ns = store.namespace(SPEC)
    for number in range(20):
        save_blocks(ns, chain(ns, number, 2))
        assert settle(store)
    tiers = {t for number in range(20) for t in ns.lookup(chain(ns, number, 2)).tiers}
    assert tiers == {DRAM, "disk", "far"}
    for number in range(20):
        assert loaded(ns, chain(ns, number, 2)) == 2


def test_a_block_with_a_wrong_parent_in_its_header_is_a_miss(tmp_path: Path) -> None:
    """After a restart nothing but the chain that is loaded says which parent is right."""
    tier = disk(tmp_path)
    store = TieredStore(16 * N, [tier])
    ns = store.namespace(SPEC)
    keys, others = chain(ns, 1, 4), chain(ns, 2, 2)
    save_blocks(ns, keys)
    save_blocks(ns, others)
    settle(store)
    store.close()
    (path,) = [p for p in stored_files(tmp_path) if p.name.startswith(keys[2].hex())]
    data = path.read_bytes()
    assert data.count(keys[1].hex().encode()) == 1
    path.write_bytes(data.replace(keys[1].hex().encode(), others[0].hex().encode()))

    tier = disk(tmp_path)
    store = TieredStore(16 * N, [tier])
    ns = store.namespace(SPEC)
    ns.prefetch([keys[3], others[1]])  # no chain: nothing is compared
    wait_until(lambda: ns.lookup([keys[3], others[1]]).tiers == (DRAM, DRAM))
    assert tier.usage().counters.get("corrupt", 0) == 0
    with ns.load([keys[0], keys[1], keys[0], keys[1]], deadline=deadline_in(10)) as lease:
        assert len(lease) == 4  # named twice
    assert loaded(ns, keys) == 2
    assert tier.usage().counters["corrupt"] == 1
    assert ns.lookup(keys).tiers[2] is None
    assert save_blocks(ns, keys) == 1
    assert loaded(ns, keys) == 4
    store.close()
