"""Other capacities while a store is used."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from kvferry.core.arena import Arena
from kvferry.core.clock import deadline_in
from kvferry.core.segments import Slot
from kvferry.store.disk.options import DiskOptions
from kvferry.store.disk.tier import DiskTier
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
