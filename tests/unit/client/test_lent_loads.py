"""Loads over a connection: the daemon lends their blocks to the kernel, and copies none of them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvferry.client import Client
from kvferry.core.clock import deadline_in
from kvferry.core.native import native
from kvferry.daemon import Daemon
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec

SPEC = small_spec("lent-loads", pages=64)  # as much as is lent
Start = Callable[..., Daemon]


@pytest.fixture
def daemon(start: Start) -> Daemon:
    return start("daemon.socket=none", "daemon.listen=tcp://127.0.0.1:0", "store.dram_capacity=8MiB")


def test_neighbours_are_sent_in_one_piece(daemon: Daemon) -> None:
    with Client(daemon.addresses[0]) as client:
        ns = client.namespace(SPEC)
        keys = ns.keys([1] * 5 * SPEC.block_tokens)
        save_blocks(ns, keys)
        inside = daemon.store_of("default").namespace(SPEC)
        with inside.load(keys, deadline=deadline_in(20)) as lease:
            assert [len(view) for view in lease.views()] == [5 * SPEC.block_nbytes]
            assert b"".join(lease.views()) == b"".join(lease.view(n) for n in range(5))
        with ns.load(keys, deadline=deadline_in(20)) as lease:
            for n, key in enumerate(keys):
                assert lease.view(n) == block_bytes(key, SPEC.block_nbytes)


@pytest.mark.skipif(native().library is None, reason="without it they are copied")
@pytest.mark.parametrize("is_over", [False, True])
def test_slots_that_are_used_again_on_the_way_give_no_wrong_byte(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_over: bool
) -> None:
    """Which can only be so once the lease is over, and is a miss then."""
    sent = threading.Event()
    done = daemon.operations.done

    def noted(verb: str, *args: Any, **kwargs: Any) -> None:
        done(verb, *args, **kwargs)
        if verb == "load":
            sent.set()

    monkeypatch.setattr(daemon.operations, "done", noted)
    with Client(daemon.addresses[0]) as client:
        ns = client.namespace(SPEC)
        keys = ns.keys([1] * SPEC.block_tokens)
        save_blocks(ns, keys)
        inside = daemon.store_of("default").namespace(SPEC)
        with inside.load(keys, deadline=deadline_in(20)) as held:
            slot = int(np.frombuffer(held.view(0), np.uint8).ctypes.data)
            leased = ns._leased

            def on_the_way(*args: Any) -> Any:
                lease = leased(*args)
                assert sent.wait(20)
                np.ctypeslib.as_array((ctypes.c_uint8 * 16).from_address(slot))[:] ^= 0xFF
                if is_over:
                    lease.expires_at = 0.0
                return lease

            monkeypatch.setattr(ns, "_leased", on_the_way)
            if is_over:
                assert len(ns.load(keys, deadline=deadline_in(20))) == 0
                assert client.counters.missed_loads == 1
            else:
                assert len(ns.load(keys, deadline=deadline_in(20))) == 0
                assert client.counters.corrupt_loads == 1
                assert "a load is a miss" in caplog.text
                assert "xxh3_64" in caplog.text
