"""What a caller gives wrong is told at the call, with its name, and nothing that is under way suffers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvferry.client import AsyncClient, Client, ClientOptions
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, StoreError
from kvferry.core.regions import Region
from kvferry.core.spec import KeyScope
from kvferry.daemon import Daemon
from kvferry.testing.blocks import save_blocks, small_spec
from kvferry.testing.paged_engine import LAYERS, SPEC, Setting, finished

Make = Callable[..., Setting]


class _Interrupts:
    """An event that ends in what is no error but the end of a program."""

    def query(self) -> bool:
        raise KeyboardInterrupt


def _still_moves(s: Setting) -> None:
    save_blocks(s.namespace, s.keys(2))
    job = s.load(s.keys(2), [1, 2])
    assert finished(job)
    assert job.ok


def test_a_load_takes_a_read_lease_of_its_spec_alone(setting: Make) -> None:
    """Anything else would end the thread that moves blocks, or fill pages with the KV of another model."""
    s = setting()
    load, by = s.registration.load, deadline_in(20)
    with s.namespace.reserve(s.keys(1), parent=None, deadline=by) as writes:
        found = s.client.find_lease(writes.lease_id)
        for wrong in (writes, found, None, "lease"):
            with pytest.raises(ConfigError, match="needs a read lease"):
                load("l", wrong, [1], deadline=by)  # type: ignore[arg-type]
    other = s.client.namespace(small_spec("other", pages=SPEC.block_nbytes // 4096, layers=LAYERS))
    keys = other.keys([7] * other.spec.block_tokens)
    save_blocks(other, keys)
    with other.load(keys, deadline=by) as lease:
        assert len(lease) == 1
        with pytest.raises(ConfigError, match=r"has blocks of .*'other'.*, these pages are for"):
            load("l", lease, [1], deadline=by)
    scoped = s.client.namespace(SPEC, KeyScope(adapter="a"))
    keys = scoped.keys([7] * SPEC.block_tokens)
    save_blocks(scoped, keys)
    with scoped.load(keys, deadline=by) as lease, pytest.raises(ConfigError, match="another scope"):
        load("l", lease, [1], deadline=by)
    _still_moves(s)
    s.leases_end()


def test_whatever_an_event_or_a_store_raises_ends_its_job_alone(
    setting: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = setting()
    keys = s.keys(2)
    for raising in ("reserve", "commit"):
        with monkeypatch.context() as patch:
            owner = s.namespace if raising == "reserve" else s.registration
            patch.setattr(owner, raising, lambda *_, **__: 1 / 0)
            save = s.registration.save("s", keys, [1, 2], parent=None, deadline=deadline_in(20))
            save.all_layers()
            assert finished(save)
            assert "ZeroDivisionError" in str(save.error)
            assert save.failed_blocks() == (1, 2)
    save = s.registration.save("s", keys, [1, 2], parent=None, deadline=deadline_in(20))
    save.all_layers(_Interrupts())
    assert finished(save)
    assert "KeyboardInterrupt" in str(save.error)
    save_blocks(s.namespace, keys)
    lease = s.namespace.load(keys, deadline=deadline_in(20))

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lease, "release", interrupted)
    job = s.registration.load("l", lease, [1, 2], deadline=deadline_in(20))
    assert finished(job)
    monkeypatch.undo()
    lease.release()
    _still_moves(s)
    s.leases_end()


def test_arguments_of_jobs_are_named(setting: Make) -> None:
    s = setting()
    keys, by = s.keys(2), deadline_in(20)
    save: Any = s.registration.save("s", keys, [1, 2], parent=None, deadline=by)
    for call, wrong in (
        (lambda: save.layer(0, 5), "event is 5"),
        (lambda: save.all_layers("now"), "event is 'now'"),
        (lambda: save.layer("x"), "layer is 'x'"),
        (lambda: save.wait_layer(None, deadline=by), "layer is None"),
        (lambda: s.registration.save("s", keys, [1, 2], parent=5, deadline=by), "parent is int 5"),  # type: ignore[arg-type]
        (lambda: s.registration.save("s", keys, None, parent=None, deadline=by), "not None"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=wrong):
            call()
    for number in (-1, LAYERS):
        with pytest.raises(IndexError, match=f"no layer {number}"):
            save.wait_layer(number, deadline=by)
    save.all_layers()
    assert finished(save)
    assert save.ok
    lease = s.namespace.load(keys, deadline=by)
    load: Any = s.registration.load
    for given, wrong in (
        ({"after": 5}, "after is 5"), ({"first": None}, "first is None"), ({"block_ids": None}, "not None"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=wrong):
            load("l", lease, **{"block_ids": [1, 2], "deadline": by, **given})
    assert finished(load("l", lease, [1, 2], deadline=by)), "it stayed the caller's"
    s.leases_end()


def test_what_a_client_is_made_from_and_registers(setting: Make) -> None:
    s, given = setting(), np.zeros((2, 4096), np.uint8)
    wrong: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
        (Client, (5,), "url is 5, must be text"),
        (s.client.namespace, (None,), "spec is None, must be a KVSpec"),
        (s.client.namespace, (SPEC, "salt"), "scope is 'salt', must be a KeyScope"),
        (s.client.mover.register, (s.namespace, [5]), "region 0 is 5, must be a Region"),
        (lambda: Region.of(given, layer="x", layout="NB"), (), "layer is 'x'"),  # type: ignore[arg-type]
    ]
    for call, args, told in wrong:
        with pytest.raises(ConfigError, match=told):
            call(*args)


@pytest.mark.parametrize("lease_id", ["zz", "", "-1", " 1", "1" * 17, 5, None])
def test_what_is_no_id_of_a_lease(start: Callable[..., Daemon], lease_id: Any) -> None:
    with (
        Client(start().addresses[0]) as client,
        pytest.raises(ConfigError, match=r"lease_id is .* 1 to 16 hex"),
    ):
        client.find_lease(lease_id)


def test_a_commit_with_no_deadline_that_is_one_keeps_the_lease(start: Callable[..., Daemon]) -> None:
    with Client(start().addresses[0]) as client:
        space = client.namespace(small_spec("commit"))
        keys = space.keys([1] * space.spec.block_tokens)
        lease: Any = space.reserve(keys, parent=None, deadline=deadline_in(20))
        with pytest.raises(ConfigError, match="'x'"):
            lease.commit("x")
        assert lease.commit(deadline_in(20)) == 1


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"session": 5}, "session is 5, must be text"),
        ({"role": 5}, "role is 5, must be text"),
        ({"checksum": 0}, "checksum is 0, must be true or false"),
        ({"token_file": 5}, "token_file is 5, must be text"),
        ({"max_mapped_nbytes": "x"}, "max_mapped_nbytes is 'x'"),
        ({"max_mapped_nbytes": -1}, "max_mapped_nbytes is -1"),
        ({"connect_timeout_s": 1e30}, "connect_timeout_s is 1e.30, must be .*at most 86400"),
        ({"credential": "kvf1_a_secret"}, r"credential is of type str, must be bytes"),
    ],
)
def test_options_are_checked_where_they_are_made(given: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong) as caught:
        ClientOptions(**given)
    assert "secret" not in str(caught.value)


def test_a_closed_async_client_says_so_and_takes_back(start: Callable[..., Daemon]) -> None:
    daemon = start()

    async def run() -> None:
        client = await AsyncClient.connect(daemon.addresses[0])
        space = client.namespace(small_spec("closed"))
        keys = space.keys([1] * space.spec.block_tokens)
        lease = await space.reserve(keys, parent=None, deadline=deadline_in(20))
        await client.close()
        for verb, args in ((space.lookup, (keys,)), (client.stats, ()), (client.find_lease, ("1",))):
            with pytest.raises(StoreError, match=r"the client of .* is closed"):
                await verb(*args)
        await lease.abort()
        await client.close()

    asyncio.run(run())
