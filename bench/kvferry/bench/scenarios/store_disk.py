"""``store.write.disk`` and ``store.read.disk``: the disk tier against the same files without it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from kvferry.bench.blocks import BlockSource, block_spec, chain_tokens
from kvferry.bench.ceilings import ColdWalk
from kvferry.bench.disk_pattern import DiskPattern, FileShape, drop_page_cache
from kvferry.bench.pairing import Progress, run_paired
from kvferry.bench.results import Param, Result, Sample, summarise
from kvferry.bench.scenarios.store import StoreOptions, Workplace
from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError
from kvferry.core.keys import BlockKey, block_keys
from kvferry.store.disk import DiskOptions, DiskTier, names
from kvferry.store.disk.header import HeaderTemplate
from kvferry.store.disk.options import Direct, Sync
from kvferry.store.encoding import TierCodec
from kvferry.store.tier import BlockRead, BlockWrite, ReadOutcome, TierNamespace, WriteOutcome

__all__ = ["direct_modes", "run_read", "run_write"]

_WAIT_S = 300.0
_RUNS_A_WALK = 4
_LEAST_BATCH = 4
_MOST_BATCH = 32
_BATCH_NBYTES = 32 << 20


def _batch(nbytes: int) -> int:
    """Blocks of a call."""
    return max(_LEAST_BATCH, min(_MOST_BATCH, _BATCH_NBYTES // nbytes))


def _calls(nbytes: int, options: StoreOptions) -> int:
    """Calls of a run."""
    return max(1, options.walk_nbytes // _RUNS_A_WALK // (nbytes * _batch(nbytes)))


def _run_nbytes(nbytes: int, options: StoreOptions) -> int:
    return nbytes * _batch(nbytes) * _calls(nbytes, options)


def direct_modes(status: Mapping[str, str]) -> tuple[bool, bool]:
    """Whether a disk tier in one directory reads and writes with O_DIRECT, from its ``usage().status``."""
    text = next(value for name, value in status.items() if name.endswith(": O_DIRECT"))
    modes = text.partition("(")[0]
    return "reads direct" in modes, "writes direct" in modes


class _Disk:
    """A disk tier and the baseline beside it, with blocks that walk through memory."""

    def __init__(self, nbytes: int, options: StoreOptions, place: Workplace) -> None:
        self.nbytes = nbytes
        self.batch = _batch(nbytes)
        self.calls = _calls(nbytes, options)
        self.held_calls = max(self.calls, options.walk_nbytes // (nbytes * self.batch))
        loses = bool(TierCodec(options.codec, allow_lossy=True).lossy)
        self.codec = TierCodec(options.codec, allow_lossy=loses)
        self.source = BlockSource(nbytes, options.walk_nbytes, values=self.codec.is_on)
        self.space = TierNamespace.of("bench", block_spec(nbytes))
        self.folder = place.path / str(nbytes)
        self.options = DiskOptions(
            directories=(str(self.folder / "tier"),),
            capacity_nbytes=shutil.disk_usage(place.path).total,  # nothing is evicted
            sync=cast("Sync", options.sync),
            direct=cast("Direct", options.direct),
        )
        self.tier = DiskTier("disk", self.options, codec=self.codec)
        self.tier.open(self.space)
        read, write = direct_modes(self.tier.usage().status)
        self.shape = FileShape(
            header_nbytes=HeaderTemplate(self.space).header_nbytes,
            data_nbytes=nbytes,
            sync=options.sync,
            direct_read=read,
            direct_write=write,
            read_threads=self.options.read_threads,
            write_threads=self.options.write_threads,
            batch=self.batch,
        )
        self.pattern = DiskPattern(self.namespace_folder, self.shape)

    @property
    def namespace_folder(self) -> Path:
        """Where the tier's files are, in folders by the first byte of the key."""
        space = self.space
        return self.folder / "tier" / names.tenant_folder(space.tenant) / space.namespace_id.hex()

    def keys(self, first: int) -> list[BlockKey]:
        """Keys of one call's chain, whose first block is block ``first``."""
        return block_keys(
            self.space.namespace_id, chain_tokens(first, self.batch), self.space.spec.block_tokens
        )

    def writes(self, first: int) -> list[BlockWrite]:
        """What one call writes."""
        keys = self.keys(first)
        parents = [None, *keys]
        return [
            BlockWrite(key, self.source[first + n], parent, n)
            for n, (key, parent) in enumerate(zip(keys, parents, strict=False))
        ]

    def write(self, firsts: Sequence[int]) -> Sample:
        """One run of writes; at its end the folders are synced if that is asked."""
        calls = [self.writes(first) for first in firsts]
        latencies = []
        cpu, start = time.process_time(), time.perf_counter()
        for writes in calls:
            begin = time.perf_counter()
            results = self.tier.write(self.space, writes, deadline=deadline_in(_WAIT_S))
            latencies.append(time.perf_counter() - begin)
            for result in results:
                if result.outcome is not WriteOutcome.STORED:
                    raise KVFerryError(f"a block was not written: {result.outcome.value} {result.reason}")
        if self.options.sync != "none" and not self.tier.flush(deadline=deadline_in(_WAIT_S)):
            raise KVFerryError("the tier could not make its blocks durable")
        seconds = time.perf_counter() - start
        return Sample(
            seconds, len(calls) * self.batch * self.nbytes, time.process_time() - cpu, tuple(latencies)
        )

    def read(self, firsts: Sequence[int], views: Sequence[memoryview]) -> Sample:
        """One run of reads, into ``views``."""
        calls = [
            [BlockRead(key, views[at * self.batch + n]) for n, key in enumerate(self.keys(first))]
            for at, first in enumerate(firsts)
        ]
        latencies = []
        cpu, start = time.process_time(), time.perf_counter()
        for reads in calls:
            begin = time.perf_counter()
            results = self.tier.read_into(self.space, reads, deadline=deadline_in(_WAIT_S))
            latencies.append(time.perf_counter() - begin)
            for result in results:
                if result.outcome is not ReadOutcome.HIT:
                    raise KVFerryError(f"a block was not read: {result.outcome.value} {result.reason}")
        seconds = time.perf_counter() - start
        return Sample(
            seconds, len(calls) * self.batch * self.nbytes, time.process_time() - cpu, tuple(latencies)
        )

    def is_right(self, firsts: Sequence[int], views: Sequence[memoryview]) -> bool:
        """Whether ``views`` hold the blocks of those calls, byte for byte, or nearly if a codec is lossy."""
        numbers = [first + n for first in firsts for n in range(self.batch)]
        is_it = self.source.resembles if self.codec.lossy else self.source.matches
        return all(is_it(n, view) for n, view in zip(numbers, views, strict=True))

    def params(self, place: Workplace, options: StoreOptions, *, write: bool) -> dict[str, Param]:
        """Everything that changes the work."""
        shape = self.shape
        counts = self.codec.counters()
        stored = counts.get("codec_stored_nbytes", 0.0)
        ratio = round(counts["codec_encoded_nbytes"] / stored, 3) if stored else 1.0
        encoded: dict[str, Param] = {"data": "normal bfloat16", "ratio": ratio} if self.codec.is_on else {}
        return {
            "nbytes": self.nbytes,
            "batch": self.batch,
            "threads": shape.write_threads if write else shape.read_threads,
            "checksum": "xxh3",
            "codec": self.codec.text,
            **encoded,
            "sync": shape.sync,
            "direct": shape.direct_write if write else shape.direct_read,
            "header_nbytes": shape.header_nbytes,
            "walk_nbytes": options.walk_nbytes,
            **place.params,
            "cpus": os.cpu_count() or 1,
        }

    def room(self, nbytes: int) -> list[memoryview]:
        """Memory for so many bytes of blocks, at least those of a run."""
        count = max(self.calls * self.batch, -(-nbytes // self.nbytes))
        walk = ColdWalk(self.nbytes, count * self.nbytes, fill=0)
        return [walk.take() for _ in range(count)]

    def pattern_reads_the_tier(self) -> None:
        """Let the baseline read the tier's files; with a codec files of its own, of blocks as they are."""
        if self.codec.is_on:
            for first in range(0, self.held_calls * self.batch, self.batch):
                self.pattern.write(first, [self.source[first + n] for n in range(self.batch)])
            return
        self.pattern.close()
        keys = [key for call in range(self.held_calls) for key in self.keys(call * self.batch)]
        self.pattern = DiskPattern(self.namespace_folder, self.shape, [names.block_name(key) for key in keys])

    def close(self) -> None:
        self.tier.close()
        self.pattern.close()


class _Turns:
    """Numbers of the first blocks of one run's calls, on and on; round after ``held_calls`` if given."""

    def __init__(self, disk: _Disk, held_calls: int | None = None) -> None:
        self._disk, self._held = disk, held_calls
        self._next = 0

    def take(self) -> list[int]:
        found = []
        for _ in range(self._disk.calls):
            call = self._next if self._held is None else self._next % self._held
            found.append(call * self._disk.batch)
            self._next += 1
        return found


class _Writes:
    """New files each time, those of both sides in the same folders.

    None is removed before the end: a file system may spare the place of a file that was just removed, and
    look long for another, at the cost of whoever comes next.
    """

    def __init__(self, disk: _Disk, *, tier: bool) -> None:
        self._disk, self._tier, self._turns = disk, tier, _Turns(disk)
        self.firsts: list[int] = []

    def __call__(self) -> Sample:
        disk = self._disk
        self.firsts = self._turns.take()
        if disk.shape.sync == "none" and not disk.shape.direct_write:
            os.sync()  # nobody pays for what others left to be written
        if self._tier:
            return disk.write(self.firsts)
        numbers = [first + n for first in self.firsts for n in range(disk.batch)]
        return disk.pattern.write(numbers[0], [disk.source[n] for n in numbers])


def run_write(options: StoreOptions, progress: Progress) -> Iterator[Result]:
    """Blocks from memory to files."""
    runs = options.runs + options.warmup
    needed = sum(2 * runs * _run_nbytes(nbytes, options) for nbytes in options.sizes)
    with Workplace.open(options, needed + needed // 8) as place:
        for nbytes in options.sizes:
            disk = _Disk(nbytes, options, place)
            try:
                writes = _Writes(disk, tier=True)
                samples = run_paired(
                    {"subject": writes, "disk_pattern": _Writes(disk, tier=False)},
                    runs=options.runs,
                    warmup=options.warmup,
                    progress=progress,
                    label=f"store.write.disk nbytes={nbytes}",
                )
                back = ColdWalk(nbytes, len(writes.firsts) * disk.batch * nbytes, fill=0)
                views = [back.take() for _ in range(len(writes.firsts) * disk.batch)]
                disk.read(writes.firsts, views)
                verified = disk.is_right(writes.firsts, views)
                params = disk.params(place, options, write=True)
            finally:
                disk.close()
            values = {name: [s.gb_per_s for s in found] for name, found in samples.items()}
            yield summarise(
                "store.write.disk", params, "GB/s", values, samples=samples["subject"], verified=verified
            )


class _Reads:
    """Reads of files that no cache holds, into memory that is walked through.

    Both sides read the same files into the same memory in each round: how fast that goes depends, by a factor
    of two and for good, on where a file has come to lie on the device, and on whether the pages of the memory
    happen to be neighbours.
    """

    def __init__(self, disk: _Disk, into: Sequence[memoryview], *, tier: bool) -> None:
        self._disk, self._tier = disk, tier
        self._turns = _Turns(disk, disk.held_calls)
        self._into = into
        self._at = 0
        self.firsts: list[int] = []
        self.views: list[memoryview] = []

    def __call__(self) -> Sample:
        disk = self._disk
        drop_page_cache(disk.folder)
        self.firsts = self._turns.take()
        self.views = [self._into[(self._at + n) % len(self._into)] for n in range(disk.calls * disk.batch)]
        self._at += len(self.views)
        if self._tier:
            return disk.read(self.firsts, self.views)
        return disk.pattern.read([f + n for f in self.firsts for n in range(disk.batch)], self.views)


def run_read(options: StoreOptions, progress: Progress) -> Iterator[Result]:
    """Blocks from files to memory."""
    needed = sum(2 * max(options.walk_nbytes, _run_nbytes(nbytes, options)) for nbytes in options.sizes)
    with Workplace.open(options, needed + needed // 8) as place:
        for nbytes in options.sizes:
            disk = _Disk(nbytes, options, place)
            try:
                disk.write([call * disk.batch for call in range(disk.held_calls)])
                disk.pattern_reads_the_tier()
                os.sync()  # what is dirty cannot be dropped from the page cache
                into = disk.room(options.walk_nbytes)
                reads = _Reads(disk, into, tier=True)
                samples = run_paired(
                    {"subject": reads, "disk_pattern": _Reads(disk, into, tier=False)},
                    runs=options.runs,
                    warmup=options.warmup,
                    progress=progress,
                    label=f"store.read.disk nbytes={nbytes}",
                )
                verified = disk.is_right(reads.firsts, reads.views)
                params = disk.params(place, options, write=False)
                params["page_cache"] = "dropped by posix_fadvise before each run"
            finally:
                disk.close()
            values = {name: [s.gb_per_s for s in found] for name, found in samples.items()}
            yield summarise(
                "store.read.disk", params, "GB/s", values, samples=samples["subject"], verified=verified
            )
