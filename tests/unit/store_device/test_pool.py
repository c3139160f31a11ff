from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest

from kvferry.core.blockstore import Namespace
from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    CapacityError,
    ConfigError,
    DeviceError,
    OverloadedError,
    SpecMismatchError,
)
from kvferry.core.eviction import Entry, LRUPolicy
from kvferry.core.keys import BlockKey
from kvferry.core.memory import MemoryStore
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.device.copy_engine import CopyEngine
from kvferry.device.cpu import CpuDevice
from kvferry.store.device import DevicePool, PoolOptions, PoolSpace
from kvferry.testing.blocks import wait_until
from kvferry.testing.gated_device import GatedDevice
from kvferry.testing.pool_stress import page_runs, stress_spec

SPEC = stress_spec()
_A_WHILE_S = 0.1  # what must not happen is given this long; right code never depends on it


def _pool(device: GatedDevice, blocks: int, options: PoolOptions = PoolOptions()) -> DevicePool:  # noqa: B008
    return DevicePool(SPEC, device, num_blocks=blocks, options=options)


def _keys(namespace: Namespace, number: int, blocks: int = 1) -> list[BlockKey]:
    return namespace.keys([number] * 4 * blocks)


def _fill(pool: DevicePool, device: GatedDevice, page: int, byte: int) -> None:
    for run in page_runs(pool, page):
        device.kernel(run, byte)


def _save(pool: DevicePool, space: PoolSpace, device: GatedDevice, keys: list[BlockKey]) -> list[int]:
    """Compute blocks of the number of their first key's first byte, and publish them; held."""
    pages = pool.allocate(len(keys))
    for key, page in zip(keys, pages, strict=True):
        _fill(pool, device, page, key[0])
    assert space.publish(keys, pages, parent=None) == len(keys)
    return pages


class _Reading:
    """A read of a page on the current stream."""

    def __init__(self, pool: DevicePool, device: GatedDevice, page: int) -> None:
        self._device, self._memory = device, page_aligned(pool.table.page_nbytes)
        device.host_register(self._memory)
        host, at = device.host_bytes(self._memory), 0
        for run in page_runs(pool, page):
            device.copy(host[at : at + run.numel()], run, device.current_stream())
            at += run.numel()
        self._event = device.event()
        self._event.record(device.current_stream())

    def bytes(self) -> set[int]:
        self._event.synchronize()
        found = set(self._memory)
        self._device.host_unregister(self._memory)
        return found


def _below(namespace: Namespace, keys: list[BlockKey]) -> list[set[int]]:
    """The bytes of the tensors' rows of each block that the store below has."""
    with namespace.load(keys, deadline=deadline_in(20)) as lease:
        return [{lease.view(n)[0], lease.view(n)[200], lease.view(n)[512]} for n in range(len(lease))]


@pytest.fixture
def namespace(store: MemoryStore) -> Namespace:
    return store.namespace(SPEC)


@pytest.fixture
def one(device: GatedDevice, namespace: Namespace) -> Iterator[tuple[DevicePool, PoolSpace]]:
    """A pool of a single page over a store."""
    with _pool(device, 1) as pool:
        yield pool, pool.space(namespace)
        device.open_all()


def test_c037_a_page_is_nobodys_until_its_copy_out_is_done(
    one: tuple[DevicePool, PoolSpace], device: GatedDevice, namespace: Namespace
) -> None:
    pool, space = one
    keys = _keys(namespace, 1)
    pool.release(_save(pool, space, device, keys))
    device.out.clear()
    with pytest.raises(CapacityError, match="1 more are still being copied down"):
        pool.allocate(1, deadline=time.monotonic() + _A_WHILE_S)
    assert space.lookup(keys) == 1
    device.out.set()
    (page,) = pool.allocate(1, deadline=deadline_in(20))
    _fill(pool, device, page, 0xDD)
    assert _below(namespace, keys) == [{keys[0][0]}]
    assert space.lookup(keys) == 0
    pool.release([page])


def test_a_block_that_is_wanted_while_it_leaves_stays(
    one: tuple[DevicePool, PoolSpace], device: GatedDevice, namespace: Namespace
) -> None:
    pool, space = one
    keys = _keys(namespace, 1)
    (page,) = _save(pool, space, device, keys)
    pool.release([page])
    device.out.clear()
    with pytest.raises(CapacityError):
        pool.allocate(1, deadline=time.monotonic())
    assert space.acquire(keys) == [page]
    device.out.set()
    wait_until(lambda: pool.stats().demoted_blocks == 1, 20)
    with pytest.raises(CapacityError, match="0 of 1 are free;"):
        pool.allocate(1, deadline=deadline_in(20))
    pool.release([page])
    assert pool.allocate(1) == [page]  # the store has it: no copy is waited for
    pool.release([page])


def test_c004_a_copy_out_waits_for_the_kernel_that_writes_the_block(
    one: tuple[DevicePool, PoolSpace], device: GatedDevice, namespace: Namespace
) -> None:
    pool, space = one
    keys = _keys(namespace, 1)
    device.compute.clear()
    device.hold_compute()
    pool.release(_save(pool, space, device, keys))
    with pytest.raises(CapacityError):
        pool.allocate(1, deadline=time.monotonic() + _A_WHILE_S)
    device.compute.set()
    assert pool.flush(deadline=deadline_in(20))
    assert _below(namespace, keys) == [{keys[0][0]}]


def test_a_copy_in_waits_for_the_last_reader_of_its_page(
    one: tuple[DevicePool, PoolSpace], device: GatedDevice, namespace: Namespace
) -> None:
    pool, space = one
    first, second = _keys(namespace, 1), _keys(namespace, 2)
    for keys in (second, first):
        pool.release(_save(pool, space, device, keys))
    assert pool.flush(deadline=deadline_in(20))
    device.compute.clear()
    device.hold_compute()
    (page,) = space.acquire(first)
    reading = _Reading(pool, device, page)
    pool.release([page])  # the reader has not begun
    late = space.restore(second, deadline=time.monotonic() + _A_WHILE_S)
    assert late.pages == [], "the page was filled while somebody was to read it"
    device.compute.set()
    assert reading.bytes() == {first[0][0]}
    again = space.restore(second, deadline=deadline_in(20))
    assert again.pages == [page]
    assert _Reading(pool, device, page).bytes() == {second[0][0]}
    pool.release(again.pages)


def _reader_elsewhere(
    pool: DevicePool, space: PoolSpace, device: GatedDevice, keys: Sequence[BlockKey]
) -> _Reading:
    """One of the page of ``keys`` on another stream, which waits for ``device.compute``; it holds no page."""
    device.compute.clear()
    with device.use(device.new_stream()):
        device.hold_compute()
        (page,) = space.acquire(keys)
        reading = _Reading(pool, device, page)
        pool.release([page])
    return reading


def _a_kernel_waits_for(reading: _Reading, pool: DevicePool, device: GatedDevice, byte: int) -> None:
    """What is written into the pool's only page comes after the reader has had ``byte`` of it."""
    (page,) = pool.allocate(1)
    _fill(pool, device, page, 0xDD)
    written = pool.record()
    assert written is not None
    time.sleep(_A_WHILE_S)
    assert not written.query()
    device.compute.set()
    assert reading.bytes() == {byte}
    pool.release([page])


def test_a_kernel_waits_for_the_last_reader_on_another_stream(
    one: tuple[DevicePool, PoolSpace], device: GatedDevice, namespace: Namespace
) -> None:
    pool, space = one
    keys = _keys(namespace, 1)
    pool.release(_save(pool, space, device, keys))
    assert pool.flush(deadline=deadline_in(20))
    reading = _reader_elsewhere(pool, space, device, keys)
    _a_kernel_waits_for(reading, pool, device, keys[0][0])


def test_the_last_reader_is_known_still_after_a_copy_in_that_was_not_made(
    one: tuple[DevicePool, PoolSpace], device: GatedDevice, namespace: Namespace
) -> None:
    pool, space = one
    first, second = _keys(namespace, 1), _keys(namespace, 2)
    for keys in (second, first):
        pool.release(_save(pool, space, device, keys))
    assert pool.flush(deadline=deadline_in(20))
    reading = _reader_elsewhere(pool, space, device, first)
    with patch.object(CopyEngine, "copy_in", side_effect=OverloadedError("too many copies wait")):
        assert space.restore(second, deadline=deadline_in(20)).pages == []
    _a_kernel_waits_for(reading, pool, device, first[0][0])


def test_a_reader_waits_for_the_kernel_of_another_stream(
    one: tuple[DevicePool, PoolSpace], device: GatedDevice, namespace: Namespace
) -> None:
    pool, space = one
    keys = _keys(namespace, 1)
    device.compute.clear()
    with device.use(device.new_stream()):
        device.hold_compute()
        pool.release(_save(pool, space, device, keys))
    pages = space.acquire(keys)
    reading = _Reading(pool, device, pages[0])
    time.sleep(_A_WHILE_S)
    device.compute.set()
    assert reading.bytes() == {keys[0][0]}
    pool.release(pages)


def test_a_block_in_use_is_never_evicted_and_shared_ones_are_counted(
    device: GatedDevice, namespace: Namespace
) -> None:
    with _pool(device, 4) as pool:
        space = pool.space(namespace)
        keys = _keys(namespace, 1, 3)
        mine = _save(pool, space, device, keys)
        shared = [space.restore(keys[:2], deadline=deadline_in(20)).pages for _ in range(2)]
        assert shared == [mine[:2]] * 2
        pool.release(mine)
        with pytest.raises(CapacityError, match="3 KV blocks of 4 tokens asked, 2 of 4 are free"):
            pool.allocate(3, deadline=deadline_in(20))
        others = pool.allocate(2, deadline=deadline_in(20))
        assert not set(others) & set(mine[:2])
        pool.release(shared[0])
        with pytest.raises(CapacityError):
            pool.allocate(1, deadline=deadline_in(20))
        pool.release(shared[1])
        with pytest.raises(ValueError, match="freed twice"):
            pool.release(shared[1])
        assert space.lookup(keys) == 2  # the tail has gone, what is left is a prefix
        more = pool.allocate(1, deadline=deadline_in(20))
        assert space.lookup(keys) == 1
        pool.release([*others, *more])


def test_what_nobody_keeps_below_goes_at_once(device: GatedDevice, namespace: Namespace) -> None:
    keys = _keys(namespace, 1)
    with _pool(device, 1) as pool:
        space = pool.space(scope=namespace.scope)
        pool.release(_save(pool, space, device, keys))
        pool.release(pool.allocate(1))
        assert space.lookup(keys) == 0
        assert pool.stats().evicted_blocks == 1
    assert namespace.lookup(keys).prefix == 0


def test_a_key_that_is_there_already_keeps_its_page(device: GatedDevice, namespace: Namespace) -> None:
    with _pool(device, 3) as pool:
        space = pool.space(namespace)
        keys = _keys(namespace, 1)
        first, (second, third) = _save(pool, space, device, keys), pool.allocate(2)
        assert space.publish(keys, [second], parent=None) == 0
        assert space.acquire(keys) == first
        with pytest.raises(ConfigError, match="not the caller's to publish"):
            space.publish(_keys(namespace, 2), first, parent=None)
        pool.release([second, third])
        assert pool.available_blocks == 2
        pool.release(first)
        assert pool.available_blocks == 2
        pool.release(first)
        assert pool.available_blocks == 3


def test_a_removed_block_lives_until_its_last_holder_and_its_copy(
    one: tuple[DevicePool, PoolSpace], device: GatedDevice, namespace: Namespace
) -> None:
    pool, space = one
    keys = _keys(namespace, 1)
    pages = _save(pool, space, device, keys)
    assert space.remove(keys) == 1
    assert space.remove(keys) == 0
    with pytest.raises(CapacityError):
        pool.allocate(1)
    pool.release(pages)
    pool.release(_save(pool, space, device, keys))
    device.out.clear()
    with pytest.raises(CapacityError):
        pool.allocate(1, deadline=time.monotonic())
    wait_until(lambda: device.held_out > 0, 20)  # one that was not begun would not be made any more
    assert space.remove(keys) == 1
    with pytest.raises(CapacityError):  # the copy still reads it
        pool.allocate(1, deadline=time.monotonic() + _A_WHILE_S)
    device.out.set()

    def is_free() -> bool:
        try:
            pool.release(pool.allocate(1))
        except CapacityError:
            return False
        return True

    wait_until(is_free, 20)


def test_blocks_go_down_when_they_are_published_if_so_configured(
    device: GatedDevice, namespace: Namespace
) -> None:
    with _pool(device, 4, PoolOptions(write="commit")) as pool:
        space, keys = pool.space(namespace), _keys(namespace, 1, 3)
        pages = _save(pool, space, device, keys)
        wait_until(lambda: namespace.lookup(keys).prefix == 3, 20)
        assert _below(namespace, keys) == [{key[0]} for key in keys]
        pool.release(pages)


def test_spare_pages_are_made_in_the_background(device: GatedDevice, namespace: Namespace) -> None:
    with _pool(device, 6, PoolOptions(spare_blocks=2)) as pool:
        space = pool.space(namespace)
        for number in range(4):
            pool.release(_save(pool, space, device, _keys(namespace, number, 2)))
            wait_until(lambda: pool.stats().free_blocks >= 2, 20)
        stats = pool.stats()
        assert stats.lost_blocks == 0
        assert stats.demoted_blocks >= 4


def test_spare_pages_are_made_also_when_blocks_are_given_back(
    device: GatedDevice, namespace: Namespace
) -> None:
    with _pool(device, 3, PoolOptions(spare_blocks=3)) as pool:
        space = pool.space(namespace)
        pages = _save(pool, space, device, _keys(namespace, 1, 3))
        assert pool.flush(deadline=deadline_in(20))  # its thread has nothing to do
        pool.release(pages)
        wait_until(lambda: pool.stats().free_blocks == 3, 20)  # without another allocation


class _Unwilling(LRUPolicy):
    """Lets nothing go, and says when it was asked."""

    asked = 0

    def victims(self, nbytes: int, pinned: Callable[[Entry], bool]) -> Iterator[Entry]:
        del nbytes, pinned
        self.asked += 1
        return iter(())


def test_a_policy_that_lets_nothing_go_is_not_asked_all_the_time(
    device: GatedDevice, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.store.device.demotion._LOOK_S", 3600.0)
    policy = _Unwilling()
    made = DevicePool(
        SPEC, device, num_blocks=2, options=PoolOptions(spare_blocks=2), eviction=lambda _: policy
    )
    with made as pool:
        pool.release(_save(pool, pool.space(namespace), device, _keys(namespace, 1)))
        wait_until(lambda: policy.asked > 0, 20)
        time.sleep(_A_WHILE_S)
        assert policy.asked <= 2, "its thread takes a whole processor"


def test_a_store_below_that_is_full_costs_the_block_and_no_more(device: GatedDevice) -> None:
    small = MemoryStore(4096)
    namespace = small.namespace(SPEC)
    with (
        namespace.reserve(_keys(namespace, 9), parent=None, deadline=deadline_in(20)),
        _pool(device, 1, PoolOptions(copy_wait_s=0.0)) as pool,
    ):
        space = pool.space(namespace)
        pool.release(_save(pool, space, device, _keys(namespace, 1)))
        pool.release(pool.allocate(1, deadline=deadline_in(20)))
        assert pool.stats().lost_blocks == 1
    small.close()


def test_a_dead_device_fails_everything_with_the_cause(
    one: tuple[DevicePool, PoolSpace], device: GatedDevice, namespace: Namespace
) -> None:
    pool, space = one
    keys = _keys(namespace, 1)
    pool.release(_save(pool, space, device, keys))
    device.out.clear()
    errors: list[BaseException] = []

    def wait_for_room() -> None:
        try:
            pool.allocate(1, deadline=deadline_in(60))
        except DeviceError as error:
            errors.append(error)

    thread = threading.Thread(target=wait_for_room)
    thread.start()
    wait_until(lambda: pool.stats().leaving_blocks == 1, 20)
    device.fail(RuntimeError("an illegal memory access"))
    wait_until(lambda: bool(device.errors), 20)
    device.out.set()
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(DeviceError, match="illegal memory access"):
        space.restore(keys, deadline=deadline_in(20))
    with pytest.raises(DeviceError, match="illegal memory access"):
        pool.allocate(1)
    assert errors
    assert "illegal memory access" in str(errors[0])
    assert namespace.lookup(keys).prefix == 0
    device.errors.clear()  # so that the fixture can end it


def test_a_flush_in_which_the_device_dies_is_not_done(
    one: tuple[DevicePool, PoolSpace], device: GatedDevice, namespace: Namespace
) -> None:
    pool, space = one
    pool.release(_save(pool, space, device, _keys(namespace, 1)))
    device.out.clear()
    with ThreadPoolExecutor(1) as executor:
        flushed = executor.submit(pool.flush, deadline=deadline_in(60))
        wait_until(lambda: device.held_out > 0, 20)
        device.fail(RuntimeError("an illegal memory access"))
        wait_until(lambda: bool(device.errors), 20)
        device.out.set()
        with pytest.raises(DeviceError, match="illegal memory access"):
            flushed.result(60)
    device.errors.clear()  # so that the fixture can end it


def test_too_large_a_pool_is_refused_with_the_remedy() -> None:
    device = GatedDevice(total_nbytes=4096)
    with pytest.raises(CapacityError, match=r"configure at most 6 blocks"):
        _pool(device, 100)
    device.close()


def test_nothing_is_allocated_on_the_device_in_steady_state(
    device: GatedDevice, namespace: Namespace
) -> None:
    with _pool(device, 3) as pool:
        before, space = device.allocations, pool.space(namespace)
        for number in range(12):
            pool.release(_save(pool, space, device, _keys(namespace, number % 5, 2)) if number < 5 else [])
            pool.release(space.restore(_keys(namespace, number % 5, 2), deadline=deadline_in(20)).pages)
        assert device.allocations == before
        assert pool.stats().promoted_blocks > 0


def test_specs_that_a_pool_cannot_have() -> None:
    state = LayerSpec((TensorSpec("state", (4,), DType.FLOAT32),))
    spec = KVSpec(model="m", revision="r", layers=(state,), block_tokens=4)
    with pytest.raises(ConfigError, match=r"tensor 'state' of layer 0 has the shape \[4\]"):
        DevicePool(spec, CpuDevice(), num_blocks=2)
    with pytest.raises(ConfigError, match="num_blocks"):
        DevicePool(SPEC, CpuDevice())
    store = MemoryStore(1 << 16)
    with DevicePool(SPEC, CpuDevice(), num_blocks=2) as pool, pytest.raises(SpecMismatchError):
        pool.space(store.namespace(stress_spec(mla=True)))
    store.close()
