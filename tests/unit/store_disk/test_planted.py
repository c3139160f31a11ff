"""What somebody made of a block, or put in its place, while the store was stopped: it costs that block."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.store.disk import DiskTier
from kvferry.store.tier import TierNamespace, WriteOutcome
from kvferry.testing.disk_usage import disk_usage
from kvferry.testing.tiers_common import (
    HIT,
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


def path_of(folder: Path, namespace: TierNamespace, key: BlockKey) -> Path:
    shard = folder / namespace.tenant / namespace.namespace_id.hex() / key.hex()[:2]
    return shard / f"{key.hex()}.safetensors"


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("emptied", [True, False])
def test_a_stretched_file_costs_itself(
    make_tier: MakeTier, folder: Path, verify: bool, emptied: bool
) -> None:
    """A terabyte that is not there evicts nothing."""
    tier = make_tier()
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 10)
    write(tier, namespace, keys)
    tier.close()
    if emptied:
        path_of(folder, namespace, keys[9]).write_bytes(b"")
    os.truncate(path_of(folder, namespace, keys[9]), 1 << 40)
    tier = make_tier(verify=verify)
    namespace = opened(tier, SPEC)
    assert tier.wait_verified(deadline=deadline_in(20))
    assert tier.contains(namespace, keys, deadline=0)[:9] == [True] * 9
    found = outcomes(read(tier, namespace, keys))
    assert found[:9] == [HIT] * 9
    assert found[9] is not HIT
    assert write_outcomes(write(tier, namespace, keys[9:])) == [STORED]
    assert outcomes(read(tier, namespace, keys)) == [HIT] * 10
    assert tier.usage().used_nbytes == disk_usage(folder)


def test_a_stretched_file_of_others_counts_what_it_takes(make_tier: MakeTier, folder: Path) -> None:
    tier = make_tier()
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 10)
    write(tier, namespace, keys)
    tier.close()
    for place in (folder, path_of(folder, namespace, keys[0]).parent):
        with (place / "others").open("wb") as file:
            file.truncate(1 << 40)
    tier = make_tier()
    namespace = opened(tier, SPEC)
    assert outcomes(read(tier, namespace, keys)) == [HIT] * 10


def test_a_folder_in_the_place_of_a_block(
    make_tier: MakeTier, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That block cannot be stored; the directory goes on, and is not said to fail."""
    tier = make_tier(retry_s=60)
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 10)
    write(tier, namespace, keys)
    tier.close()
    for number in (4, 5):
        path = path_of(folder, namespace, keys[number])
        path.unlink()
        path.mkdir()
    (path / "something").write_bytes(b"of others")
    caplog.set_level(logging.INFO)
    tier = make_tier(retry_s=60)
    namespace = opened(tier, SPEC)
    assert write_outcomes(write(tier, namespace, keys[4:6])) == [WriteOutcome.FAILED] * 2
    assert tier.usage().healthy
    assert write_outcomes(write(tier, namespace, chain(namespace, 2, 10))) == [STORED] * 10
    assert not list(folder.rglob("*.tmp"))
    assert (path / "something").read_bytes() == b"of others"
    assert sum("in the way" in r.getMessage() for r in caplog.records) == 1


def test_a_file_in_the_place_of_a_folder(make_tier: MakeTier, folder: Path) -> None:
    """Only what belongs into that folder cannot be stored."""
    tier = make_tier(retry_s=60)
    namespace = opened(tier, SPEC)
    (key,) = chain(namespace, 1, 1)
    shard = path_of(folder, namespace, key).parent
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"no folder")
    assert write_outcomes(write(tier, namespace, [key])) == [WriteOutcome.FAILED]
    assert tier.usage().healthy
    others = [k for k in chain(namespace, 2, 8) if k[0] != key[0]]
    assert set(write_outcomes(write(tier, namespace, others))) == {STORED}
