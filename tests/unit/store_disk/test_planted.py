"""What somebody made of a block, or put in its place, while the store was stopped: it costs that block."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.core.clock import deadline_in
from kvferry.store.disk import DiskTier
from kvferry.store.tier import WriteOutcome
from kvferry.testing.blocks import wait_until
from kvferry.testing.disk_usage import disk_usage, files_below, path_of
from kvferry.testing.faulty_files import FaultyFiles
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
    """It is put into the quarantine, whole, and the block is stored the next time."""
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
    first = write(tier, namespace, keys[4:6])
    assert write_outcomes(first) == [WriteOutcome.FAILED] * 2
    assert all("moved away" in result.reason for result in first)
    assert tier.usage().healthy
    assert tier.usage().counters["obstacles"] == 2
    assert write_outcomes(write(tier, namespace, keys[4:6])) == [STORED] * 2
    assert outcomes(read(tier, namespace, keys)) == [HIT] * 10
    assert write_outcomes(write(tier, namespace, chain(namespace, 2, 10))) == [STORED] * 10
    assert not files_below(folder, ".tmp")
    (kept,) = (folder / ".quarantine").rglob("something")
    assert kept.read_bytes() == b"of others"
    assert sum("in the way" in r.getMessage() for r in caplog.records) == 1
    assert tier.usage().used_nbytes == disk_usage(folder)
    tier.close()
    again = make_tier(quarantine_nbytes=0)
    assert again.usage().used_nbytes == disk_usage(folder)
    assert kept.exists()


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("what", ["file", "link", "dangling", "fifo"])
def test_something_in_the_place_of_a_folder(
    make_tier: MakeTier, folder: Path, tmp_path: Path, level: int, what: str
) -> None:
    """In that of a shard, a namespace or a tenant: moved away, and nothing is written through a link."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    tier = make_tier(retry_s=60)
    namespace = opened(tier, SPEC)
    (key,) = chain(namespace, 1, 1)
    place = path_of(folder, namespace, key).parents[level - 1]
    place.parent.mkdir(parents=True, exist_ok=True)
    if what == "file":
        place.write_bytes(b"of others")
    elif what == "fifo":
        os.mkfifo(place)
    else:
        place.symlink_to(elsewhere if what == "link" else tmp_path / "nowhere")
    assert write_outcomes(write(tier, namespace, [key])) == [WriteOutcome.FAILED]
    assert tier.usage().counters["obstacles"] == 1
    assert write_outcomes(write(tier, namespace, [key])) == [STORED]
    assert outcomes(read(tier, namespace, [key])) == [HIT]
    assert tier.usage().healthy
    assert not list(elsewhere.iterdir())
    (kept,) = (folder / ".quarantine").iterdir()
    assert what != "file" or kept.read_bytes() == b"of others"


def test_folders_replaced_while_blocks_are_held(make_tier: MakeTier, folder: Path) -> None:
    """Reads, removals and evictions find it out, too: none goes on failing for ever."""
    tier = make_tier(capacity_nbytes=256 << 10)
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 4)
    write(tier, namespace, keys)
    tier.close()
    shards = {path_of(folder, namespace, key).parent for key in keys}
    tier = make_tier(capacity_nbytes=256 << 10, verify=False)
    namespace = opened(tier, SPEC)
    for shard in shards:
        shutil.rmtree(shard)
        shard.symlink_to(folder.parent)
    assert HIT not in outcomes(read(tier, namespace, keys[:1]))
    assert tier.remove(namespace, keys[1:2], deadline=deadline_in(20)) == [True]
    for number in range(2, 40):  # evicts the rest
        assert write_outcomes(write(tier, namespace, chain(namespace, number, 1)))[0] in (
            STORED, WriteOutcome.FAILED,
        )  # fmt: skip
    assert write_outcomes(write(tier, namespace, chain(namespace, 50, 4))) == [STORED] * 4
    wait_until(lambda: tier.usage().healthy)
    assert not any(shard.is_symlink() for shard in shards)


def test_what_cannot_be_moved_away_is_said(make_tier: MakeTier, folder: Path) -> None:
    """The tier is not healthy until that is gone; others are stored."""
    files = FaultyFiles()
    tier = make_tier(files)
    namespace = opened(tier, SPEC)
    (key,) = chain(namespace, 1, 1)
    shard = path_of(folder, namespace, key).parent
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"no folder")
    (folder / ".quarantine").write_bytes(b"no folder either")
    assert write_outcomes(write(tier, namespace, [key])) == [WriteOutcome.FAILED]
    usage = tier.usage()
    assert not usage.healthy
    assert f"a file in the place of {namespace.tenant}/" in str(usage.status)
    assert "cannot be moved away" in str(usage.status)
    others = [k for k in chain(namespace, 2, 8) if k[0] != key[0]]
    assert set(write_outcomes(write(tier, namespace, others))) == {STORED}
    assert not tier.usage().healthy
    (folder / ".quarantine").unlink()
    tier._state.wake()
    wait_until(lambda: tier.usage().healthy)
    assert write_outcomes(write(tier, namespace, [key])) == [STORED]
