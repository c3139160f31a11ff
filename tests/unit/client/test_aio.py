from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import AsyncClient, ClientOptions
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError, ConfigError, LeaseExpiredError
from kvferry.daemon import Daemon
from kvferry.testing.blocks import block_bytes, small_spec, wait_until

SPEC = small_spec("aio")
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
