from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.core.address import parse_url
from kvferry.core.clock import deadline_in
from kvferry.core.errors import AuthError, ConnectError, ConnectionClosedError, ProtocolError, TransportError
from kvferry.transports import ip, peer_owner
from kvferry.transports.ucx import UcxTransport, bootstrap, frames, listener
from kvferry.transports.ucx.bootstrap import Preamble, pack_preamble, parse_body, parse_prefix, problem_with
from kvferry.transports.ucx.context import get_context
from kvferry.transports.ucx.lane import Lane
from kvferry.transports.ucx.listener import UcxListener
from kvferry.transports.ucx.settings import Options


@contextlib.contextmanager
def silent_server(answer: bytes, *, end: bool = False) -> Iterator[str]:
    """Accepts one connection, says ``answer`` and nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        done = threading.Event()

        def serve() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as guest:
                guest.sendall(answer)
                if not end:
                    done.wait(30)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"ucx://127.0.0.1:{server.getsockname()[1]}"
        finally:
            done.set()
            thread.join(30)


@pytest.mark.parametrize(
    ("answer", "end", "reason"),
    [
        (b"", False, "did not answer"),
        (b"kvf", False, "did not answer"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False, "no ucx end"),
        (b"kvf-ucx\x02\x03\x00abc", False, "cannot be read"),
        (b"kvf-ucx\x02\xff\xff", False, "no ucx end"),
        (b"", True, "ended the connection"),
    ],
)
def test_who_is_dialled_is_no_ucx_listener(answer: bytes, end: bool, reason: str) -> None:
    """C067."""
    get_context(Options())  # loading UCX takes longer than the deadline
    with silent_server(answer, end=end) as url:
        # who says something wrong is known by it, not by the time that passed: no test may last as long
        limit = deadline_in(0.3 if reason == "did not answer" else 1000)
        with pytest.raises(ConnectError, match=reason) as caught:
            UcxTransport().connect(url, limit)
        assert url in str(caught.value)


def test_guests_without_manners_keep_nobody_out(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[socket.socket] = []

    class Guest(listener._Guest):
        def __init__(self, sock: socket.socket, sockaddr: ip.SockAddr) -> None:
            super().__init__(sock, sockaddr)
            taken.append(sock)
            if len(taken) <= 4:  # the guests; who comes then has its five seconds, and more
                self.until = time.monotonic() + 0.2
            else:
                self.until += 1000

    monkeypatch.setattr(listener, "_Guest", Guest)
    with (
        contextlib.closing(UcxTransport().listen("ucx://127.0.0.1:0")) as server,
        contextlib.ExitStack() as stack,
    ):
        port = parse_url(server.address).port
        guests = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port or 0), timeout=20))
            for _ in range(4)
        ]
        guests[1].sendall(b"kv")
        guests[2].sendall(b"GET / HTTP/1.1\r\n\r\n")
        guests[3].sendall(b"kvf-ucx\x02\x02\x00\xc1\xc1")
        one = stack.enter_context(contextlib.closing(UcxTransport().connect(server.address, deadline_in(20))))
        other = stack.enter_context(contextlib.closing(server.accept(deadline_in(20))))
        one.send([b"x"], deadline_in(20))
        other.recv_into([memoryview(bytearray(1))], deadline_in(20))
        for guest in guests:
            with contextlib.suppress(ConnectionResetError):
                assert guest.recv(1) == b"", "is turned away in the end"
    assert "said nothing complete" in caplog.text


def test_guests_that_go_away_at_once_harm_nobody() -> None:
    preamble = pack_preamble(bootstrap.own_preamble(get_context(Options())))
    with contextlib.closing(UcxTransport().listen("ucx://127.0.0.1:0")) as server:
        place = ("127.0.0.1", parse_url(server.address).port or 0)
        for said in range(len(preamble) + 1):
            with socket.create_connection(place, timeout=20) as guest:
                guest.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                guest.sendall(preamble[:said])
        one = UcxTransport().connect(server.address, deadline_in(20))
        one.send([b"x"], deadline_in(20))
        for _ in range(5):
            with (
                contextlib.closing(server.accept(deadline_in(20))) as other,
                contextlib.suppress(TransportError),
            ):
                other.recv_into([memoryview(bytearray(1))], deadline_in(20))
                break
        else:
            pytest.fail("the good connection was lost")
        one.close()


@pytest.mark.parametrize("tls", ["tcp", "posix,cma"])
def test_ends_with_nothing_in_common_are_refused_on_both_sides(
    tls: str, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(UcxTransport().listen(f"ucx://127.0.0.1:0?tls={tls}")) as server:
        others = {"tcp": "posix,cma", "posix,cma": "tcp"}[tls]
        url = f"ucx://127.0.0.1:{parse_url(server.address).port}?tls={others}"
        with pytest.raises(ConnectError) as caught:
            UcxTransport().connect(url, deadline_in(20))
        assert "no transport in common" in str(caught.value)
        assert "cma, posix" in str(caught.value)
        assert "tcp" in str(caught.value)
        assert "UCX_TLS" in str(caught.value)
    assert "no transport in common" in caplog.text


def test_what_two_ends_have_in_common() -> None:
    def preamble(host: str, *names: str) -> Preamble:
        return Preamble(host=host, ucx="1.21.0", transports=list(names), nonce=bytes(16))

    here = preamble("a", "self", "posix", "cma", "tcp", "rc_mlx5")
    assert problem_with(here, preamble("a", "posix"), Options()) == ""
    assert "(on another host)" in problem_with(here, preamble("b", "self", "posix"), Options())
    assert problem_with(here, preamble("b", "rc_mlx5", "tcp"), Options(require="rdma")) == ""
    assert "asked for rdma" in problem_with(here, preamble("b", "tcp"), Options(require="rdma"))
    assert "asked for shm" in problem_with(here, preamble("b", "tcp", "posix"), Options(require="shm"))
    assert bootstrap.uses_shared_memory(here, preamble("a", "cma", "tcp"))
    assert not bootstrap.uses_shared_memory(here, preamble("b", "cma", "tcp"))
    assert bootstrap.keeps_messages(here, preamble("a", "posix", "tcp"))
    assert not bootstrap.keeps_messages(here, preamble("a", "cma", "tcp"))
    assert not bootstrap.keeps_messages(here, preamble("b", "posix", "tcp"))


def test_preamble_is_read_back() -> None:
    preamble = Preamble(host="h", ucx="1.21.0", transports=["tcp"], nonce=bytes(16), refused="no")
    data = pack_preamble(preamble)
    assert parse_prefix(data[: bootstrap.PREFIX_NBYTES]) == len(data) - bootstrap.PREFIX_NBYTES
    assert parse_body(data[bootstrap.PREFIX_NBYTES :]) == preamble


def test_address_carries_options_but_not_those_of_this_host() -> None:
    with contextlib.closing(UcxTransport().listen("ucx://127.0.0.1:0?tls=tcp&net_devices=lo")) as server:
        assert parse_url(server.address).options == {"tls": "tcp"}
        one = UcxTransport().connect(server.address, deadline_in(20))
        other = server.accept(deadline_in(20))
        one.close()
        with pytest.raises(ConnectionClosedError):
            other.recv_into([memoryview(bytearray(1))], deadline_in(20))
        other.close()


_FORKING = """
import os, sys, time
from kvferry.core.errors import ConnectError
from kvferry.transports.ucx import UcxTransport
soon = time.monotonic() + 20
listener = UcxTransport().listen("ucx://127.0.0.1:0")
pid = os.fork()
if pid == 0:
    try:
        UcxTransport().connect(listener.address, soon)
    except ConnectError as error:
        print(error, flush=True)
        os._exit(0)
    os._exit(1)
print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
listener.close()
"""


def test_new_connections_in_a_forked_child_are_refused() -> None:
    """C122: the library cannot be used there."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", _FORKING],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    first, second = done.stdout.splitlines()
    assert "was forked from one that uses UCX" in first
    assert "spawn" in first
    assert second == "child 0"


# -- strangers -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stranger(server: UcxListener) -> Iterator[tuple[socket.socket, bytes]]:
    """A socket behind a good preamble, and the key of its digests."""
    own = bootstrap.own_preamble(get_context(Options()))
    place = ("127.0.0.1", parse_url(server.address).port or 0)
    with socket.create_connection(place, timeout=20) as sock:
        sock.sendall(pack_preamble(own))
        prefix = sock.recv(bootstrap.PREFIX_NBYTES, socket.MSG_WAITALL)
        body = sock.recv(parse_prefix(prefix), socket.MSG_WAITALL)
        yield sock, bootstrap.key_of(own, parse_body(body))


@pytest.mark.parametrize(
    "nbytes",
    [0, 1, frames.DIGEST_NBYTES, frames.DIGEST_NBYTES + 200, frames.MAX_ADDRESS_NBYTES + 100, 1 << 20],
)
def test_an_address_that_is_none_never_reaches_ucx(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX would end the process."""

    def endpoint(*_: object, **__: object) -> None:
        pytest.fail("UCX was given bytes of a stranger")

    monkeypatch.setattr(Lane, "endpoint", endpoint)
    with (
        contextlib.closing(UcxTransport().listen("ucx://127.0.0.1:0")) as server,
        stranger(server) as (sock, _),
        contextlib.closing(server.accept(deadline_in(20))) as other,
    ):
        sock.sendall(frames.pack_header(frames.OPEN, nbytes) + os.urandom(min(nbytes, 1000)).ljust(nbytes))
        with pytest.raises(ProtocolError):
            other.recv_into([memoryview(bytearray(300_000))], deadline_in(20))


def test_an_address_of_another_connection_or_a_damaged_one_is_refused() -> None:
    key, address = os.urandom(32), os.urandom(300)
    sealed = frames.seal_address(key, address)
    assert frames.open_address(key, memoryview(sealed), "c") == address
    for place in range(0, len(sealed), 7):
        damaged = bytearray(sealed)
        damaged[place] ^= 1
        with pytest.raises(ProtocolError, match="damaged"):
            frames.open_address(key, damaged, "c")
    with pytest.raises(ProtocolError, match="not meant for this connection"):
        frames.open_address(os.urandom(32), sealed, "c")


def test_a_flood_of_different_garbage_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(UcxTransport().listen("ucx://127.0.0.1:0")) as server:
        place = ("127.0.0.1", parse_url(server.address).port or 0)
        for _ in range(20):
            with socket.create_connection(place, timeout=20) as guest:
                guest.sendall(os.urandom(bootstrap.PREFIX_NBYTES))
                with contextlib.suppress(ConnectionResetError):
                    assert guest.recv(1) == b""
        assert sum("no ucx end" in record.getMessage() for record in caplog.records) == 1


def test_other_users_of_this_machine_are_refused_at_both_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner = 4242
    monkeypatch.setattr(peer_owner, "owner_of_peer", lambda _: owner)
    with contextlib.closing(UcxTransport().listen("ucx://127.0.0.1:0")) as server:
        url = server.address
        with pytest.raises(AuthError, match=r"lets this process not in.*uid 4242.*allow_uid=4242"):
            UcxTransport().connect(url, deadline_in(20))
    assert "allow_uid=4242" in caplog.text
    with contextlib.closing(UcxTransport().listen("ucx://127.0.0.1:0?allow_uid=4242")) as server:
        assert parse_url(server.address).options == {"allow_uid": str(os.geteuid())}
        url = f"ucx://127.0.0.1:{parse_url(server.address).port}"
        with pytest.raises(AuthError, match=r"cannot connect.*uid 4242"):
            UcxTransport().connect(url, deadline_in(20))
        UcxTransport().connect(f"{url}?allow_uid=4242", deadline_in(20)).close()
        owner_unknown = pytest.raises(AuthError, match="allow_uid=any")
        monkeypatch.setattr(peer_owner, "owner_of_peer", lambda _: None)
        with owner_unknown:
            UcxTransport().connect(url, deadline_in(20))
    with contextlib.closing(UcxTransport().listen("ucx://127.0.0.1:0?allow_uid=any")) as server:
        url = f"ucx://127.0.0.1:{parse_url(server.address).port}?allow_uid=any"
        UcxTransport().connect(url, deadline_in(20)).close()
