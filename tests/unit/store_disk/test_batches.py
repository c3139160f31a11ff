"""Several small blocks in one call: a thread takes a few at once, each has its own result."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.store import io_pool
from kvferry.store.disk import DiskTier
from kvferry.store.disk.batches import shares_of
from kvferry.store.disk.blocks import is_aligned
from kvferry.store.tier import BlockRead, BlockWrite, ReadOutcome, WriteOutcome, WriteResult
from kvferry.testing.blocks import block_bytes, small_spec
from kvferry.testing.disk_usage import disk_usage, files_below, stored_files
from kvferry.testing.faulty_files import FaultyFiles
from kvferry.testing.tiers_common import (
    HIT,
    MISS,
    PRESENT,
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


def odd_spec(nbytes: int) -> KVSpec:
    """Blocks that end in the middle of a page."""
    layer = LayerSpec((TensorSpec("k", (4, 1, nbytes // 4), DType.UINT8),))
    return KVSpec(model=f"odd{nbytes}", revision="r1", layers=(layer,), block_tokens=4)


@pytest.mark.parametrize("spec", [SPEC, odd_spec(4096 + 64), odd_spec(64), small_spec("big", pages=80)])
@pytest.mark.parametrize("direct", ["on", "off"])
def test_each_block_is_written_and_read_by_one_call(make_tier: MakeTier, spec: KVSpec, direct: str) -> None:
    files = FaultyFiles()
    tier = make_tier(files, direct=direct, capacity_nbytes=64 << 20, verify=False)
    namespace = opened(tier, spec)
    keys = chain(namespace, 1, 37)
    files.calls.clear()
    assert write_outcomes(write(tier, namespace, keys)) == [STORED] * 37
    assert files.calls["create"] == files.calls["pwritev"] == files.calls["rename"] == 37
    files.calls.clear()
    results = read(tier, namespace, keys)
    assert outcomes(results) == [HIT] * 37
    assert [r.parent for r in results] == [None, *keys[:-1]]
    assert [r.position for r in results] == list(range(37))
    assert files.calls["open_read"] == files.calls["preadv"] == 37


@pytest.mark.parametrize("spec", [SPEC, odd_spec(4096 + 64)])
def test_files_are_the_same_with_and_without_o_direct(
    make_tier: MakeTier, tmp_path: Path, spec: KVSpec
) -> None:
    found: list[list[tuple[str, bytes]]] = []
    for direct in ("on", "off"):
        folder = tmp_path / direct
        tier = make_tier(direct=direct, directories=(str(folder),))
        namespace = opened(tier, spec)
        write(tier, namespace, chain(namespace, 1, 20))
        found.append([(p.name, p.read_bytes()) for p in stored_files(folder)])
    assert found[0] == found[1]
    assert len(found[0]) == 20


def test_buffers_that_o_direct_does_not_take(make_tier: MakeTier) -> None:
    tier = make_tier(direct="on")
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 16)
    write(tier, namespace, keys)
    memory = page_aligned(16 * (SPEC.block_nbytes + 4096))
    views = [memory[n * (SPEC.block_nbytes + 512) :][: SPEC.block_nbytes] for n in range(16)]
    assert [is_aligned(view) for view in views] == [n % 8 == 0 for n in range(16)]
    assert [is_aligned(view.toreadonly()) for view in views] == [n % 8 == 0 for n in range(16)]
    blocks = [BlockRead(key, view) for key, view in zip(keys, views, strict=True)]
    assert outcomes(tier.read_into(namespace, blocks, deadline=deadline_in(20))) == [HIT] * 16
    assert all(bytes(b.into) == block_bytes(b.key, len(b.into)) for b in blocks)
    status = next(v for k, v in tier.usage().status.items() if k.endswith("O_DIRECT"))
    assert status.startswith("reads direct, writes direct")


def test_a_key_twice_in_one_call(make_tier: MakeTier, folder: Path) -> None:
    tier = make_tier()
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 8)
    results = write_outcomes(write(tier, namespace, [*keys, *keys]))
    assert sorted(results, key=lambda r: r.value) == [PRESENT] * 8 + [STORED] * 8
    assert outcomes(read(tier, namespace, [*keys, *keys])) == [HIT] * 16
    assert tier.usage().used_nbytes == disk_usage(folder)


def test_what_is_wrong_with_one_file_is_no_matter_to_its_neighbours(
    make_tier: MakeTier, folder: Path
) -> None:
    tier = make_tier(read_threads=1)
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 8)
    write(tier, namespace, keys)
    paths = {p.name[:64]: p for p in stored_files(folder)}
    gone, short, long, flipped = (paths[keys[n].hex()] for n in (0, 2, 4, 6))
    gone.unlink()
    os.truncate(short, 8192)
    with long.open("ab") as file:
        file.write(b"x")
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    bad = ReadOutcome.CORRUPT
    assert outcomes(read(tier, namespace, keys)) == [MISS, HIT, bad, HIT, bad, HIT, bad, HIT]
    assert outcomes(read(tier, namespace, keys)) == [MISS, HIT] * 4
    assert tier.usage().used_nbytes == disk_usage(folder)


class FailsOnce(FaultyFiles):
    """The ``which``-th file cannot be made."""

    def __init__(self, which: int, error: int) -> None:
        super().__init__()
        self.which = which
        self.error = error

    def create(self, name: str, folder: int, flags: int = 0) -> int:
        fd = super().create(name, folder, flags)
        if self.calls["create"] != self.which:
            return fd
        self.close(fd)
        self.unlink(name, folder)
        raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EINVAL])
def test_a_write_that_fails_costs_one_block(make_tier: MakeTier, folder: Path, error: int) -> None:
    files = FailsOnce(0, error)
    tier = make_tier(files, write_threads=1, direct="on")
    namespace = opened(tier, SPEC)
    files.which = files.calls["create"] + 3
    keys = chain(namespace, 1, 16)
    results = write_outcomes(write(tier, namespace, keys))
    expected = [STORED] * 16
    if error != errno.EINVAL:  # that is how a file system says that it has no O_DIRECT
        expected[2] = WriteOutcome.FAILED
    assert results == expected
    assert outcomes(read(tier, namespace, keys)) == [HIT if r is STORED else MISS for r in results]
    assert tier.usage().used_nbytes == disk_usage(folder)


@pytest.mark.parametrize("capacity_nbytes", [160 << 10, 1 << 20, 3 << 20])
def test_a_call_with_more_than_fits_stores_all_one_after_another(
    make_tier: MakeTier, folder: Path, capacity_nbytes: int
) -> None:
    tier = make_tier(capacity_nbytes=capacity_nbytes, write_threads=1)
    namespace = opened(tier, SPEC)
    blocks = []
    for number in range(300):
        data = page_aligned(SPEC.block_nbytes)
        blocks.append(BlockWrite(chain(namespace, number, 1)[0], data, None, 0))
    for _ in range(2):
        results = tier.write(namespace, blocks, deadline=deadline_in(60))
        assert write_outcomes(results) == [STORED] * 300
        held = tier.contains(namespace, [block.key for block in blocks], deadline=0)
        assert held == sorted(held), "the last ones are held"
        assert tier.usage().used_nbytes == disk_usage(folder) <= capacity_nbytes
        tier.remove(namespace, [block.key for block in blocks], deadline=deadline_in(20))


def test_room_that_the_same_call_has_taken_is_waited_for(make_tier: MakeTier, folder: Path) -> None:
    """What is not the tier's leaves room for two or three blocks at a time: eight are written."""
    folder.mkdir()
    (folder / "Other").write_bytes(bytes((2 << 20) - (120 << 10)))
    tier = make_tier(capacity_nbytes=2 << 20, write_threads=1)
    namespace = opened(tier, SPEC)
    for number in range(4):
        assert write_outcomes(write(tier, namespace, chain(namespace, number, 8))) == [STORED] * 8
        assert tier.usage().used_nbytes == disk_usage(folder) <= 2 << 20
    assert 2 <= tier.usage().entries < 8


def test_what_was_not_begun_by_the_deadline_is_not_written(make_tier: MakeTier, folder: Path) -> None:
    files = FaultyFiles()
    tier = make_tier(files, write_threads=1)
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 8)
    with files.stalling("create"):
        results = write(tier, namespace, keys, seconds=1.0)
        assert write_outcomes(results) == [WriteOutcome.FAILED] * 8
        assert all(r.in_flight is not None and not r.in_flight.is_set() for r in results)
    assert all(r.in_flight is not None and r.in_flight.wait(20) for r in results)
    assert tier.contains(namespace, keys, deadline=0) == [True] + [False] * 7
    assert tier.usage().used_nbytes == disk_usage(folder)
    assert write_outcomes(write(tier, namespace, keys)) == [PRESENT] + [STORED] * 7


def test_nothing_is_written_after_close(
    make_tier: MakeTier, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a thread that hung in the device meanwhile, but for the file that it hung in."""
    monkeypatch.setattr(io_pool, "_CLOSE_S", 0.2)
    files = FaultyFiles()
    tier = make_tier(files, write_threads=1)
    namespace = opened(tier, SPEC)
    keys = [BlockKey(bytes([7]) + bytes([n]) * 31) for n in range(9)]  # of one folder, which is open
    write(tier, namespace, keys[:1])
    results: list[WriteResult] = []
    caller = threading.Thread(target=lambda: results.extend(write(tier, namespace, keys[1:])))
    with files.stalling("rename") as begun:
        caller.start()
        assert begun.wait(20)
        tier.close()
    caller.join(20)
    # close wakes the caller, who cannot know yet what becomes of the file that hangs
    assert write_outcomes(results) == [WriteOutcome.FAILED] * 8
    assert all(r.in_flight is None or r.in_flight.wait(20) for r in results)
    assert len(stored_files(folder)) == 2
    assert not files_below(folder, ".tmp")


@pytest.mark.parametrize(
    ("count", "most", "sizes"),
    [
        (0, 8, []),
        (5, 8, [5]),
        (31, 8, [8, 8, 8, 7]),
        (32, 8, [4, 4, 8, 8, 4, 4]),
        (17, 3, [1, 1, 3, 3, 3, 3, 1, 1, 1]),
        (4, 1, [1, 1, 1, 1]),
    ],
)
def test_shares_leave_out_no_file_and_are_small_at_both_ends(count: int, most: int, sizes: list[int]) -> None:
    shares = shares_of(count, most, threads=2)
    assert [len(share) for share in shares] == sizes
    assert [n for share in shares for n in share] == list(range(count))
