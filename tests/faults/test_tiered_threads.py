"""Eight threads over little memory and a disk: every load is a miss or exactly the bytes of its key."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from kvferry.core.blockstore import Namespace
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError
from kvferry.core.keys import BlockKey
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.level import LevelOptions
from kvferry.store.policies import OnEvict, WriteBack, WritePolicy, WriteThrough
from kvferry.store.tiered import TieredStore
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec
from kvferry.testing.store_calls import settle

SPEC = small_spec("threads", pages=4)
N = SPEC.block_nbytes
MEMORY_BLOCKS = 4
DISK_BLOCKS = 400
CHAINS = 200
THREADS = 8


def chain(ns: Namespace, number: int, blocks: int) -> list[BlockKey]:
    return ns.keys([number] * (blocks * SPEC.block_tokens))


class Worker:
    """One thread's mixed work until a time; what it finds wrong is in ``failure``."""

    def __init__(self, store: TieredStore, seed: int, until: float) -> None:
        self.ns = store.namespace(SPEC)
        self.rng = random.Random(seed)
        self.until = until
        self.loads = self.hits = 0
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=f"kvferry-test-{seed}")
        self.thread.start()

    def _run(self) -> None:
        try:
            while time.monotonic() < (self.until if self.hits else self.until + 50):
                self._step(chain(self.ns, self.rng.randrange(CHAINS), self.rng.randrange(1, 4)))
        except BaseException as error:  # noqa: BLE001 - root of a thread: told to the test
            self.failure = error

    def _step(self, keys: list[BlockKey]) -> None:
        verb = self.rng.randrange(20)
        if verb < 9:
            self._load(keys)
        elif verb < 16:
            try:
                save_blocks(self.ns, keys, seconds=0.5)
            except CapacityError:
                return
        elif verb < 17:
            self.ns.pin(keys[:1], ttl=0.01)
        elif verb < 18:
            self.ns.remove(keys[1:])
        elif verb < 19:
            self.ns.prefetch(keys)
        else:
            self.ns.lookup(keys)

    def _load(self, keys: list[BlockKey]) -> None:
        with self.ns.load(keys, deadline=deadline_in(0.5)) as lease:
            assert lease.keys == tuple(keys[: len(lease)])
            for index, key in enumerate(lease.keys):
                assert lease.view(index) == block_bytes(key, N)
            self.loads += 1
            self.hits += len(lease)


def _threads(folder: Path, seconds: float, write: WritePolicy) -> None:
    disk = DiskTier("disk", DiskOptions((str(folder),), DISK_BLOCKS * 2 * N))
    store = TieredStore(MEMORY_BLOCKS * N, [(disk, LevelOptions(write=write))])
    until = time.monotonic() + seconds
    workers = [Worker(store, seed, until) for seed in range(THREADS)]
    for worker in workers:
        worker.thread.join(seconds + 60)
    assert not [w.failure for w in workers if w.failure or w.thread.is_alive()]
    assert min(w.loads for w in workers) > 0
    assert sum(w.hits for w in workers) > 0
    deadline = deadline_in(30)
    while store._prefetching and time.monotonic() < deadline:
        time.sleep(0.01)
    settle(store)
    store.namespace(SPEC).unpin([k for n in range(CHAINS) for k in chain(store.namespace(SPEC), n, 3)])
    store.namespace(SPEC).clear()
    settle(store)
    stats = store.stats()
    assert (stats.pinned_nbytes, stats.quarantined_nbytes, stats.leases) == (0, 0, 0)
    assert stats.used_nbytes == stats.per_tier["disk"]["entries"] == 0
    for allocator in store.arena._allocators:
        assert allocator.runs() == [(0, allocator.pages)]
    store.close()


@pytest.mark.parametrize("write", [WriteThrough(), OnEvict()], ids=["write_through", "on_evict"])
def test_threads_over_four_blocks_and_a_disk(tmp_path: Path, write: WritePolicy) -> None:
    _threads(tmp_path, 2.0, write)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("write", [WriteThrough(), WriteBack(), OnEvict()], ids=["through", "back", "evict"])
def test_threads_over_four_blocks_and_a_disk_for_long(tmp_path: Path, write: WritePolicy) -> None:
    _threads(tmp_path, 60.0, write)


def _rss() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def _saves(folder: Path, capacity: int, total: int, slack: int) -> None:
    spec = small_spec("large", pages=256)
    nbytes = spec.block_nbytes
    data = bytes(nbytes)
    disk = DiskTier("disk", DiskOptions((str(folder),), 64 << 20))
    before = _rss()
    store = TieredStore(capacity, [(disk, LevelOptions(write=WriteBack(), queue_nbytes=capacity // 4))])
    ns = store.namespace(spec)
    peak = 0
    for number in range(total // nbytes):
        keys = ns.keys([number] * spec.block_tokens)
        assert ns.save([(keys[0], data)], parent=None, deadline=deadline_in(30)) == 1
        if number % 32 == 0:
            peak = max(peak, _rss())
    assert store.stats().used_nbytes <= capacity
    assert peak - before <= capacity + slack
    assert store.stats().evicted_blocks > 0
    store.close()


def test_memory_stays_below_its_cap(tmp_path: Path) -> None:
    _saves(tmp_path, 32 << 20, 256 << 20, 64 << 20)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_memory_stays_below_its_cap_over_8_gib(tmp_path: Path) -> None:
    _saves(tmp_path, 256 << 20, 8 << 30, 64 << 20)
