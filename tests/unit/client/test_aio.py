from __future__ import annotations

import asyncio
import gc
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.client import AsyncClient, Client, ClientOptions
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError, ConfigError, LeaseExpiredError, StoreError, UnavailableError
from kvferry.core.regions import Region
from kvferry.daemon import Daemon
from kvferry.testing import paged_engine as paged
from kvferry.testing.blocks import block_bytes, small_spec, wait_until
from kvferry.testing.paged_engine import FakeDevice

SPEC = small_spec("aio")


def soon() -> dict[str, Any]:
    return {"parent": None, "deadline": deadline_in(0.05)}


BLOCKS = (1 << 20) // SPEC.block_nbytes


def test_the_same_verbs_as_coroutines(start: Callable[..., Daemon]) -> None:
    daemon = start()

    async def run() -> None:
        async with await AsyncClient.connect(daemon.addresses[0]) as client:
            ns = client.namespace(SPEC)
            keys = ns.keys([1] * 3 * SPEC.block_tokens)
            blocks = [(key, block_bytes(key, SPEC.block_nbytes)) for key in keys]
            assert await ns.save(blocks, parent=None, deadline=deadline_in(20)) == 3
            assert (await ns.lookup(keys)).prefix == 3
            async with await ns.load(keys, deadline=deadline_in(20)) as lease:
                assert len(lease) == 3
                assert lease.view(1) == blocks[1][1]
                await lease.renew()
            with pytest.raises(LeaseExpiredError):
                lease.release()
            other = ns.keys([2] * SPEC.block_tokens)
            async with await ns.reserve(other, parent=None, deadline=deadline_in(20)) as write:
                write.view(0)[:] = blocks[0][1]
                stored, held = await write.publish()
            assert stored == 1
            assert held.view(0) == blocks[0][1]
            held.release()
            assert (await client.stats()).entries == 4
            assert await client.flush(deadline=deadline_in(20))
            assert await client.poll() == []

    asyncio.run(run())


def test_a_lease_that_nobody_waits_for_is_given_back(start: Callable[..., Daemon]) -> None:
    daemon = start()

    async def run() -> None:
        async with await AsyncClient.connect(daemon.addresses[0]) as client:
            ns = client.namespace(SPEC)
            all_of_it = ns.keys([1] * BLOCKS * SPEC.block_tokens)
            first = await ns.reserve(all_of_it, parent=None, deadline=deadline_in(20))
            late = asyncio.ensure_future(
                ns.reserve(ns.keys([2] * SPEC.block_tokens), parent=None, deadline=deadline_in(20))
            )
            await asyncio.to_thread(wait_until, lambda: daemon.work.total >= 3)
            late.cancel()
            with pytest.raises(asyncio.CancelledError):
                await late
            await first.abort()  # now the other reservation is made, for nobody
            await asyncio.to_thread(wait_until, lambda: daemon.store_of("default").stats().pinned_nbytes == 0)

    asyncio.run(run())


def test_many_calls_at_once_take_few_connections(start: Callable[..., Daemon]) -> None:
    daemon = start()

    async def run() -> None:
        async with await AsyncClient.connect(daemon.addresses[0], ClientOptions(max_connections=3)) as client:
            ns = client.namespace(SPEC)
            keys = ns.keys([1] * SPEC.block_tokens)
            hits = await asyncio.gather(*(ns.lookup(keys) for _ in range(50)))
            assert all(hit.prefix == 0 for hit in hits)
            assert daemon.connections <= 3
            too_many = ns.keys([3] * (BLOCKS + 1) * SPEC.block_tokens)
            with pytest.raises(CapacityError):
                await ns.reserve(too_many, parent=None, deadline=deadline_in(1))

    asyncio.run(run())
    assert not [t for t in threading.enumerate() if t.name.startswith("kvferry-async-client")]


async def fill(ns: Any, waiting: int, daemon: Daemon) -> tuple[Any, list[asyncio.Future[Any]]]:
    """All memory taken, and reservations that wait for it, with a thread each."""
    held = await ns.reserve(ns.keys([1] * BLOCKS * SPEC.block_tokens), parent=None, deadline=deadline_in(60))
    late = [
        asyncio.ensure_future(ns.reserve(keys, parent=None, deadline=deadline_in(60)))
        for keys in [ns.keys([n] * SPEC.block_tokens) for n in range(2, 2 + waiting)]
    ]
    await asyncio.to_thread(wait_until, lambda: daemon.work.count == waiting)
    return held, late


def test_a_call_whose_turn_does_not_come_is_a_miss_by_its_deadline(start: Callable[..., Daemon]) -> None:
    """All threads wait for room: what comes behind them does not wait with them."""
    daemon = start()
    options = ClientOptions(max_connections=2, call_timeout_s=0.2)

    async def run() -> None:
        async with await AsyncClient.connect(daemon.addresses[0], options) as client:
            ns = client.namespace(SPEC)
            held, late = await fill(ns, 2, daemon)
            keys = ns.keys([9] * SPEC.block_tokens)
            block = [(keys[0], block_bytes(keys[0], SPEC.block_nbytes))]
            async with await ns.load(keys, deadline=deadline_in(0.1)) as missed:
                assert len(missed) == 0
            assert (await ns.lookup(keys)).tiers == (await ns.lookup(keys=iter(keys))).tiers == (None,)
            asking = (
                ns.save(block, **soon()),
                ns.save(blocks=block * 2, **soon()),
                ns.reserve(keys, **soon()),
                ns.clear(),
                client.find_lease("1"),
            )
            for refused in asking:
                with pytest.raises(UnavailableError, match="not begun by its deadline: 2 calls"):
                    await refused
            assert not await client.flush(deadline=deadline_in(-1))
            assert (await client.stats()).entries == 0
            assert await ns.pin(keys, ttl=5) == 0
            with pytest.raises(LeaseExpiredError):
                await held.renew()
            counted = client.counters
            assert (counted.missed_loads, counted.missed_lookups) == (1, 2)
            assert (counted.refused_saves, counted.refused_blocks) == (3, 4)
            assert not any(one.done() for one in late), "it came only since they had ended"
            for one in [client._threads.ends.submit(int) for _ in range(4)]:
                await asyncio.wrap_future(one)
            assert len(held.view(0)) == SPEC.block_nbytes, "it was not renewed, and is not over yet"
            await held.abort()  # waits behind nobody
            for lease in await asyncio.wait_for(asyncio.gather(*late), 60):
                await lease.abort()
            await asyncio.to_thread(wait_until, lambda: daemon.store_of("default").stats().pinned_nbytes == 0)

    asyncio.run(run())


def test_a_commit_whose_turn_does_not_come_gives_its_slots_back(start: Callable[..., Daemon]) -> None:
    daemon = start()

    async def run() -> None:
        async with await AsyncClient.connect(daemon.addresses[0], ClientOptions(max_connections=1)) as client:
            ns = client.namespace(SPEC)
            held, (late,) = await fill(ns, 1, daemon)
            with pytest.raises(UnavailableError, match="commit was not begun"):
                await held.commit(deadline_in(0.1))
            with pytest.raises(LeaseExpiredError):
                held.view(0)
            await (await asyncio.wait_for(late, 60)).abort()
            assert (await client.stats()).entries == 0

    asyncio.run(run())


def test_what_is_cancelled_leaves_no_lease_and_no_error_behind(
    start: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start()
    unheard: list[dict[str, Any]] = []
    begun, go_on = threading.Event(), threading.Event()

    def failing(*_: object) -> None:
        begun.set()
        go_on.wait(60)
        raise StoreError("nobody hears of this")

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        async with await AsyncClient.connect(daemon.addresses[0], ClientOptions(max_connections=1)) as client:
            ns = client.namespace(SPEC)
            held = await ns.reserve(ns.keys([1] * SPEC.block_tokens), parent=None, deadline=deadline_in(60))
            for _ in range(2):
                client._threads.ends.submit(go_on.wait, 60)
            tasks = [asyncio.ensure_future(held.abort()), asyncio.ensure_future(client.find_lease("1"))]
            assert await asyncio.to_thread(begun.wait, 60)  # of the other the turn has not come
            while tasks:
                tasks[0].cancel()
                with pytest.raises(asyncio.CancelledError):
                    await tasks[0]
                del tasks[0]
            go_on.set()
            await client.flush(deadline=deadline_in(20))  # behind the other call, by the same thread
            gc.collect()
            stats = daemon.store_of("default").stats
            await asyncio.to_thread(wait_until, lambda: stats().pinned_nbytes == 0, 20)  # before it expires
            await client.close()  # once more by the context

    monkeypatch.setattr(Client, "find_lease", failing)
    asyncio.run(run())
    assert not unheard


def test_jobs_hold_up_neither_the_loop_nor_calls(start: Callable[..., Daemon], device: FakeDevice) -> None:
    """Jobs wait for a device that the test holds up; the loop goes on, and no call waits behind them."""
    daemon = start()
    client = Client(daemon.addresses[0], ClientOptions(max_connections=1), copiers={"fake": device})
    row = paged.SPEC.layers[0].tensors[0].shape[-1]
    array = np.zeros((paged.LAYERS, 2, paged.PAGES, paged.SPEC.block_tokens, 1, row), np.uint8)
    regions = [
        replace(Region.of(array[n], layer=n, layout="stacked_nhd"), device="fake")
        for n in range(paged.LAYERS)
    ]

    async def copied(count: int) -> None:
        for _ in range(count):
            await asyncio.to_thread(wait_until, lambda: bool(device.waiting))
            device.run_one()

    async def run() -> None:
        async with AsyncClient(client) as aio:
            ns = aio.namespace(paged.SPEC)
            keys = ns.keys([1] * 3 * paged.SPEC.block_tokens)
            async with ns.register(regions) as pages:
                array[:] = 7
                save = pages.save("s", keys, [1, 2, 3], parent=None, deadline=deadline_in(60))
                save.all_layers()
                waits = [asyncio.ensure_future(save.wait_layer(n, deadline=deadline_in(60))) for n in (0, 3)]
                assert not await save.wait(deadline=deadline_in(0))
                assert (await ns.lookup(keys)).prefix == 0
                await copied(1)
                assert await waits[0]
                assert not waits[1].done()
                await copied(paged.LAYERS - 1)
                assert await save.wait(deadline=deadline_in(60))
                assert (await waits[1], save.ok, save.stored) == (True, True, 3)
                array[:] = 0
                lease = await ns.load(keys, deadline=deadline_in(60))
                load = pages.load("l", lease, [4, 5, 6], deadline=deadline_in(60))
                await copied(1)
                assert await load.wait_layer(0, deadline=deadline_in(60))
                assert (array[0, :, 4:7] == 7).all()
                cancel = asyncio.ensure_future(load.cancel())
                await asyncio.to_thread(wait_until, lambda: load.error is not None)
                assert not cancel.done(), "the device still writes"
                await copied(paged.LAYERS - 1)
                await asyncio.wait_for(cancel, 60)
                assert load.failed_blocks() == (4, 5, 6)
                assert not await load.wait_layer(3, deadline=deadline_in(0))
                assert [(done.job, done.ok) for done in await aio.poll()] == [("s", True), ("l", False)]
            with pytest.raises(StoreError, match="closed"):
                pages.save("s", keys, [1, 2, 3], parent=None, deadline=deadline_in(1))

    asyncio.run(run())


def test_an_address_is_refused_with_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"await AsyncClient\.connect"):
        AsyncClient("unix:///somewhere")  # type: ignore[arg-type]


def test_the_example_of_the_document_runs(start: Callable[..., Daemon]) -> None:
    text = (Path(__file__).parents[3] / "docs" / "daemon.md").read_text()
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "AsyncClient" in one]
    names: dict[str, Any] = {}
    exec(compile(code, "docs/daemon.md", "exec"), names)
    found = asyncio.run(names["reuse"](start().addresses[0], SPEC, [7] * 3 * SPEC.block_tokens))
    assert found == [bytes(SPEC.block_nbytes)] * 3
