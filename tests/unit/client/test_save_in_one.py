"""Saves over a connection: in one frame, or asked for first, and what becomes of blocks that are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from kvferry.client import Client
from kvferry.client.namespace import ClientNamespace
from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.daemon import Daemon
from kvferry.daemon.service import Service
from kvferry.testing.blocks import block_bytes, small_spec
from kvferry.wire import daemon_messages as d

SPEC = small_spec("in-one", pages=256)  # five of them are more than is sent without a question at any rate
Start = Callable[..., Daemon]


@pytest.fixture
def blocks(start: Start) -> Iterator[ClientNamespace]:
    daemon = start("daemon.socket=none", "daemon.listen=tcp://127.0.0.1:0", "store.dram_capacity=32MiB")
    (address,) = daemon.addresses
    with Client(address) as client:
        yield client.namespace(SPEC)


def verbs_with(kind: type[Any], verb: Callable[..., Any]) -> dict[type[Any], Callable[..., Any]]:
    verbs: dict[type[Any], Callable[..., Any]] = dict(Service._VERBS)
    verbs[kind] = verb
    return verbs


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the daemon was asked to store blocks with."""
    found: list[str] = []
    for verb in ("_save", "_reserve"):
        before = getattr(Service, verb)

        def noted(self: Service, *args: Any, verb: str = verb, before: Any = before) -> Any:
            found.append(verb)
            return before(self, *args)

        if verb == "_reserve":
            monkeypatch.setattr(Service, "_VERBS", verbs_with(d.ReserveBlocks, noted))
        else:
            monkeypatch.setattr(Service, verb, noted)
    return found


def save(blocks: ClientNamespace, keys: Sequence[BlockKey]) -> int:
    pairs = [(key, block_bytes(key, SPEC.block_nbytes)) for key in keys]
    return blocks.save(pairs, parent=None, deadline=deadline_in(20))


def test_what_is_new_goes_in_one_frame_until_something_was_stored(
    blocks: ClientNamespace, asked: list[str]
) -> None:
    keys = blocks.keys(list(range(14 * SPEC.block_tokens)))
    assert save(blocks, keys[:5]) == 5
    assert save(blocks, keys[:7]) == 2
    assert save(blocks, keys[:7]) == 0
    assert save(blocks, keys[:12]) == 5
    assert save(blocks, keys[12:]) == 2  # little is sent at any rate
    assert asked == ["_save", "_save", "_reserve", "_reserve", "_save"]
    with blocks.load(keys, deadline=deadline_in(20)) as lease:
        assert len(lease) == len(keys)
        for index, key in enumerate(keys):
            assert lease.view(index) == block_bytes(key, SPEC.block_nbytes)


@pytest.mark.parametrize("stored", [(0,), (1, 2), (0, 4), (5,)], ids=str)
def test_what_is_stored_is_left_and_the_rest_comes_in_its_place(
    blocks: ClientNamespace, asked: list[str], stored: tuple[int, ...]
) -> None:
    keys = blocks.keys(list(range(6 * SPEC.block_tokens)))
    for index in stored:
        save(blocks, [keys[index]])
    del asked[:]
    assert save(blocks, keys) == 6 - len(stored)
    assert asked == ["_save"]
    with blocks.load(keys, deadline=deadline_in(20)) as lease:
        assert [bytes(lease.view(n)) for n in range(6)] == [block_bytes(k, SPEC.block_nbytes) for k in keys]


def test_a_daemon_that_does_not_say_how_much_it_takes_is_asked_first(
    blocks: ClientNamespace, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Service._open

    def older(self: Service, message: d.OpenNamespace) -> Any:
        reply = opened(self, message)
        assert isinstance(reply.message, d.NamespaceOpened)
        return reply._replace(message=msgspec.structs.replace(reply.message, in_one=msgspec.UNSET))

    monkeypatch.setattr(Service, "_VERBS", verbs_with(d.OpenNamespace, older))
    keys = blocks.keys(list(range(9 * SPEC.block_tokens)))
    assert save(blocks, keys[:5]) == 5
    assert save(blocks, keys[5:]) == 4
    assert asked == ["_reserve", "_save"]
