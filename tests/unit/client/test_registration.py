"""Jobs between a daemon and the paged memory of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from kvferry.client import (
    BlockMover,
    Client,
    LoadJob,
    SaveJob,
)
from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    ConfigError,
    KVFerryError,
    LeaseExpiredError,
    StoreError,
)
from kvferry.core.memory import MemoryStore
from kvferry.testing.blocks import wait_until
from kvferry.testing.paged_engine import (
    LAYERS,
    PAGES,
    SPEC,
    Gate,
    Pages,
    Setting,
    finished,
)

Make = Callable[..., Setting]


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
