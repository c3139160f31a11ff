"""How a disk tier starts and ends, and what it finds there."""

from __future__ import annotations

import logging
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import TierError
from kvferry.core.spec import KeyScope
from kvferry.store.disk import DiskTier
from kvferry.store.tier import ReadOutcome, TierNamespace, WriteOutcome
from kvferry.testing.blocks import small_spec, wait_until
from kvferry.testing.disk_usage import disk_usage, path_of, stored_files
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


def test_a_directory_belongs_to_one_store(make_tier: MakeTier) -> None:
    tier = make_tier()
    with pytest.raises(TierError, match="used by another tier of this process"):
        make_tier()
    tier.close()
    make_tier()


def test_temporaries_are_removed_at_the_start(make_tier: MakeTier, folder: Path) -> None:
    tier = make_tier()
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 2)
    write(tier, namespace, keys)
    tier.close()
    left = path_of(folder, namespace, keys[0]).with_name(f".{keys[0].hex()}.1f.tmp")
    left.write_bytes(bytes(5000))
    again = make_tier()
    assert not left.exists()
    assert again.usage().used_nbytes == disk_usage(folder)


def test_headers_are_compared_in_the_background(make_tier: MakeTier, folder: Path) -> None:
    """Also of namespaces that nobody has opened; what is wrong is put away before anybody asks."""
    tier = make_tier()
    spaces = [opened(tier, SPEC), opened(tier, small_spec("other"), "Tenant/2")]
    keys = [chain(space, 1, 5) for space in spaces]
    for space, some in zip(spaces, keys, strict=True):
        write(tier, space, some)
    tier.close()
    bad = path_of(folder, spaces[0], keys[0][2])
    data = bytearray(bad.read_bytes())
    data[300] ^= 1
    bad.write_bytes(data)
    again = make_tier()
    assert again.wait_verified(deadline=deadline_in(30))
    found = {e.key: e for e in again.scan()}
    assert set(found) == {*keys[0], *keys[1]} - {keys[0][2]}
    assert all(e.verified for e in found.values())
    assert found[keys[1][3]].parent == keys[1][2]
    assert found[keys[1][0]].parent is None
    assert again.usage().status["verified"].startswith("10 of 10")


def test_no_block_is_served_unverified(make_tier: MakeTier, folder: Path) -> None:
    """Without the background thread's help too: a swapped file is noticed on its first read."""
    tier = make_tier()
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 4)
    write(tier, namespace, keys)
    tier.close()
    shutil.copyfile(path_of(folder, namespace, keys[0]), path_of(folder, namespace, keys[2]))
    again = make_tier(verify=False)
    opened(again, SPEC)
    assert not any(e.verified for e in again.scan())
    results = read(again, namespace, keys)
    assert outcomes(results) == [HIT, HIT, ReadOutcome.CORRUPT, HIT]
    assert "key in the header" in results[2].reason


def test_a_directory_that_vanishes_and_comes_back(
    make_tier: MakeTier, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other directory goes on; the lost one is used again when it is there."""
    caplog.set_level(logging.INFO, LOGGER)
    other = tmp_path / "disk2"
    tier = make_tier(directories=(str(folder), str(other)))
    namespace = opened(tier, SPEC)
    keys = [key for n in range(10) for key in chain(namespace, n, 1)]
    write(tier, namespace, keys)
    there = {key for key in keys if path_of(other, namespace, key).exists()}
    assert 0 < len(there) < len(keys)
    shutil.rmtree(folder)
    found = read(tier, namespace, keys)
    assert {k for k, r in zip(keys, found, strict=True) if r.outcome is HIT} == there
    lost = [key for key in keys if key not in there]
    assert write_outcomes(write(tier, namespace, lost)) == [STORED] * len(lost)
    assert outcomes(read(tier, namespace, keys)) == [HIT] * 10
    assert not tier.usage().healthy
    assert len(lines(caplog, "has vanished")) == 1
    folder.mkdir()
    wait_until(lambda: tier.usage().healthy)
    more = [key for n in range(100, 120) for key in chain(namespace, n, 1)]
    assert write_outcomes(write(tier, namespace, more)) == [STORED] * 20
    assert any(path_of(folder, namespace, key).exists() for key in more)
    assert tier.usage().used_nbytes == disk_usage(folder) + disk_usage(other)


def test_a_directory_that_is_not_there_at_the_start(make_tier: MakeTier, tmp_path: Path) -> None:
    """Below a file nothing can be made; the tier starts, fails, and works when the cause is gone."""
    blocker = tmp_path / "blocker"
    blocker.write_text("")
    tier = make_tier(directories=(str(blocker / "disk"),))
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 2)
    assert write_outcomes(write(tier, namespace, keys)) == [WriteOutcome.FAILED] * 2
    assert outcomes(read(tier, namespace, keys)) == [MISS] * 2
    assert not tier.usage().healthy
    blocker.unlink()
    (blocker / "disk").mkdir(parents=True)
    wait_until(lambda: tier.usage().healthy)
    assert write_outcomes(write(tier, namespace, keys)) == [STORED] * 2


def test_a_block_in_two_directories_is_kept_once(make_tier: MakeTier, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "disk2"
    both = (str(folder), str(other))
    tier = make_tier(directories=both)
    namespace = opened(tier, SPEC)
    keys = [key for n in range(8) for key in chain(namespace, n, 1)]
    write(tier, namespace, keys)
    tier.close()
    shutil.copytree(folder, other, dirs_exist_ok=True)
    again = make_tier(directories=both)
    opened(again, SPEC)
    assert len(stored_files(folder)) + len(stored_files(other)) == again.usage().entries == 8
    assert outcomes(read(again, namespace, keys)) == [HIT] * 8
    assert again.usage().used_nbytes == disk_usage(folder) + disk_usage(other)


def test_memory_of_namespaces_that_are_not_used_is_small(make_tier: MakeTier) -> None:
    """Headers of several KiB are kept for the namespaces used last; the others make theirs again."""
    tier = make_tier()
    spaces = [TierNamespace.of("t", SPEC, KeyScope(adapter=str(number))) for number in range(2000)]
    tier.open(spaces[0])
    tracemalloc.start()
    try:
        for space in spaces:
            tier.open(space)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 3000 * len(spaces), grown
    assert len(tier._state.templates) <= 64
    for space in (spaces[0], spaces[1000], spaces[-1], spaces[0]):
        key = chain(space, 1, 1)
        write(tier, space, key)
        assert outcomes(read(tier, space, key)) == [HIT]
    tier.close()
    again = make_tier()
    assert again.wait_verified(deadline=deadline_in(20))
    for space in (spaces[0], spaces[1000], spaces[-1]):
        again.open(space)
        assert outcomes(read(again, space, chain(space, 1, 1))) == [HIT]
