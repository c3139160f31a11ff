"""Files by the native library and one system call at a time: the same files, results and accounts."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.core.buffers import address_of, page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.core.native import native
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.store.disk import DiskTier, state
from kvferry.store.disk.header import HeaderTemplate
from kvferry.store.disk.runs import DONE, NOT_BEGUN, FileRuns, file_runs
from kvferry.store.tier import ReadOutcome, TierNamespace, WriteOutcome
from kvferry.testing.blocks import small_spec
from kvferry.testing.disk_usage import disk_usage, files_below
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
IN_THE_WAY = WriteOutcome.FAILED


@pytest.fixture(autouse=True, params=["native", "python"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(state, "file_runs", lambda: None)
    elif file_runs() is None:
        pytest.skip(f"no native files: {native().reason or 'the library is older'}")
    return str(request.param)


@pytest.fixture
def written_together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many files each call into the library wrote."""
    counts: list[int] = []
    real = FileRuns.write

    def write_(self: FileRuns, *args: object) -> object:
        found = real(self, *args)  # type: ignore[arg-type]
        counts.append(sum(each[0] == DONE for each in found))
        return found

    monkeypatch.setattr(FileRuns, "write", write_)
    return counts


def odd_spec(nbytes: int) -> KVSpec:
    layer = LayerSpec((TensorSpec("k", (4, 1, nbytes // 4), DType.UINT8),))
    return KVSpec(model=f"odd{nbytes}", revision="r1", layers=(layer,), block_tokens=4)


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.rglob("*.safetensors"))}


def of_one_folder(count: int, first: int = 0) -> list[BlockKey]:
    return [BlockKey(bytes([7]) + (first + n).to_bytes(31, "big")) for n in range(count)]


@pytest.mark.parametrize("spec", [SPEC, odd_spec(4096 + 64), odd_spec(64), small_spec("big", pages=80)])
@pytest.mark.parametrize("direct", ["on", "off"])
@pytest.mark.parametrize("sync", ["none", "data", "full"])
def test_files_are_the_same_as_those_of_python(
    make_tier: MakeTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: KVSpec, direct: str,
    sync: str,
) -> None:  # fmt: skip
    options = {"direct": direct, "sync": sync, "capacity_nbytes": 64 << 20}
    tier = make_tier(**options)
    namespace = opened(tier, spec)
    keys = [*chain(namespace, 1, 20), *of_one_folder(20)]
    assert write_outcomes(write(tier, namespace, keys)) == [STORED] * 40
    assert outcomes(read(tier, namespace, keys)) == [HIT] * 40
    assert tier.flush(deadline=deadline_in(20))
    assert tier.usage().used_nbytes == disk_usage(tmp_path / "disk")
    monkeypatch.setattr(state, "file_runs", lambda: None)
    other = make_tier(directories=(str(tmp_path / "other"),), **options)
    opened(other, spec)
    write(other, namespace, keys)
    assert files_of(tmp_path / "disk") == files_of(tmp_path / "other")
    assert other.usage().used_nbytes == tier.usage().used_nbytes


def test_all_files_of_a_run_go_by_one_call(
    make_tier: MakeTier, kernel: str, written_together: list[int]
) -> None:
    tier = make_tier(write_threads=1)
    namespace = opened(tier, SPEC)
    write(tier, namespace, of_one_folder(1))  # makes the folder
    written_together.clear()
    assert write_outcomes(write(tier, namespace, of_one_folder(16, first=1))) == [STORED] * 16
    assert written_together == ([8, 8] if kernel == "native" else [])


@pytest.mark.parametrize("direct", ["on", "off"])
def test_evicted_files_are_written_over(make_tier: MakeTier, folder: Path, direct: str) -> None:
    """But not one that has another name, and one that was removed is made anew."""
    tier = make_tier(write_threads=1, capacity_nbytes=2 << 20, direct=direct)
    namespace = opened(tier, SPEC)
    keys = of_one_folder(400)
    write(tier, namespace, keys[:200])
    held = [k for k, is_held in zip(keys, tier.contains(namespace, keys, deadline=0), strict=True) if is_held]
    paths = {p.name[:64]: p for p in folder.rglob("*.safetensors")}
    linked, cut, gone = (paths[held[n].hex()] for n in (1, 2, 3))
    kept = linked.read_bytes()
    os.link(linked, folder / "kept")
    os.truncate(cut, 4096)
    gone.unlink()
    inodes = {p.stat().st_ino for p in folder.rglob("*.safetensors")}
    assert write_outcomes(write(tier, namespace, keys[200:208])) == [STORED] * 8
    new = [next(folder.rglob(f"{key.hex()}.safetensors")).stat().st_ino for key in keys[200:208]]
    assert any(inode in inodes for inode in new)  # how many, the file system has a say in
    assert write_outcomes(write(tier, namespace, keys[208:])) == [STORED] * 192
    assert (folder / "kept").read_bytes() == kept
    assert sum(o is HIT for o in outcomes(read(tier, namespace, keys[200:]))) == tier.usage().entries
    (folder / "kept").unlink()
    assert tier.usage().used_nbytes == disk_usage(folder) <= 2 << 20
    assert not files_below(folder, ".tmp")


def test_a_folder_in_the_way_costs_one_block(make_tier: MakeTier, folder: Path) -> None:
    tier = make_tier(write_threads=1)
    namespace = opened(tier, SPEC)
    keys = of_one_folder(9)
    write(tier, namespace, keys[:1])
    above = next(folder.rglob("*.safetensors")).parent
    (above / f"{keys[3].hex()}.safetensors").mkdir()
    results = write(tier, namespace, keys)
    assert write_outcomes(results) == [PRESENT, STORED, STORED, IN_THE_WAY, *[STORED] * 5]
    assert "EISDIR" in results[3].reason
    assert not files_below(folder, ".tmp")
    assert write_outcomes(write(tier, namespace, keys)) == [*[PRESENT] * 3, STORED, *[PRESENT] * 5]
    assert tier.usage().used_nbytes == disk_usage(folder)


def test_a_folder_that_was_removed_is_made_anew(make_tier: MakeTier, folder: Path) -> None:
    tier = make_tier(write_threads=1)
    namespace = opened(tier, SPEC)
    keys = of_one_folder(9)
    write(tier, namespace, keys[:1])
    shutil.rmtree(next(folder.rglob("*.safetensors")).parent)
    assert outcomes(read(tier, namespace, keys[:1])) == [MISS]
    assert write_outcomes(write(tier, namespace, keys)) == [STORED] * 9
    assert outcomes(read(tier, namespace, keys)) == [HIT] * 9


def test_what_is_planted_or_damaged_is_no_matter_to_its_neighbours(make_tier: MakeTier, folder: Path) -> None:
    tier = make_tier(read_threads=1)
    namespace = opened(tier, odd_spec(4096 + 64))
    keys = of_one_folder(8)
    write(tier, namespace, keys)
    paths = {p.name[:64]: p for p in folder.rglob("*.safetensors")}
    gone, link, fifo, long, into = (paths[keys[n].hex()] for n in (0, 1, 3, 4, 6))
    gone.unlink()
    link.rename(folder / "elsewhere")
    link.symlink_to(folder / "elsewhere")
    fifo.unlink()
    os.mkfifo(fifo)
    with long.open("ab") as file:
        file.write(b"x")
    into.unlink()
    into.mkdir()
    bad = ReadOutcome.CORRUPT
    assert outcomes(read(tier, namespace, keys)) == [MISS, bad, HIT, bad, bad, HIT, bad, HIT]


@pytest.mark.parametrize("direct", ["on", "off"])
def test_files_of_several_pieces_are_checked_in_each(make_tier: MakeTier, folder: Path, direct: str) -> None:
    tier = make_tier(capacity_nbytes=64 << 20, direct=direct)
    namespace = opened(tier, odd_spec((5 << 20) + 64))
    keys = of_one_folder(4)
    write(tier, namespace, keys)
    assert outcomes(read(tier, namespace, keys)) == [HIT] * 4
    paths = {p.name[:64]: p for p in folder.rglob("*.safetensors")}
    for key, at in zip(keys, (8192, 3 << 20, (5 << 20) + 4096 + 32), strict=False):
        with paths[key.hex()].open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
    assert outcomes(read(tier, namespace, keys)) == [ReadOutcome.CORRUPT] * 3 + [HIT]


def test_the_position_is_compared(make_tier: MakeTier, folder: Path) -> None:
    """As the parent is: a file that names another one than was written is not this tier's."""
    tier = make_tier()
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 3)
    write(tier, namespace, keys)
    path = next(folder.rglob(f"{keys[1].hex()}.safetensors"))
    content = path.read_bytes()
    assert content.count(b'"position":"000000000001"') == 1
    path.write_bytes(content.replace(b'"position":"000000000001"', b'"position":"000000000007"'))
    results = read(tier, namespace, keys)
    assert outcomes(results) == [HIT, ReadOutcome.CORRUPT, HIT]
    assert results[1].reason == "the position in the header is 7, it was stored with 1"


def test_nothing_is_begun_after_the_deadline_or_the_end(tmp_path: Path, kernel: str) -> None:
    runs = file_runs()
    if kernel == "python" or runs is None:
        pytest.skip("of the library alone")
    template = HeaderTemplate(TierNamespace.of("default", SPEC))
    turns = runs.turns(1)
    page, data = page_aligned(template.header_nbytes), page_aligned(template.data_nbytes)
    folder, ended = os.open(tmp_path, os.O_RDONLY), ctypes.c_int32(0)

    def files(seconds: float, error: int = 0) -> list[int]:
        run = runs.begin(template, 2)
        for number in range(2):
            where, sum_at = (address_of(page), address_of(data), 0), template.checksum_at(None)
            names = f"n{number}", f"t{number}"
            run.add_write(folder, error, where, sum_at, *names, ctypes.addressof(ended))
        return [each[0] for each in runs.write(run, "none", time.monotonic() + seconds, turns)]

    try:
        assert files(-1) == [NOT_BEGUN]
        ended.value = 1
        assert files(20) == [NOT_BEGUN]
        assert not list(tmp_path.iterdir())
        ended.value = 0
        assert files(20) == [DONE, DONE]
        assert {p.name: p.stat().st_size for p in tmp_path.iterdir()} == dict.fromkeys(
            ("n0", "n1"), template.file_nbytes
        )
        run = runs.begin(template, 1)
        run.add_read(folder, 0, (address_of(page), address_of(data), address_of(page)), "n0")
        assert runs.read(run, time.monotonic() - 1) == []
    finally:
        os.close(folder)


SMALL_DEVICE = """
import gc
import os
import sys
from pathlib import Path
from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.store.disk import DiskOptions, DiskTier, state
from kvferry.store.tier import BlockWrite, TierNamespace, WriteOutcome
from kvferry.testing.blocks import small_spec
from kvferry.testing.disk_usage import disk_usage
if sys.argv[2] == "python":
    state.file_runs = lambda: None
space = TierNamespace.of("default", small_spec("full", pages=16, layers=2))
tier = DiskTier("disk", DiskOptions((sys.argv[1],), 1 << 30, retry_s=0.05, write_threads=1))
tier.open(space)
gc.collect()
gc.disable()
reasons = set()
for call in range(40):
    blocks = [
        BlockWrite(BlockKey(bytes([7]) + n.to_bytes(31, "big")), page_aligned(65536), None, 0)
        for n in range(8 * call, 8 * call + 8)
    ]
    for result in tier.write(space, blocks, deadline=deadline_in(30)):
        reasons.add((result.outcome.value, result.reason.partition(": ")[2]))
assert tier.usage().used_nbytes == disk_usage(Path(sys.argv[1])), "what failed is not counted"
assert not list(Path(sys.argv[1]).rglob("*.tmp"))
tier.close()
links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
left = [p for p in map(os.readlink, filter(os.path.lexists, links)) if p.startswith(sys.argv[1])]
assert not left, "a failure keeps folders open"
print(sorted(reasons))
"""


def test_a_full_device(tmp_path: Path, kernel: str) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mounting a small file system needs root and unshare")
    mount = 'mount --make-rprivate / && mount -t tmpfs -o size=8m tmpfs $0 && exec $1 -c "$2" $0 $3'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, str(tmp_path), sys.executable, SMALL_DEVICE, kernel],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert "No space left on device (ENOSPC)" in done.stdout
    assert "stored" in done.stdout
