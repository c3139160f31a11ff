from __future__ import annotations

import pytest

from kvferry.core.blockstore import Namespace
from kvferry.core.errors import ConfigError
from kvferry.core.memory import MemoryStore
from kvferry.store.device import DevicePool
from kvferry.testing.gated_device import GatedDevice
from kvferry.testing.pool_stress import stress_spec

SPEC = stress_spec()


@pytest.fixture
def namespace(store: MemoryStore) -> Namespace:
    return store.namespace(SPEC)


@pytest.mark.parametrize(
    ("keys", "pages", "parent", "why"),
    [
        ([0, 1], [0, 0], None, "under two keys"),
        ([0, 0], [0, 1], None, "given twice"),
        ([0, 1], [0, 1], 1, "its parent is the key before the first, None at the head"),
        ([0, 1], [0], None, "2 keys are to be published, in 1 pages"),
    ],
)
def test_what_is_no_run_of_a_chain_in_pages_of_its_own_is_not_published(
    device: GatedDevice, namespace: Namespace, keys: list[int], pages: list[int], parent: int | None, why: str
) -> None:
    with DevicePool(SPEC, device, num_blocks=2) as pool:
        space, chain, mine = pool.space(namespace), namespace.keys([1] * 4 * 2), pool.allocate(2)
        with pytest.raises(ConfigError, match=why):
            space.publish(
                [chain[n] for n in keys],
                [mine[n] for n in pages],
                parent=None if parent is None else chain[parent],
            )
        assert pool.stats().entries == 0
        with pytest.raises(ConfigError, match="given twice"):
            space.acquire([chain[0], chain[0]])
        pool.release(mine)
        assert pool.stats().free_blocks == 2


@pytest.mark.parametrize("count", [-1, True, 1.5])
def test_so_many_pages_cannot_be_allocated(device: GatedDevice, count: int) -> None:
    with DevicePool(SPEC, device, num_blocks=2) as pool:
        with pytest.raises(ConfigError, match="count is"):
            pool.allocate(count)
        assert pool.stats().free_blocks == 2
