"""A directory whose writes fail: its reads go on, and it works again by itself when the cause is gone."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.core.errors import TierError
from kvferry.store.disk import DiskTier
from kvferry.store.tier import ReadOutcome, WriteOutcome
from kvferry.testing.blocks import wait_until
from kvferry.testing.disk_usage import disk_usage
from kvferry.testing.faulty_files import FaultyFiles
from kvferry.testing.tiers_common import SPEC, STORED, chain, opened, outcomes, read, write, write_outcomes

from .conftest import LOGGER, lines

MakeTier = Callable[..., DiskTier]
FAILED = WriteOutcome.FAILED


def test_writes_of_a_read_only_directory_stop_and_reads_go_on(
    make_tier: MakeTier, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After the first failure no more is tried, but by the tier itself, until it finds that writes work."""
    caplog.set_level(logging.INFO, LOGGER)
    files = FaultyFiles()
    tier = make_tier(files, retry_s=1.0)  # the tier's own attempts keep a pause of twice that from ending
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 4)
    write(tier, namespace, keys)
    with files.failing("create", "open_write", "unlink", "rename", error=errno.EROFS):
        assert write_outcomes(write(tier, namespace, chain(namespace, 2, 1))) == [FAILED]
        tried = files.calls["rename"], files.calls["pwritev"]
        for number in range(40):
            (result,) = write(tier, namespace, chain(namespace, 100 + number, 1))
            assert result.outcome is FAILED
            assert "tried again in a moment" in result.reason
            assert outcomes(read(tier, namespace, keys)) == [ReadOutcome.HIT] * 4
        assert (files.calls["rename"], files.calls["pwritev"]) == tried
        usage = tier.usage()
        assert not usage.healthy
        assert "Read-only file system" in str(usage.status)
    wait_until(lambda: tier.usage().healthy)
    wait_until(lambda: tier.usage().used_nbytes == disk_usage(folder))
    assert write_outcomes(write(tier, namespace, chain(namespace, 2, 1))) == [STORED]
    assert not (folder / ".probe").exists()
    wait_until(lambda: bool(lines(caplog, "works again")))  # told after it is so
    assert len(lines(caplog, "going on without it")) == len(lines(caplog, "works again")) == 1


def test_one_error_does_not_stop_writes(make_tier: MakeTier) -> None:
    files = FaultyFiles()
    tier = make_tier(files, retry_s=60)
    namespace = opened(tier, SPEC)
    with files.failing("pwritev", error=errno.EIO):
        assert write_outcomes(write(tier, namespace, chain(namespace, 1, 1))) == [FAILED]
    assert write_outcomes(write(tier, namespace, chain(namespace, 1, 1))) == [STORED]


def test_many_errors_do(make_tier: MakeTier) -> None:
    files = FaultyFiles()
    tier = make_tier(files, retry_s=60)
    namespace = opened(tier, SPEC)
    with files.failing("pwritev", error=errno.EIO):
        for number in range(20):
            assert write_outcomes(write(tier, namespace, chain(namespace, number, 1))) == [FAILED]
    assert files.calls["pwritev"] <= 10


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_false_alarm_of_a_full_device_is_over_without_a_write(
    make_tier: MakeTier, folder: Path, error: int
) -> None:
    """The tier tries by itself, with as much as did not fit, within its cap and leaving nothing."""
    files = FaultyFiles()
    tier = make_tier(files)
    namespace = opened(tier, SPEC)
    with files.failing("pwritev", error=error):
        assert write_outcomes(write(tier, namespace, chain(namespace, 1, 1))) == [FAILED]
        before = files.calls["pwritev"]
        wait_until(lambda: files.calls["pwritev"] > before)
        usage = tier.usage()
        assert not usage.healthy
        words = "quota is used up" if error == errno.EDQUOT else "bytes free"
        assert words in str(usage.status)
    wait_until(lambda: tier.usage().healthy)
    wait_until(lambda: tier.usage().used_nbytes == disk_usage(folder))
    assert not (folder / ".probe").exists()


def test_a_quota_that_is_used_up_at_the_start_leaves_reads(
    make_tier: MakeTier, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock's file cannot be made then: the directory itself is locked."""
    tier = make_tier()
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 3)
    write(tier, namespace, keys)
    tier.close()
    (folder / ".lock").unlink()
    real = os.open

    def full(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == ".lock" and flags & os.O_CREAT:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", full)
    again = make_tier()
    opened(again, SPEC)
    assert outcomes(read(again, namespace, keys)) == [ReadOutcome.HIT] * 3
    assert not (folder / ".lock").exists()
    with pytest.raises(TierError, match="is used by"):
        make_tier()
