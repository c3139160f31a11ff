from __future__ import annotations

import gc
import json
import mmap
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import Client, ClientOptions, ClientWriteLease
from kvferry.client.client import _with_port
from kvferry.client.line import Line
from kvferry.client.link import Link
from kvferry.core import cause
from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    CapacityError,
    ConfigError,
    LeaseExpiredError,
    SpecMismatchError,
    UnavailableError,
)
from kvferry.core.spec import KeyScope
from kvferry.daemon import Daemon
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, wait_until
from kvferry.wire import daemon_messages as d

SPEC = small_spec("client")
BLOCKS = (1 << 20) // SPEC.block_nbytes
Start = Callable[..., Daemon]


def stats(daemon: Daemon) -> Any:
    return daemon.store_of("default").stats()


def test_options_of_another_kind_are_refused() -> None:
    options: Any = None
    with pytest.raises(ConfigError, match="options is None, must be ClientOptions"):
        Client("unix:///nowhere", options)


def test_two_clients_share_blocks_and_nothing_else(start: Start) -> None:
    daemon = start()
    with Client(daemon.addresses[0]) as one, Client(daemon.addresses[0]) as other:
        keys = one.namespace(SPEC).keys([1] * 3 * SPEC.block_tokens)
        save_blocks(one.namespace(SPEC), keys)
        lease = other.namespace(SPEC).load(keys, deadline=deadline_in(20))
        assert len(lease) == 3
        assert one.find_lease(lease.lease_id) is None
        one.close()
        lease.check()
        wait_until(lambda: len(daemon.sessions.active) == 1)
        status: Any = json.loads(json.dumps(daemon.status()))
        assert status["sessions"] == [
            {"session": other.session, "tenant": "default", "connections": 1, "leases": 1}
        ]
        assert status["tenants"]["default"]["entries"] == 3
        assert stats(daemon).leases == 1
    wait_until(lambda: stats(daemon).leases == 0)
    wait_until(lambda: not daemon.sessions.active)


@pytest.mark.parametrize("share_memory", [True, False])
def test_a_lease_is_found_by_another_process_of_its_session(start: Start, share_memory: bool) -> None:
    daemon = start()
    options = ClientOptions(share_memory=share_memory)
    scheduler = Client(daemon.addresses[0], options)
    worker = Client(daemon.addresses[0], options, session=scheduler.session)
    with scheduler, worker:
        ns = scheduler.namespace(SPEC)
        keys = ns.keys([1] * 2 * SPEC.block_tokens)
        write = ns.reserve(keys, parent=None, deadline=deadline_in(20))
        same = worker.find_lease(write.lease_id)
        assert isinstance(same, ClientWriteLease)
        assert same.keys == tuple(keys)
        for index, key in enumerate(keys):
            same.view(index)[:] = block_bytes(key, SPEC.block_nbytes)
        assert same.commit() == 2
        with pytest.raises(LeaseExpiredError):
            write.commit()
        read = ns.load(keys, deadline=deadline_in(20))
        found = worker.find_lease(read.lease_id)
        assert found is not None
        assert found.view(1) == block_bytes(keys[1], SPEC.block_nbytes)
        assert found.layer(1, 1) == block_bytes(keys[1], SPEC.block_nbytes)[SPEC.layer_slice(1)]
        del found
        gc.collect()
        assert scheduler.stats().leases == 1, "it was taken by the other process"
        read.release()
        assert worker.find_lease(read.lease_id) is None or scheduler.stats().leases == 0


@pytest.mark.parametrize("share_memory", [True, False])
def test_the_daemon_hears_which_blocks_a_lossy_codec_brought(
    start: Start, tmp_path: Path, share_memory: bool
) -> None:
    daemon = start(f"store.tiers=disk:{tmp_path}/kv?capacity=4MiB&direct=off")
    with Client(daemon.addresses[0], ClientOptions(share_memory=share_memory)) as client:
        namespace = client.namespace(SPEC)
        keys = namespace.keys([1] * 3 * SPEC.block_tokens)
        with namespace.reserve(keys, parent=None, deadline=deadline_in(20)) as lease:
            lease.mark_lossy([2])
            with pytest.raises(IndexError, match="no block 3"):
                lease.mark_lossy([3])
            stored, held = lease.publish()
            assert stored == 3
            held.release()
        assert client.flush(deadline=deadline_in(20))
        assert stats(daemon).per_tier["disk"]["entries"] == 2


def test_a_release_is_told_without_a_further_call(start: Start) -> None:
    daemon = start()
    with Client(daemon.addresses[0]) as client:
        ns = client.namespace(SPEC)
        keys = ns.keys([1] * SPEC.block_tokens)
        save_blocks(ns, keys)
        ns.load(keys, deadline=deadline_in(20)).release()
        wait_until(lambda: stats(daemon).leases == 0, 5)
        ns.load(keys, deadline=deadline_in(20))  # dropped: the end of the object is the end of the lease
        gc.collect()
        wait_until(lambda: stats(daemon).leases == 0, 5)


def test_a_reservation_whose_answer_nobody_waits_for_is_not_kept(start: Start) -> None:
    """The daemon is asked, and answers when the client has gone on."""
    daemon = start()
    with Client(daemon.addresses[0]) as client:
        ns = client.namespace(SPEC)
        held = ns.reserve(ns.keys([1] * BLOCKS * SPEC.block_tokens), parent=None, deadline=deadline_in(20))
        number = client.link.new_number()
        with suppress(UnavailableError), client.link.line(deadline_in(20)) as line:
            request = d.ReserveBlocks(
                namespace=line.opened[ns.namespace_id, False].namespace,
                keys=b"k" * 32,
                lease=number,
                timeout_s=20,
            )
            line.channel.send(request, deadline=deadline_in(20))
            wait_until(lambda: daemon.work.total >= 3)
            raise UnavailableError("as after a deadline")
        client.link.abandon(number)
        wait_until(lambda: not client.link.has_ends)
        held.abort()
        wait_until(lambda: (stats(daemon).pinned_nbytes, stats(daemon).quarantined_nbytes) == (0, 0))


def test_a_daemon_that_understands_the_spec_otherwise_refuses_it(start: Start) -> None:
    daemon = start()
    with Client(daemon.addresses[0]) as client:
        ns = client.namespace(SPEC)
        ns.namespace_id = bytes(32)
        with pytest.raises(SpecMismatchError, match="client"):
            ns.lookup([])
        assert client.namespace(SPEC, KeyScope(salt=b"x")).lookup([]).prefix == 0, "the connection goes on"
        assert client.counters.connects == 1


def test_no_daemon_is_no_error_and_no_wait(tmp_path: Path) -> None:
    with Client(f"unix://{tmp_path}/none.sock") as client:
        assert client.away
        ns = client.namespace(SPEC)
        keys = ns.keys([1] * SPEC.block_tokens)
        started = time.monotonic()
        assert ns.lookup(keys).prefix == 0
        assert len(ns.load(keys, deadline=deadline_in(60))) == 0
        assert ns.pin(keys, ttl=1) == 0
        assert not client.flush(deadline=deadline_in(60))
        assert client.stats().entries == 0
        for call in (partial(save_blocks, ns, keys), ns.clear, partial(ns.remove, keys)):
            with pytest.raises(CapacityError):
                call()
        assert time.monotonic() - started < 5
        assert (client.counters.refused_saves, client.counters.missed_loads) == (1, 1)
    with pytest.raises(ConfigError):
        Client("tcp://host:99999")


def test_one_at_a_time_tries_to_connect(tmp_path: Path) -> None:
    """Many callers of a daemon that has gone: few attempts, and nobody waits."""
    client = Client(f"unix://{tmp_path}/none.sock", ClientOptions(first_pause_s=5, last_pause_s=5))
    with client, ThreadPoolExecutor(8) as pool:
        ns = client.namespace(SPEC)
        started = time.monotonic()
        hits = list(pool.map(lambda _: ns.lookup(ns.keys([1] * SPEC.block_tokens)).prefix, range(64)))
        assert hits == [0] * 64
        assert time.monotonic() - started < 5
        assert client.link.connections == 0


def test_a_daemon_that_gives_no_further_connection_is_not_away(start: Start) -> None:
    """One connection has to do for all calls: they take turns."""
    daemon = start("wire.max_connections=1")
    with Client(daemon.addresses[0]) as client, ThreadPoolExecutor(4) as pool:
        ns = client.namespace(SPEC)
        keys = ns.keys([1] * SPEC.block_tokens)
        save_blocks(ns, keys)
        hits = list(pool.map(lambda _: ns.lookup(keys).prefix, range(200)))
        assert hits == [1] * 200
        assert not client.away
        assert client.link.connections == 1


def test_a_read_only_arena_cannot_be_mapped_writable(start: Start) -> None:
    """With ``daemon.arena=copy`` the kernel refuses what the client must not do."""
    daemon = start("daemon.arena=copy")
    with Client(daemon.addresses[0]) as client:
        ns = client.namespace(SPEC)
        keys = ns.keys([1] * SPEC.block_tokens)
        save_blocks(ns, keys)
        with ns.load(keys, deadline=deadline_in(20)) as lease:
            assert lease.view(0).readonly
            assert not client.link.arena.writable
        fd = daemon.store_of("default").arena.descriptors()[0][0]
        with pytest.raises(PermissionError):
            mmap.mmap(fd, mmap.PAGESIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)


LOST = """
import sys
from kvferry.client import Client
from kvferry.core.clock import deadline_in
from kvferry.testing.blocks import small_spec
client = Client(sys.argv[1])
ns = client.namespace(small_spec("client"))
lease = ns.reserve(ns.keys([7] * 3 * ns.spec.block_tokens), parent=None, deadline=deadline_in(20))
client.link.closed = True  # it does not connect again
for line in client.link._idle:
    line.channel.abort()
print("lost", flush=True)
sys.stdin.read()
"""


def test_slots_of_a_process_without_a_connection_stay_in_quarantine(start: Start) -> None:
    """It still has the memory mapped: only its end gives the slots back."""
    daemon = start()
    command = [sys.executable, "-c", LOST, daemon.addresses[0]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "lost\n"
        wait_until(lambda: daemon.sessions.left_behind == 1)
        assert (stats(daemon).quarantined_nbytes, stats(daemon).leases) == (3 * SPEC.block_nbytes, 0)
        child.kill()
        child.wait()
        wait_until(lambda: stats(daemon).quarantined_nbytes == 0)
        wait_until(lambda: daemon.sessions.left_behind == 0)


def test_a_later_connection_of_the_session_ends_what_was_left(start: Start) -> None:
    daemon = start()
    with Client(daemon.addresses[0]) as client:
        ns = client.namespace(SPEC)
        lease = ns.reserve(ns.keys([1] * SPEC.block_tokens), parent=None, deadline=deadline_in(20))
        for line in client.link._idle:
            line.channel.abort()
        wait_until(lambda: stats(daemon).quarantined_nbytes == SPEC.block_nbytes)
        lease.abort()
        wait_until(lambda: stats(daemon).quarantined_nbytes == 0)
        assert client.counters.reconnects == 1
        wait_until(lambda: daemon.sessions.left_behind == 0)


def test_close_ends_its_threads_and_leases(start: Start) -> None:
    daemon = start()
    before = {t.name for t in threading.enumerate()}
    client = Client(daemon.addresses[0])
    ns = client.namespace(SPEC)
    lease = ns.reserve(ns.keys([1] * SPEC.block_tokens), parent=None, deadline=deadline_in(20))
    client.close()
    client.close()
    with pytest.raises(LeaseExpiredError):
        lease.view(0)
    wait_until(lambda: (stats(daemon).quarantined_nbytes, stats(daemon).pinned_nbytes) == (0, 0))
    wait_until(lambda: {t.name for t in threading.enumerate()} <= before)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("tcp://127.0.0.1", "tcp://127.0.0.1:8450"),
        ("tcp://127.0.0.1:9", "tcp://127.0.0.1:9"),
        ("unix:///a/b", "unix:///a/b"),
    ],
)
def test_an_address_without_a_port_has_the_daemon_s(given: str, taken: str) -> None:
    assert _with_port(given) == taken


def test_another_reason_for_being_away_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cause, "_LEAST_S", 0.0)
    link = Link("tcp://127.0.0.1:9", ClientOptions(), label="peer tcp://127.0.0.1:9")
    for reason in ("connection refused", "connection refused", "the token is not valid"):
        with link._lock:
            link._leave(reason)
        link._tell()
        assert link._away_reason == reason
    link.close()
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [line.startswith("peer tcp://127.0.0.1:9: the daemon is ") for line in told] == [True, True]
    assert "still away, and the reason is another now: the token is not valid" in told[1]


def test_a_request_that_overtakes_the_ends_of_leases_carries_them(
    start: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's thread tells the daemon of ends too: what is asked meanwhile must not see the lease."""
    daemon = start()
    told, go_on = threading.Event(), threading.Event()
    call = Line.call

    def held_up(line: Line, message: Any, *args: Any) -> Any:
        if isinstance(message, d.EndLeases):
            told.set()
            assert go_on.wait(60)
        return call(line, message, *args)

    monkeypatch.setattr(Line, "call", held_up)
    with Client(daemon.addresses[0]) as client:
        ns = client.namespace(SPEC)
        lease = ns.reserve(ns.keys([1] * SPEC.block_tokens), parent=None, deadline=deadline_in(20))
        assert client.stats().leases == 1
        lease.abort()
        try:
            assert told.wait(60)
            assert client.stats().leases == 0
        finally:
            go_on.set()
