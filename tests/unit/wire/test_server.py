from __future__ import annotations

import contextlib
import logging
import pickle
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry import transports
from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    CapacityError,
    ConnectError,
    ConnectionClosedError,
    KVFerryError,
    OverloadedError,
    ProtocolError,
    TransportError,
)
from kvferry.testing.transports_common import resident_nbytes
from kvferry.transports import Connection, Listener
from kvferry.wire import Channel, ChannelOptions, ChannelServer
from kvferry.wire import messages as m
from kvferry.wire import server as server_module

OPTIONS = ChannelOptions(role="server", session="s", hello_timeout_s=2.0)
CLIENT = ChannelOptions(role="client", session="c")


def echo(channel: Channel) -> None:
    """Answers pings until the peer leaves; an abort message says what to raise."""
    while True:
        request = channel.receive(deadline_in(60))
        if isinstance(request.message, m.Ping):
            channel.reply(request, m.Pong(at=1.0), deadline=deadline_in(20))
        elif isinstance(request.message, m.AbortStream):
            if request.message.reason == "full":
                raise CapacityError("arena is full of secrets\nnot of air")
            if request.message.reason == "bug":
                raise ZeroDivisionError("where the secret is")
            return
        elif isinstance(request.message, m.PutLayer):
            raise CapacityError("no room for this layer")
        elif isinstance(request.message, m.Describe):
            raise ConnectionClosedError("the connection to another worker ended")


Serve = Callable[..., ChannelServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    made: list[ChannelServer] = []
    before = set(threading.enumerate())  # other tests of this process may have left some

    def make(handler: Callable[[Channel], None] = echo, **options: Any) -> ChannelServer:
        url = options.pop("url", "tcp://127.0.0.1:0")
        channel_options = options.pop("options", OPTIONS)
        made.append(ChannelServer(url, channel_options, handler, name="test", **options))
        return made[-1]

    yield make
    for server in made:
        server.close()
        server.close()
    assert not [t.name for t in threading.enumerate() if t not in before and t.name.startswith("kvferry-")]


def ping(address: str) -> Channel:
    channel = Channel.connect(address, CLIENT, deadline_in(20))
    assert channel.call(m.Ping(), m.Pong, deadline=deadline_in(20)) == m.Pong(at=1.0)
    return channel


def raw(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").partition(":")
    sock = socket.create_connection((host, int(port)), timeout=20)
    sock.settimeout(20)
    return sock


def ended(sock: socket.socket) -> bytes:
    """What the server still sent before it closed; fails if it does not close."""
    data = b""
    try:
        while piece := sock.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:0", "tcp://[::1]:0", "inproc://wire-server"])
def test_many_clients_are_served_at_once(serve: Serve, url: str, until: Any) -> None:
    server = serve(url=url)
    channels = [ping(server.address) for _ in range(5)]
    assert server.connections == 5
    names = [t.name for t in threading.enumerate() if t.name.startswith("kvferry-test-")]
    assert len(names) == 6
    for channel in channels:
        channel.close()
    until(lambda: server.connections + server.arriving == 0)
    ping(server.address).abort()


def test_a_handlers_error_reaches_the_client_and_one_log_line(
    serve: Serve, caplog: pytest.LogCaptureFixture, until: Any
) -> None:
    server = serve()
    channel = ping(server.address)
    with pytest.raises(CapacityError, match=f"{channel.address}: arena is full"):
        channel.call(m.AbortStream(reason="full"), m.Pong, deadline=deadline_in(20))
    channel.close()
    until(lambda: server.connections + server.arriving == 0)
    lines = [r.getMessage() for r in caplog.records if "capacity" in r.getMessage()]
    assert len(lines) == 1
    ping(server.address).close()


def test_a_bug_in_the_handler_shows_its_class_only(
    serve: Serve, caplog: pytest.LogCaptureFixture, until: Any
) -> None:
    server = serve()
    channel = ping(server.address)
    with pytest.raises(KVFerryError, match="internal error in test: ZeroDivisionError") as caught:
        channel.call(m.AbortStream(reason="bug"), m.Pong, deadline=deadline_in(20))
    assert "where the secret is" not in str(caught.value)
    channel.close()
    until(lambda: server.connections + server.arriving == 0)
    assert [r for r in caplog.records if r.exc_info and r.exc_info[0] is ZeroDivisionError]
    ping(server.address).close()


def test_a_failure_is_heard_behind_a_large_unread_payload(serve: Serve) -> None:
    server = serve()
    channel = ping(server.address)
    with pytest.raises(CapacityError, match="no room for this layer"):
        channel.call(
            m.PutLayer(layer=0, blocks=()), m.LayerAck, payload=[bytes(32 << 20)], deadline=deadline_in(20)
        )
    channel.close()


def test_the_end_of_another_connection_is_told_too(serve: Serve) -> None:
    channel = ping(serve().address)
    with pytest.raises(ConnectionClosedError, match="another worker"):
        channel.call(m.Describe(), m.Description, deadline=deadline_in(20))
    channel.close()


def test_a_handler_that_returns_closes(serve: Serve) -> None:
    channel = ping(serve().address)
    channel.send(m.AbortStream(reason="bye"), deadline=deadline_in(20))
    with pytest.raises(ConnectionClosedError):
        channel.receive(deadline_in(20))


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def garbage(kind: str, marker: Path) -> bytes:
    header = struct.Struct("<4sHHIQIQ").pack
    return {
        "http": b"GET / HTTP/1.1\r\n\r\n",
        "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        "pickle": pickle.dumps(Marker(marker)),
        "pickle in a hello": header(b"KVFY", 1, 1, 0, 0, len(pickle.dumps(Marker(marker))), 0)
        + pickle.dumps(Marker(marker)),
        "random": random.Random(3).randbytes(4096),
        "no hello": header(b"KVFY", 1, 4, 0, 0, 7, 0) + b"\x81\xa1t\xa4ping",
        "huge meta": header(b"KVFY", 1, 1, 0, 0, 2**32 - 1, 0),
        "huge payload": header(b"KVFY", 1, 1, 0, 0, 10, 2**64 - 1),
        "zeros": bytes(1000),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "http",
        "tls",
        "pickle",
        "pickle in a hello",
        "random",
        "no hello",
        "huge meta",
        "huge payload",
        "zeros",
    ],
)
def test_garbage_on_the_port_costs_one_line_and_its_own_connection(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, until: Any
) -> None:
    """C125 with a pickle; nothing is evaluated, nobody else notices."""
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(Marker(marker)))
    assert marker.exists(), "the pickle would work"
    marker.unlink()
    server = serve()
    good = ping(server.address)
    data = garbage(kind, marker)
    for _ in range(5):
        with raw(server.address) as sock:
            sock.sendall(data)
            assert ended(sock) == b""
    assert not marker.exists()
    assert good.call(m.Ping(), m.Pong, deadline=deadline_in(20)) == m.Pong(at=1.0)
    good.close()
    until(lambda: server.connections + server.arriving == 0)
    server.close()
    lines = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    assert len(lines) == 2, lines  # the first one, and the sum of the others
    assert "127.0.0.1" in lines[0]
    assert "(4 more in" in lines[1]


def test_silent_and_slow_strangers_are_cut_off_in_time(serve: Serve, until: Any) -> None:
    server = serve(options=ChannelOptions(role="server", session="s", hello_timeout_s=0.3))
    with raw(server.address) as silent, raw(server.address) as short, raw(server.address) as slow:
        short.sendall(b"KVF")
        header = struct.pack("<4sHHIQIQ", b"KVFY", 1, 1, 0, 0, 60_000, 0)
        with pytest.raises(OSError):  # noqa: PT012 - a byte every now and then does not buy time
            for byte in header + bytes(60_000):  # for longer than a test may last
                slow.sendall(bytes([byte]))
                time.sleep(0.01)
        assert ended(silent) == ended(short) == b""
    until(lambda: server.connections + server.arriving == 0)
    ping(server.address).close()


def test_silent_strangers_keep_nobody_out(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from a place, and where there is none not from hearing so; however many they are."""
    monkeypatch.setattr(server_module, "MOST_ARRIVING", 3)
    server = serve(max_connections=2, options=ChannelOptions("server", "s", hello_timeout_s=1000.0))
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(raw(server.address)) for _ in range(20)]
        channels = [ping(server.address) for _ in range(2)]
        strangers += [stack.enter_context(raw(server.address)) for _ in range(20)]
        with pytest.raises(OverloadedError, match="test serves 2 connections"):
            ping(server.address)
        for channel in channels:
            assert channel.call(m.Ping(), m.Pong, deadline=deadline_in(20)) == m.Pong(at=1.0)
            channel.close()
        assert ended(strangers[0]) == b""
        assert server.arriving <= 3


def test_one_connection_too_many_is_told_to_come_later(serve: Serve, until: Any) -> None:
    server = serve(max_connections=2)
    first, second = ping(server.address), ping(server.address)
    with pytest.raises(OverloadedError, match="test serves 2 connections") as caught:
        Channel.connect(server.address, CLIENT, deadline_in(20))
    assert caught.value.retryable
    first.close()
    until(lambda: server.connections == 1)
    ping(server.address).close()
    second.close()


def test_a_flood_over_the_limit_costs_few_threads(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_ARRIVING", 8)
    server = serve(max_connections=1, options=ChannelOptions("server", "s", hello_timeout_s=0.3))
    good = ping(server.address)
    flood = [raw(server.address) for _ in range(40)]
    most = 0
    for sock in flood:
        assert ended(sock) == b""
        most = max(most, sum(t.name.startswith("kvferry-test") for t in threading.enumerate()))
        sock.close()
    assert most <= 2 + 8 + 5, "and those that are just ending"
    assert good.call(m.Ping(), m.Pong, deadline=deadline_in(20)) == m.Pong(at=1.0)
    good.close()


def test_idle_connections_are_closed_and_busy_ones_are_not(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_TICK_S", 0.05)
    begun, finish, busy_done = (threading.Event() for _ in range(3))

    def handler(channel: Channel) -> None:
        request = channel.receive(deadline_in(60))
        if isinstance(request.message, m.Describe):
            begun.set()
            finish.wait(60)  # computes: not idle, though nothing moves
            channel.send(m.Pong(at=2.0), deadline=deadline_in(20))
            busy_done.set()
            return
        echo(channel)

    server = serve(handler)
    busy = Channel.connect(server.address, CLIENT, deadline_in(20))
    busy.send(m.Describe(), deadline=deadline_in(20))
    assert begun.wait(20)
    server._idle_timeout_s = 0.2
    started = time.monotonic()
    idle = Channel.connect(server.address, CLIENT, deadline_in(20))
    with pytest.raises(ConnectionClosedError):
        idle.receive(deadline_in(20))
    assert time.monotonic() - started >= 0.15
    finish.set()
    assert busy.receive(deadline_in(20)).message == m.Pong(at=2.0)
    assert busy_done.wait(20)
    busy.close()


def test_close_aborts_what_is_under_way(serve: Serve, until: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = serve()
    channel = ping(server.address)
    with raw(server.address) as stranger:  # still in its handshake
        until(lambda: (server.connections, server.arriving) == (1, 1))
        server.close()
        assert not any("did not end" in r.getMessage() for r in caplog.records)
        assert ended(stranger) == b""
    with pytest.raises(ConnectionClosedError):
        channel.receive(deadline_in(20))
    with pytest.raises(ConnectError):
        Channel.connect(server.address, CLIENT, deadline_in(20))
    assert server.connections == 0


def test_close_also_joins_who_is_just_ending(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten, threads = threading.Event(), []
    original = ChannelServer._forget

    def forget(self: ChannelServer, served: Any) -> None:
        original(self, served)
        threads.append(threading.current_thread())
        forgotten.set()
        time.sleep(0.1)

    monkeypatch.setattr(ChannelServer, "_forget", forget)
    server = serve()
    ping(server.address).close()
    assert forgotten.wait(20)
    server.close()
    assert not threads[0].is_alive()


def test_a_handler_may_close_its_server(serve: Serve) -> None:
    closed = threading.Event()

    def handler(channel: Channel) -> None:
        channel.receive(deadline_in(20))
        server.close()
        closed.set()

    server = serve(handler)
    channel = Channel.connect(server.address, CLIENT, deadline_in(20))
    channel.send(m.Ping(), deadline=deadline_in(20))
    assert closed.wait(20)
    channel.abort()


@pytest.mark.parametrize("cycles", [150, pytest.param(2000, marks=pytest.mark.soak)])
def test_connections_that_come_and_go_leave_nothing(serve: Serve, until: Any, cycles: int) -> None:
    """C070, some cut in the middle of the handshake; many leave no memory in use either."""
    server = serve()
    ping(server.address).close()
    until(lambda: server.connections + server.arriving == 0)
    descriptors, threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    resident = 0
    for n in range(cycles):
        if n % 3:
            ping(server.address).close()
        else:
            with raw(server.address) as sock:
                sock.sendall(b"KVFY\x01\x00\x01"[: n % 8])
        if n == 200:  # by then everything was in use once
            resident = resident_nbytes()
    until(lambda: server.connections + server.arriving == 0)
    assert not resident or resident_nbytes() - resident < 4 << 20  # 2 KiB a cycle would be more
    until(lambda: threading.active_count() <= threads)
    until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= descriptors)
    ping(server.address).close()


def test_a_handler_that_does_not_end_is_named(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    monkeypatch.setattr(server_module, "_JOIN_TIMEOUT_S", 0.2)
    release = threading.Event()
    server = serve(lambda channel: release.wait(20) and None)
    channel = Channel.connect(server.address, CLIENT, deadline_in(20))
    server.close()
    assert any("kvferry-test-1 did not end" in r.getMessage() for r in caplog.records)
    release.set()
    channel.abort()
    until(lambda: server.connections + server.arriving == 0)


class Flaky(Listener):
    """Fails once before it accepts, then is closed by somebody else."""

    def __init__(self, inner: Listener) -> None:
        self.inner = inner
        self.failed = False

    @property
    def address(self) -> str:
        return self.inner.address

    def accept(self, deadline: float) -> Connection:
        if not self.failed:
            self.failed = True
            raise TransportError("too many open files")
        return self.inner.accept(deadline)

    def close(self) -> None:
        self.inner.close()


def test_a_failing_accept_does_not_end_the_server(
    serve: Serve, caplog: pytest.LogCaptureFixture, until: Any
) -> None:
    listener = Flaky(transports.listen("tcp://127.0.0.1:0"))
    server = serve(url=listener)
    ping(server.address).close()
    assert any("accept failed: too many open files" in r.getMessage() for r in caplog.records)
    listener.close()
    until(lambda: any("closed from outside" in r.getMessage() for r in caplog.records))


def test_no_more_threads_is_survived(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    start = threading.Thread.start
    failed = threading.Event()

    def fail_once(thread: threading.Thread) -> None:
        if thread.name.startswith("kvferry-test") and not failed.is_set():
            failed.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    with raw(server.address) as sock:
        assert ended(sock) == b""
    assert failed.is_set()
    ping(server.address).close()


def test_a_hello_of_strange_text_keeps_the_log_in_lines(
    serve: Serve, caplog: pytest.LogCaptureFixture, until: Any
) -> None:
    caplog.set_level(logging.DEBUG)
    server = serve()
    options = ChannelOptions(role="x\n2026 ERROR forged", session="s")
    channel = Channel.connect(server.address, options, deadline_in(20))
    with pytest.raises(CapacityError):
        channel.call(m.AbortStream(reason="full"), m.Pong, deadline=deadline_in(20))
    channel.close()
    until(lambda: server.connections + server.arriving == 0)
    assert not [r for r in caplog.records if "forged" in r.getMessage()]


def test_a_protocol_error_of_a_known_peer_is_logged_and_ends_it(
    serve: Serve, caplog: pytest.LogCaptureFixture, until: Any
) -> None:
    server = serve()
    connection = transports.connect(server.address, deadline_in(20))
    channel = Channel.open(connection, CLIENT, deadline_in(20))
    connection.send([b"GET / HTTP/1.1\r\n" + bytes(100)], deadline_in(20))
    with pytest.raises((ConnectionClosedError, ProtocolError)):
        channel.receive(deadline_in(20))
    until(lambda: server.connections + server.arriving == 0)
    assert any("[protocol]" in r.getMessage() for r in caplog.records)


def test_an_address_in_use_is_refused_at_once(serve: Serve) -> None:
    server = serve()
    with pytest.raises(ConnectError):
        serve(url=server.address)


def test_hosts_of_peers() -> None:
    assert server_module._host("tcp://1.2.3.4:5") == "1.2.3.4"
    assert server_module._host("tcp://[::1]:5") == "::1"
    assert server_module._host("unix:///tmp/x") == "unix:///tmp/x"
    assert server_module._host("tcp://[::1") == "tcp://[::1"
