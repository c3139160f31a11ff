"""A removed block stays removed, also when its file could not go at once."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.store.disk import DiskTier
from kvferry.store.disk.leftovers import Leftovers
from kvferry.store.encoding import TierCodec
from kvferry.store.tier import ReadOutcome, TierNamespace, WriteOutcome
from kvferry.store.tiered import TieredStore
from kvferry.testing.blocks import save_blocks, small_spec, wait_until
from kvferry.testing.disk_usage import disk_usage, stored_files
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


def take_away(tier: DiskTier, files: FaultyFiles, folder: Path, space: TierNamespace, key: BlockKey) -> Path:
    """Move ``folder`` away and let the tier find out by reading ``key``; returns where it is."""
    away = folder.with_name(folder.name + "-away")
    folder.rename(away)
    with files.failing("open_read", error=errno.ENOENT):
        read(tier, space, [key])
    assert not tier.usage().healthy
    return away


def bring_back(tier: DiskTier, away: Path, folder: Path) -> None:
    away.rename(folder)
    wait_until(lambda: tier.usage().healthy)


def remove(tier: DiskTier, space: TierNamespace, keys: Sequence[BlockKey]) -> list[bool]:
    return tier.remove(space, keys, deadline=deadline_in(20))


def test_removed_while_the_directory_is_down(make_tier: MakeTier, folder: Path) -> None:
    files = FaultyFiles()
    tier = make_tier(files)
    space = opened(tier, SPEC)
    keys = chain(space, 1, 4)
    write(tier, space, keys)
    away = take_away(tier, files, folder, space, keys[0])
    remove(tier, space, keys[2:])
    bring_back(tier, away, folder)
    wait_until(lambda: len(stored_files(folder)) == 2)
    assert outcomes(read(tier, space, keys)) == [HIT, HIT, MISS, MISS]
    wait_until(lambda: tier.usage().used_nbytes == disk_usage(folder))
    assert write_outcomes(write(tier, space, keys[2:])) == [STORED] * 2
    away = take_away(tier, files, folder, space, keys[0])  # the removal is done with
    bring_back(tier, away, folder)
    assert outcomes(read(tier, space, keys)) == [HIT] * 4


def test_a_directory_that_vanishes_before_what_resisted_is_gone(make_tier: MakeTier, folder: Path) -> None:
    files = FaultyFiles()
    tier = make_tier(files)
    space = opened(tier, SPEC)
    keys = chain(space, 1, 4)
    write(tier, space, keys)
    with files.failing("unlink"):
        assert remove(tier, space, keys[2:]) == [True, True]
        away = take_away(tier, files, folder, space, keys[0])
        away.rename(folder)
        wait_until(lambda: tier.usage().healthy)
        assert outcomes(read(tier, space, keys)) == [HIT, HIT, MISS, MISS]
        assert len(stored_files(folder)) == 4
        assert tier.usage().used_nbytes == disk_usage(folder)
    wait_until(lambda: len(stored_files(folder)) == 2)
    wait_until(lambda: tier.usage().used_nbytes == disk_usage(folder))


def test_removed_before_the_directory_was_ever_seen(make_tier: MakeTier, folder: Path) -> None:
    tier = make_tier()
    space = opened(tier, SPEC)
    keys = chain(space, 1, 4)
    write(tier, space, keys)
    tier.close()
    away = folder.rename(folder.with_name("away"))
    folder.write_text("")
    again = make_tier()
    opened(again, SPEC)
    assert not again.usage().healthy
    remove(again, space, keys[:1])
    folder.unlink()
    bring_back(again, away, folder)
    assert outcomes(read(again, space, keys)) == [MISS, HIT, HIT, HIT]
    wait_until(lambda: len(stored_files(folder)) == 3)


def test_a_store_cleared_while_the_directory_is_down(make_tier: MakeTier, folder: Path) -> None:
    files = FaultyFiles()
    tier = make_tier(files)
    store = TieredStore(1 << 20, [tier])
    ns = store.namespace(SPEC)
    keys = ns.keys([1] * SPEC.block_tokens * 3)
    save_blocks(ns, keys)
    assert store.flush(deadline=deadline_in(20))
    space = opened(tier, SPEC)
    away = take_away(tier, files, folder, space, keys[0])
    ns.clear()
    bring_back(tier, away, folder)
    assert ns.lookup(keys).prefix == 0
    wait_until(lambda: not stored_files(folder))
    save_blocks(ns, keys)
    assert store.flush(deadline=deadline_in(20))
    assert outcomes(read(tier, space, keys)) == [HIT] * 3
    store.close()


class FirstUnlink(FaultyFiles):
    """The first removal of a file after ``armed`` waits, and fails."""

    def __init__(self) -> None:
        super().__init__()
        self.armed, self.begun, self.go_on = threading.Event(), threading.Event(), threading.Event()

    def unlink(self, name: str, folder: int) -> None:
        if self.armed.is_set() and not self.begun.is_set():
            self.begun.set()
            assert self.go_on.wait(60)
            raise OSError(errno.EIO, "on purpose")
        super().unlink(name, folder)


def test_a_block_whose_eviction_fails_while_all_is_cleared_does_not_come_back(
    make_tier: MakeTier, folder: Path
) -> None:
    """While its file is going it is not held; if that fails it stays, unless all was cleared meanwhile."""
    files = FirstUnlink()
    tier = make_tier(files, capacity_nbytes=256 << 10, write_threads=1)
    store = TieredStore(4 << 20, [tier])
    ns, big = store.namespace(SPEC), store.namespace(small_spec("big", pages=5))
    keys = ns.keys([1] * SPEC.block_tokens * 40)
    save_blocks(ns, keys)
    assert store.flush(deadline=deadline_in(30))
    assert tier.usage().counters["evicted"] > 0
    files.armed.set()
    save_blocks(big, big.keys([1] * SPEC.block_tokens * 8))  # no file is as large: one that goes is removed
    try:
        assert files.begun.wait(30)
        assert ns.clear() == len(keys)  # memory has all
    finally:
        files.go_on.set()
    store.flush(deadline=deadline_in(30))
    assert ns.lookup(keys).prefix == 0
    assert not any(ns.lookup(keys).tiers)
    wait_until(lambda: len(stored_files(folder)) == tier.usage().entries)
    wait_until(lambda: tier.usage().used_nbytes == disk_usage(folder))
    save_blocks(ns, keys[:1])
    assert store.flush(deadline=deadline_in(30))
    assert tier.contains(opened(tier, SPEC), keys[:1], deadline=deadline_in(20)) == [True]
    store.close()


def test_written_elsewhere_after_the_removal(make_tier: MakeTier, folder: Path, tmp_path: Path) -> None:
    files, other = FaultyFiles(), tmp_path / "disk2"
    tier = make_tier(files, directories=(str(folder), str(other)))
    space = opened(tier, SPEC)
    keys = [key for n in range(10) for key in chain(space, n, 1)]
    write(tier, space, keys)
    here = [key for key in keys if any(folder.rglob(f"{key.hex()}.safetensors"))]
    assert len(here) > 1
    away = take_away(tier, files, folder, space, here[0])
    remove(tier, space, here)
    assert write_outcomes(write(tier, space, here[1:])) == [STORED] * (len(here) - 1)
    bring_back(tier, away, folder)
    wait_until(lambda: not stored_files(folder))
    assert outcomes(read(tier, space, here)) == [MISS] + [HIT] * (len(here) - 1)
    wait_until(lambda: tier.usage().used_nbytes == disk_usage(folder) + disk_usage(other))


def test_corrupt_files_that_cannot_be_put_away_go_later(make_tier: MakeTier, folder: Path) -> None:
    files = FaultyFiles()
    tier = make_tier(files)
    space = opened(tier, SPEC)
    keys = chain(space, 1, 2)
    write(tier, space, keys)
    with files.failing("preadv", "rename", "unlink"):
        read(tier, space, keys)
        assert len(stored_files(folder)) == 2
    wait_until(lambda: not stored_files(folder))
    wait_until(lambda: tier.usage().used_nbytes == disk_usage(folder))


@pytest.mark.parametrize("codec", ["off", "zstd"])
def test_a_block_removed_and_stored_anew_while_it_is_read_is_not_corrupt(
    make_tier: MakeTier, codec: str
) -> None:
    """The reader finds the new file, which says another parent than the block that it was sent for."""
    files = FaultyFiles()
    tier = make_tier(files, codec=TierCodec(codec))
    space = opened(tier, SPEC)
    keys = chain(space, 1, 2)
    write(tier, space, keys)
    found: list[ReadOutcome] = []
    reader = threading.Thread(target=lambda: found.extend(outcomes(read(tier, space, keys[1:]))))
    with files.stalling("open_read") as begun:
        reader.start()
        assert begun.wait(20)
        assert remove(tier, space, keys[1:]) == [True]
        assert write_outcomes(write(tier, space, keys[1:])) == [STORED]  # without a parent
    reader.join(20)
    assert found == [ReadOutcome.MISS]
    assert outcomes(read(tier, space, keys[1:])) == [ReadOutcome.HIT]
    usage = tier.usage()
    assert (usage.quarantined_nbytes, usage.healthy) == (0, True)
    assert not {"corrupt", "corrupt_reads"} & {name for name, count in usage.counters.items() if count}


def test_a_write_that_failed_late_leaves_no_block(make_tier: MakeTier, folder: Path) -> None:
    """The file has its name already when its folder cannot be synced, nor the file be removed."""
    files = FaultyFiles()
    tier = make_tier(files, sync="full")
    space = opened(tier, SPEC)
    keys = [chain(space, number, 1)[0] for number in range(5000)]
    key = next(one for one in keys[1:] if one[0] == keys[0][0])
    write(tier, space, keys[:1])  # makes the folder
    with files.failing("sync", "unlink"):
        assert write_outcomes(write(tier, space, [key])) == [WriteOutcome.FAILED]
        assert len(stored_files(folder)) == 2
        assert outcomes(read(tier, space, [key])) == [MISS]
    wait_until(lambda: len(stored_files(folder)) == 1)
    wait_until(lambda: tier.usage().used_nbytes == disk_usage(folder))


@pytest.mark.parametrize("grown", [False, True])
def test_a_device_that_was_full_works_again_before_the_next_write(make_tier: MakeTier, grown: bool) -> None:
    class Device(FaultyFiles):
        free = 4096

        def free_nbytes(self, fd: int) -> int:
            del fd
            self.calls["free_nbytes"] += 1
            return self.free

    files = Device()
    tier = make_tier(files)
    space = opened(tier, SPEC)
    with files.failing("pwritev", error=errno.ENOSPC):
        write(tier, space, chain(space, 1, 1))
    assert not tier.usage().healthy
    if grown:
        files.free = 1 << 30
        wait_until(lambda: tier.usage().healthy)
        assert write_outcomes(write(tier, space, chain(space, 1, 1))) == [STORED]
    else:  # inodes or a quota may be what ran out: nothing says that it is over
        wait_until(lambda: files.calls["free_nbytes"] > 3)
        assert not tier.usage().healthy


def temporaries(folder: Path) -> list[str]:
    return [name for _, _, names in os.walk(folder) for name in names if name.endswith(".tmp")]


def test_c049_a_temporary_that_could_not_be_removed_goes_when_it_can(
    make_tier: MakeTier, folder: Path
) -> None:
    """Meanwhile it counts as what it takes up; it does not use up the capacity for good."""
    files = FaultyFiles()
    tier = make_tier(files, retry_s=60.0)  # else probes take room, and fail and stop the writes
    space = opened(tier, SPEC)
    kept = chain(space, 1, 2)
    write(tier, space, kept)
    with files.failing("rename", "unlink"):
        for number in range(2, 6):
            assert write_outcomes(write(tier, space, chain(space, number, 1))) == [WriteOutcome.FAILED]
        assert len(temporaries(folder)) == 4
        wait_until(lambda: "4 files" in str(tier.usage().status))
        assert tier.usage().used_nbytes == disk_usage(folder)
    tier._state.wake()
    wait_until(lambda: not temporaries(folder))
    wait_until(lambda: "left behind" not in str(tier.usage().status))
    wait_until(lambda: tier.usage().used_nbytes == disk_usage(folder))
    assert outcomes(read(tier, space, kept)) == [HIT] * 2
    assert write_outcomes(write(tier, space, chain(space, 2, 1))) == [STORED]


def test_a_temporary_that_the_start_could_not_remove_goes_later(make_tier: MakeTier, folder: Path) -> None:
    tier = make_tier()
    space = opened(tier, SPEC)
    key = chain(space, 1, 1)[0]
    write(tier, space, [key])
    tier.close()
    shard = folder / space.tenant / space.namespace_id.hex() / key.hex()[:2]
    (shard / f".{key.hex()}.1.tmp").write_bytes(bytes(5000))
    files = FaultyFiles()
    with files.failing("unlink"):
        tier = make_tier(files)
        assert len(temporaries(folder)) == 1
        assert tier.usage().used_nbytes == disk_usage(folder)
        assert "1 files" in str(tier.usage().status)
    wait_until(lambda: not temporaries(folder))
    wait_until(lambda: tier.usage().used_nbytes == disk_usage(folder))


def test_what_the_quarantine_could_not_let_go_goes_later(make_tier: MakeTier, folder: Path) -> None:
    files = FaultyFiles()
    tier = make_tier(files, quarantine_nbytes=3 * 4096)  # one block with its header
    space = opened(tier, SPEC)
    keys = chain(space, 1, 3)
    write(tier, space, keys)
    for path in folder.rglob("*.safetensors"):
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"?")
    with files.failing("unlink"):
        assert outcomes(read(tier, space, keys)) == [ReadOutcome.CORRUPT] * 3
        assert len(list((folder / ".quarantine").iterdir())) == 3
        assert tier.usage().used_nbytes == disk_usage(folder)
    tier._state.wake()
    wait_until(lambda: len(list((folder / ".quarantine").iterdir())) == 1)
    wait_until(lambda: tier.usage().used_nbytes == disk_usage(folder))


def test_leftovers_try_a_few_at_a_time_and_forget_what_is_gone(tmp_path: Path) -> None:
    charged: list[int] = []
    files = FaultyFiles()
    left = Leftovers(files, charged.append)
    for number in range(20):
        (tmp_path / str(number)).write_bytes(b"x")
        left.add("", str(number), 10)
    left.add("no/such/folder", "x", 7)
    root = os.open(tmp_path, os.O_RDONLY)
    try:
        with files.failing("unlink"):
            assert left.retry(root)
        assert files.calls["unlink"] < 20
        assert charged == []
        assert not left.retry(root)
    finally:
        os.close(root)
    assert (len(left), sum(charged)) == (0, -207)
    assert not list(tmp_path.iterdir())
