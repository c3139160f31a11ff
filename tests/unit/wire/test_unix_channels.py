"""Channels over ``unix``: who is refused, connections that come and go, and a process that forks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import AuthError, ConnectionClosedError
from kvferry.testing.transports_common import open_descriptors
from kvferry.transports import unix, unix_path
from kvferry.wire import Channel, ChannelOptions, ChannelServer
from kvferry.wire.messages import Ping, Pong

CLIENT = ChannelOptions(role="client", session="c")


def _answer(channel: Channel) -> None:
    while True:
        try:
            incoming = channel.receive(deadline_in(30))
        except ConnectionClosedError:
            return
        channel.reply(incoming, Pong(), deadline=deadline_in(20))


@pytest.fixture
def server() -> Iterator[ChannelServer]:
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        server = ChannelServer(f"unix://{folder}/s", ChannelOptions("server", "s"), _answer, name="test")
        yield server
        server.close()
        assert not list(Path(folder).iterdir())


def _ping(address: str) -> Channel:
    channel = Channel.connect(address, CLIENT, deadline_in(20))
    channel.call(Ping(), Pong, deadline=deadline_in(20))
    return channel


def test_a_stranger_is_told_so_during_the_handshake(
    server: ChannelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = unix_path.peer_credentials

    def as_the_server_sees_it(sock: socket.socket) -> tuple[int, int, int]:
        accepting = threading.current_thread().name.endswith("-accept")
        return (1, 4242, 4242) if accepting else real(sock)

    monkeypatch.setattr(unix, "peer_credentials", as_the_server_sees_it)
    with pytest.raises(AuthError, match="allow_uid=4242"):
        Channel.connect(server.address, CLIENT, deadline_in(20))
    monkeypatch.undo()
    _ping(server.address).close()


def test_the_peer_is_known_by_its_process(server: ChannelServer) -> None:
    channel = _ping(server.address)
    assert channel.peer_pid == os.getpid()
    channel.close()


@pytest.mark.parametrize("cycles", [150, pytest.param(2000, marks=pytest.mark.soak)])
def test_connections_that_come_and_go_leave_nothing(server: ChannelServer, until: Any, cycles: int) -> None:
    """C070, some cut in the middle of the handshake."""
    _ping(server.address).close()
    until(lambda: server.connections == 0)
    descriptors, threads = open_descriptors(), threading.active_count()
    for n in range(cycles):
        if n % 3:
            _ping(server.address).close()
        else:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(server.address.removeprefix("unix://"))
                sock.sendall(b"KVFY\x01\x00\x01"[: n % 8])
    until(lambda: server.connections == 0)
    until(lambda: threading.active_count() <= threads)
    until(lambda: open_descriptors() <= descriptors)
    _ping(server.address).close()


# The library is in use in every way that there is when the process forks.
_FORKING = """
import os, sys, time
from kvferry.core.arena import Arena
from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError
from kvferry.wire import SHARED_ARENA, ArenaOffer, SharedArena
from kvferry.wire import Channel, ChannelOptions, ChannelPool, ChannelServer
from kvferry.wire.messages import AttachArena, Ping, Pong

address = sys.argv[1]
options = ChannelOptions("x", "s", capabilities=(SHARED_ARENA,))
arena = Arena(1 << 20, segment_nbytes=1 << 16)
slot = arena.allocate(5000)
arena.view(slot)[:4] = b"kept"

def serve(channel):
    offer = ArenaOffer(channel, arena, may_write=True)
    while True:
        incoming = channel.receive(deadline_in(60))
        if isinstance(incoming.message, AttachArena):
            offer.answer(incoming, deadline_in(20))
        else:
            channel.reply(incoming, Pong(), deadline=deadline_in(20))

server = ChannelServer(address, options, serve, name="owner")
pool = ChannelPool(address, options)
mine = Channel.connect(address, options, deadline_in(20))
mine.call(Ping(), Pong, deadline=deadline_in(20))
with pool.channel(deadline_in(20)) as channel:
    shared = SharedArena()
    shared.attach(channel, deadline_in(20))

pid = os.fork()
if pid == 0:
    try:
        started = time.monotonic()
        try:
            mine.call(Ping(), Pong, deadline=deadline_in(60))
            print("child: the parent's channel worked", flush=True)
        except KVFerryError as error:
            print("child: fork" if "fork" in str(error) else f"child: {error}", flush=True)
        with pool.channel(deadline_in(20)) as channel:  # makes a new one, which the parent serves
            channel.call(Ping(), Pong, deadline=deadline_in(20))
            print("child: fresh", bytes(shared.view(slot)[:4]), channel.peer_pid == os.getppid(), flush=True)
        mine.close(), pool.close(), shared.close(), server._listener.close(), arena.close()
        print("child: in time", time.monotonic() - started < 40, flush=True)
    finally:
        os._exit(0)
_, status = os.waitpid(pid, 0)
mine.call(Ping(), Pong, deadline=deadline_in(20))
with pool.channel(deadline_in(20)) as channel:
    shared.attach(channel, deadline_in(20))
Channel.connect(address, options, deadline_in(20)).close()
print("parent: good", status, bytes(shared.view(slot)[:4]), flush=True)
server.close()
"""


def test_a_forked_child_gets_an_error_or_a_fresh_connection() -> None:
    """C122: no hang, the parent's streams stay whole, and the child's end unlinks nothing."""
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        done = subprocess.run(
            [sys.executable, "-c", _FORKING, f"unix://{folder}/s"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stdout.splitlines() == [
        "child: fork",
        "child: fresh b'kept' True",
        "child: in time True",
        "parent: good 0 b'kept'",
    ], done.stderr
