"""What costs nothing on one machine: loads copy no byte, saves each byte once, an idle poll asks nobody."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvferry.client import Client, leases
from kvferry.core import raw_copy
from kvferry.core.clock import deadline_in
from kvferry.daemon import Daemon
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec

SPEC = small_spec("no-copies")
Start = Callable[..., Daemon]


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_a_load_is_views_of_the_daemons_own_memory(start: Start) -> None:
    """What stands in the arena of the daemon is seen through views taken before: they are no copies."""
    daemon = start()
    with Client(daemon.addresses[0]) as client:
        ns = client.namespace(SPEC)
        keys = ns.keys([1] * 3 * SPEC.block_tokens)
        save_blocks(ns, keys)
        theirs = daemon.store_of("default").namespace(SPEC)
        with (
            ns.load(keys, deadline=deadline_in(20)) as one,
            ns.load(keys, deadline=deadline_in(20)) as two,
            theirs.load(keys, deadline=deadline_in(20)) as inside,
        ):
            assert [address(one.view(n)) for n in range(3)] == [address(two.view(n)) for n in range(3)]
            slot, kept = inside.view(1), bytes(inside.view(1))  # read-only too: written by its address
            there = np.ctypeslib.as_array((ctypes.c_uint8 * 16).from_address(address(slot)))
            there[:] ^= 0xFF
            assert bytes(one.view(1)[:16]) == bytes(byte ^ 0xFF for byte in kept[:16])
            there[:] ^= 0xFF


def test_a_save_copies_each_byte_once_and_sends_none(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = start()
    copied: list[int] = []
    copy = raw_copy.copy_blocks

    def counted(addresses: Any, sources: Sequence[memoryview], nbytes: int) -> None:
        copied.append(len(sources) * nbytes)
        copy(addresses, sources, nbytes)

    monkeypatch.setattr(leases, "copy_blocks", counted)
    payloads: list[int] = []
    with Client(daemon.addresses[0]) as client:
        ns = client.namespace(SPEC)
        ns.lookup([])
        (line,) = client.link._idle
        send = line.channel.send

        def sent(message: Any, payload: Sequence[memoryview] = (), **kwargs: Any) -> Any:
            payloads.append(sum(map(len, payload)))
            return send(message, payload, **kwargs)

        monkeypatch.setattr(line.channel, "send", sent)
        keys = ns.keys([1] * 3 * SPEC.block_tokens)
        blocks = [(key, block_bytes(key, SPEC.block_nbytes)) for key in keys]
        assert ns.save(blocks, parent=None, deadline=deadline_in(20)) == 3
        assert sum(copied) == 3 * SPEC.block_nbytes
        assert sum(payloads) == 0
        assert ns.save(blocks, parent=None, deadline=deadline_in(20)) == 0
        assert sum(copied) == 3 * SPEC.block_nbytes, "what is stored is not copied again"


def test_an_idle_poll_asks_nobody_and_takes_no_lock(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = start()

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"poll has asked: {args} {kwargs}")

    with Client(daemon.addresses[0]) as client, monkeypatch.context() as patch:
        patch.setattr(client.link, "line", never)
        patch.setattr(client.mover, "cond", None)
        patch.setattr(client.link, "_lock", None)
        for _ in range(1000):
            assert client.poll() == []
