"""What the store's benchmarks are made of: blocks, options, children, and the files without a store."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry.bench.blocks import BlockSource, block_spec, chain_tokens
from kvferry.bench.child import anonymous_rss, run_child
from kvferry.bench.disk_pattern import DiskPattern, FileShape, drop_page_cache, filesystem_of
from kvferry.bench.registry import GROUPS, Options, run_group
from kvferry.bench.results import Result
from kvferry.bench.scenarios import store_disk
from kvferry.bench.scenarios.store import DAEMON_SCENARIOS, SCENARIOS, StoreOptions, Workplace
from kvferry.bench.scenarios.store_disk import direct_modes
from kvferry.core.buffers import page_aligned
from kvferry.core.errors import CapacityError, ConfigError, KVFerryError, StoreError, UnknownPluginError
from kvferry.core.keys import block_keys, split_keys
from kvferry.store.disk import DiskOptions, DiskTier


@pytest.mark.parametrize("nbytes", [4096, 12 << 10, 64 << 10, 1 << 20, 32 << 20])
def test_a_block_has_the_size_asked_for(nbytes: int) -> None:
    assert block_spec(nbytes).block_nbytes == nbytes


@pytest.mark.parametrize("nbytes", [0, 1000, 5000])
def test_a_size_that_is_not_whole_pages_is_refused(nbytes: int) -> None:
    with pytest.raises(ConfigError, match=f"a block of {nbytes} bytes"):
        block_spec(nbytes)


def test_chains_of_different_numbers_share_no_key_and_are_parsed_back() -> None:
    first, second = (block_keys(bytes(32), chain_tokens(n, 8), 16) for n in (1, 2))
    assert len(first) == 8
    assert not set(first) & set(second)
    assert split_keys(b"".join(first)) == first


def test_every_page_of_a_source_differs_and_a_byte_out_of_place_is_seen() -> None:
    source = BlockSource(8192, 3 * 8192)
    assert len(source) == 3
    pages = {bytes(source[n][at : at + 4096]) for n in range(3) for at in (0, 4096)}
    assert len(pages) == 6
    copy = bytearray(source[1])
    assert source.matches(1, memoryview(copy))
    assert source.matches(4, memoryview(copy))
    assert not source.matches(2, memoryview(copy))
    copy[5000] ^= 1
    assert not source.matches(1, memoryview(copy))


def test_options_name_what_is_wrong() -> None:
    found = StoreOptions.of(Options(params={"sizes": "64KiB,1MiB", "entries": 5, "scenario": "store.evict"}))
    assert found.sizes == (65536, 1 << 20)
    assert found.scenarios == ("store.evict",)
    assert (found.lookup_entries, found.restart_entries) == (5, 5)
    assert StoreOptions.of(Options()).lookup_entries == 1_000_000
    assert StoreOptions.of(Options()).restart_entries == 100_000
    with pytest.raises(UnknownPluginError, match=r"store\.evikt.*store\.evict"):
        StoreOptions.of(Options(params={"scenario": "store.evikt"}))
    with pytest.raises(ConfigError, match="a block of 100 bytes"):
        StoreOptions.of(Options(params={"sizes": "100"}))
    reported = [name for name in GROUPS["store"].scenarios if not name.endswith(".raw")]  # beside others
    assert [*SCENARIOS, *DAEMON_SCENARIOS] == reported


def test_what_the_disk_refuses_is_an_error_with_the_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(options: StoreOptions, progress: object) -> Iterator[Result]:
        raise OSError(errno.EINVAL, "Invalid argument")
        yield

    monkeypatch.setattr(store_disk, "run_write", refuse)
    options = Options(params={"scenario": "store.write.disk"})
    with pytest.raises(StoreError, match=r"store\.write\.disk: Invalid argument \(EINVAL\).*--direct"):
        list(run_group("store", options, lambda *_: None))


def test_a_lookup_over_more_than_memory_is_refused() -> None:
    options = Options(params={"scenario": "store.lookup", "entries": 10**12})
    with pytest.raises(CapacityError, match="ask for fewer with --entries"):
        list(run_group("store", options, lambda *_: None))


def test_a_workplace_is_removed_and_says_where_it_was(tmp_path: Path) -> None:
    with Workplace.open(StoreOptions(directory=tmp_path / "new"), 1) as place:
        assert place.path.parent == tmp_path / "new"
        assert place.params["filesystem"] == filesystem_of(tmp_path) != ""
        (place.path / "file").touch()
    assert not list((tmp_path / "new").iterdir())
    with (
        pytest.raises(CapacityError, match="choose another with --dir"),
        Workplace.open(StoreOptions(directory=tmp_path), 1 << 60),
    ):
        pass
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="cannot work in"),
        Workplace.open(StoreOptions(directory=tmp_path / "file"), 1),
    ):
        pass


def test_a_child_that_fails_is_named_with_its_last_words() -> None:
    with pytest.raises(KVFerryError, match=r"store_lookup ended with code 1: KeyError: 'entries'"):
        run_child("kvferry.bench.scenarios.store_lookup", {}, timeout_s=60)


def test_own_memory_is_counted_and_shared_memory_is_not() -> None:
    gc.collect()  # what earlier tests left would go some time
    before = anonymous_rss()
    own = page_aligned(128 << 20)
    assert anonymous_rss() - before > 100 << 20
    fd = os.memfd_create("test")
    os.write(fd, own)
    assert anonymous_rss() - before < 200 << 20
    os.close(fd)


@pytest.mark.parametrize("sync", ["none", "data", "full"])
def test_the_pattern_writes_and_reads_whole_files(tmp_path: Path, sync: str) -> None:
    shape = FileShape(4096, 8192, sync, False, False, read_threads=3, write_threads=2, batch=4)
    pattern = DiskPattern(tmp_path / "files", shape)
    source = BlockSource(8192, 10 * 8192)
    sample = pattern.write(0, [source[n] for n in range(10)])
    assert sample.nbytes == 10 * 8192
    assert len(sample.latencies) == 3
    files = sorted(p for p in (tmp_path / "files").rglob("*") if p.is_file())
    assert len(files) == 10
    assert {p.stat().st_size for p in files} == {4096 + 8192}
    drop_page_cache(tmp_path)
    whole = page_aligned(10 * 8192)
    views = [whole[n * 8192 : (n + 1) * 8192] for n in range(10)]
    assert pattern.read(range(9, -1, -1), views).nbytes == 10 * 8192
    assert all(source.matches(9 - n, view) for n, view in enumerate(views))
    pattern.close()


def test_a_file_that_is_too_short_ends_the_baseline(tmp_path: Path) -> None:
    shape = FileShape(4096, 8192, "none", False, False, read_threads=1, write_threads=1, batch=1)
    pattern = DiskPattern(tmp_path, shape)
    pattern.write(0, [memoryview(bytes(8192))])
    next(p for p in tmp_path.rglob("*") if p.is_file()).write_bytes(b"short")
    with pytest.raises(KVFerryError, match="5 of 12288 bytes"):
        pattern.read([0], [page_aligned(8192)])
    pattern.close()


@pytest.mark.parametrize("direct", ["on", "off"])
def test_the_modes_of_a_tier_are_read_from_its_status(tmp_path: Path, direct: str) -> None:
    options = DiskOptions((str(tmp_path),), 1 << 20, direct=direct)  # type: ignore[arg-type]
    tier = DiskTier("disk", options)
    assert direct_modes(tier.usage().status) == (direct == "on",) * 2
    tier.close()
    assert direct_modes({"/a: O_DIRECT": "reads cached, writes direct (reads direct)"}) == (False, True)


def test_sources_are_page_aligned() -> None:
    address = np.frombuffer(BlockSource(4096, 8192)[1], np.uint8).__array_interface__["data"][0]
    assert address % 4096 == 0
