from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.core.clock import deadline_in
from kvferry.store.disk import DiskTier
from kvferry.store.tier import ReadOutcome, WriteOutcome
from kvferry.testing.blocks import small_spec, wait_until
from kvferry.testing.disk_usage import disk_usage, files_below, path_of, stored_files
from kvferry.testing.faulty_files import Call, FaultyFiles
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

from .conftest import LOGGER, lines

MakeTier = Callable[..., DiskTier]


# -- room ----------------------------------------------------------------------------------------------


def test_c035_files_that_somebody_removed(make_tier: MakeTier, folder: Path) -> None:
    """10 stored, 3 removed by hand, all evicted: no error, nothing used, later writes work."""
    tier = make_tier()
    namespace = opened(tier, SPEC)
    empty = tier.usage().used_nbytes
    keys = chain(namespace, 1, 10)
    write(tier, namespace, keys)
    for key in keys[:3]:
        path_of(folder, namespace, key).unlink()
    assert outcomes(read(tier, namespace, keys[:1])) == [MISS]
    assert tier.usage().used_nbytes == disk_usage(folder) + 2 * 12288  # the two that nobody has missed yet
    assert sum(tier.remove(namespace, keys, deadline=deadline_in(20))) == 9
    assert tier.usage().entries == 0
    assert tier.usage().used_nbytes == disk_usage(folder) <= empty + 4096  # the tenant's folder stays
    assert write_outcomes(write(tier, namespace, keys)) == [STORED] * 10
    assert outcomes(read(tier, namespace, keys)) == [HIT] * 10


def test_the_bytes_used_are_those_that_du_counts(make_tier: MakeTier, folder: Path) -> None:
    """Headers, folders and rounding included; after evictions and after a restart too."""
    tier = make_tier(capacity_nbytes=1 << 20)
    spaces = [opened(tier, small_spec(f"m{n}", pages=n), f"tenant{n % 2}") for n in (1, 2, 5)]
    for number in range(60):
        for namespace in spaces:
            assert write_outcomes(write(tier, namespace, chain(namespace, number, 2))) == [STORED] * 2
        assert disk_usage(folder) <= 1 << 20
    assert tier.usage().counters["evicted"] > 0
    assert tier.usage().used_nbytes == disk_usage(folder)
    tier.close()
    again = make_tier(capacity_nbytes=1 << 20)
    assert again.usage().used_nbytes == disk_usage(folder)


def test_a_lower_cap_evicts_at_the_start(make_tier: MakeTier, folder: Path) -> None:
    tier = make_tier()
    namespace = opened(tier, SPEC)
    for number in range(40):
        write(tier, namespace, chain(namespace, number, 2))
    tier.close()
    again = make_tier(capacity_nbytes=512 << 10)
    assert disk_usage(folder) <= 512 << 10
    assert again.usage().used_nbytes == disk_usage(folder)
    assert again.usage().entries > 5


def test_what_is_not_the_tiers_counts_and_stays(
    make_tier: MakeTier, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    (folder / "Other" / "deep").mkdir(parents=True)
    (folder / "Other" / "deep" / "file").write_bytes(bytes(100_000))
    (folder / "notes.txt").write_bytes(b"mine")
    tier = make_tier(capacity_nbytes=256 << 10)
    assert tier.usage().used_nbytes == disk_usage(folder)
    namespace = opened(tier, SPEC)
    for number in range(20):
        write(tier, namespace, chain(namespace, number, 1))
    assert disk_usage(folder) <= 256 << 10
    assert (folder / "Other" / "deep" / "file").stat().st_size == 100_000
    assert len(lines(caplog, "not the tier's")) == 1


def test_the_least_recently_used_goes_first_also_after_a_restart(make_tier: MakeTier, folder: Path) -> None:
    tier = make_tier(capacity_nbytes=512 << 10)
    namespace = opened(tier, SPEC)
    keys = [chain(namespace, number, 1)[0] for number in range(8)]
    write(tier, namespace, keys[:1])
    for key in keys[1:]:
        write(tier, namespace, [key])
    tier.close()
    for age, key in enumerate(keys):  # as if written minutes apart, the first one last
        os.utime(path_of(folder, namespace, key), (1e9 - age * 100, 1e9 - age * 100))
    again = make_tier(capacity_nbytes=512 << 10)
    opened(again, SPEC)
    number = 100
    while again.usage().entries < 9 or all(again.contains(namespace, keys, deadline=0)):
        write(again, namespace, chain(namespace, number, 1))
        number += 1
    held = again.contains(namespace, keys, deadline=0)
    assert held == sorted(held, reverse=True)
    assert not held[-1]


def test_bytes_that_must_stay_free(make_tier: MakeTier, folder: Path) -> None:
    """What is evicted for it is the tier's own; without any, writes are refused."""

    class Nearly(FaultyFiles):
        free = 10 << 20

        def free_nbytes(self, fd: int) -> int:
            return self.free - disk_usage(folder)

    files = Nearly()
    tier = make_tier(files, keep_free_nbytes=9 << 20)
    namespace = opened(tier, SPEC)
    for number in range(100):
        assert write_outcomes(write(tier, namespace, chain(namespace, number, 2))) == [STORED] * 2
        assert files.free_nbytes(0) >= 9 << 20
    assert tier.usage().counters["evicted"] > 0
    files.free = 0
    (result,) = write(tier, namespace, chain(namespace, 999, 1))
    assert result.outcome is WriteOutcome.REFUSED
    assert tier.usage().entries == 0


# -- writes that fail ----------------------------------------------------------------------------------


def test_c049_a_short_write_and_a_full_device(make_tier: MakeTier, folder: Path) -> None:
    """Half a write is no success: the rest follows, or the block is absent and no temporary is left."""
    files = FaultyFiles()
    tier = make_tier(files)
    namespace = opened(tier, SPEC)
    files.write_limit = 1000
    keys = chain(namespace, 1, 3)
    assert write_outcomes(write(tier, namespace, keys[:1])) == [STORED]
    assert outcomes(read(tier, namespace, keys[:1])) == [HIT]
    files.write_limit = 0
    (result,) = write(tier, namespace, keys[1:2])
    assert result.outcome is WriteOutcome.FAILED
    assert "took 0 of" in result.reason
    assert files_below(folder, ".tmp") == []
    assert tier.contains(namespace, keys, deadline=0) == [True, False, False]
    assert not tier.usage().healthy
    files.write_limit = None
    wait_until(lambda: write_outcomes(write(tier, namespace, keys[1:]))[0] in (STORED, WriteOutcome.PRESENT))
    assert tier.usage().healthy


def test_c049_a_limit_on_the_size_of_files(make_tier: MakeTier, folder: Path) -> None:
    """The kernel's own limit, in the middle of a file."""
    tier = make_tier()
    namespace = opened(tier, small_spec("limit", pages=32, layers=4))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        (result,) = write(tier, namespace, chain(namespace, 1, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.outcome is WriteOutcome.FAILED
    assert files_below(folder, ".tmp") == []
    assert tier.usage().used_nbytes == disk_usage(folder)


@pytest.mark.parametrize("call", ["create", "pwritev", "rename", "make_folder", "sync_data", "sync"])
def test_whatever_call_fails_nothing_is_left(
    make_tier: MakeTier, folder: Path, call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, and once more when it is over."""
    caplog.set_level(logging.INFO, LOGGER)
    files = FaultyFiles()
    tier = make_tier(files, sync="full", retry_s=60)
    namespace = opened(tier, SPEC)
    with files.failing(call, error=errno.EIO):
        for number in range(3):
            results = write(tier, namespace, chain(namespace, number, 2))
            assert set(write_outcomes(results)) == {WriteOutcome.FAILED}
    assert stored_files(folder) == files_below(folder, ".tmp") == []
    assert tier.usage().used_nbytes == disk_usage(folder)
    assert write_outcomes(write(tier, namespace, chain(namespace, 1, 2))) == [STORED] * 2
    assert len(lines(caplog, "going on without it")) == 1
    assert len(lines(caplog, "works again")) == 1


def test_what_cannot_be_removed_goes_later(make_tier: MakeTier, folder: Path) -> None:
    files = FaultyFiles()
    tier = make_tier(files)
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 4)
    write(tier, namespace, keys)
    with files.failing("unlink", error=errno.EROFS):
        assert all(tier.remove(namespace, keys, deadline=deadline_in(20)))
        assert outcomes(read(tier, namespace, keys)) == [MISS] * 4
        assert len(stored_files(folder)) == 4
    wait_until(lambda: not stored_files(folder))
    wait_until(lambda: tier.usage().used_nbytes == disk_usage(folder))
    assert write_outcomes(write(tier, namespace, keys)) == [STORED] * 4


@pytest.mark.parametrize("calls", [("unlink", "rename"), ("rename",), ("open_write", "create")])
def test_eviction_that_fails_loses_nothing(
    make_tier: MakeTier, folder: Path, calls: tuple[Call, ...]
) -> None:
    """But the one whose file was to be written over, where that is what fails."""
    files = FaultyFiles()
    tier = make_tier(files, capacity_nbytes=256 << 10)
    namespace = opened(tier, SPEC)
    for number in range(30):
        write(tier, namespace, chain(namespace, number, 1))
    held = {e.key for e in tier.scan()}
    with files.failing(*calls, error=errno.EROFS):
        for number in range(100, 110):
            (result,) = write(tier, namespace, chain(namespace, number, 1))
            assert result.outcome is WriteOutcome.FAILED
            assert tier.usage().used_nbytes == disk_usage(folder) <= 256 << 10
    if "unlink" in calls:
        assert held == {e.key for e in tier.scan()}
    more = [chain(namespace, number, 1)[0] for number in range(200, 230)]
    wait_until(lambda: WriteOutcome.FAILED not in write_outcomes(write(tier, namespace, more)))
    assert tier.usage().used_nbytes == disk_usage(folder) <= 256 << 10
    assert files_below(folder, ".tmp") == []


def test_evicted_files_are_written_over(make_tier: MakeTier, folder: Path) -> None:
    """Not made and removed each time; unless somebody keeps one by another name."""
    files = FaultyFiles()
    tier = make_tier(files, capacity_nbytes=1 << 20)
    namespace = opened(tier, SPEC)
    number = 0
    while not tier.usage().counters.get("evicted"):
        write(tier, namespace, chain(namespace, number, 1))
        number += 1
    kept = {p: p.read_bytes() for p in stored_files(folder)}
    (folder / "backup").mkdir()
    for path in kept:
        os.link(path, folder / "backup" / path.name)
    made = files.calls["create"]
    keys = [chain(namespace, 1000 + n, 1)[0] for n in range(3 * len(kept))]
    for key in keys:
        assert write_outcomes(write(tier, namespace, [key])) == [STORED]
        assert outcomes(read(tier, namespace, [key])) == [HIT]
    assert 0 < files.calls["create"] - made < 2 * len(kept)
    for path, data in kept.items():
        assert (folder / "backup" / path.name).read_bytes() == data
    tier.close()
    again = make_tier(capacity_nbytes=2 << 20)
    held = [e.key for e in again.scan()]
    opened(again, SPEC)
    assert set(outcomes(read(again, namespace, held))) == {HIT}


# -- reads that fail -----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 4096, 6000, 12287, 12289, 16384])
def test_c050_files_of_a_wrong_length(
    make_tier: MakeTier, folder: Path, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A miss, logged once, put away, and the next key is served."""
    tier = make_tier()
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 3)
    write(tier, namespace, keys)
    path = path_of(folder, namespace, keys[1])
    assert path.stat().st_size == 12288
    os.truncate(path, length)
    for _ in range(3):
        assert outcomes(read(tier, namespace, keys))[::2] == [HIT, HIT]
    assert outcomes(read(tier, namespace, keys))[1] is MISS
    assert not path.exists()
    assert len(list((folder / ".quarantine").iterdir())) == 1
    assert len(lines(caplog, "corrupt block")) == 1
    assert tier.usage().counters["corrupt"] == 1
    assert bool(tier.usage().quarantined_nbytes) == bool(length)


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES])
def test_c050_a_file_that_cannot_be_read(make_tier: MakeTier, error: int) -> None:
    files = FaultyFiles()
    tier = make_tier(files)
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 3)
    write(tier, namespace, keys)
    with files.failing("open_read" if error == errno.EACCES else "preadv", error=error):
        (result,) = read(tier, namespace, keys[:1])
        assert result.outcome is ReadOutcome.CORRUPT
        assert errno.errorcode[error] in result.reason
    assert outcomes(read(tier, namespace, keys)) == [MISS, HIT, HIT]


def test_a_passing_error_costs_nothing(make_tier: MakeTier) -> None:
    """Too many open files is no fault of the file."""
    files = FaultyFiles()
    tier = make_tier(files)
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 3)
    write(tier, namespace, keys)
    with files.failing("open_read", error=errno.EMFILE):
        assert outcomes(read(tier, namespace, keys)) == [ReadOutcome.FAILED] * 3
    assert outcomes(read(tier, namespace, keys)) == [HIT] * 3


def test_the_quarantine_is_bounded(make_tier: MakeTier, folder: Path) -> None:
    tier = make_tier(quarantine_nbytes=30_000)
    namespace = opened(tier, SPEC)
    keys = [chain(namespace, n, 1)[0] for n in range(8)]
    for key in keys:
        write(tier, namespace, [key])
        path = path_of(folder, namespace, key)
        path.write_bytes(path.read_bytes()[:-1] + b"x" + b"y")
        assert outcomes(read(tier, namespace, [key])) == [ReadOutcome.CORRUPT]
    kept = sorted(p.name[:64] for p in (folder / ".quarantine").iterdir())
    assert kept == [keys[7].hex()]  # of 16 KiB each one fits
    assert tier.usage().used_nbytes >= disk_usage(folder)
    tier.close()
    again = make_tier(quarantine_nbytes=30_000)
    assert again.usage().quarantined_nbytes == 16384
    assert again.usage().used_nbytes == disk_usage(folder)


def test_c132_nothing_planted_is_followed(make_tier: MakeTier, folder: Path, tmp_path: Path) -> None:
    """Links, FIFOs and folders in the place of files and folders; what is outside stays as it is."""
    outside = tmp_path / "outside"
    outside.mkdir()
    tier = make_tier()
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 4)
    write(tier, namespace, keys)
    paths = [path_of(folder, namespace, key) for key in keys]
    block = paths[0].read_bytes()  # even what is right is not taken from elsewhere
    (outside / "secret").write_bytes(block)
    for path in paths:
        path.unlink()
    paths[0].symlink_to(outside / "secret")
    os.mkfifo(paths[1])
    paths[2].mkdir()
    shutil.rmtree(paths[3].parent)
    paths[3].parent.symlink_to(outside)
    found = outcomes(read(tier, namespace, keys))
    assert HIT not in found
    assert HIT not in outcomes(read(tier, namespace, keys))
    write(tier, namespace, keys)
    tier.close()
    other = make_tier()
    planted = opened(other, small_spec("planted"), "mallory")
    (folder / "mallory").symlink_to(outside)
    assert write_outcomes(write(other, planted, chain(planted, 1, 1))) == [WriteOutcome.FAILED]
    assert write_outcomes(write(other, planted, chain(planted, 1, 2))) == [STORED] * 2
    assert [p.name for p in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_bytes() == block
