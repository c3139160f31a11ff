"""``daemon.save`` and ``daemon.load``: blocks through a cache daemon in another process."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvferry.bench.blocks import BlockSource, block_spec, chain_tokens
from kvferry.bench.ceilings import MemcpyCold
from kvferry.bench.link.channel import Link
from kvferry.bench.link.ends import LinkEnds
from kvferry.bench.link.memory import LinkMemory
from kvferry.bench.lmcache import LMCacheLink, lmcache_command, lmcache_server
from kvferry.bench.own_cpu import cpu_pair, on_cpu, staying_on
from kvferry.bench.pairing import Progress, run_paired
from kvferry.bench.results import Param, Result, Sample, percentile, summarise
from kvferry.bench.scenarios.store import StoreOptions
from kvferry.client import Client, ClientOptions
from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError
from kvferry.core.keys import BlockKey

__all__ = ["daemon_client", "daemon_params", "run_load", "run_save"]

_WAIT_S = 60.0
_RUNS_A_WALK = 4
_BATCH_NBYTES = 32 << 20
_LOAD_BATCH = 256
_LOADS = 64
_SLACK_NBYTES = 96 << 20


@contextlib.contextmanager
def _daemon(options: StoreOptions, capacity_nbytes: int) -> Iterator[str]:
    """The address of the daemon: one that runs, or one of our own."""
    if not options.url.endswith(":auto"):
        yield options.url
        return
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        tcp = options.url.startswith("tcp")
        words = [
            "serve", "--disk", "none", "--http", "none", "--capacity", str(capacity_nbytes), "--socket",
            "none" if tcp else f"{folder}/d.sock", "--set", f"wire.checksum={options.checksum != 'off'}",
            "--set", f"daemon.listen={'tcp://127.0.0.1:0' if tcp else 'none'}", "--set", "log.level=warning",
        ]  # fmt: skip
        command = [sys.executable, "-m", "kvferry.cli", *words]
        with staying_on(_cpus(options)[1]):
            child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        with child:
            assert child.stdout is not None
            try:
                ready = child.stdout.readline()
                if not ready.startswith("ready "):
                    raise KVFerryError(f"the daemon of the benchmark did not start: {' '.join(words)}")
                yield dict(word.split("=", 1) for word in shlex.split(ready)[1:])["listen"]
            finally:
                child.terminate()


def _cpus(options: StoreOptions) -> tuple[int | None, int | None]:
    """For this end and the others, if there is a connection to a daemon of our own between them."""
    return cpu_pair() if options.url == "tcp:auto" else (None, None)


@dataclass(frozen=True, slots=True)
class _Chain:
    number: int  # of its first block
    keys: list[BlockKey]


class _Blocks:
    """Blocks of one size that walk through the memory of a daemon, in chains of ``batch``."""

    def __init__(self, client: Client, nbytes: int, batch: int, options: StoreOptions) -> None:
        self.nbytes, self.batch = nbytes, batch
        self.source = BlockSource(nbytes, options.walk_nbytes)
        self.calls = max(1, options.walk_nbytes // _RUNS_A_WALK // (nbytes * batch))
        self.namespace = client.namespace(block_spec(nbytes))
        self.namespace.clear()
        self.chains: deque[_Chain] = deque()
        self._saved = 0
        for _ in range(max(self.calls, options.walk_nbytes // (nbytes * batch)) + self.calls):
            self._save(self._next())
        self._make_room()

    def _next(self) -> _Chain:
        chain = _Chain(self._saved, self.namespace.keys(chain_tokens(self._saved, self.batch)))
        self._saved += self.batch
        self.chains.append(chain)
        return chain

    def _save(self, chain: _Chain) -> float:
        blocks = [(key, self.source[chain.number + n]) for n, key in enumerate(chain.keys)]
        start = time.perf_counter()
        stored = self.namespace.save(blocks, parent=None, deadline=deadline_in(_WAIT_S))
        seconds = time.perf_counter() - start
        if stored != self.batch:
            raise KVFerryError(f"chain {chain.number}: {stored} of {self.batch} blocks were new")
        return seconds

    def _make_room(self) -> None:
        for _ in range(self.calls):
            self.namespace.remove(self.chains.popleft().keys)

    def save(self) -> Sample:
        """Save as much as a run is."""
        chains = [self._next() for _ in range(self.calls)]
        cpu, start = time.process_time(), time.perf_counter()
        latencies = [self._save(chain) for chain in chains]
        seconds = time.perf_counter() - start
        cpu = time.process_time() - cpu
        self._make_room()
        return Sample(seconds, self.calls * self.batch * self.nbytes, cpu, tuple(latencies))

    def load(self, count: int, *, touch: bool) -> Sample:
        """``count`` loads: lease, a view of each block, all of their bytes if ``touch``, release."""
        latencies, total = [], 0
        cpu, start = time.process_time(), time.perf_counter()
        for _ in range(count):
            self.chains.rotate(-1)
            began = time.perf_counter()
            lease = self.namespace.load(self.chains[0].keys, deadline=deadline_in(_WAIT_S))
            views = [lease.view(n) for n in range(len(lease))]
            if touch:
                total += sum(int(np.frombuffer(view, np.uint64).max()) for view in views)
            lease.release()
            latencies.append(time.perf_counter() - began)
            if len(views) != self.batch:
                raise KVFerryError(f"{len(views)} of {self.batch} blocks were loaded")
        seconds = time.perf_counter() - start
        cpu = time.process_time() - cpu
        return Sample(seconds, count * self.batch * self.nbytes, cpu, tuple(latencies))

    def verify(self) -> bool:
        """Whether what was saved last is there and right."""
        for chain in list(self.chains)[-self.calls :]:
            with self.namespace.load(chain.keys, deadline=deadline_in(_WAIT_S)) as lease:
                right = [self.source.matches(chain.number + n, lease.view(n)) for n in range(len(lease))]
            if len(right) != self.batch or not all(right):
                return False
        return True


class _Beside:
    """What stands beside a figure: a cold memcpy, over tcp the transport alone, LMCache's server if there."""

    def __init__(self, options: StoreOptions, stack: contextlib.ExitStack) -> None:
        self._options = options
        self._stack = stack
        self._ends: LinkEnds | None = None
        command = lmcache_command()
        with staying_on(_cpus(options)[1]):
            self._lmcache = stack.enter_context(lmcache_server(command)) if command else 0

    def of(
        self, nbytes: int, batch: int, count: int, verb: str, *, touch: bool = True
    ) -> dict[str, Callable[[], Sample]]:
        """For ``count`` calls of ``batch`` blocks each."""
        walk = self._options.walk_nbytes
        found: dict[str, Callable[[], Sample]] = {
            "memcpy_cold": MemcpyCold(nbytes, min(count * batch, max(1, walk // nbytes)), walk_nbytes=walk)
        }
        if self._options.url.startswith("tcp"):
            if self._ends is None:
                self._ends = self._stack.enter_context(LinkEnds(walk))
            address = self._ends.of("tcp", pinned=self._options.url == "tcp:auto").address
            checksum = self._options.checksum != "off"
            link = Link(address, LinkMemory(nbytes, walk), checksum=checksum, lent=True)
            self._stack.callback(link.close)
            found["tcp_bare"] = (
                partial(link.put, batch, count)
                if verb == "save"
                else partial(link.get, batch, count, touch=touch)
            )
        if self._lmcache:
            other = LMCacheLink(self._lmcache, nbytes, walk)
            self._stack.callback(other.close)
            other.fill()
            found["lmcache_server"] = (
                partial(other.put, batch, count)
                if verb == "save"
                else partial(other.get, batch, count, touch=touch)
            )
        return found


def daemon_params(nbytes: int, batch: int, options: StoreOptions, **more: Param) -> dict[str, Param]:
    """What changes the work."""
    if _cpus(options)[0] is not None:
        more["pinned"] = True
    return {
        "url": options.url, "nbytes": nbytes, "batch": batch, "threads": 1, "checksum": options.checksum,
        "walk_nbytes": options.walk_nbytes, "cpus": os.cpu_count() or 1, **more,
    }  # fmt: skip


@contextlib.contextmanager
def daemon_client(options: StoreOptions) -> Iterator[Client]:
    """A client of one daemon, which has room for every size."""
    largest = max(options.walk_nbytes, *options.sizes)
    capacity = 2 * options.walk_nbytes + 2 * largest + _SLACK_NBYTES
    client_options = ClientOptions(checksum=options.checksum != "off", call_timeout_s=_WAIT_S)
    with _daemon(options, capacity) as url, Client(url, client_options) as client:
        if client.away:
            raise KVFerryError(f"there is no daemon at {url}: {client.away}")
        yield client


@contextlib.contextmanager
def _blocks(client: Client, nbytes: int, batch: int, options: StoreOptions) -> Iterator[_Blocks]:
    """Blocks of one size, which make room for the next at the end."""
    blocks = _Blocks(client, nbytes, batch, options)
    try:
        yield blocks
    finally:
        blocks.namespace.clear()


def run_save(options: StoreOptions, progress: Progress) -> Iterator[Result]:
    """Saves, one copy each on one machine."""
    with contextlib.ExitStack() as stack, daemon_client(options) as client:
        beside = _Beside(options, stack)
        for nbytes in options.sizes:
            for batch in sorted({1, max(1, min(_BATCH_NBYTES, options.walk_nbytes // 2) // nbytes)}):
                with _blocks(client, nbytes, batch, options) as blocks:
                    others = beside.of(nbytes, batch, blocks.calls, "save")
                    samples = run_paired(
                        on_cpu(_cpus(options)[0], {"subject": blocks.save, **others}),
                        runs=options.runs, warmup=options.warmup, progress=progress,
                        label=f"daemon.save nbytes={nbytes} batch={batch}",
                    )  # fmt: skip
                    verified = blocks.verify()
                values = {name: [s.gb_per_s for s in found] for name, found in samples.items()}
                params = daemon_params(nbytes, batch, options, touch="all")
                yield summarise(
                    "daemon.save", params, "GB/s", values, samples=samples["subject"], verified=verified
                )


def run_load(options: StoreOptions, progress: Progress) -> Iterator[Result]:
    """Loads: of addresses alone where nothing is copied, and with every byte read."""
    with contextlib.ExitStack() as stack, daemon_client(options) as client:
        beside = _Beside(options, stack)
        for nbytes in options.sizes:
            for batch in sorted({1, max(1, min(_LOAD_BATCH, options.walk_nbytes // nbytes))}):
                with _blocks(client, nbytes, batch, options) as blocks:
                    for touch in ("none", "all"):
                        yield _loads(options, blocks, beside, touch, progress)


def _loads(options: StoreOptions, blocks: _Blocks, beside: _Beside, touch: str, progress: Progress) -> Result:
    nbytes, batch = blocks.nbytes, blocks.batch
    addresses = touch == "none" and not options.url.startswith("tcp")
    count = max(1, _LOADS if addresses else min(_LOADS, options.walk_nbytes // (nbytes * batch)))
    others = beside.of(nbytes, batch, count, "load", touch=touch == "all")
    if addresses:
        others.pop("lmcache_server", None)  # it has no way to lend memory
    samples = run_paired(
        on_cpu(_cpus(options)[0], {"subject": partial(blocks.load, count, touch=touch == "all"), **others}),
        runs=options.runs, warmup=options.warmup, progress=progress,
        label=f"daemon.load nbytes={nbytes} batch={batch} touch={touch}",
    )  # fmt: skip
    verified = blocks.verify()
    params = daemon_params(nbytes, batch, options, touch=touch, timed="load, views, release")
    if addresses:  # nothing is moved: the time of a call beside that of copying as much
        values = {
            "subject": [percentile(s.latencies, 0.5) * 1e6 for s in samples["subject"]],
            "memcpy_cold": [s.seconds / s.nbytes * nbytes * batch * 1e6 for s in samples["memcpy_cold"]],
        }
        return summarise("daemon.load", params, "us", values, samples=samples["subject"], verified=verified)
    values = {name: [s.gb_per_s for s in found] for name, found in samples.items()}
    return summarise("daemon.load", params, "GB/s", values, samples=samples["subject"], verified=verified)
