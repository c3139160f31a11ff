"""Other capacities while a store is used."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvferry.core.arena import Arena
from kvferry.core.clock import deadline_in
from kvferry.core.segments import Slot
from kvferry.store.disk.options import DiskOptions
from kvferry.store.disk.tier import DiskTier
from kvferry.store.policies import S3FIFOPolicy
from kvferry.store.tiered import TieredStore
from kvferry.testing.blocks import save_blocks, small_spec, wait_until
from kvferry.testing.faulty_files import FaultyFiles

SPEC = small_spec("resize")
MIB = 1 << 20


@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 4)])
def test_a_save_gives_back_what_it_was_charged(
    before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is charged hangs on the capacity, which changes while it copies."""
    store = TieredStore(before * MIB, write_quota_nbytes=4 * MIB)
    ns = store.namespace(SPEC)
    write = Arena.write

    def meanwhile(arena: Arena, slots: Sequence[Slot], sources: Iterable[memoryview]) -> None:
        store.resize(after * MIB, 4 * MIB, {})
        write(arena, slots, sources)

    monkeypatch.setattr(Arena, "write", meanwhile)
    assert save_blocks(ns, ns.keys([1] * (10 * SPEC.block_tokens))) == 10
    assert store._pool.writes.session_nbytes(store.session) == 0
    store.close()


def test_what_is_stored_is_saved_again_above_a_lowered_capacity() -> None:
    store = TieredStore(4 * MIB)
    ns = store.namespace(SPEC)
    keys = ns.keys([1] * (2 * MIB // SPEC.block_nbytes * SPEC.block_tokens))
    save_blocks(ns, keys)
    with ns.load(keys, deadline=deadline_in(20)):
        store.resize(MIB, None, {})
        assert store.stats().used_nbytes > MIB
        assert save_blocks(ns, keys, seconds=0.01) == 0
    store.close()


def test_a_disk_that_cannot_remove_keeps_what_need_not_go(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = DiskTier("disk", DiskOptions((str(tmp_path),), 64 * MIB), files=files)
    store = TieredStore(16 * MIB, [tier])
    ns = store.namespace(SPEC)
    save_blocks(ns, ns.keys(range(50 * SPEC.block_tokens)))
    assert store.flush(deadline=deadline_in(20))
    usage = tier.usage()
    assert usage.entries == 50
    with files.failing("unlink", error=errno.EIO):
        tier._state.index.capacity_nbytes = usage.used_nbytes - usage.used_nbytes // 25
        assert tier._state.shrink() > 0
        assert tier.usage().entries >= 45
    store.resize(16 * MIB, None, {0: tier.usage().capacity_nbytes})
    wait_until(lambda: tier.usage().used_nbytes <= tier.usage().capacity_nbytes, 30)
    assert tier.usage().entries >= 40
    store.close()
    tier.close()


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_policy_is_told_of_another_capacity(tier: str, tmp_path: Path) -> None:
    disk = DiskTier("disk", DiskOptions((str(tmp_path),), 64 * MIB, eviction="s3fifo"))
    store = TieredStore(16 * MIB, [disk], eviction=S3FIFOPolicy)
    policy = store._pool.policy if tier == "memory" else disk._state.index._policy
    assert isinstance(policy, S3FIFOPolicy)
    store.resize(4 * MIB, None, {0: 8 * MIB})
    assert policy._small_nbytes == (4 if tier == "memory" else 8) * MIB // 10
    store.close()


def test_a_save_that_waits_for_room_has_it_when_memory_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TieredStore(MIB)
    ns = store.namespace(SPEC)
    lease = ns.reserve(ns.keys([1] * (MIB // SPEC.block_nbytes * SPEC.block_tokens)), parent=None, deadline=0)
    waits = threading.Event()

    def wait(_now: float, _deadline: float) -> None:
        waits.set()
        store._cond.wait(60.0)  # only who is told goes on

    monkeypatch.setattr(store, "_wait_for_room", wait)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save_blocks, ns, ns.keys([2] * SPEC.block_tokens), seconds=300)
        assert waits.wait(20)
        store.resize(2 * MIB, None, {})
        assert saving.result(30) == 1
    lease.abort()
    store.close()


def test_a_disk_says_whether_blocks_fit_into_what_it_has_now(tmp_path: Path) -> None:
    tier = DiskTier("disk", DiskOptions((str(tmp_path),), 8 * MIB))
    store = TieredStore(MIB, [tier])
    store.namespace(small_spec("large", pages=64, layers=4))
    notes = [any("none is stored" in str(note) for note in tier.usage().status.values())]
    for capacity in (64 << 10, 8 * MIB):
        store.resize(MIB, None, {0: capacity})
        notes.append(any("none is stored" in str(note) for note in tier.usage().status.values()))
    assert notes == [False, True, False]
    store.close()


def test_corrupt_files_keep_their_share_of_a_lowered_capacity(tmp_path: Path) -> None:
    tier = DiskTier("disk", DiskOptions((str(tmp_path),), 64 * MIB))
    store = TieredStore(16 * MIB, [tier])
    ns = store.namespace(SPEC)
    save_blocks(ns, ns.keys(range(200 * SPEC.block_tokens)))
    assert store.flush(deadline=deadline_in(20))
    for entry in tier._state.index.snapshot(tier._state.index.namespaces()[0])[:150]:
        assert tier._state.quarantine(entry, "of a test")
    assert tier.usage().quarantined_nbytes > MIB
    store.resize(16 * MIB, None, {0: MIB})
    wait_until(lambda: tier.usage().used_nbytes <= MIB and tier.usage().quarantined_nbytes <= MIB // 8, 30)
    wait_until(lambda: not any("none is stored" in str(note) for note in tier.usage().status.values()), 30)
    assert tier.usage().entries >= 40, "blocks have the rest"
    store.close()


def test_the_bound_of_corrupt_files_follows_the_capacity_both_ways(tmp_path: Path) -> None:
    tier = DiskTier("disk", DiskOptions((str(tmp_path),), 16 * MIB))
    (root,) = tier._state.roots
    for capacity in (8 * MIB, 16 * MIB, 32 * MIB):  # though nothing is above it
        tier.resize(capacity)
        wait_until(lambda: root._quarantine._max_nbytes == tier.options.quarantine_bound_nbytes, 30)
        assert root._quarantine._max_nbytes <= capacity // 8
    root.stop()
    root.limit_quarantine(0)
    assert root._quarantine._max_nbytes == 0
    tier.close()
