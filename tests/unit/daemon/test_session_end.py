"""What a session held is free when it ends: by then and there, not when the garbage collector comes."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kvferry.client import Client
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError, StoreError
from kvferry.core.sessions import Session
from kvferry.daemon.sessions import EngineSession, Sessions
from kvferry.store.tiered import TieredStore
from kvferry.testing.blocks import save_blocks, small_spec, wait_until
from kvferry.wire.channel import Channel

from .conftest import Running


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()  # stores of earlier tests hold descriptors
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def descriptors() -> Counter[str]:
    """By kind; without files and segments, which a store has as many of as it has use for."""
    found: Counter[str] = Counter()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            name = str(path.readlink())
            found[name.partition(":")[0]] += not name.startswith("/")
    return found


def watching() -> int:
    """How many descriptors there are of processes; nothing else of this process opens such."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += "pidfd" in str(path.readlink())
    return found


def work(url: str) -> None:
    """What an engine does, in a session of its own: saves, finds it stored, reads, and leaves a lease."""
    with Client(url) as client:
        namespace = client.namespace(small_spec())
        keys = namespace.keys([1] * 4 * namespace.spec.block_tokens)
        save_blocks(namespace, keys)
        assert len(namespace.reserve(keys, parent=None, deadline=deadline_in(20))) == 0
        with namespace.load(keys, deadline=deadline_in(20)) as lease:
            assert len(lease) == 4
        namespace.load(keys, deadline=deadline_in(20))
        client.poll()


def test_nothing_of_it_stays(running: Running) -> None:
    running.client.stats()
    work(running.daemon.addresses[0])  # once before, for what is made once
    wait_until(lambda: len(running.daemon.sessions.active) == 1, 20)
    before, own = descriptors(), running.daemon.sessions.active[0]
    seen: list[weakref.ref[EngineSession | Session]] = []
    joined = running.daemon.sessions.join

    def join(channel: Channel, tenant: str, store: TieredStore) -> EngineSession:
        session = joined(channel, tenant, store)
        if session is not own:
            seen.extend((weakref.ref(session), weakref.ref(session.core)))
        return session

    running.daemon.sessions.join = join  # type: ignore[method-assign]
    threads = threading.active_count()
    for _ in range(3):
        work(running.daemon.addresses[0])
    wait_until(lambda: len(seen) >= 6 and not any(ref() for ref in seen), 20)
    wait_until(lambda: threading.active_count() <= threads, 20)
    wait_until(lambda: descriptors() <= before, 20)
    assert running.daemon.sessions.left_behind == 0
    assert running.client.stats().leases == 0


def test_its_descriptor_is_closed_even_if_somebody_still_refers_to_it(child: subprocess.Popen[bytes]) -> None:
    store, sessions = TieredStore(1 << 20), Sessions()
    channel = channel_of(child.pid)
    before = watching()
    session = sessions.join(channel, "default", store)
    assert watching() == before + 1
    sessions.leave(session)
    assert watching() == before
    assert session.core.writers_gone
    with pytest.raises(StoreError, match="closed; open another"):
        session.core.watch(child.pid)
    assert watching() == before
    store.close()


def test_another_name_gives_no_write_quota_anew(child: subprocess.Popen[bytes]) -> None:
    """What a process left in quarantine counts until it is ended, whatever it calls itself next."""
    spec = small_spec()
    store, sessions = TieredStore(1 << 20, write_quota_nbytes=3 * spec.block_nbytes), Sessions()
    keys = store.namespace(spec).keys([1] * 4 * spec.block_tokens)

    def joined(name: str, pid: int = child.pid, tenant: str = "default") -> EngineSession:
        return sessions.join(channel_of(pid, name), tenant, store)

    def may_fill(session: EngineSession, count: int) -> bool:
        try:
            namespace = session.store.namespace(spec)
            namespace.reserve(keys[:count], parent=None, deadline=deadline_in(0)).abort()
        except CapacityError:
            return False
        return True

    first = joined("one")
    lease = first.store.namespace(spec).reserve(keys[:2], parent=None, deadline=deadline_in(20))
    first.add(7, lease)
    sessions.leave(first)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        for session in (again := joined("one"), other := joined("two")):
            assert not may_fill(session, 2)
            assert may_fill(session, 1)
        assert may_fill(joined("three", stranger.pid), 3)
        assert may_fill(joined("two", tenant="another"), 3)
        assert again.end([7]) == 1
        assert may_fill(other, 3)
        sessions.sweep()
        assert other.core.earlier == ()
        stranger.kill()
    store.close()


@pytest.mark.parametrize("how", ["aborted", "killed", "closed"])
def test_left_behind_it_is_watched_until_nobody_can_write(child: subprocess.Popen[bytes], how: str) -> None:
    store, sessions = TieredStore(1 << 20), Sessions()
    session = sessions.join(channel_of(child.pid), "default", store)
    namespace = session.store.namespace(small_spec())
    lease = namespace.reserve(namespace.keys([1] * 4), parent=None, deadline=deadline_in(20))
    session.add(7, lease)
    at_work = watching()
    sessions.leave(session)
    sessions.sweep()
    assert sessions.left_behind == 1
    assert watching() == at_work
    assert store.stats().quarantined_nbytes > 0
    if how == "aborted":
        assert session.end([7]) == 1
    elif how == "killed":
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        store.poll()
    else:
        sessions.end_all()
    sessions.sweep()
    assert sessions.left_behind == 0
    assert watching() == at_work - 1
    if how != "closed":
        assert store.stats().quarantined_nbytes == 0
    store.close()


def channel_of(pid: int, name: str = "engine") -> Channel:
    """As much of a channel as a session looks at."""
    return cast("Channel", SimpleNamespace(peer_pid=pid, peer=SimpleNamespace(session=name)))


def test_a_load_that_needs_the_room_of_a_lease_that_it_ends_gets_it(running: Running) -> None:
    spec = small_spec(pages=64)
    namespace, blocks = running.client.namespace(spec), (4 << 20) // spec.block_nbytes
    first, second = (namespace.keys([n] * blocks * spec.block_tokens) for n in (1, 2))
    for keys in (first, second):  # either fills the memory
        save_blocks(namespace, keys)
        assert running.client.flush(deadline=deadline_in(20))
    for keys in (second, first, second):
        lease = namespace.load(keys, deadline=deadline_in(20))
        assert len(lease) == blocks
        lease.release()  # which the daemon hears with the next load
    namespace.load(second, deadline=deadline_in(20)).release()
    with namespace.load(second, deadline=deadline_in(20)):
        assert running.client.stats().leases == 1
