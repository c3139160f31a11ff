"""TLS: whom it trusts, what each failure says, and how its streams end."""

# ruff: noqa: SIM117 - nested: the inner one is what is under test

from __future__ import annotations

import contextlib
import datetime as dt
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from kvferry.core.address import parse_url
from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    AuthError,
    ConfigError,
    ConnectError,
    ConnectionClosedError,
    KVFerryError,
    TransferTimeoutError,
    TransportError,
)
from kvferry.transports import connect, listen, tls
from kvferry.transports.base import Connection, Listener
from kvferry.transports.tls_connection import TlsConnection
from kvferry.transports.tls_context import TlsSession
from kvferry.wire import Channel, ChannelOptions, ChannelServer
from kvferry.wire import messages as m

LONG_S = 30.0
DAY = dt.timedelta(days=1)


class Files(NamedTuple):
    folder: Path

    def query(self, cert: str = "good", ca: str = "ca", **more: str) -> str:
        options = {"ca": f"{ca}.pem"} | ({"cert": f"{cert}.pem", "key": f"{cert}.key"} if cert else {}) | more
        paths = {n: v if n == "server_name" else str(self.folder / v) for n, v in options.items() if v}
        return "&".join(f"{name}={value}" for name, value in paths.items())

    def listen_url(self, cert: str = "good", **more: str) -> str:
        return f"tls://127.0.0.1:0?{self.query(cert, **more)}"

    def dial_url(self, listener: Listener, **options: str) -> str:
        host_port = parse_url(listener.address).host_port
        return f"tls://{host_port}?{self.query(**{'cert': '', **options})}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    kind = trustme.KeyType.ECDSA
    ca, other_ca = trustme.CA(key_type=kind), trustme.CA(key_type=kind)
    ca.cert_pem.write_to_path(folder / "ca.pem")
    other_ca.cert_pem.write_to_path(folder / "other_ca.pem")
    now = dt.datetime.now(dt.timezone.utc)

    def issue(name: str, by: trustme.CA, *identities: str, valid: tuple[int, int] = (-1, 9)) -> None:
        first, last = (now + DAY * days for days in valid)
        made = by.issue_cert(*identities, key_type=kind, not_before=first, not_after=last)
        (folder / f"{name}.pem").write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        made.private_key_pem.write_to_path(folder / f"{name}.key")

    issue("good", ca, "127.0.0.1", "localhost")
    issue("client", ca, "client.example")
    issue("stranger", other_ca, "127.0.0.1")
    issue("elsewhere", ca, "elsewhere.example")
    issue("expired", ca, "127.0.0.1", valid=(-9, -1))
    issue("early", ca, "127.0.0.1", valid=(1, 9))
    key = load_pem_private_key((folder / "good.key").read_bytes(), None)
    (folder / "locked.key").write_bytes(
        key.private_bytes(
            Encoding.PEM, PrivateFormat.TraditionalOpenSSL, BestAvailableEncryption(b"a password")
        )
    )
    (folder / "empty.pem").write_text("nothing here\n")
    return Files(folder)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


@pytest.fixture
def listener(files: Files) -> Iterator[Listener]:
    with contextlib.closing(listen(files.listen_url())) as made:
        yield made


def soon() -> float:
    return deadline_in(LONG_S)


def received(end: Connection, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    end.recv_into([memoryview(data)], soon())
    return bytes(data)


def host_port(listener: Listener) -> tuple[str, int]:
    address = parse_url(listener.address)
    assert address.port is not None
    return address.host, address.port


@contextlib.contextmanager
def ends(listener: Listener, url: str = "") -> Iterator[tuple[TlsConnection, TlsConnection]]:
    with contextlib.closing(connect(url or listener.address, soon())) as one:
        with contextlib.closing(listener.accept(soon())) as other:
            assert isinstance(one, TlsConnection)
            assert isinstance(other, TlsConnection)
            yield one, other


# -- files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cert": "missing"}, r"cert=.*missing\.pem cannot be read: No such file"),
        ({"key": "missing.key"}, r"key=.*missing\.key cannot be read: No such file"),
        ({"key": "client.key"}, r"client\.key does not belong to the certificate in .*good\.pem"),
        ({"key": "locked.key"}, r"the key in .*locked\.key is encrypted"),
        ({"key": "empty.pem"}, r"no key in .*empty\.pem in PEM form"),
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


def test_key_may_lie_in_the_file_of_its_certificate(files: Files, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes((files.folder / "good.key").read_bytes() + (files.folder / "good.pem").read_bytes())
    with contextlib.closing(listen(f"tls://127.0.0.1:0?cert={both}")) as listener:
        with ends(listener, files.dial_url(listener)) as (one, other):
            one.send([b"x"], soon())
            assert received(other, 1) == b"x"


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


# -- peers that speak something else -------------------------------------------------------------------


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


# -- streams -------------------------------------------------------------------------------------------


def test_end_without_the_end_of_tls_is_a_cut(listener: Listener) -> None:
    with ends(listener) as (one, other):
        one.send([b"x" * 10], soon())
        one._guard.sock.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionClosedError, match=r"cut.* after 10 of 20 bytes"):
            received(other, 20)


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
