"""``daemon.gather`` and ``daemon.scatter``: blocks between a daemon and an engine's paged memory, by jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from kvferry.bench.beside_memcpy import beside_memcpy
from kvferry.bench.blocks import block_spec, chain_tokens
from kvferry.bench.pairing import Progress
from kvferry.bench.results import Result, Sample
from kvferry.bench.scenarios.store import StoreOptions
from kvferry.bench.scenarios.store_daemon import daemon_client, daemon_params
from kvferry.client import Client
from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, KVFerryError
from kvferry.core.keys import BlockKey
from kvferry.core.paged_copy import pages_kernel
from kvferry.core.regions import Region

__all__ = ["run_gather", "run_scatter"]

_WAIT_S = 60.0
_RUNS_A_WALK = 4
_BATCH_NBYTES = 32 << 20
_LAYOUTS = ("stacked_nhd", "packed_hnd")


class _Pages:
    """An engine's pages that walk through memory, and chains of ``batch`` blocks that are theirs.

    Args:
        client: Of the daemon.
        nbytes: Of a block.
        layout: Of the pages.
        options: Of the benchmark.
    """

    def __init__(self, client: Client, nbytes: int, layout: str, options: StoreOptions) -> None:
        spec = block_spec(nbytes)
        if len(spec.layers) == 1:
            raise ConfigError(f"blocks of {nbytes} bytes have no heads: take a multiple of 64 KiB (--sizes)")
        self.nbytes, self.layout = nbytes, layout
        self.namespace = client.namespace(spec)
        self.namespace.clear()
        self.batch = max(1, min(_BATCH_NBYTES, options.walk_nbytes // _RUNS_A_WALK) // nbytes)
        self.calls = max(1, options.walk_nbytes // _RUNS_A_WALK // (self.batch * nbytes))
        count = max(self.calls * self.batch, options.walk_nbytes // nbytes)
        tokens, heads, dim = spec.layers[0].tensors[0].shape
        shapes = {
            "stacked_nhd": (2, count, tokens, heads, dim),
            "packed_hnd": (count, heads, tokens, 2 * dim),
        }
        rng = np.random.default_rng(3)
        some = rng.integers(0, 1 << 16, 1 << 16, np.uint16)
        self.layers = []
        for _ in spec.layers:
            flat = np.frombuffer(page_aligned(count * spec.layers[0].nbytes), np.uint16)
            flat[:] = np.resize(some, len(flat))
            flat[:: 1 << 11] = np.arange(-(-len(flat) // (1 << 11)))  # no page like another
            self.layers.append(flat.reshape(shapes[layout]))
        self.registration = self.namespace.register(
            [Region.of(array, layer=n, layout=layout) for n, array in enumerate(self.layers)]
        )
        self.order = rng.permutation(count)
        self._at = self._saved = 0
        self._chains: list[tuple[list[BlockKey], list[int]]] = []

    def _ids(self) -> list[int]:
        """The next pages, anywhere, none of which was touched lately."""
        if self._at + self.batch > len(self.order):
            self._at = 0
        self._at += self.batch
        return [int(page) for page in self.order[self._at - self.batch : self._at]]

    def fill(self) -> None:
        """Store as much as two runs load."""
        for _ in range(2 * self.calls):
            self.gather_one()

    def gather_one(self) -> float:
        """One save of a batch; seconds."""
        keys, ids = self.namespace.keys(chain_tokens(self._saved, self.batch)), self._ids()
        self._saved += 1
        start = time.perf_counter()
        job = self.registration.save("save", keys, ids, parent=None, deadline=deadline_in(_WAIT_S))
        job.all_layers()
        job.wait(deadline=deadline_in(_WAIT_S))
        seconds = time.perf_counter() - start
        if job.stored != self.batch:
            raise KVFerryError(f"{job.stored} of {self.batch} blocks were new: {job.error}")
        self._chains.append((keys, ids))
        return seconds

    def gather(self) -> Sample:
        """Save as much as a run is, and make room again."""
        cpu = time.process_time()
        latencies = [self.gather_one() for _ in range(self.calls)]
        cpu = time.process_time() - cpu
        while len(self._chains) > self.calls:
            self.namespace.remove(self._chains.pop(0)[0])
        return Sample(sum(latencies), self.calls * self.batch * self.nbytes, cpu, tuple(latencies))

    def scatter(self) -> Sample:
        """Load as much as a run is, into the pages that it came from."""
        cpu, latencies = time.process_time(), []
        for _ in range(self.calls):
            self._chains.append(self._chains.pop(0))
            keys, ids = self._chains[-1]
            start = time.perf_counter()
            lease = self.namespace.load(keys, deadline=deadline_in(_WAIT_S))
            job = self.registration.load("load", lease, ids, deadline=deadline_in(_WAIT_S))
            job.wait(deadline=deadline_in(_WAIT_S))
            latencies.append(time.perf_counter() - start)
            if not job.ok:
                raise KVFerryError(f"{len(job.failed_blocks())} of {self.batch} blocks failed: {job.error}")
        cpu = time.process_time() - cpu
        return Sample(sum(latencies), self.calls * self.batch * self.nbytes, cpu, tuple(latencies))

    def verify(self) -> bool:
        """Whether what is stored is what the pages hold, and comes back to them."""
        keys, ids = self._chains[-1]
        axis = self.layers[0].shape.index(len(self.order))
        before = [np.take(array, ids, axis) for array in self.layers]
        for array in self.layers:
            np.moveaxis(array, axis, 0)[ids] = 0
        lease = self.namespace.load(keys, deadline=deadline_in(_WAIT_S))
        job = self.registration.load("verify", lease, ids, deadline=deadline_in(_WAIT_S))
        job.wait(deadline=deadline_in(_WAIT_S))
        return job.ok and all(
            np.array_equal(np.take(array, ids, axis), kept)
            for array, kept in zip(self.layers, before, strict=True)
        )


def run_gather(options: StoreOptions, progress: Progress) -> Iterator[Result]:
    """Saves of an engine's pages, batches of 32 MiB: reserve, copy, commit."""
    yield from _run("daemon.gather", options, progress)


def run_scatter(options: StoreOptions, progress: Progress) -> Iterator[Result]:
    """Loads into an engine's pages, batches of 32 MiB: lease, copy, check, release."""
    yield from _run("daemon.scatter", options, progress)


def _run(scenario: str, options: StoreOptions, progress: Progress) -> Iterator[Result]:
    kernel = "numpy" if pages_kernel() is None else "native"
    with daemon_client(options) as client:
        for nbytes in options.sizes:
            for layout in _LAYOUTS:
                pages = _Pages(client, nbytes, layout, options)
                copies = min(pages.calls * pages.batch, max(1, options.walk_nbytes // nbytes))
                try:
                    pages.fill()
                    yield beside_memcpy(
                        scenario,
                        pages.gather if scenario == "daemon.gather" else pages.scatter,
                        (nbytes, copies),
                        options,
                        progress,
                        params=daemon_params(nbytes, pages.batch, options, layout=layout, copy=kernel),
                        verify=pages.verify,
                    )
                finally:
                    pages.registration.close()
                    pages.namespace.clear()
