"""TLS: peers that speak something else, or nothing."""

# ruff: noqa: SIM117 - nested: the inner one is what is under test

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvferry.core.address import parse_url
from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    ConnectError,
    KVFerryError,
)
from kvferry.transports import connect, listen, tls
from kvferry.transports.base import Listener
from kvferry.transports.tls_context import TlsSession
from kvferry.wire import Channel, ChannelOptions

from .conftest import LONG_S, Files, ends, host_port, received, soon


def test_plain_client_of_a_tls_listener(
    files: Files, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(host_port(listener), timeout=LONG_S) as peer:
        peer.sendall(b"KVFY" + bytes(28))
        assert peer.recv(100)[:2] == b"\x15\x03", "an alert, and not silence"
        with ends(listener):
            pass
    assert "does not speak TLS" in caplog.text


def test_plain_channel_to_a_tls_listener_hears_of_tls(files: Files, listener: Listener) -> None:
    options = ChannelOptions(role="test", session="s")
    with pytest.raises(KVFerryError, match="TLS"):
        Channel.connect(f"tcp://{parse_url(listener.address).host_port}", options, soon())


@contextlib.contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that treats its first connection with ``answer``."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            with server.accept()[0] as sock:
                sock.settimeout(LONG_S)
                answer(sock)

        served = pool.submit(serve)
        yield f"tls://127.0.0.1:{server.getsockname()[1]}"
        served.result(LONG_S)


def _answer_plainly(sock: socket.socket) -> None:
    sock.sendall(b"220 welcome\r\n")
    sock.recv(1 << 16)


def _hang_up(sock: socket.socket) -> None:
    sock.recv(1 << 16)


def _cut(sock: socket.socket) -> None:
    sock.recv(1 << 16)
    sock.sendall(b"\x16\x03\x03\x00\x7a\x02\x00")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (_answer_plainly, "the peer does not speak TLS; use tls:// on both sides or on neither"),
        (_hang_up, "ended .*during the TLS handshake.*does it speak TLS"),
        (_cut, "ended .*during the TLS handshake"),
    ],
)
def test_server_that_speaks_something_else(
    files: Files, answer: Callable[[socket.socket], None], says: str
) -> None:
    with serving(answer) as address, pytest.raises(ConnectError, match=says) as caught:
        connect(f"{address}?ca={files.folder / 'ca.pem'}", soon())
    assert address in str(caught.value)


def test_silent_server(files: Files) -> None:
    over = threading.Event()

    def wait(_sock: socket.socket) -> None:
        over.wait(LONG_S)

    with serving(wait) as address:
        started = time.monotonic()
        with pytest.raises(ConnectError, match="no TLS handshake by the deadline"):
            connect(f"{address}?ca={files.folder / 'ca.pem'}", deadline_in(0.2))
        assert 0.15 < time.monotonic() - started < 4  # tls._HANDSHAKE_S would be 5 s
        over.set()


def _old_context(files: Files, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.load_cert_chain(files.folder / "good.pem", files.folder / "good.key")
    return context


def test_client_of_tls_1_2(files: Files, listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    context = _old_context(files, ssl.PROTOCOL_TLS_CLIENT)
    with socket.create_connection(host_port(listener), timeout=LONG_S) as sock:
        with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
            context.wrap_socket(sock)
    with ends(listener):
        pass
    assert "does not speak TLS 1.3" in caplog.text


def test_one_host_has_a_line_for_each_reason(
    files: Files, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    context = _old_context(files, ssl.PROTOCOL_TLS_CLIENT)
    for _ in range(2):
        with socket.create_connection(host_port(listener), timeout=LONG_S) as peer:
            peer.sendall(b"KVFY" + bytes(28))
            assert peer.recv(100)[:2] == b"\x15\x03"
        with socket.create_connection(host_port(listener), timeout=LONG_S) as sock:
            with pytest.raises(ssl.SSLError):
                context.wrap_socket(sock)
    with ends(listener):
        pass
    lines = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    first = [line for line in lines if "more in" not in line]
    assert len({line.partition("refused: ")[2] for line in first}) == 2, lines


def test_server_of_tls_1_2(files: Files) -> None:
    context = _old_context(files, ssl.PROTOCOL_TLS_SERVER)

    def answer(sock: socket.socket) -> None:
        with pytest.raises(ssl.SSLError):
            context.wrap_socket(sock, server_side=True)

    with serving(answer) as address, pytest.raises(ConnectError, match=r"does not speak TLS 1\.3"):
        connect(f"{address}?ca={files.folder / 'ca.pem'}", soon())


def test_silent_strangers_stall_nobody_and_are_dropped(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "_HANDSHAKE_S", 0.2)
    taken: list[socket.socket] = []
    original = tls._Handshake

    def handshake(sock: socket.socket, sockaddr: Any, session: TlsSession, until: float) -> object:
        taken.append(sock)  # after the three strangers: ours
        return original(sock, sockaddr, session, until + (1000 if len(taken) > 3 else 0))

    monkeypatch.setattr(tls, "_Handshake", handshake)
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(host_port(listener), timeout=LONG_S))
            for _ in range(3)
        ]
        strangers[1].sendall(b"\x16\x03\x01")
        with ends(listener) as (one, other):
            one.send([b"x"], soon())
            assert received(other, 1) == b"x"
        for stranger in strangers:
            assert stranger.recv(1) == b""
    assert "no complete TLS handshake within 0.2 s" in caplog.text


@pytest.mark.parametrize(("cert", "told"), [("expired", "expired.pem has expired; renew it"), ("good", "")])
def test_a_certificate_that_is_over_is_told_at_the_start(
    files: Files, caplog: pytest.LogCaptureFixture, cert: str, told: str
) -> None:
    listen(files.listen_url(cert)).close()
    assert told in caplog.text
    assert bool(caplog.text) == bool(told)


def test_handshakes_are_bounded(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "_MAX_HANDSHAKES", 2)
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(host_port(listener), timeout=LONG_S))
            for _ in range(3)
        ]
        assert strangers[0].recv(1) == b"", "the oldest"
        with ends(listener):
            pass


def test_who_has_begun_its_handshake_is_not_pushed_out(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "_MAX_HANDSHAKES", 2)
    handshakes: dict[int, tls._Handshake] = listener._handshakes  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:

        def stranger(said: bytes) -> socket.socket:
            sock = stack.enter_context(socket.create_connection(host_port(listener), timeout=LONG_S))
            sock.sendall(said)
            return sock

        first = stranger(b"\x16\x03")
        until = soon()
        while not [one for one in list(handshakes.values()) if one.heard]:
            assert time.monotonic() < until
            time.sleep(0.001)
        last = [stranger(b"") for _ in range(3)][-1]
        with ends(listener):
            pass
        first.settimeout(0.05)
        with pytest.raises(TimeoutError):
            first.recv(1)
        assert last.recv(1) == b"", "the oldest that said nothing"
    assert "2 handshakes are under way" in caplog.text


def test_who_only_begins_its_handshake_keeps_nobody_out(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "_MAX_HANDSHAKES", 2)
    with contextlib.ExitStack() as stack:
        strangers = []
        for _ in range(4):
            sock = stack.enter_context(socket.create_connection(host_port(listener), timeout=LONG_S))
            sock.sendall(b"\x16\x03")
            strangers.append(sock)
        with ends(listener):
            pass
        assert strangers[0].recv(1) == b"", "the oldest"
