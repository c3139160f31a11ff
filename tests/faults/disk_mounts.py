"""What a disk tier does on a full, a read-only and a vanished file system, in its own mount namespace.

Started by ``test_disk_mounts.py`` as root: ``unshare -m python disk_mounts.py FOLDER``.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError
from kvferry.core.keys import BlockKey, block_keys
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.tier import BlockRead, BlockWrite, ReadOutcome, TierNamespace, WriteOutcome
from kvferry.testing.blocks import block_bytes, small_spec, wait_until
from kvferry.testing.disk_usage import files_below

SPACE = TierNamespace.of("default", small_spec("mounts", pages=64, layers=4))
NBYTES = SPACE.spec.block_nbytes
LINES: list[str] = []


class Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LINES.append(record.getMessage())


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, timeout=30)


def keys(number: int, count: int) -> list[BlockKey]:
    tokens = [number] * (count * SPACE.spec.block_tokens)
    return block_keys(SPACE.namespace_id, tokens, SPACE.spec.block_tokens)


def write(tier: DiskTier, some: Sequence[BlockKey]) -> list[WriteOutcome]:
    blocks = []
    for key in some:
        data = page_aligned(NBYTES)
        data[:] = block_bytes(key, NBYTES)
        blocks.append(BlockWrite(key, data, None, 0))
    return [r.outcome for r in tier.write(SPACE, blocks, deadline=deadline_in(30))]


def read(tier: DiskTier, some: Sequence[BlockKey]) -> list[ReadOutcome]:
    blocks = [BlockRead(key, page_aligned(NBYTES)) for key in some]
    results = tier.read_into(SPACE, blocks, deadline=deadline_in(30))
    for block, result in zip(blocks, results, strict=True):
        assert result.outcome is not ReadOutcome.HIT or bytes(block.into) == block_bytes(block.key, NBYTES)
    return [r.outcome for r in results]


def stored(tier: DiskTier, number: int) -> Callable[[], bool]:
    return lambda: write(tier, keys(number, 1)) in ([WriteOutcome.STORED], [WriteOutcome.PRESENT])


def said(word: str) -> int:
    return sum(word in line for line in LINES)


def fill(path: Path) -> None:
    """Append until the device is full."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for nbytes in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while os.write(fd, bytes(nbytes)) == nbytes:
                    pass
    finally:
        os.close(fd)


def full(tier: DiskTier, disk: Path) -> None:
    """Our own blocks make room for each other; what others fill is waited for."""
    held = keys(1, 8)
    assert set(write(tier, held)) == {WriteOutcome.STORED}
    outcomes = {outcome for number in range(100, 140) for outcome in write(tier, keys(number, 8))}
    assert outcomes >= {WriteOutcome.STORED, WriteOutcome.FAILED}, outcomes  # 80 MiB into 64
    wait_until(stored(tier, 5000))  # by eviction
    ballast = disk / "ballast"
    fill(ballast)
    for entry in list(tier.scan()):
        tier.remove(SPACE, [entry.key], deadline=deadline_in(30))
    fill(ballast)
    before = said("the device is full; going on")
    for number in range(200, 240):
        assert WriteOutcome.STORED not in write(tier, keys(number, 1))
    assert said("the device is full; going on") <= before + 1
    start = time.monotonic()
    assert WriteOutcome.STORED not in write(tier, keys(300, 8))
    assert time.monotonic() - start < 25
    ballast.unlink()
    wait_until(stored(tier, 6000), 30)
    assert tier.usage().healthy
    assert not files_below(disk, ".tmp")


def read_only(tier: DiskTier, disk: Path) -> None:
    held = keys(2, 4)
    assert set(write(tier, held)) == {WriteOutcome.STORED}
    mount("-o", "remount,ro", str(disk))
    for number in range(20):
        assert write(tier, keys(400 + number, 1)) == [WriteOutcome.FAILED]
    assert read(tier, held) == [ReadOutcome.HIT] * 4
    assert said("Read-only file system") == 1
    mount("-o", "remount,rw", str(disk))
    wait_until(lambda: tier.usage().healthy, 30)  # by itself
    wait_until(stored(tier, 500), 30)


def opened_read_only(disk: Path) -> None:
    """A tier that is opened on a file system which is read-only by then says so, and heals by itself."""
    mount("-o", "remount,ro", str(disk))
    tier = DiskTier("disk", DiskOptions((str(disk),), 1 << 30, retry_s=0.05))
    tier.open(SPACE)
    usage = tier.usage()
    assert not usage.healthy
    assert "read-only" in str(usage.status).lower(), usage.status  # found at the start, or by a write since
    held = [entry.key for entry in tier.scan() if entry.namespace_id == SPACE.namespace_id][:4]
    assert read(tier, held) == [ReadOutcome.HIT] * 4
    mount("-o", "remount,rw", str(disk))
    wait_until(lambda: tier.usage().healthy, 30)
    wait_until(stored(tier, 501), 30)
    tier.close()


def refusal(*directories: Path) -> str:
    """What is said of directories that no tier may have."""
    try:
        DiskTier("both", DiskOptions(tuple(map(str, directories)), 1 << 20)).close()
    except ConfigError as error:
        return str(error)
    return "taken"


def vanished(tier: DiskTier, disk: Path, again: Path) -> None:
    """Unmounted: the empty mount point is not filled; mounted again: its blocks are there again."""
    held = keys(2, 4)
    assert read(tier, held) == [ReadOutcome.HIT] * 4
    mount("--bind", str(disk), str(again))
    assert "are the same directory" in refusal(disk, again)
    assert "lies inside" in refusal(disk / "x", again)
    subprocess.run(["umount", "-l", str(disk)], check=True, timeout=30)
    # the tier's descriptors still reach it, and it notices all the same
    numbers = itertools.count(7000)

    def noticed() -> bool:
        read(tier, held)  # used, so that what is written until then does not take their place
        write(tier, keys(next(numbers), 1))
        return said("has vanished") == 1

    wait_until(noticed, 30)
    assert write(tier, keys(next(numbers), 1)) == [WriteOutcome.FAILED]
    assert not list(disk.iterdir())
    mount("--bind", str(again), str(disk))
    wait_until(lambda: tier.usage().healthy, 30)
    assert read(tier, held) == [ReadOutcome.HIT] * 4
    tier.close()


def main(folder: Path) -> None:
    logger = logging.getLogger("kvferry.store.disk")
    logger.setLevel(logging.INFO)
    logger.addHandler(Listener())
    disk, again = folder / "disk", folder / "again"
    disk.mkdir()
    again.mkdir()
    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk))
    tier = DiskTier("disk", DiskOptions((str(disk),), 1 << 30, retry_s=0.05))
    tier.open(SPACE)
    full(tier, disk)
    read_only(tier, disk)
    tier.close()
    opened_read_only(disk)
    tier = DiskTier("disk", DiskOptions((str(disk),), 1 << 30, retry_s=0.05))
    tier.open(SPACE)
    vanished(tier, disk, again)
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
