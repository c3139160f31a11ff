"""The HTTP port's bounds, over an application that does what a test wants."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from starlette.types import Receive, Scope, Send

from kvferry.core.address import parse_url
from kvferry.core.errors import ConfigError
from kvferry.core.http_port import HttpServer, PortLimits
from kvferry.testing.blocks import wait_until

Serve = Callable[[PortLimits], HttpServer]
ENDLESS = threading.Event()
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """``/body`` reads the whole body first; ``/stream`` sends without end; ``/hang`` never answers."""
    if scope["path"] == "/hang":
        await asyncio.sleep(60)
    if scope["path"] == "/body":
        while (await receive()).get("more_body"):
            pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while scope["path"] == "/stream" and not ENDLESS.is_set():
        await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def serve() -> Iterator[Serve]:
    ENDLESS.clear()
    with ExitStack() as stack:

        def start(limits: PortLimits) -> HttpServer:
            server = HttpServer("http://127.0.0.1:0", "--x", name="test-http", default_port=0, limits=limits)
            server.start(app, drain_s=1)

            def end() -> None:
                ENDLESS.set()
                server.stop()
                server.join(10)
                assert not server.is_alive()
                server.close()

            stack.callback(end)
            return server

        yield start


def connect(server: HttpServer) -> socket.socket:
    address = parse_url(server.url, default_port=0)
    return socket.create_connection((address.host, address.port or 0), timeout=20)


def rest(sock: socket.socket) -> bytes:
    parts = []
    try:
        while part := sock.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize(
    "head", [b"", b"GET / HTTP/1.1\r\nHost:", b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HT"]
)
def test_a_head_that_does_not_come_is_cut_off(serve: Serve, head: bytes) -> None:
    server = serve(PortLimits(head_timeout_s=0.2))
    with connect(server) as sock:
        sock.sendall(head)
        assert rest(sock).count(b"200 OK") == head.count(b"\r\n\r\n")


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /hang HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1",
    ],
)
def test_a_body_or_an_answer_that_takes_too_long_is_cut_off(
    serve: Serve, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    server = serve(PortLimits(answer_timeout_s=0.2))
    with connect(server) as sock:
        sock.sendall(request_)
        assert not rest(sock)
    assert not [record for record in caplog.records if record.exc_info]


def test_a_stream_goes_on_while_it_is_taken_and_is_cut_off_when_not(serve: Serve) -> None:
    server = serve(PortLimits(answer_timeout_s=0.1, streams=frozenset({"/stream"}), stall_timeout_s=2.0))
    with connect(server) as sock:
        sock.sendall(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
        got = 0
        while got < 20 << 20:
            part = sock.recv(1 << 20)
            assert part
            got += len(part)
        peer = server._server
        assert peer is not None
        wait_until(lambda: not peer.server_state.connections)


def test_requests_under_way_are_bounded(serve: Serve) -> None:
    server = serve(PortLimits(max_connections=2))
    with ExitStack() as stack:
        for _ in range(2):
            sock = stack.enter_context(connect(server))
            sock.sendall(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        three = stack.enter_context(connect(server))
        three.sendall(GET)
        assert not rest(three)


@pytest.mark.parametrize(
    "said", [b"", b"GET / HT", b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1", GET]
)
def test_connections_without_a_whole_request_keep_nobody_out(serve: Serve, said: bytes) -> None:
    server = serve(PortLimits(max_connections=30, max_waiting=3, head_timeout_s=1000.0))
    with ExitStack() as stack:
        strangers = [stack.enter_context(connect(server)) for _ in range(20)]
        for sock in strangers:
            with suppress(OSError):  # some are cut off already
                sock.sendall(said)
        with connect(server) as honest:
            honest.sendall(GET)
            assert honest.recv(100).startswith(b"HTTP/1.1 200")
        rest(strangers[0])  # has ended


@pytest.mark.parametrize("more", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_whole_head_may_not_be_larger_either(serve: Serve, more: bytes) -> None:
    server = serve(PortLimits(max_head_nbytes=16 << 10))
    for nbytes, status in ((16_000, b"200"), (17_000, b"400"), (120_000, b"400")):
        with connect(server) as sock:
            sock.sendall(
                more
                + b"GET / HTTP/1.1\r\nHost: x\r\nX: "
                + bytes(nbytes).replace(b"\0", b"x")
                + b"\r\nConnection: close\r\n\r\n"
            )
            answers = rest(sock)
            assert answers.startswith(b"HTTP/1.1 " + (b"200" if more else status))
            assert answers.count(b"HTTP/1.1 " + status) >= 1


def test_addresses_that_cannot_be_used_are_named() -> None:
    with pytest.raises(ConfigError, match=r"--x.*loopback"):
        HttpServer("http://0.0.0.0:0", "--x", name="t", default_port=0)
    with pytest.raises(ConfigError, match="must be http://host:port"):
        HttpServer("tcp://127.0.0.1:0", "--x", name="t", default_port=0)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match=r"in use.*--x"):
        HttpServer(f"http://127.0.0.1:{taken.getsockname()[1]}", "--x", name="t", default_port=0)
