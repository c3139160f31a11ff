"""``store.save.dram``, ``store.load.dram`` and ``store.evict``: a store that has nothing but memory."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.bench.blocks import BlockSource, block_spec, chain_tokens
from kvferry.bench.ceilings import MemcpyCold
from kvferry.bench.pairing import Progress, run_paired
from kvferry.bench.results import Param, Result, Sample, percentile, summarise
from kvferry.bench.scenarios.store import StoreOptions
from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError
from kvferry.core.keys import BlockKey
from kvferry.core.streaming_copy import copy_kernel
from kvferry.store.tiered import TieredStore

__all__ = ["run_evict", "run_load", "run_save"]

_WAIT_S = 60.0
_RUNS_A_WALK = 4  # a run moves so much of what is walked through
_SAVE_BATCH = 32
_SAVE_BATCH_NBYTES = 32 << 20
_LOAD_BATCH = 256
_LOADS = 512  # blocks a run, or so many single loads
_SLACK_NBYTES = 128 << 20  # segments end where a block no longer fits


@dataclass(frozen=True, slots=True)
class _Chain:
    number: int  # of its first block
    keys: list[BlockKey]


class _Memory:
    """A store whose blocks walk through memory: what is saved next replaces what was saved first.

    Args:
        nbytes: Of a block.
        batch: Blocks of a call, a chain of their own.
        options: Of the benchmark.
        evict: The store is full, so that saves evict; else room is made between the runs.
    """

    def __init__(self, nbytes: int, batch: int, options: StoreOptions, *, evict: bool) -> None:
        self.nbytes, self.batch, self.evict = nbytes, batch, evict
        self.source = BlockSource(nbytes, options.walk_nbytes)
        self.calls = max(1, options.walk_nbytes // _RUNS_A_WALK // (nbytes * batch))
        held = max(self.calls, -(-options.walk_nbytes // (nbytes * batch)))
        capacity = (held + (0 if evict else self.calls)) * batch * nbytes
        self.store = TieredStore(capacity if evict else capacity + capacity // 8 + _SLACK_NBYTES)
        self.namespace = self.store.namespace(block_spec(nbytes))
        self.chains: deque[_Chain] = deque()
        self._saved = 0
        for chain in self._new_chains(held + self.calls):
            self._save(chain, self._blocks(chain))
        if not evict:
            self._make_room()

    def _new_chains(self, count: int) -> list[_Chain]:
        found = []
        for _ in range(count):
            found.append(_Chain(self._saved, self.namespace.keys(chain_tokens(self._saved, self.batch))))
            self._saved += self.batch
        self.chains += found
        return found

    def _blocks(self, chain: _Chain) -> list[tuple[BlockKey, memoryview]]:
        return [(key, self.source[chain.number + n]) for n, key in enumerate(chain.keys)]

    def _save(self, chain: _Chain, blocks: Sequence[tuple[BlockKey, memoryview]]) -> float:
        start = time.perf_counter()
        stored = self.namespace.save(blocks, parent=None, deadline=deadline_in(_WAIT_S))
        seconds = time.perf_counter() - start
        if stored != self.batch:
            raise KVFerryError(f"chain {chain.number}: {stored} of {self.batch} blocks were new")
        return seconds

    def _make_room(self) -> None:
        for _ in range(self.calls):
            self.namespace.remove(self.chains.popleft().keys)

    def __call__(self) -> Sample:
        """Save as much as a run is."""
        chains = [(chain, self._blocks(chain)) for chain in self._new_chains(self.calls)]
        cpu, start = time.process_time(), time.perf_counter()
        latencies = [self._save(chain, blocks) for chain, blocks in chains]
        seconds = time.perf_counter() - start
        cpu = time.process_time() - cpu
        if not self.evict:
            self._make_room()
        return Sample(seconds, self.calls * self.batch * self.nbytes, cpu, tuple(latencies))

    def copy(self) -> Sample:
        """The ceiling: the same copies between the same memory, with all that the store does left untimed.

        Memory of one machine differs by a third in speed from place to place, so only equal places compare.
        """
        chains = [(chain, self._blocks(chain)) for chain in self._new_chains(self.calls)]
        leases = [
            self.namespace.reserve(chain.keys, parent=None, deadline=deadline_in(_WAIT_S))
            for chain, _ in chains
        ]
        pairs = [
            (np.frombuffer(lease.view(n), np.uint8), np.frombuffer(source, np.uint8))
            for lease, (_, blocks) in zip(leases, chains, strict=True)
            for n, (_, source) in enumerate(blocks)
        ]
        start = time.perf_counter()
        for slot, source in pairs:
            np.copyto(slot, source)
        seconds = time.perf_counter() - start
        for lease in leases:
            lease.commit()
        if not self.evict:
            self._make_room()
        return Sample(seconds, len(pairs) * self.nbytes)

    def verify(self) -> bool:
        """Whether what the last run saved is there and right, and evictions were what was asked for."""
        if (self.store.stats().evicted_blocks > 0) != self.evict:
            raise KVFerryError(f"{self.store.stats().evicted_blocks} blocks were evicted")
        for chain in list(self.chains)[-self.calls :]:
            with self.namespace.load(chain.keys, deadline=deadline_in(_WAIT_S)) as lease:
                views = [lease.view(n) for n in range(len(lease))]
                if len(views) != self.batch or not all(
                    self.source.matches(chain.number + n, view) for n, view in enumerate(views)
                ):
                    return False
        return True


def _params(nbytes: int, batch: int, options: StoreOptions) -> dict[str, Param]:
    return {
        "nbytes": nbytes,
        "batch": batch,
        "threads": 1,
        "checksum": "off",
        "walk_nbytes": options.walk_nbytes,
        "cpus": os.cpu_count() or 1,
    }


def run_save(options: StoreOptions, progress: Progress) -> Iterator[Result]:
    """Copies into memory that has room."""
    yield from _saves("store.save.dram", options, progress, evict=False)


def run_evict(options: StoreOptions, progress: Progress) -> Iterator[Result]:
    """Copies into memory that is full: every save evicts as many blocks as it brings."""
    yield from _saves("store.evict", options, progress, evict=True)


def _saves(scenario: str, options: StoreOptions, progress: Progress, *, evict: bool) -> Iterator[Result]:
    for nbytes in options.sizes:
        for batch in sorted({1, min(_SAVE_BATCH, max(1, _SAVE_BATCH_NBYTES // nbytes))}):
            memory = _Memory(nbytes, batch, options, evict=evict)
            try:
                private = MemcpyCold(nbytes, memory.calls * batch, walk_nbytes=options.walk_nbytes)
                samples = run_paired(
                    {"subject": memory, "memcpy_cold": memory.copy, "memcpy_private": private},
                    runs=options.runs,
                    warmup=options.warmup,
                    progress=progress,
                    label=f"{scenario} nbytes={nbytes} batch={batch}",
                )
                verified = memory.verify()
            finally:
                memory.store.close()
            values = {name: [s.gb_per_s for s in found] for name, found in samples.items()}
            params: dict[str, Param] = {
                **_params(nbytes, batch, options),
                "policy": "lru",
                "copy": copy_kernel(),
                "memcpy_cold": "same sources and slots",
                "memcpy_private": "memory of its own",
            }
            yield summarise(scenario, params, "GB/s", values, samples=samples["subject"], verified=verified)


class _Loads:
    """Loads of chains that lie all over memory: lease, a view of each block, release."""

    def __init__(self, memory: _Memory) -> None:
        self._memory = memory
        self.calls = max(8, _LOADS // memory.batch)
        self._turn = 0

    def __call__(self) -> Sample:
        """Some loads; no bytes are moved, so none are counted."""
        memory, latencies = self._memory, []
        chains = memory.chains
        for _ in range(self.calls):
            keys = chains[self._turn % len(chains)].keys
            self._turn += 1
            start = time.perf_counter()
            lease = memory.namespace.load(keys, deadline=deadline_in(_WAIT_S))
            views = [lease.view(n) for n in range(len(lease))]
            lease.release()
            latencies.append(time.perf_counter() - start)
            if len(views) != memory.batch:
                raise KVFerryError(f"{len(views)} of {memory.batch} blocks were loaded")
        return Sample(sum(latencies), 0, None, tuple(latencies))


def run_load(options: StoreOptions, progress: Progress) -> Iterator[Result]:
    """Leases on blocks in memory; the value is a run's median for each block, percentiles are of calls."""
    for nbytes in options.sizes:
        most = max(1, options.walk_nbytes // nbytes)  # more would need more memory, and shows nothing else
        for batch in sorted({1, min(_LOAD_BATCH, most)}):
            memory = _Memory(nbytes, batch, options, evict=False)
            try:
                loads = _Loads(memory)
                copies = max(1, options.walk_nbytes // _RUNS_A_WALK // nbytes)
                memcpy = MemcpyCold(nbytes, copies, walk_nbytes=options.walk_nbytes)
                samples = run_paired(
                    {"subject": loads, "memcpy_cold": memcpy},
                    runs=options.runs,
                    warmup=options.warmup,
                    progress=progress,
                    label=f"store.load.dram nbytes={nbytes} batch={batch}",
                )
                verified = memory.verify()
            finally:
                memory.store.close()
            values = {
                "subject": [percentile(s.latencies, 0.5) / batch * 1e6 for s in samples["subject"]],
                "memcpy_cold": [s.seconds / copies * 1e6 for s in samples["memcpy_cold"]],
            }
            params: dict[str, Param] = {**_params(nbytes, batch, options), "timed": "load, views, release"}
            yield summarise(
                "store.load.dram", params, "us/block", values, samples=samples["subject"], verified=verified
            )
