from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.store.disk import DiskTier
from kvferry.store.tier import BlockRead, BlockWrite
from kvferry.testing.blocks import small_spec
from kvferry.testing.disk_usage import disk_usage
from kvferry.testing.faulty_files import FaultyFiles
from kvferry.testing.tiers_common import (
    HIT,
    MISS,
    SPEC,
    STORED,
    chain,
    opened,
    outcomes,
    read,
    write,
    write_outcomes,
)

MakeTier = Callable[..., DiskTier]


def one_of_each_shard() -> list[BlockKey]:
    return [BlockKey(bytes([shard]) * 32) for shard in range(256)]


def blocks(keys: list[BlockKey]) -> list[BlockWrite]:
    return [BlockWrite(key, memoryview(bytes(SPEC.block_nbytes)), None, 0) for key in keys]


def test_a_new_shard_costs_one_folder_and_an_open_one_nothing(make_tier: MakeTier) -> None:
    files = FaultyFiles()
    tier = make_tier(files, capacity_nbytes=64 << 20)
    namespace = opened(tier, SPEC)
    files.calls.clear()
    tier.write(namespace, blocks(one_of_each_shard()), deadline=deadline_in(30))
    assert files.calls["make_folder"] <= 256 + 4  # two threads may both make those above
    assert files.calls["open_folder"] <= 2 * 256 + 32  # found missing once, opened once, by either thread
    files.calls.clear()
    more = blocks([BlockKey(bytes([s]) + bytes([s ^ 1]) * 31) for s in range(256)])
    results = tier.write(namespace, more, deadline=deadline_in(30))
    assert write_outcomes(results) == [STORED] * 256
    assert files.calls["make_folder"] == files.calls["open_folder"] == 0


def test_namespaces_that_take_turns_open_a_folder_at_a_time(make_tier: MakeTier) -> None:
    """More folders than are kept open: each costs one call, not a walk from the top."""
    files = FaultyFiles()
    before = len(list(Path("/proc/self/fd").iterdir()))
    tier = make_tier(files, capacity_nbytes=64 << 20)
    spaces = [opened(tier, SPEC), opened(tier, small_spec("other"))]
    for namespace in spaces:
        results = tier.write(namespace, blocks(one_of_each_shard()), deadline=deadline_in(30))
        assert write_outcomes(results) == [STORED] * 256
    for _ in range(2):
        for namespace in spaces:
            files.calls.clear()
            into = [BlockRead(key, page_aligned(SPEC.block_nbytes)) for key in one_of_each_shard()]
            assert outcomes(tier.read_into(namespace, into, deadline=deadline_in(30))) == [HIT] * 256
            assert 0 < files.calls["open_folder"] <= 256 + 8  # four threads may all open those above
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 380


def test_a_namespace_that_somebody_removed(make_tier: MakeTier, folder: Path) -> None:
    """While its folder is open: it is made anew, for shards that were in use and for others."""
    tier = make_tier()
    namespace = opened(tier, SPEC)
    keys = [chain(namespace, number, 1)[0] for number in range(12)]
    write(tier, namespace, keys[:4])
    shutil.rmtree(folder / namespace.tenant)
    assert write_outcomes(write(tier, namespace, keys[4:])) == [STORED] * 8
    assert outcomes(read(tier, namespace, keys)) == [MISS] * 4 + [HIT] * 8
    shutil.rmtree(folder / namespace.tenant / namespace.namespace_id.hex())
    assert outcomes(read(tier, namespace, keys)) == [MISS] * 12
    assert write_outcomes(write(tier, namespace, keys)) == [STORED] * 12
    assert outcomes(read(tier, namespace, keys)) == [HIT] * 12
    assert disk_usage(folder) <= tier.usage().used_nbytes <= disk_usage(folder) + (256 << 10)
