from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from kvferry.core.arena import Arena
from kvferry.core.buffers import PAGE_NBYTES
from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    AuthError,
    ConnectionClosedError,
    KVFerryError,
    ProtocolError,
    StoreError,
)
from kvferry.core.segments import Slot
from kvferry.testing.transports_common import open_descriptors
from kvferry.wire import (
    SHARED_ARENA,
    ArenaOffer,
    Channel,
    ChannelOptions,
    SharedArena,
    can_share_arena,
    shared_arena,
)
from kvferry.wire.messages import ArenaSegments, AttachArena, Ping, Pong, SharedSegment

SEGMENT = 64 << 10
KNOWING = ChannelOptions(role="x", session="s", capabilities=(SHARED_ARENA,))


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(64 * SEGMENT, tenant="t", segment_nbytes=SEGMENT)
    yield arena
    arena.close()


def grow(arena: Arena, segments: int) -> list[Slot]:
    """Slots in as many new segments."""
    slots: list[Slot] = []
    until = arena.segment_count + segments
    while arena.segment_count < until or not slots:
        slot = arena.allocate(PAGE_NBYTES)
        assert slot is not None
        slots.append(slot)
    return slots


def serve(channel: Channel, arena: Arena, *, may_write: bool = True) -> None:
    """Answer requests for segments until the client leaves."""
    offer = ArenaOffer(channel, arena, may_write=may_write)
    while True:
        try:
            incoming = channel.receive(deadline_in(20))
            if isinstance(incoming.message, Ping):
                channel.reply(incoming, Pong(), deadline=deadline_in(20))
                continue
            offer.answer(incoming, deadline_in(20))
        except ConnectionClosedError:
            return
        except (AuthError, StoreError) as error:
            channel.send_failure(error, deadline=deadline_in(20))


@pytest.fixture
def served(pair: Any, spawn: Any, arena: Arena) -> Iterator[Callable[..., Channel]]:
    """Makes a client's channel whose server offers an arena."""
    made: list[tuple[Channel, Future[None]]] = []

    def make(which: Arena | None = None, **options: Any) -> Channel:
        client, server = pair("unix", client=KNOWING, server=KNOWING)
        made.append((client, spawn(lambda: serve(server, which or arena, **options))))
        return client  # type: ignore[no-any-return]

    yield make
    for client, done in made:
        client.abort()
        done.result(20)


def fill(view: memoryview, seed: int) -> None:
    view[:] = np.random.default_rng(seed).integers(0, 256, len(view), np.uint8).data


def test_both_sides_see_the_same_memory(served: Callable[..., Channel], arena: Arena) -> None:
    slots = grow(arena, 2)
    shared = SharedArena()
    channel = served()
    assert can_share_arena(channel)
    shared.attach(channel, deadline_in(20))
    assert shared.epoch == arena.epoch
    assert shared.writable
    for seed, slot in enumerate(slots):
        fill(arena.view(slot), seed)  # mapped before it was filled
        assert shared.view(slot) == arena.view(slot)
        shared.view(slot)[:4] = b"mine"
        assert bytes(arena.view(slot)[:4]) == b"mine"
    assert shared.map.is_current(slots[0])
    arena.free(slots[0])
    assert not shared.map.is_current(slots[0])


def test_what_grew_since_is_fetched_once(served: Callable[..., Channel], arena: Arena) -> None:
    channel, shared = served(), SharedArena()
    assert shared.attach(channel, deadline_in(20)).segments == 0  # an arena takes memory when it is needed
    first = grow(arena, 1)[0]
    shared.attach(channel, deadline_in(20))
    kept = shared.view(first)
    late = grow(arena, 2)[-1]
    with pytest.raises(StoreError, match="not mapped"):
        shared.view(late)
    known = shared.map
    assert shared.attach(channel, deadline_in(20)) is known
    assert shared.map.segments == arena.segment_count == 3
    fill(arena.view(late), 1)
    assert shared.view(late) == arena.view(late)
    assert kept == arena.view(first)


def test_many_segments_take_several_frames(
    served: Callable[..., Channel], arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_arena, "_SEGMENTS_A_FRAME", 3)
    grow(arena, 8)
    shared, channel = SharedArena(), served()
    before = open_descriptors()
    assert shared.attach(channel, deadline_in(20)).segments == arena.segment_count == 8
    # a mapping keeps one of its own, and there is one of the owner's process
    assert open_descriptors() <= before + 2 * 8 + 1


def test_announcements_come_by_themselves(pair: Any, spawn: Any, arena: Arena) -> None:
    client, server = pair("unix", client=KNOWING, server=KNOWING)
    offer, shared = ArenaOffer(server, arena, may_write=True), SharedArena()
    assert offer.announce(deadline_in(20)) == 0
    slots = grow(arena, 2)
    assert offer.announce(deadline_in(20)) == 2
    assert offer.announce(deadline_in(20)) == 0
    shared.take(client, client.receive(deadline_in(20)), deadline_in(20))
    slots += grow(arena, 1)
    assert offer.announce(deadline_in(20)) == 1
    shared.take(client, client.receive(deadline_in(20)), deadline_in(20))
    for slot in slots:
        assert shared.view(slot) == arena.view(slot)
    asked = spawn(lambda: offer.answer(server.receive(deadline_in(20)), deadline_in(20)))
    shared.attach(client, deadline_in(20))  # what it knows is not sent again
    asked.result(20)
    server.send(Ping(), deadline=deadline_in(20))
    ping = client.receive(deadline_in(20))
    with pytest.raises(ProtocolError, match="brings no segments"):
        shared.take(client, ping, deadline_in(20))


def test_a_restarted_owner_replaces_the_map(served: Callable[..., Channel], arena: Arena) -> None:
    slot = grow(arena, 1)[0]
    shared = SharedArena()
    old = shared.attach(served(), deadline_in(20))
    view = shared.view(slot)
    fill(arena.view(slot), 3)
    again = Arena(8 * SEGMENT, tenant="t", segment_nbytes=SEGMENT)
    other = grow(again, 1)[0]
    fill(again.view(other), 4)
    new = shared.attach(served(again), deadline_in(20))
    assert new is not old
    assert shared.epoch == again.epoch
    assert shared.view(other) == again.view(other)
    assert view == old.view(slot) == arena.view(slot), "a lease goes on with the map that it began with"
    again.close()


def test_copy_mode_is_mapped_read_only(served: Callable[..., Channel]) -> None:
    arena = Arena(8 * SEGMENT, segment_nbytes=SEGMENT, shared=False)
    slot = grow(arena, 1)[0]
    shared = SharedArena()
    shared.attach(served(arena, may_write=False), deadline_in(20))
    assert not shared.writable
    assert shared.view(slot).readonly
    fill(arena.view(slot), 1)
    assert shared.view(slot) == arena.view(slot)
    arena.close()


def test_who_may_only_read_does_not_get_writable_memory(served: Callable[..., Channel], arena: Arena) -> None:
    grow(arena, 1)
    channel, shared = served(may_write=False), SharedArena()
    with pytest.raises(AuthError, match="message path"):
        shared.attach(channel, deadline_in(20))
    with pytest.raises(StoreError, match="attach first"):
        _ = shared.map


def test_only_between_processes_of_one_machine(pair: Any, arena: Arena) -> None:
    client, server = pair("tcp", client=KNOWING, server=KNOWING)
    grow(arena, 1)
    assert not can_share_arena(client)
    with pytest.raises(ProtocolError, match="unix://"):
        ArenaOffer(server, arena, may_write=True).announce(deadline_in(20))
    server.send(Ping(), deadline=deadline_in(20))  # nothing was sent, the channel is good
    assert isinstance(client.receive(deadline_in(20)).message, Ping)


def test_a_peer_without_the_capability_is_not_asked(pair: Any) -> None:
    client, server = pair("unix", client=KNOWING)
    assert not can_share_arena(client)
    assert can_share_arena(server)


def test_more_than_the_client_will_map(served: Callable[..., Channel], arena: Arena) -> None:
    grow(arena, 2)
    shared = SharedArena(max_nbytes=arena.mapped_nbytes - 1)
    before = open_descriptors()
    with pytest.raises(StoreError, match="max_nbytes"):
        shared.attach(served(), deadline_in(20))
    assert open_descriptors() <= before + 2


@pytest.mark.parametrize("mode", ["shared", "copy"])
def test_what_the_owner_does_not_use_any_more_is_let_go_of_and_does_not_count(
    served: Callable[..., Channel], mode: str
) -> None:
    arena = Arena(4 * SEGMENT, tenant="t", segment_nbytes=SEGMENT, shared=mode == "shared")
    channel, shared = served(arena), SharedArena(max_nbytes=4 * SEGMENT)
    held = arena.allocate(PAGE_NBYTES)
    assert held is not None
    for turn in range(30):
        slots = arena.allocate_many(4 * SEGMENT // PAGE_NBYTES - 1, PAGE_NBYTES)
        assert slots is not None
        shared.attach(channel, deadline_in(20))
        assert shared.map.segments == arena.segment_count
        for slot in (slots[0], slots[-1], held):
            assert shared.view(slot) == arena.view(slot)
        for slot in slots:
            arena.free(slot)
        arena.resize(SEGMENT)
        assert not shared.forget_gone()  # as a client does now and then
        assert shared.map.mapped_nbytes == SEGMENT
        arena.resize(4 * SEGMENT)
        if turn % 7 == 6:  # what is held lies in different segments
            moved = arena.allocate(PAGE_NBYTES)
            assert moved is not None
            arena.free(held)
            held = moved
    late = SharedArena(max_nbytes=4 * SEGMENT)
    late.attach(served(arena), deadline_in(20))
    assert late.map.segments == arena.segment_count > 4
    assert late.view(held) == arena.view(held)
    arena.close()
    assert not shared.forget_gone()
    assert shared.map.mapped_nbytes == 0


def test_a_closed_arena_or_map_says_so(served: Callable[..., Channel], arena: Arena) -> None:
    grow(arena, 1)
    channel, shared = served(), SharedArena()
    arena.close()
    with pytest.raises(StoreError, match="closed"):
        shared.attach(channel, deadline_in(20))
    shared.close()
    shared.close()


def _memfd(nbytes: int, *, seal: bool) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seal:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


@pytest.mark.parametrize(
    ("offered", "real", "seal", "fds"),
    [
        (SEGMENT, SEGMENT, False, 2),  # could be cut short under our hands
        (SEGMENT, SEGMENT // 2, True, 2),  # reading its end would kill us
        (SEGMENT, SEGMENT, True, 1),
        (SEGMENT, SEGMENT, True, 3),
        (1, SEGMENT, True, 2),
    ],
)
def test_a_malicious_owner(
    pair: Any,
    spawn: Any,
    offered: int,
    real: int,
    seal: bool,
    fds: int,
) -> None:
    client, server = pair("unix", client=KNOWING, server=KNOWING)
    files = [_memfd(real, seal=seal) for _ in range(fds)]
    before = open_descriptors()

    def lie() -> None:
        request = server.receive(deadline_in(20))
        segment = SharedSegment(segment=0, nbytes=offered)
        answer = ArenaSegments(tenant="t", epoch="e", first=0, total=1, segments=(segment,), writable=True)
        server.send(answer, deadline=deadline_in(20), request_id=request.request_id, descriptors=files)
        with contextlib.suppress(ConnectionClosedError):
            server.send(Ping(), deadline=deadline_in(20))

    lying = spawn(lie)
    shared = SharedArena()
    with pytest.raises(ProtocolError):  # noqa: PT012 - one file too many is found by the next frame
        shared.attach(client, deadline_in(20))
        client.receive(deadline_in(20))
    lying.result(20)
    client.abort()
    assert open_descriptors() <= before
    for fd in files:
        os.close(fd)


@pytest.mark.parametrize(
    "answer",
    [
        ArenaSegments(tenant="t", epoch="e", first=1, total=2),
        ArenaSegments(tenant="t", epoch="e", first=0, total=1),  # and never names it
    ],
)
def test_an_owner_that_makes_no_sense(pair: Any, spawn: Any, answer: ArenaSegments) -> None:
    client, server = pair("unix", client=KNOWING, server=KNOWING)

    def reply() -> None:
        request = server.receive(deadline_in(20))
        assert isinstance(request.message, AttachArena)
        server.reply(request, answer, deadline=deadline_in(20))

    spawn(reply)
    with pytest.raises(ProtocolError):
        SharedArena().attach(client, deadline_in(20))


_CHILD = """
import sys, threading
from kvferry.core.arena import Arena
from kvferry.core.buffers import PAGE_NBYTES
from kvferry.core.clock import deadline_in
from kvferry.wire import SHARED_ARENA, ArenaOffer, ChannelOptions, ChannelServer
arena = Arena(1 << 20, tenant="t", segment_nbytes=1 << 16)
slot = arena.allocate(60000)
arena.view(slot)[:5] = b"child"
def serve(channel):
    offer = ArenaOffer(channel, arena, may_write=True)
    while True:
        offer.answer(channel.receive(deadline_in(60)), deadline_in(20))
options = ChannelOptions(role="owner", session="o", capabilities=(SHARED_ARENA,))
server = ChannelServer(sys.argv[1], options, serve, name="owner")
print(slot.segment, slot.offset, slot.nbytes, slot.generation, flush=True)
sys.stdin.read()
server.close()
"""


def test_memory_of_a_killed_owner_stays_and_a_new_one_is_found(tmp_path_factory: Any) -> None:
    url = f"unix://{tmp_path_factory.mktemp('kvf')}/s"
    shared = SharedArena()
    epochs: list[str] = []
    views: list[memoryview] = []
    for _ in range(2):  # the second one replaces the socket file of the first
        with subprocess.Popen(
            [sys.executable, "-c", _CHILD, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as owner:
            assert owner.stdout is not None
            slot = Slot(*map(int, owner.stdout.readline().split()))
            channel = Channel.connect(url, KNOWING, deadline_in(20))
            assert channel.peer_pid == owner.pid
            shared.attach(channel, deadline_in(20))
            epochs.append(shared.epoch)
            views.append(shared.view(slot))
            assert not shared.forget_gone()
            owner.send_signal(signal.SIGKILL)
        with pytest.raises(KVFerryError):
            shared.attach(channel, deadline_in(20))
        assert [bytes(view[:5]) for view in views] == [b"child"] * len(views)
        if len(epochs) == 1:  # the second owner is found whether or not the first one was forgotten
            continue
        assert shared.forget_gone()
        assert not shared.forget_gone()
        assert shared.epoch == ""
        with pytest.raises(StoreError, match="attach first"):
            _ = shared.map
    assert epochs[0] != epochs[1]


def test_threads_attach_at_once(served: Callable[..., Channel], arena: Arena) -> None:
    slots = grow(arena, 3)
    shared = SharedArena()
    channels = [served() for _ in range(3)]
    threads = [threading.Thread(target=shared.attach, args=(c, deadline_in(20))) for c in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert shared.map.segments == 3
    assert all(shared.view(slot) == arena.view(slot) for slot in slots)
