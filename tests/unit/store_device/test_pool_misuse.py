from __future__ import annotations

import threading
import time
from typing import Any
from unittest.mock import patch

import pytest

from kvferry.core.blockstore import Namespace
from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, TierError
from kvferry.core.memory import MemoryStore
from kvferry.store.device import DevicePool, PoolOptions
from kvferry.testing.blocks import wait_until
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


def test_pages_of_a_restore_that_was_given_up_are_nobodys_to_release(
    device: GatedDevice, namespace: Namespace
) -> None:
    keys = namespace.keys([1] * 4)
    namespace.save([(keys[0], page_aligned(SPEC.block_nbytes))], parent=None, deadline=deadline_in(20))
    with DevicePool(SPEC, device, num_blocks=1) as pool:
        space = pool.space(namespace)
        device.inward.clear()
        assert space.restore(keys, deadline=time.monotonic() + 0.1).pages == []
        with pytest.raises(ValueError, match="freed twice or do not exist"):
            pool.release([0])
        with pytest.raises(ConfigError, match="page 0 is not the caller's"):
            space.publish(keys, [0], parent=None)
        device.inward.set()
        pool.release(pool.allocate(1, deadline=deadline_in(20)))
        assert pool.stats().free_blocks == 1


@pytest.mark.parametrize("by_option", [True, False])
def test_a_store_below_that_hangs_holds_a_close_up_no_longer_than_it_was_given(
    device: GatedDevice, namespace: Namespace, caplog: pytest.LogCaptureFixture, *, by_option: bool
) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def reserve(*_args: Any, **_options: Any) -> None:
        asked.set()
        go_on.wait(60)
        raise TierError("it hung")

    waits = 0.05 if by_option else 60.0
    pool = DevicePool(SPEC, device, num_blocks=1, options=PoolOptions(write="commit", close_wait_s=waits))
    with patch.object(namespace, "reserve", reserve):
        pages = pool.allocate(1)
        pool.space(namespace).publish(namespace.keys([1] * 4), pages, parent=None)
        assert asked.wait(20)
        pool.close(deadline=None if by_option else time.monotonic())
        assert not go_on.is_set()
        assert "does not let go" in caplog.text
        go_on.set()
        wait_until(lambda: not any(t.name.startswith("kvferry-demote") for t in threading.enumerate()), 20)
