"""More namespaces than a device should know for ever: a salt a user."""

from __future__ import annotations

import gc

from kvferry.core.spec import KeyScope
from kvferry.device.cpu import CpuDevice
from kvferry.store.device import DevicePool, DeviceTier
from kvferry.store.tier import ReadOutcome
from kvferry.testing.pool_stress import stress_spec
from kvferry.testing.tiers_common import SPEC, chain, opened, outcomes, read, write

MANY = 3000


def scope(number: int) -> KeyScope:
    return KeyScope(salt=b"user %d" % number)


def test_a_tier_knows_those_with_blocks_alone() -> None:
    tier = DeviceTier.from_options("spare", {"device": "cpu", "capacity": "64KiB", "page": "4KiB"})
    first = opened(tier, SPEC, "default", scope(-1))
    keys = chain(first, 1, 2)
    write(tier, first, keys)
    for number in range(MANY):
        space = opened(tier, SPEC, "default", scope(number))
        assert outcomes(read(tier, space, chain(space, 1, 1))) == [ReadOutcome.MISS]
    assert list(tier.table.indexes) == [first]
    assert [entry.key for entry in tier.scan()] == keys
    for number in range(100):  # these push it out
        space = opened(tier, SPEC, "default", scope(number))
        write(tier, space, chain(space, 1, 1))
    gc.collect()
    assert len(tier.table.indexes) <= tier.table.entries <= 16
    tier.close()


def test_a_pool_knows_those_with_blocks_or_in_use() -> None:
    spec = stress_spec()
    with DevicePool(spec, CpuDevice(), num_blocks=4) as pool:
        used, filled = pool.space(scope=scope(-1)), pool.space(scope=scope(-2))
        key = chain(filled.name, 1, 1)
        pages = pool.allocate(1)
        filled.publish(key, pages, parent=None)
        pool.release(pages)
        name = filled.name
        del filled
        for number in range(MANY):
            assert pool.space(scope=scope(number)).lookup(key) == 0
        gc.collect()
        assert set(pool._spaces) == {used.name, name}
        assert list(pool.table.indexes) == [name]
        assert pool.space(scope=scope(-1)) is used
        assert pool.space(scope=scope(-2)).lookup(key) == 1
