"""How jobs end when they do not end well: cancelled, late, out of room, with a device that fails."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvferry.client import mover as mover_module
from kvferry.client import (
    namespace,
    save_job,
)
from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    CapacityError,
    LeaseExpiredError,
    RequestCancelledError,
    StoreError,
    TransferTimeoutError,
)
from kvferry.core.regions import Region
from kvferry.testing.blocks import save_blocks, small_spec, wait_until
from kvferry.testing.paged_engine import (
    LAYERS,
    PAGES,
    SPEC,
    FakeDevice,
    Gate,
    Pages,
    Setting,
    SlowHost,
    finished,
)

Make = Callable[..., Setting]


def test_cancel_returns_when_the_device_has_ended(setting: Make, device: FakeDevice) -> None:
    """What is under way cannot be stopped; nothing more is begun, and nothing is written after the return."""
    s = setting(copier=device)
    save_blocks(s.namespace, s.keys(3))
    job = s.load(s.keys(3), [1, 2, 3])
    wait_until(lambda: len(device.waiting) == LAYERS)
    device.run_one()
    assert job.wait_layer(0, deadline=deadline_in(20))
    canceller = threading.Thread(target=job.cancel)
    canceller.start()
    wait_until(lambda: job.error is not None)
    for _ in range(LAYERS - 1):
        assert canceller.is_alive()
        assert not job.done
        device.run_one()
    canceller.join(20)
    assert not canceller.is_alive()
    assert job.failed_blocks() == (1, 2, 3)
    assert isinstance(job.error, RequestCancelledError)
    s.leases_end()
    assert not device.waiting
    job.cancel()  # again: nothing


def test_cancel_returns_when_the_copy_of_this_process_has_ended(setting: Make) -> None:
    copier = SlowHost()
    s = setting(copier=copier)
    save_blocks(s.namespace, s.keys(3))
    job = s.load(s.keys(3), [1, 2, 3])
    assert copier.entered.wait(20)
    canceller = threading.Thread(target=job.cancel)
    canceller.start()
    wait_until(lambda: job.error is not None)
    assert not job.done, "it is still being copied"
    before = s.pages.of([1, 2, 3])
    copier.go.set()
    canceller.join(20)
    assert not canceller.is_alive()
    assert not job.wait_layer(0, deadline=deadline_in(20)), "a layer that was stopped counts as loaded"
    np.testing.assert_array_equal(s.pages.of([1, 2, 3]), before)
    s.leases_end()


def test_closing_does_not_wait_for_a_dead_device(
    setting: Make, device: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mover_module, "_JOIN_S", 0.1)
    s = setting(copier=device)
    save_blocks(s.namespace, s.keys(2))
    job = s.load(s.keys(2), [1, 2])
    wait_until(lambda: len(device.waiting) == LAYERS)
    s.client.close()
    assert not job.done
    assert "copies have not ended" in caplog.text
    while device.waiting:
        device.run_one()
    assert finished(job)
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "kvferry-mover"])


def test_a_device_that_fails_fails_its_jobs_alone(setting: Make, device: FakeDevice) -> None:
    s = setting(copier=device)
    save_blocks(s.namespace, s.keys(2))
    device.fails = True
    job = s.load(s.keys(2), [1, 2])
    assert finished(job)
    assert job.failed_blocks() == (1, 2)
    assert "the device has failed" in str(job.error)
    device.fails = False
    device.waiting.clear()
    other = s.load(s.keys(2), [1, 2])
    wait_until(lambda: len(device.waiting) == LAYERS)
    for _ in range(LAYERS):
        device.run_one()
    assert finished(other)
    assert other.ok
    s.leases_end()


def test_cancel_of_what_has_not_begun_returns_at_once(setting: Make) -> None:
    s = setting()
    keys = s.saved(2, [0, 1])
    gate, before = Gate(), s.pages.of([4, 5])
    load = s.load(keys, [4, 5], after=gate)
    save = s.save(s.keys(2, first=9), [0, 1])
    save.layer(0)
    load.cancel()
    save.cancel()
    assert load.done
    assert save.done
    gate.done = True
    save.all_layers()
    assert finished(s.load(keys, [6, 7]))
    np.testing.assert_array_equal(s.pages.of([4, 5]), before)
    assert s.namespace.lookup(s.keys(2, first=9)).prefix == 0
    assert (load.failed_blocks(), save.failed_blocks()) == ((4, 5), (0, 1))
    s.leases_end()


def test_jobs_end_by_their_deadline(setting: Make) -> None:
    s = setting()
    keys = s.saved(2, [0, 1])
    before = s.pages.of([4, 5])
    load = s.load(keys, [4, 5], after=Gate(), deadline=deadline_in(0.2))
    save = s.save(s.keys(2, first=9), [0, 1], seconds=0.2)  # no layer is ever given
    for job in (load, save):
        assert finished(job)
        assert isinstance(job.error, TransferTimeoutError)
    np.testing.assert_array_equal(s.pages.of([4, 5]), before)
    assert {one.failed for one in s.client.poll()} >= {(4, 5), (0, 1)}
    s.leases_end()


def test_blocks_loaded_before_the_deadline_are_whole(setting: Make, device: FakeDevice) -> None:
    """Block by block, those that came in time count."""
    big = small_spec("paged", layers=LAYERS, pages=1024)  # 4 MiB: two of them are one piece
    s = setting("store.dram_capacity=40MiB", copier=device)
    namespace = s.client.namespace(big)
    shape = (2, 5, big.block_tokens, 1, big.layers[0].tensors[0].shape[-1])
    arrays = [np.zeros(shape, np.uint8) for _ in range(LAYERS)]
    regions = [Region.of(a, layer=n, layout="stacked_nhd") for n, a in enumerate(arrays)]
    held = namespace.register([replace(region, device="fake") for region in regions])
    keys = namespace.keys([1] * 5 * big.block_tokens)
    save_blocks(namespace, keys)
    lease = namespace.load(keys, deadline=deadline_in(20))
    job = held.load("l", lease, range(5), order="block", deadline=deadline_in(60))
    wait_until(lambda: len(device.waiting) == 3)
    device.run_one()
    wait_until(lambda: job.nbytes == 2 * big.block_nbytes)
    job.deadline = time.monotonic()
    wait_until(lambda: job.error is not None)
    assert not job.done
    device.run_one()
    device.run_one()
    assert finished(job)
    assert job.failed_blocks() == (2, 3, 4)
    assert arrays[3][1, 1].any()


def test_leases_are_renewed_while_they_are_needed(setting: Make) -> None:
    s = setting("store.lease=300s")
    keys = s.saved(2, [0, 1])
    gate = Gate()
    load = s.load(keys, [4, 5], after=gate)
    save = s.save(s.keys(2, first=9), [0, 1])
    save.layer(0)
    assert save.wait_layer(0, deadline=deadline_in(20))
    for job in (load, save):
        lease = job._lease
        assert lease is not None
        before = lease.expires_at
        assert before - 300 < job._renew_at < before - 100, "half of its time is over"
        job._renew_at = 0.0
        s.client.mover.wake()
        wait_until(lambda lease=lease, before=before: lease.expires_at > before)  # type: ignore[misc]
    gate.done = True
    save.all_layers()
    for job in (load, save):
        assert finished(job)
        assert job.ok, job.error
    s.leases_end()


def test_a_lease_that_is_lost_in_mid_load_fails_it(setting: Make, device: FakeDevice) -> None:
    s = setting(copier=device)
    save_blocks(s.namespace, s.keys(2))
    job = s.load(s.keys(2), [1, 2])
    wait_until(lambda: len(device.waiting) == LAYERS)
    device.run_one()
    assert job.wait_layer(0, deadline=deadline_in(20))
    job._lease.release()
    device.run_one()
    wait_until(lambda: job.error is not None)
    assert not job.done, "the device may still write"
    device.run_one()
    device.run_one()
    assert finished(job)
    assert isinstance(job.error, LeaseExpiredError)
    assert job.failed_blocks() == (1, 2)
    assert not job.wait_layer(1, deadline=deadline_in(20))


def test_a_save_without_room_fails_and_is_told(setting: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_job, "_RESERVE_S", 20.0)
    monkeypatch.setattr(namespace, "_left", lambda _: 0.05)  # what the daemon waits for room
    s = setting()
    filling = s.keys((1 << 20) // SPEC.block_nbytes, first=7)
    save_blocks(s.namespace, filling)
    held = s.namespace.load(filling, deadline=deadline_in(20))
    assert len(held) == len(filling)
    job = s.save(s.keys(2), [0, 1])
    job.all_layers()
    assert finished(job)
    assert isinstance(job.error, CapacityError)
    assert job.failed_blocks() == (0, 1)
    assert [one.ok for one in s.client.poll()] == [False]
    held.release()
    monkeypatch.undo()
    assert s.saved(2, [0, 1])


def test_an_event_that_raises_fails_its_job(setting: Make) -> None:
    class Broken(Gate):
        def query(self) -> bool:
            raise RuntimeError("sticky")

    s = setting()
    job = s.save(s.keys(2), [0, 1])
    job.layer(0, Broken())
    assert finished(job)
    assert "sticky" in str(job.error)
    s.saved(2, [0, 1])


def test_cancel_races_with_the_end(setting: Make) -> None:
    """Whenever it comes, nothing is written after it returned, and every job is told of once."""
    s = setting()
    s.saved(6, range(6))
    s.client.poll()
    rng = random.Random(3)
    for _ in range(100):
        ids = rng.sample(range(6, PAGES), 6)
        s.pages.bytes[:, :, ids] = 0
        job = s.load(s.keys(6), ids, order=rng.choice(["layer", "block"]))
        if rng.random() < 0.7:
            job.wait_layer(rng.randrange(LAYERS), deadline=deadline_in(rng.random() * 1e-3))
        job.cancel()
        kept = s.pages.of(ids)
        failed = job.failed_blocks() if job.done else ()
        assert finished(job)
        assert job.failed_blocks() in (failed, ()), "decided twice"
        assert job.failed_blocks() in ((), tuple(ids))
        if job.ok:
            np.testing.assert_array_equal(kept, s.pages.of(range(6)))
        np.testing.assert_array_equal(s.pages.of(ids), kept)
    wait_until(lambda: not s.client.mover.jobs)
    assert len(s.client.poll()) == 100
    s.leases_end()


def test_closing_ends_jobs_and_threads(setting: Make) -> None:
    s = setting()
    keys = s.saved(2, [0, 1])
    one = s.load(keys, [4, 5], after=Gate())
    s.registration.close()
    assert one.done
    with pytest.raises(StoreError):
        s.save(keys, [0, 1])
    with Pages(s.namespace, s.client.mover).registration as other:
        job = other.save("s", s.keys(2, first=3), [0, 1], parent=None, deadline=deadline_in(20))
    assert job.done
    assert job.failed_blocks() == (0, 1)
    s.client.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("kvferry-mover")]
    with pytest.raises(StoreError):
        Pages(s.namespace, s.client.mover)
