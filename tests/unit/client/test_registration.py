"""Jobs between a daemon and the paged memory of an engine."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.client import (
    BlockMover,
    Client,
    ClientNamespace,
    LoadJob,
    Registration,
    SaveJob,
    jobs,
    namespace,
)
from kvferry.client import mover as mover_module
from kvferry.core.blockstore import Namespace
from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    CapacityError,
    ConfigError,
    KVFerryError,
    LeaseExpiredError,
    RequestCancelledError,
    StoreError,
    TransferTimeoutError,
)
from kvferry.core.keys import BlockKey
from kvferry.core.memory import MemoryStore
from kvferry.core.paged_copy import Copying, Event, HostCopier, Transfer
from kvferry.core.regions import Region
from kvferry.daemon import Daemon
from kvferry.testing.blocks import save_blocks, small_spec, wait_until

LAYERS = 4
SPEC = small_spec("paged", layers=LAYERS)
ROW = SPEC.layers[0].tensors[0].shape[-1]
PAGES = 24
Start = Callable[..., Daemon]
Bytes = npt.NDArray[np.uint8]


class Pages:
    """An engine's paged memory of random bytes, all layers in one array."""

    def __init__(self, namespace: Namespace, mover: BlockMover, device: str = "cpu") -> None:
        shape = (LAYERS, 2, PAGES, SPEC.block_tokens, 1, ROW)
        self.bytes: Bytes = np.random.default_rng(5).integers(0, 255, shape, np.uint8)
        regions = [Region.of(self.bytes[n], layer=n, layout="stacked_nhd") for n in range(LAYERS)]
        self.registration: Registration = mover.register(
            namespace, [replace(region, device=device) for region in regions]
        )

    def of(self, ids: Sequence[int]) -> Bytes:
        found: Bytes = self.bytes[:, :, list(ids)]
        return found


class Gate:
    """An event of a device that does not exist."""

    def __init__(self) -> None:
        self.done = False
        self.asked = threading.Event()

    def query(self) -> bool:
        self.asked.set()
        return self.done


class FakeDevice:
    """Copies when the test says so, as a copy engine that nobody can stop."""

    orders_events = True

    def __init__(self) -> None:
        self.waiting: deque[tuple[Callable[[], object], Gate]] = deque()
        self.fails = False

    def start(
        self, transfer: Transfer, layers: Sequence[int], first: int, count: int, after: Event | None
    ) -> Copying | None:
        gate = Gate()
        same = Transfer(transfer.plan, transfer.pages.tolist(), transfer.slots, to_pages=transfer.to_pages)
        self.waiting.append((partial(HostCopier().start, same, list(layers), first, count, after), gate))
        return self if self.fails else gate

    def query(self) -> bool:
        raise StoreError("the device has failed")

    def run_one(self) -> None:
        copy, gate = self.waiting.popleft()
        copy()
        gate.done = True


class SlowHost:
    """A copy by the mover's own hand that stands still in the middle, until the test lets it go on."""

    orders_events = False

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()

    def start(
        self, transfer: Transfer, layers: Sequence[int], first: int, count: int, after: Event | None
    ) -> Copying | None:
        self.entered.set()
        assert self.go.wait(30)
        return HostCopier().start(transfer, layers, first, count, after)


class Setting:
    """A client, a namespace, pages, and keys for as many blocks as a test has."""

    def __init__(
        self, start: Start, *settings: str, copier: FakeDevice | SlowHost | None = None, url: int = 0
    ) -> None:
        self.daemon = start(*settings)
        copiers = {"fake": copier} if copier else None
        self.client = Client(self.daemon.addresses[url], copiers=copiers)
        self.namespace: ClientNamespace = self.client.namespace(SPEC)
        self.pages = Pages(self.namespace, self.client.mover, "fake" if copier else "cpu")
        self.registration = self.pages.registration

    def keys(self, count: int, first: int = 1) -> list[BlockKey]:
        return self.namespace.keys([first] * count * SPEC.block_tokens)

    def save(self, keys: Sequence[BlockKey], ids: Sequence[int], seconds: float = 20) -> SaveJob:
        deadline = deadline_in(seconds)
        return self.registration.save("s", keys, ids, parent=None, deadline=deadline)

    def saved(self, count: int, ids: Sequence[int]) -> list[BlockKey]:
        keys = self.keys(count)
        job = self.save(keys, ids)
        job.all_layers()
        assert job.wait(deadline=deadline_in(20))
        assert job.ok
        return keys

    def load(self, keys: Sequence[BlockKey], ids: Sequence[int], **more: Any) -> LoadJob:
        lease = self.namespace.load(keys, deadline=deadline_in(20))
        return self.registration.load("l", lease, ids, **{"deadline": deadline_in(20), **more})

    def leases_end(self) -> None:
        wait_until(lambda: self.client.stats().leases == 0)
        assert self.client.stats().quarantined_nbytes == self.client.stats().pinned_nbytes == 0


Make = Callable[..., Setting]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    monkeypatch.setattr(jobs, "_TOGETHER_NBYTES", 0)  # each layer is a copy of its own
    return FakeDevice()


@pytest.fixture
def setting(start: Start) -> Iterator[Make]:
    made: list[Setting] = []

    def make(*settings: str, **more: Any) -> Setting:
        made.append(Setting(start, *settings, **more))
        return made[-1]

    yield make
    for one in made:
        one.client.close()


def finished(job: LoadJob | SaveJob) -> bool:
    return job.wait(deadline=deadline_in(20))


@pytest.mark.parametrize("url", [0, 1], ids=["unix", "tcp"])
@pytest.mark.parametrize("order", ["layer", "block"])
def test_blocks_go_round_layer_by_layer(setting: Make, url: int, order: str) -> None:
    s = setting("daemon.listen=tcp://127.0.0.1:0", url=url)
    keys, ids = s.keys(3), [5, 0, 7]
    save = s.registration.save("first", keys, ids, parent=None, deadline=deadline_in(20))
    for layer in (2, 0, 1):
        save.layer(layer)
        assert save.wait_layer(layer, deadline=deadline_in(20))
    assert s.namespace.lookup(keys).prefix == 0, "published before all layers were read"
    assert not save.done
    s.pages.bytes[[2, 0, 1]] += 1  # layers that were read may be used again
    kept = s.pages.of(ids)
    kept[[2, 0, 1]] -= 1
    save.layer(3)
    assert finished(save)
    assert (save.ok, save.stored, save.failed_blocks(), save.error) == (True, 3, (), None)
    load = s.load(keys, [1, 2, 3], order=order)
    for layer in range(LAYERS):
        assert load.wait_layer(layer, deadline=deadline_in(20))
        np.testing.assert_array_equal(s.pages.of([1, 2, 3])[layer], kept[layer])
    assert finished(load)
    assert load.ok
    wait_until(lambda: not s.client.mover.jobs)
    told = [(one.job, one.kind, one.ok, one.nbytes, one.failed) for one in s.client.poll()]
    nbytes = 3 * SPEC.block_nbytes
    assert told == [("first", "save", True, nbytes, ()), ("l", "load", True, nbytes, ())]
    assert s.client.poll() == []
    s.leases_end()


def test_who_waited_for_the_end_finds_it_told(setting: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    s = setting()
    ended = s.client.mover.ended

    def late(job: LoadJob | SaveJob) -> None:
        time.sleep(0.1)  # who could have waited for less would be back
        ended(job)

    monkeypatch.setattr(s.client.mover, "ended", late)
    s.saved(2, [0, 1])
    assert [one.ok for one in s.client.poll()] == [True]


def test_what_is_stored_already_is_not_copied(setting: Make) -> None:
    s = setting()
    s.saved(2, [0, 1])
    job = s.save(s.keys(3), [9, 9, 2])
    job.all_layers()
    assert finished(job)
    assert (job.stored, job.nbytes) == (1, SPEC.block_nbytes)
    load = s.load(s.keys(3), [4, 5, 6])
    assert finished(load)
    np.testing.assert_array_equal(s.pages.of([4, 5, 6]), s.pages.of([0, 1, 2]))
    again = s.save(s.keys(3), [0, 1, 2])
    again.all_layers()
    assert finished(again)
    assert (again.stored, again.nbytes, again.ok) == (0, 0, True)


def test_blocks_that_missed_are_named(setting: Make) -> None:
    """C001: exactly those are to be computed."""
    s = setting()
    s.saved(2, [0, 1])
    before = s.pages.of([8, 9])
    job = s.load(s.keys(4), [4, 5, 8, 9])
    assert job.failed_blocks() == (8, 9), "known from the start"
    assert finished(job)
    assert (job.failed_blocks(), job.ok, job.error) == ((8, 9), False, None)
    np.testing.assert_array_equal(s.pages.of([4, 5]), s.pages.of([0, 1]))
    np.testing.assert_array_equal(s.pages.of([8, 9]), before)
    nothing = s.load(s.keys(2, first=7), [4, 5])
    assert finished(nothing)
    assert nothing.failed_blocks() == (4, 5)
    assert not nothing.wait_layer(0, deadline=deadline_in(20))
    some = s.load(s.keys(2), [6], first=1)
    assert finished(some)
    np.testing.assert_array_equal(s.pages.of([6]), s.pages.of([1]))


def test_a_save_waits_for_the_write_that_fills_its_blocks(setting: Make) -> None:
    """C004: the write ends after the save was asked for, and its event says so."""
    s = setting()
    for number in range(200):
        keys, ids = s.keys(2, first=number), [number % 7, 7 + number % 5]
        gates = [Gate() for _ in range(LAYERS)]
        job = s.save(keys, ids)
        for layer, gate in enumerate(gates):
            job.layer(layer, gate)
        for layer, gate in enumerate(gates):
            s.pages.bytes[layer][:, ids] = (number + layer) % 251
            gate.done = True
        assert finished(job)
        with s.namespace.load(keys, deadline=deadline_in(20)) as lease:
            for layer in range(LAYERS):
                held = np.frombuffer(lease.layer(1, layer), np.uint8)
                assert (held == (number + layer) % 251).all(), f"run {number}: a stale copy"
        s.namespace.remove(keys)


def test_a_load_waits_for_the_last_reader_of_its_blocks(setting: Make) -> None:
    s = setting()
    keys = s.saved(2, [0, 1])
    gate, before = Gate(), s.pages.of([4, 5])
    job = s.load(keys, [4, 5], after=gate)
    assert gate.asked.wait(20)
    np.testing.assert_array_equal(s.pages.of([4, 5]), before)
    other = s.load(keys, [6, 7])  # and holds up nobody else
    assert finished(other)
    gate.done = True
    assert finished(job)
    np.testing.assert_array_equal(s.pages.of([4, 5]), s.pages.of([0, 1]))


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
    monkeypatch.setattr(jobs, "_RESERVE_S", 20.0)
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


def test_what_cannot_be_meant_is_refused(setting: Make) -> None:
    s = setting()
    keys = s.saved(2, [0, 1])
    lease = s.namespace.load(keys, deadline=deadline_in(20))
    load = partial(s.registration.load, "l", lease, deadline=deadline_in(20))
    for ids in ([1], [1, 1], [1, PAGES], [-1, 2]):
        with pytest.raises(ConfigError):
            load(ids)
    with pytest.raises(ConfigError, match="take one of layer, block"):
        load([1, 2], order="rows")
    with pytest.raises(ConfigError, match="from number 3 on"):
        load([1, 2], first=3)
    for keys_, ids in (([keys[0]] * 2, [0, 1]), (keys, [0]), ([b"short", keys[0]], [0, 1])):
        with pytest.raises(ConfigError):
            s.save(keys_, ids)  # type: ignore[arg-type]
    with pytest.raises(IndexError):
        s.save(s.keys(1, first=4), [0]).layer(LAYERS)
    lease.release()
    with pytest.raises(LeaseExpiredError):
        load([1, 2])
    with pytest.raises(StoreError, match="'fake': nothing here copies"):
        Pages(s.namespace, s.client.mover, "fake")


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


def test_a_store_in_this_process_has_jobs_too() -> None:
    store = MemoryStore(1 << 20)
    with BlockMover() as mover:
        pages = Pages(store.namespace(SPEC), mover)
        keys = store.namespace(SPEC).keys([1] * 2 * SPEC.block_tokens)
        save = pages.registration.save("s", keys, [3, 1], parent=None, deadline=deadline_in(20))
        save.all_layers()
        assert finished(save)
        lease = store.namespace(SPEC).load(keys, deadline=deadline_in(20))
        load = pages.registration.load("l", lease, [4, 5], deadline=deadline_in(20))
        assert finished(load)
        np.testing.assert_array_equal(pages.of([4, 5]), pages.of([3, 1]))
        assert [one.ok for one in mover.poll()] == [True, True]
    assert store.stats().leases == 0
    store.close()


def test_a_lease_may_come_from_another_process(setting: Make) -> None:
    """The scheduler takes it, the worker loads by its id."""
    s = setting()
    keys = s.saved(2, [0, 1])
    with Client(s.daemon.addresses[0], session=s.client.session) as scheduler:
        held = scheduler.namespace(SPEC).load(keys, deadline=deadline_in(20))
        found = s.client.find_lease(held.lease_id)
        assert found is not None
        job = s.registration.load("l", found, [4, 5], deadline=deadline_in(20))  # type: ignore[arg-type]
        assert finished(job)
        assert job.ok
        np.testing.assert_array_equal(s.pages.of([4, 5]), s.pages.of([0, 1]))
    s.leases_end()


def test_what_has_lost_something_stays_marked(setting: Make) -> None:
    s = setting()
    deadline = deadline_in(20)
    save = s.registration.save("s", s.keys(2), [0, 1], parent=None, deadline=deadline, lossy=True)
    save.all_layers()
    assert finished(save)
    assert s.namespace.lookup(s.keys(2)).prefix == 0, "whoever takes no loss gets none"
    lossy = s.client.namespace(SPEC, takes_lossy=True)
    lease = lossy.load(s.keys(2), deadline=deadline_in(20))
    job = s.registration.load("l", lease, [4, 5], deadline=deadline)
    assert job.lossy
    assert finished(job)
    s.saved(2, [0, 1])
    assert not s.load(s.keys(2), [4, 5]).lossy


def test_errors_of_a_client_that_is_closed_are_ours(setting: Make) -> None:
    s = setting()
    job = s.save(s.keys(2), [0, 1])
    s.client.close()
    assert job.done
    with pytest.raises(KVFerryError):
        s.save(s.keys(2), [0, 1])
