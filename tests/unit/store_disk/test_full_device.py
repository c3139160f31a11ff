"""A device that is full, or says that it is: what goes for it, and what is said of it."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.core.keys import BlockKey
from kvferry.store.disk import DiskTier
from kvferry.store.tier import TierNamespace, WriteOutcome
from kvferry.testing.disk_usage import disk_usage
from kvferry.testing.faulty_files import FaultyFiles
from kvferry.testing.tiers_common import SPEC, STORED, chain, opened, write, write_outcomes

from .conftest import LOGGER, lines

MakeTier = Callable[..., DiskTier]


class Device(FaultyFiles):
    """A device of ``nbytes``, on which others have taken up ``others``."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        super().__init__()
        self.folder = folder
        self.nbytes = nbytes
        self.others = 0

    def free_nbytes(self, fd: int) -> int:
        """See :class:`Files`."""
        del fd
        return max(0, self.nbytes - self.others - disk_usage(self.folder))

    def create(self, name: str, folder: int, flags: int = 0) -> int:
        """See :class:`Files`."""
        if self.free_nbytes(0) < 12288:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(name, folder, flags)


def one(tier: DiskTier, namespace: TierNamespace, number: int) -> WriteOutcome:
    return write_outcomes(write(tier, namespace, chain(namespace, number, 1)))[0]


def held(tier: DiskTier, namespace: TierNamespace, keys: list[BlockKey]) -> int:
    return sum(tier.contains(namespace, keys, deadline=0))


@pytest.mark.parametrize("times", [1, 3])
def test_one_failure_on_a_device_with_room_costs_no_block(
    make_tier: MakeTier, folder: Path, caplog: pytest.LogCaptureFixture, times: int
) -> None:
    """Nothing goes while there is room; the next write that goes well ends it."""
    caplog.set_level(logging.INFO, LOGGER)
    files = Device(folder, 8 << 20)
    tier = make_tier(files, retry_s=60)
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 10)
    write(tier, namespace, keys)
    with files.failing("pwritev", error=errno.ENOSPC):
        for number in range(times):
            assert one(tier, namespace, 100 + number) is WriteOutcome.FAILED
    usage = tier.usage()
    assert not usage.healthy
    assert "bytes free" in str(usage.status)
    for number in range(20):
        assert one(tier, namespace, 200 + number) is STORED
        assert tier.usage().healthy
    assert held(tier, namespace, keys) == 10
    assert tier.usage().counters.get("evicted", 0) == 0
    assert len(lines(caplog, "going on without it")) == len(lines(caplog, "works again")) == 1


def test_on_a_full_device_one_goes_for_each_that_comes(make_tier: MakeTier, folder: Path) -> None:
    """And none any more as soon as there is room again."""
    files = Device(folder, 600_000)
    tier = make_tier(files, retry_s=60)
    namespace = opened(tier, SPEC)
    count = 0
    while one(tier, namespace, count) is STORED:
        count += 1
        assert count < 100
    for number in range(1000, 1040):
        assert one(tier, namespace, number) is STORED
    assert tier.usage().healthy
    assert count - 6 <= tier.usage().entries <= count
    files.nbytes *= 2
    before = tier.usage().entries
    for number in range(2000, 2020):
        assert one(tier, namespace, number) is STORED
    assert tier.usage().entries == before + 20


def test_many_writes_at_once_on_a_full_device(make_tier: MakeTier, folder: Path) -> None:
    """They do not take each other's room."""
    files = Device(folder, 600_000)
    tier = make_tier(files, retry_s=60)
    namespace = opened(tier, SPEC)
    for number in range(10):
        write(tier, namespace, chain(namespace, number, 8))
    before = tier.usage().entries
    for number in range(1000, 1010):
        assert set(write_outcomes(write(tier, namespace, chain(namespace, number, 8)))) == {STORED}
    assert tier.usage().entries >= before // 2


def test_others_fill_the_device_and_empty_it(make_tier: MakeTier, folder: Path) -> None:
    """Refused and said while there is no room; taken at once when there is."""
    files = Device(folder, 600_000)
    tier = make_tier(files, retry_s=60)
    namespace = opened(tier, SPEC)
    write(tier, namespace, chain(namespace, 1, 4))
    files.others = 1 << 20
    outcomes = [one(tier, namespace, 100 + number) for number in range(8)]
    assert STORED not in outcomes
    assert not tier.usage().healthy
    files.others = 0
    for number in range(8):
        assert one(tier, namespace, 200 + number) is STORED
    assert tier.usage().healthy


def test_a_quota_is_not_seen_before(make_tier: MakeTier, folder: Path) -> None:
    """One block goes for each that comes, since nobody tells when there is room again."""
    files = Device(folder, 8 << 20)
    tier = make_tier(files, retry_s=60)
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 30)
    write(tier, namespace, keys)
    with files.failing("pwritev", error=errno.EDQUOT):
        assert one(tier, namespace, 100) is WriteOutcome.FAILED
    for number in range(10):
        assert one(tier, namespace, 200 + number) is STORED
    assert tier.usage().entries == 30
