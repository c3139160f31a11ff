"""Where a tier's directories may lie, and what becomes of one that is moved, replaced or taken."""

from __future__ import annotations

import fcntl
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError, TierError
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.tier import ReadOutcome, TierNamespace, WriteOutcome
from kvferry.testing.blocks import wait_until
from kvferry.testing.disk_usage import stored_files
from kvferry.testing.tiers_common import SPEC, STORED, chain, opened, outcomes, read, write, write_outcomes

MakeTier = Callable[..., DiskTier]
FAILED = WriteOutcome.FAILED


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.store.disk.root._LOOK_S", 0.05)


NUMBERS = itertools.count(1000)


def one(tier: DiskTier, namespace: TierNamespace) -> WriteOutcome:
    """Write a block that was never written."""
    return write_outcomes(write(tier, namespace, chain(namespace, next(NUMBERS), 1)))[0]


# -- apart ---------------------------------------------------------------------------------------------


def test_one_directory_inside_another_is_refused_by_name(make_tier: MakeTier, folder: Path) -> None:
    for pair in ((folder, folder / "sub"), (folder / "sub" / "deep", folder)):  # nothing is made
        names = tuple(map(str, pair))
        with pytest.raises(
            ConfigError, match=r"disk/sub\S* lies inside \S*disk: give directories side by side"
        ):
            make_tier(directories=names)


def test_two_names_of_one_directory_are_refused(make_tier: MakeTier, folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(ConfigError, match="are the same directory"):
        make_tier(directories=(str(folder), str(link)))
    with pytest.raises(ConfigError, match="lies inside"):
        make_tier(directories=(str(folder / "sub"), str(link)))
    with pytest.raises(ConfigError, match="each once"):
        make_tier(directories=(str(folder), f"{folder}/"))
    assert list(folder.iterdir()) == []


def test_tiers_of_their_own_keep_apart_too(make_tier: MakeTier, folder: Path) -> None:
    """Whichever is there first; a directory that no store uses any more is in nobody's way."""
    inner = folder / "a" / "b"
    outer = make_tier()
    with pytest.raises(TierError, match=r"b lies inside .*disk, the directory of a disk tier"):
        make_tier(directories=(str(inner),))
    outer.close()
    below = make_tier(directories=(str(inner),))
    with pytest.raises(TierError, match="has the directory of another disk tier inside, a/b"):
        make_tier()
    below.close()
    make_tier().close()


def test_paths_are_absolute_and_know_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    options = DiskOptions(("~/kv", "here"), 1 << 20)
    assert options.directories == (str(tmp_path / "kv"), str(tmp_path / "here"))
    with pytest.raises(ConfigError, match="no home directory"):
        DiskOptions(("~nobody-of-that-name/kv",), 1 << 20)


def test_a_file_where_a_directory_should_be_is_named(make_tier: MakeTier, folder: Path) -> None:
    folder.write_text("")
    tier = make_tier(directories=(str(folder / "deep" / "er"),))
    assert f"{folder} is a file, not a directory" in str(tier.usage().status)
    tier = make_tier()
    assert f"{folder} is a file, not a directory" in str(tier.usage().status)


# -- moved and replaced --------------------------------------------------------------------------------


def test_a_directory_that_was_moved_away_is_written_to_no_more(
    make_tier: MakeTier, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make_tier(capacity_nbytes=256 << 20)
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 3)
    write(tier, namespace, keys)
    moved = folder.rename(folder.with_name("moved"))
    wait_until(lambda: one(tier, namespace) is FAILED)
    there = stored_files(moved)
    assert not tier.usage().healthy
    assert "the directory has vanished" in caplog.text
    for _ in range(5):
        assert one(tier, namespace) is FAILED
    assert stored_files(moved) == there
    assert outcomes(read(tier, namespace, keys)) == [ReadOutcome.MISS] * 3
    moved.rename(folder)
    wait_until(lambda: tier.usage().healthy)
    assert outcomes(read(tier, namespace, keys)) == [ReadOutcome.HIT] * 3
    assert one(tier, namespace) is STORED


def test_another_directory_in_its_place_is_noticed(make_tier: MakeTier, folder: Path) -> None:
    tier = make_tier(capacity_nbytes=256 << 20)
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 3)
    write(tier, namespace, keys)
    moved = folder.rename(folder.with_name("moved"))
    folder.mkdir()

    def is_there() -> bool:
        one(tier, namespace)
        return bool(stored_files(folder))

    wait_until(is_there)
    late = stored_files(moved)
    for _ in range(5):
        assert one(tier, namespace) is STORED
    assert stored_files(moved) == late
    assert outcomes(read(tier, namespace, keys)) == [ReadOutcome.MISS] * 3
    assert tier.usage().healthy


# -- the lock ------------------------------------------------------------------------------------------

TAKER = """
import sys
from kvferry.core.errors import TierError
from kvferry.store.disk import DiskOptions, DiskTier
try:
    DiskTier("disk", DiskOptions((sys.argv[1],), 4 << 20, direct="off")).close()
except TierError as error:
    print(error)
else:
    print("taken")
"""


def taker(folder: Path) -> str:
    command = [sys.executable, "-c", TAKER, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_a_lock_whose_file_was_removed_still_holds(make_tier: MakeTier, folder: Path) -> None:
    tier = make_tier()
    namespace = opened(tier, SPEC)
    (folder / ".lock").unlink()
    assert "is used by" in taker(folder)
    wait_until(lambda: one(tier, namespace) is STORED and (folder / ".lock").exists())
    wait_until(lambda: f"another process (pid {os.getpid()})" in taker(folder))
    assert tier.usage().healthy
    tier.close()
    assert taker(folder) == "taken"


def test_who_finds_the_lock_taken_leaves(make_tier: MakeTier, folder: Path) -> None:
    """Where directories cannot be locked, a removed file lets another store in: one of the two goes."""
    tier = make_tier()
    namespace = opened(tier, SPEC)
    (folder / ".lock").unlink()
    fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        os.write(fd, b"1              \n")
        fcntl.flock(fd, fcntl.LOCK_EX)
        wait_until(lambda: one(tier, namespace) is FAILED)
        wait_until(lambda: "pid 1" in str(tier.usage().status))
    finally:
        os.close(fd)
    wait_until(lambda: tier.usage().healthy)
    assert one(tier, namespace) is STORED


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_lies_where_the_lock_should_is_named_and_holds_nobody_up(
    make_tier: MakeTier, folder: Path, kind: str
) -> None:
    folder.mkdir()
    lock = folder / ".lock"
    os.mkfifo(lock) if kind == "fifo" else lock.mkdir()
    tier = make_tier()
    assert ".lock" in str(tier.usage().status)
    assert not tier.usage().healthy
    lock.unlink() if kind == "fifo" else lock.rmdir()
    wait_until(lambda: tier.usage().healthy)
    assert one(tier, opened(tier, SPEC)) is STORED


@pytest.fixture
def shared(make_tier: MakeTier) -> Iterator[Path]:
    """A directory with two blocks that an ordinary user owns and can reach; the test is that user."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        folder = Path(name) / "disk"
        tier = make_tier(directories=(str(folder),))
        namespace = opened(tier, SPEC)
        write(tier, namespace, chain(namespace, 1, 2))
        tier.close()
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 65534, 65534)
        yield folder
        os.seteuid(0)


def test_rights_that_an_ordinary_user_lacks(make_tier: MakeTier, shared: Path) -> None:
    """Reads go on where only writes are forbidden; who has them again writes again."""
    os.chown(shared / ".lock", 0, 0)
    (shared / ".lock").chmod(0o600)
    for path in (shared, *(p for p in shared.rglob("*") if p.is_dir())):
        path.chmod(0o555)
    os.seteuid(65534)
    tier = make_tier(directories=(str(shared),))
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 2)
    assert outcomes(read(tier, namespace, keys)) == [ReadOutcome.HIT] * 2
    (result,) = write(tier, namespace, chain(namespace, 2, 1))
    assert result.outcome is FAILED
    assert "this user lacks the right" in result.reason
    assert not tier.usage().healthy
    for path in (shared, *(p for p in shared.rglob("*") if p.is_dir())):
        path.chmod(0o755)
    wait_until(lambda: tier.usage().healthy)
    assert one(tier, namespace) is STORED
    with pytest.raises(TierError, match="is used by"):  # its file is not ours: the directory is locked
        make_tier(directories=(str(shared),))
    tier.close()
