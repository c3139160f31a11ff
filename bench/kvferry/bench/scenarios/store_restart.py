"""``store.restart``: a store over a directory full of blocks, each time in a process of its own.

Before each start some files are spoiled, and asked for as soon as the store is ready, before the background
has come to them: none of them may be served.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.bench.blocks import BlockSource, block_spec, chain_tokens
from kvferry.bench.child import anonymous_rss, run_child, serve_child
from kvferry.bench.disk_pattern import drop_page_cache, files_below
from kvferry.bench.pairing import Progress, run_paired
from kvferry.bench.results import Param, Result, Sample, summarise
from kvferry.bench.scenarios.store import StoreOptions, Workplace, rounded
from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError
from kvferry.core.keys import BlockKey, block_keys
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.disk.header import HeaderTemplate
from kvferry.store.tier import BlockWrite, TierNamespace, WriteOutcome
from kvferry.store.tiered import TieredStore

__all__ = ["run_restart"]

_NBYTES = 4096
_CHAIN = 64
_SPOILED = 8
_TENANT = "bench"
_WAIT_S = 300.0
_TIMEOUT_S = 600.0
_MEMORY_NBYTES = 16 << 20


def _space() -> TierNamespace:
    return TierNamespace.of(_TENANT, block_spec(_NBYTES))


def _keys(chain: int) -> list[BlockKey]:
    space = _space()
    return block_keys(space.namespace_id, chain_tokens(chain, _CHAIN), space.spec.block_tokens)


def _options(directory: Path, entries: int) -> DiskOptions:
    room = 2 * entries * (_NBYTES + HeaderTemplate(_space()).header_nbytes) + (64 << 20)
    return DiskOptions(directories=(str(directory),), capacity_nbytes=room)


class _Restarts:
    """A directory of blocks, started over in child processes."""

    def __init__(self, directory: Path, chains: int, progress: Progress) -> None:
        self._directory, self._chains = directory, chains
        self._source = BlockSource(_NBYTES, _CHAIN * _NBYTES)
        self._fill(progress)
        os.sync()  # what is dirty cannot be dropped from the page cache
        self._spoiled = self._spoil()
        self.rows: dict[str, list[dict[str, float]]] = {"tier": [], "pattern": []}

    def _fill(self, progress: Progress) -> None:
        space = _space()
        tier = DiskTier("disk", _options(self._directory, self._chains * _CHAIN))
        tier.open(space)
        for chain in range(self._chains):
            keys = _keys(chain)
            writes = [
                BlockWrite(key, self._source[n], parent, n)
                for n, (key, parent) in enumerate(zip(keys, [None, *keys], strict=False))
            ]
            for result in tier.write(space, writes, deadline=deadline_in(_WAIT_S)):
                if result.outcome is not WriteOutcome.STORED:
                    raise KVFerryError(f"a block was not written: {result.outcome.value} {result.reason}")
            progress("store.restart: files written", chain * _CHAIN, self._chains * _CHAIN)
        tier.close()

    def _spoil(self) -> list[tuple[Path, bytes]]:
        """The last file of some chains and bytes for each that are whole, but are not that block."""
        paths = {Path(path).stem: Path(path) for path in files_below(self._directory)}
        ends = [_keys(chain)[-2:] for chain in range(min(_SPOILED, self._chains))]
        return [(paths[last.hex()], paths[before.hex()].read_bytes()) for before, last in ends]

    def run(self, mode: str) -> Sample:
        """One start in a new process; with ``pattern`` only the system calls of one."""
        for path, content in self._spoiled:
            path.write_bytes(content)
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        drop_page_cache(self._directory)
        request = {"mode": mode, "directory": str(self._directory), "chains": self._chains}
        row = run_child(__name__, request, timeout_s=_TIMEOUT_S)
        self.rows[mode].append(row)
        return Sample(row["ready_s"])


def run_restart(options: StoreOptions, progress: Progress) -> Iterator[Result]:
    """Run the scenario: time to be ready, time until all headers are verified, memory of an entry."""
    chains = max(1, options.restart_entries // _CHAIN)
    entries = chains * _CHAIN
    with Workplace.open(options, 2 * entries * (_NBYTES + 8192)) as place:
        restarts = _Restarts(place.path / "tier", chains, progress)
        run_paired(
            {"subject": lambda: restarts.run("tier"), "disk_pattern": lambda: restarts.run("pattern")},
            runs=options.runs,
            warmup=options.warmup,
            progress=progress,
            label=f"store.restart entries={entries}{rounded(options.restart_entries, entries, _CHAIN)}",
        )
    ours, raw = (restarts.rows[mode][options.warmup :] for mode in ("tier", "pattern"))
    params: dict[str, Param] = {
        "entries": entries,
        **({"asked": options.restart_entries} if options.restart_entries != entries else {}),
        "nbytes": _NBYTES,
        **place.params,
        "names": "as cached by the kernel",
        "page_cache": "dropped by posix_fadvise before each run",
        "threads": _options(place.path, entries).read_threads,
        "compared": "names and headers",
        "cpus": os.cpu_count() or 1,
    }
    spoiled = {"spoiled": min(_SPOILED, chains), "verified_when_asked": max(r["asked_at"] for r in ours)}
    for name, measured in (("ready_s", "ready"), ("verified_s", "headers verified, after ready")):
        values = {"subject": [r[name] for r in ours], "disk_pattern": [r[name] for r in raw]}
        given: dict[str, Param] = {**params, "measured": measured, **spoiled}
        yield summarise("store.restart", given, "s", values, verified=True)
    values = {"subject": [r["entry_nbytes"] for r in ours]}
    yield summarise("store.restart", {**params, "measured": "anonymous RSS, an entry"}, "bytes", values)


# ---- the child ---------------------------------------------------------------------------------------


def _start(directory: Path, chains: int) -> dict[str, object]:
    entries = chains * _CHAIN
    asked = _keys(chains - 1)
    before = anonymous_rss()
    start = time.perf_counter()
    tier = DiskTier("disk", _options(directory, entries))
    store = TieredStore(_MEMORY_NBYTES, [tier], tenant=_TENANT)
    namespace = store.namespace(_space().spec)
    hit = namespace.lookup(asked)
    ready = time.perf_counter()
    if hit.prefix != len(asked) or tier.usage().entries != entries:
        raise KVFerryError(f"{tier.usage().entries} of {entries} blocks were found")
    _require_sound(store, chains)
    asked_at = _progress(tier)[0]
    if not tier.wait_verified(deadline=deadline_in(_WAIT_S)):
        raise KVFerryError(f"headers are not verified after {_WAIT_S:g} s: {_progress(tier)}")
    verified = time.perf_counter()
    if _progress(tier) != (entries, entries):
        raise KVFerryError(f"the progress at the end is {_progress(tier)}, not {entries} of {entries}")
    entry_nbytes = (anonymous_rss() - before) / entries
    store.close()
    return {
        "ready_s": ready - start,
        "verified_s": verified - ready,
        "entry_nbytes": entry_nbytes,
        "asked_at": asked_at,
    }


def _require_sound(store: TieredStore, chains: int) -> None:
    """Load chains: sound blocks come byte for byte, the spoiled last one of each never."""
    source = BlockSource(_NBYTES, _CHAIN * _NBYTES)
    namespace = store.namespace(_space().spec)
    for chain in range(min(_SPOILED, chains)):
        keys = _keys(chain)
        with namespace.load(keys[-1:], deadline=deadline_in(_WAIT_S)) as lease:
            if len(lease):
                raise KVFerryError("a block was served whose file is that of another")
        with namespace.load(keys[-2:-1], deadline=deadline_in(_WAIT_S)) as lease:
            if len(lease) != 1 or not source.matches(_CHAIN - 2, lease.view(0)):
                raise KVFerryError("a sound block was not served, or with other bytes")


def _progress(tier: DiskTier) -> tuple[int, int]:
    """Headers verified, and found at the start, from the tier's status."""
    words = tier.usage().status["verified"].split()
    return int(words[0]), int(words[2])


def _imitate(directory: Path) -> dict[str, object]:
    """The system calls of a start: names and sizes of all files, then the header of each."""
    start = time.perf_counter()
    paths: list[str] = []
    _walk(str(directory), paths)
    ready = time.perf_counter()
    header = page_aligned(HeaderTemplate(_space()).header_nbytes)
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.preadv(fd, [header], 0)
        os.close(fd)
    return {"ready_s": ready - start, "verified_s": time.perf_counter() - ready}


def _walk(folder: str, paths: list[str]) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _walk(entry.path, paths)
            else:
                entry.stat(follow_symlinks=False)
                paths.append(entry.path)


def _work(request: dict[str, Any]) -> dict[str, object]:
    directory = Path(request["directory"])
    np.empty(1)  # what is imported must not count as time or memory of the store
    if request["mode"] == "pattern":
        return _imitate(directory)
    return _start(directory, request["chains"])


if __name__ == "__main__":
    serve_child(_work)
