"""TLS: whom it trusts, what each failure says, and how its streams end."""

# ruff: noqa: SIM117 - nested: the inner one is what is under test

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvferry.core.address import parse_url
from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    AuthError,
    ConfigError,
    ConnectError,
    ConnectionClosedError,
    TransferTimeoutError,
    TransportError,
)
from kvferry.transports import connect, listen
from kvferry.transports.base import Listener
from kvferry.wire import Channel, ChannelOptions, ChannelServer
from kvferry.wire import messages as m

from .conftest import LONG_S, Files, ends, received, soon

# -- files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cert": "missing"}, r"cert=.*missing\.pem cannot be read: No such file"),
        ({"key": "missing.key"}, r"key=.*missing\.key cannot be read: No such file"),
        ({"key": "client.key"}, r"client\.key does not belong to the certificate in .*good\.pem"),
        ({"key": "locked.key"}, r"the key in .*locked\.key is encrypted"),
        ({"key": "empty.pem"}, r": no key in .*empty\.pem in PEM form$"),
        ({"cert": "empty", "key": "good.key"}, r": no certificate in .*empty\.pem in PEM form$"),
        ({"client_ca": "missing.pem"}, r"client_ca=.*missing\.pem cannot be read: No such file"),
        ({"client_ca": "empty.pem"}, r"client_ca=.*empty\.pem has no certificate in PEM form"),
        ({"cert": ""}, r"needs its certificate; write tls://host:port\?cert=PATH&key=PATH"),
        ({"rate": "fast"}, r"rate"),
    ],
)
def test_files_that_a_listener_cannot_use(files: Files, options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        listen(files.listen_url(**{"cert": "good", **options}))
    for key in ("good.key", "locked.key"):
        secret = (files.folder / key).read_text().splitlines()[2]
        assert secret not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ca": "missing"}, r"ca=.*missing\.pem cannot be read"),
        ({"ca": "empty"}, r"ca=.*empty\.pem has no certificate"),
        ({"cert": "client", "key": "good.key"}, r"good\.key does not belong"),
        ({"key": "good.key"}, r"key without a cert"),
        ({"server_name": ".x"}, r"server_name=\.x"),
    ],
)
def test_files_that_who_dials_cannot_use(
    files: Files, listener: Listener, options: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        connect(files.dial_url(listener, **options), soon())


@pytest.mark.parametrize("option", ["ca", "cert"])
def test_a_file_that_would_hold_up_whoever_opens_it(option: str, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.pem"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match=f"{option}=.* cannot be read: it is no regular file"):
            connect(f"tls://127.0.0.1:9?{option}={path}", deadline_in(LONG_S))
        with pytest.raises(ConfigError, match=r"cert=.* cannot be read: it is no regular file"):
            listen(f"tls://127.0.0.1:0?cert={path}")


def test_key_may_lie_in_the_file_of_its_certificate(files: Files, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes((files.folder / "good.key").read_bytes() + (files.folder / "good.pem").read_bytes())
    with contextlib.closing(listen(f"tls://127.0.0.1:0?cert={both}")) as listener:
        with ends(listener, files.dial_url(listener)) as (one, other):
            one.send([b"x"], soon())
            assert received(other, 1) == b"x"


def test_a_key_that_was_left_out(files: Files) -> None:
    with pytest.raises(ConfigError, match=r": no key in .*good\.pem in PEM form; add key=PATH$"):
        listen(f"tls://127.0.0.1:0?cert={files.folder / 'good.pem'}")


def test_options_are_part_of_the_address(files: Files, listener: Listener) -> None:
    assert listener.address.endswith(files.query())


# -- who is trusted ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cert", "says"),
    [
        ("expired", "the peer's certificate has expired"),
        ("early", "the peer's certificate is not valid yet"),
        ("stranger", "is of a CA that is not trusted; give its certificate with ca"),
        (
            "elsewhere",
            "is not for the address '127.0.0.1'; dial a name that it has, or say it with server_name",
        ),
    ],
)
def test_listener_that_is_not_trusted(files: Files, cert: str, says: str) -> None:
    with contextlib.closing(listen(files.listen_url(cert))) as listener:
        with pytest.raises(ConnectError, match=says) as caught:
            connect(files.dial_url(listener), soon())
        assert parse_url(listener.address).host_port in str(caught.value)
        with pytest.raises(TransferTimeoutError):
            listener.accept(deadline_in(0.05))


def test_wrong_server_name(files: Files, listener: Listener) -> None:
    with pytest.raises(ConnectError, match=r"is not for 'other\.example'"):
        connect(files.dial_url(listener, server_name="other.example"), soon())


def test_server_name_is_what_the_certificate_must_have(files: Files) -> None:
    with contextlib.closing(listen(files.listen_url("elsewhere"))) as listener:
        url = files.dial_url(listener, server_name="elsewhere.example")
        with ends(listener, url) as (one, other):
            other.send([b"x"], soon())
            assert received(one, 1) == b"x"


def test_the_systems_cas_do_not_know_ours(files: Files, listener: Listener) -> None:
    with pytest.raises(ConnectError, match="is of a CA that is not trusted"):
        connect(f"tls://{parse_url(listener.address).host_port}", soon())


@pytest.mark.parametrize(
    ("cert", "key", "says"),
    [
        ("", "", "the peer wants a client certificate and got none; dial with cert and key"),
        ("stranger", "stranger.key", "the peer does not know the CA of our certificate"),
        ("expired", "expired.key", "the peer says that our certificate has expired"),
    ],
)
@pytest.mark.parametrize("first", ["receive", "send", "wait"])
def test_client_that_is_not_trusted(files: Files, cert: str, key: str, says: str, first: str) -> None:
    """TLS 1.3 tells it after the client's side of the handshake is done: at the first call that hears."""
    with contextlib.closing(listen(files.listen_url(client_ca="ca.pem"))) as listener:
        one = connect(files.dial_url(listener, cert=cert, key=key), soon())
        with contextlib.closing(one), pytest.raises(AuthError, match=says):  # noqa: PT012 - any of them
            if first == "wait":
                one.wait_readable(soon())
            one.send([bytes(1000)] * (50_000 if first == "send" else 0), soon())
            received(one, 1)
        with pytest.raises(TransferTimeoutError):
            listener.accept(deadline_in(0.05))


def test_mutual(files: Files) -> None:
    with contextlib.closing(listen(files.listen_url(client_ca="ca.pem"))) as listener:
        with ends(listener, files.dial_url(listener, cert="client", key="client.key")) as (one, other):
            one.send([b"x"], soon())
            assert received(other, 1) == b"x"


def test_a_channel_says_that_a_client_certificate_is_wanted(files: Files) -> None:
    options = ChannelOptions(role="test", session="s")
    listener = listen(files.listen_url(client_ca="ca.pem"))
    with contextlib.closing(ChannelServer(listener, options, lambda _: None, name="tls-test")):
        with pytest.raises(AuthError, match="wants a client certificate"):
            Channel.connect(files.dial_url(listener), options, soon())


# -- streams -------------------------------------------------------------------------------------------


def test_end_without_the_end_of_tls_is_a_cut(listener: Listener) -> None:
    with ends(listener) as (one, other):
        one.send([b"x" * 10], soon())
        one._guard.sock.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionClosedError, match=r"cut.* after 10 of 20 bytes"):
            received(other, 20)
        with pytest.raises(ConnectionClosedError, match=r"cut by the peer .* while sending"):
            other.send([b"x"], soon())


def test_end_of_tls_is_an_end(listener: Listener) -> None:
    with ends(listener) as (one, other):
        one.send([b"x" * 10], soon())
        one.close()
        with pytest.raises(ConnectionClosedError, match="was ended by the peer after 10 of 20 bytes"):
            received(other, 20)


def test_changed_bytes_are_found(listener: Listener) -> None:
    with ends(listener) as (one, other):
        one.send([b"x" * 10], soon())
        assert received(other, 10) == b"x" * 10
        one._guard.sock.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
        with pytest.raises(TransportError, match="bytes were changed on their way"):
            received(other, 1)


def test_session_tickets_and_key_updates_are_no_bytes(files: Files, pool: ThreadPoolExecutor) -> None:
    """Another implementation sends what is no data: here the tickets that Python's own server sends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.folder / "good.pem", files.folder / "good.key")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> ssl.SSLSocket:
            sock = context.wrap_socket(server.accept()[0], server_side=True)
            sock.sendall(b"x")
            return sock

        serving_ = pool.submit(serve)
        url = f"tls://127.0.0.1:{server.getsockname()[1]}?ca={files.folder / 'ca.pem'}"
        with contextlib.closing(connect(url, soon())) as one, serving_.result(LONG_S) as peer:
            assert received(one, 1) == b"x"
            assert not one.wait_readable(deadline_in(0.05))
            one.send([b"y"], soon())
            assert peer.recv(1) == b"y"


def test_records_of_all_sizes_arrive(listener: Listener, pool: ThreadPoolExecutor) -> None:
    sizes = [1, 16383, 16384, 16385, 5, 40_000, 65_536, 3, 200_000, 7, 7, 7]
    parts = [bytes([i]) * size for i, size in enumerate(sizes)]
    with ends(listener) as (one, other):
        sending = pool.submit(one.send, parts, soon())
        assert received(other, sum(sizes)) == b"".join(parts)
        sending.result(LONG_S)
        room = memoryview(bytearray(50_000))
        other.send([bytes(30_000)], soon())
        got = one.recv_at_least(room, 20_000, soon())
        assert 20_000 <= got <= 30_000
        received(one, 30_000 - got)


def test_many_at_once_share_nothing(listener: Listener, pool: ThreadPoolExecutor) -> None:
    def echo() -> None:
        with contextlib.closing(listener.accept(soon())) as other:
            other.send([received(other, 50_000)], soon())

    serving_ = [pool.submit(echo) for _ in range(8)]
    for i in range(8):
        with contextlib.closing(connect(listener.address, soon())) as one:
            one.send([bytes([i]) * 50_000], soon())
            assert received(one, 50_000) == bytes([i]) * 50_000
    for one_served in serving_:
        one_served.result(LONG_S)


def test_thread_of_a_listener_ends_with_it(files: Files) -> None:
    listener = listen(files.listen_url())
    name = f"kvferry-tls-{parse_url(listener.address).port}"
    assert name in [thread.name for thread in threading.enumerate()]
    one = connect(listener.address, soon())
    listener.close()
    assert name not in [thread.name for thread in threading.enumerate()]
    with contextlib.closing(one), pytest.raises(ConnectionClosedError):
        received(one, 1)


def test_messages_over_tls(files: Files, listener: Listener) -> None:
    options = ChannelOptions(role="test", session="s")

    def serve(channel: Channel) -> None:
        while True:
            request = channel.receive(soon())
            request.discard(soon())
            channel.reply(request, m.Pong(at=float(request.payload_nbytes)), deadline=soon())

    with contextlib.closing(ChannelServer(listener, options, serve, name="tls-test")):
        channel = Channel.connect(listener.address, options, soon())
        for nbytes in (1, 100_000, 2_000_000):
            ask = m.PutLayer(layer=0, blocks=(1,))
            assert channel.call(ask, m.Pong, payload=[bytes(nbytes)], deadline=soon()).at == nbytes
        channel.close()


def test_rate_counts_what_is_sent(files: Files, pool: ThreadPoolExecutor) -> None:
    with contextlib.closing(listen(files.listen_url() + "&rate=20MB/s")) as listener:
        with ends(listener) as (one, other):
            receiving = pool.submit(received, other, 4_000_000)
            started = time.monotonic()
            one.send([bytes(4_000_000)], soon())
            receiving.result(LONG_S)
            assert time.monotonic() - started >= 0.19
