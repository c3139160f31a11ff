"""``store.lookup``: a prompt's keys in a large index, with caches flushed; and what an entry costs.

Runs in a child process, so that the growth of its memory is the index's alone.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvferry.bench.blocks import block_spec, chain_tokens
from kvferry.bench.child import anonymous_rss, run_child, serve_child
from kvferry.bench.pairing import Progress, run_paired
from kvferry.bench.results import Param, Result, Sample, percentile, summarise
from kvferry.bench.scenarios.store import StoreOptions, rounded
from kvferry.core.arena import available_memory
from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError, KVFerryError
from kvferry.core.keys import split_keys
from kvferry.core.units import format_nbytes
from kvferry.store.tiered import TieredStore

__all__ = ["run_lookup"]

_CHAIN = 512
_BLOCK_NBYTES = 4096
_FLUSH_NBYTES = 64 << 20
_LOOKUPS = 20  # a run
_PROMPTS = 64
_MOST_ENTRY_NBYTES = 1024  # index, the plain dict beside it, and what else a child needs
_TIMEOUT_S = 600.0
_WAIT_S = 60.0


def run_lookup(options: StoreOptions, progress: Progress) -> Iterator[Result]:
    """Run the scenario: one result for the time, one for the memory of an entry."""
    entries = max(1, options.lookup_entries // _CHAIN) * _CHAIN
    needed, available = entries * (_BLOCK_NBYTES + _MOST_ENTRY_NBYTES), available_memory()
    if needed > available:
        raise CapacityError(
            f"store.lookup over {entries} entries needs {format_nbytes(needed)} of memory, "
            f"{format_nbytes(available)} are available; ask for fewer with --entries"
        )
    label = f"store.lookup entries={entries}{rounded(options.lookup_entries, entries, _CHAIN)}"
    progress(label, 0, 1)
    flush = min(_FLUSH_NBYTES, options.walk_nbytes)
    request = {"entries": entries, "flush_nbytes": flush, "runs": options.runs, "warmup": options.warmup}
    found = run_child(__name__, request, timeout_s=_TIMEOUT_S)
    progress(label, 1, 1)
    params: dict[str, Param] = {
        "entries": entries,
        **({"asked": options.lookup_entries} if options.lookup_entries != entries else {}),
        "tier": "dram",
        "policy": "lru",
        "threads": 1,
        "cpus": os.cpu_count() or 1,
    }
    timed = {
        **params,
        "blocks": _CHAIN,
        "flush_nbytes": flush,
        "timed": "keys from bytes, lookup",
    }
    samples = [Sample(sum(row), latencies=tuple(row)) for row in found["subject"]]
    values = {name: [percentile(row, 0.5) * 1e6 for row in found[name]] for name in ("subject", "plain_dict")}
    yield summarise("store.lookup", timed, "us", values, samples=samples)
    memory = {**params, "measured": "anonymous RSS, an entry", "links": "parent, policy"}
    yield summarise("store.lookup", memory, "bytes", {"subject": [found["entry_nbytes"]]})


class _Index:
    """A store of chains of 512 blocks each, committed in one batch."""

    def __init__(self, entries: int) -> None:
        gc.collect()
        before = anonymous_rss()
        self.store = TieredStore(entries * _BLOCK_NBYTES + (64 << 20), lease_s=_TIMEOUT_S)
        self.namespace = self.store.namespace(block_spec(_BLOCK_NBYTES))
        chains = entries // _CHAIN
        chosen = set(np.random.default_rng(3).permutation(chains)[:_PROMPTS].tolist())
        self.blobs: list[bytes] = []
        for number in range(chains):
            keys = self.namespace.keys(chain_tokens(number, _CHAIN))
            self.namespace.reserve(keys, parent=None, deadline=deadline_in(_WAIT_S)).commit()
            if number in chosen:
                self.blobs.append(b"".join(keys))
        gc.collect()
        if self.store.stats().entries != entries:
            raise KVFerryError(f"{self.store.stats().entries} of {entries} blocks are stored")
        self.entry_nbytes = (anonymous_rss() - before) / entries
        self.plain: dict[bytes, str] = {}
        for number in range(chains):
            self.plain.update(dict.fromkeys(self.namespace.keys(chain_tokens(number, _CHAIN)), "dram"))
        if any(self.namespace.lookup(self.namespace.keys(chain_tokens(chains, _CHAIN))).tiers):
            raise KVFerryError("a block was found that was never stored")


class _Lookups:
    """Prompts looked up in turn, each after a walk through other memory."""

    def __init__(self, index: _Index, flush_nbytes: int, *, plain: bool) -> None:
        self._index, self._plain = index, plain
        self._other = np.frombuffer(page_aligned(flush_nbytes), np.uint64)
        self._turn = 0

    def __call__(self) -> Sample:
        namespace, plain, blobs = self._index.namespace, self._index.plain, self._index.blobs
        latencies = []
        for _ in range(_LOOKUPS):
            blob = blobs[self._turn % len(blobs)]
            self._turn += 1
            self._other += np.uint64(1)
            start = time.perf_counter()
            keys = split_keys(blob)
            hits = [plain.get(key) for key in keys] if self._plain else namespace.lookup(keys).tiers
            latencies.append(time.perf_counter() - start)
            if len(hits) != _CHAIN or None in hits:
                raise KVFerryError("a stored block was not found")
        return Sample(sum(latencies), latencies=tuple(latencies))


def _work(request: dict[str, Any]) -> dict[str, object]:
    index = _Index(request["entries"])
    subjects = {
        "subject": _Lookups(index, request["flush_nbytes"], plain=False),
        "plain_dict": _Lookups(index, request["flush_nbytes"], plain=True),
    }
    samples = run_paired(subjects, runs=request["runs"], warmup=request["warmup"])
    found: dict[str, object] = {name: [s.latencies for s in rows] for name, rows in samples.items()}
    index.store.close()
    return {**found, "entry_nbytes": index.entry_nbytes}


if __name__ == "__main__":
    serve_child(_work)
