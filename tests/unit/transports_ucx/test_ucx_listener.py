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
from kvferry.core.errors import ConnectError, ConnectionClosedError, TransportError
from kvferry.transports.ucx import UcxTransport, bootstrap, listener
from kvferry.transports.ucx.bootstrap import Preamble, pack_preamble, parse_body, parse_prefix, problem_with
from kvferry.transports.ucx.context import get_context
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
        (b"kvf-ucx\x01\x03\x00abc", False, "cannot be read"),
        (b"kvf-ucx\x01\xff\xff", False, "no ucx end"),
        (b"", True, "ended the connection"),
    ],
)
def test_who_is_dialled_is_no_ucx_listener(answer: bytes, end: bool, reason: str) -> None:
    """C067."""
    get_context(Options())  # loading UCX takes longer than the deadline
    with silent_server(answer, end=end) as url:
        started = time.monotonic()
        with pytest.raises(ConnectError, match=reason) as caught:
            UcxTransport().connect(url, deadline_in(0.3))
        assert url in str(caught.value)
        assert time.monotonic() - started < 3


def test_guests_without_manners_keep_nobody_out(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "PREAMBLE_S", 0.2)
    with (
        contextlib.closing(UcxTransport().listen("ucx://127.0.0.1:0")) as server,
        contextlib.ExitStack() as stack,
    ):
        port = parse_url(server.address).port
        guests = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port or 0), timeout=10))
            for _ in range(4)
        ]
        guests[1].sendall(b"kv")
        guests[2].sendall(b"GET / HTTP/1.1\r\n\r\n")
        guests[3].sendall(b"kvf-ucx\x01\x02\x00\xc1\xc1")
        one = stack.enter_context(contextlib.closing(UcxTransport().connect(server.address, deadline_in(10))))
        other = stack.enter_context(contextlib.closing(server.accept(deadline_in(10))))
        one.send([b"x"], deadline_in(10))
        other.recv_into([memoryview(bytearray(1))], deadline_in(10))
        for guest in guests:
            with contextlib.suppress(ConnectionResetError):
                assert guest.recv(1) == b"", "is turned away in the end"
    assert "said nothing complete" in caplog.text


def test_guests_that_go_away_at_once_harm_nobody() -> None:
    preamble = pack_preamble(bootstrap.own_preamble(get_context(Options())))
    with contextlib.closing(UcxTransport().listen("ucx://127.0.0.1:0")) as server:
        place = ("127.0.0.1", parse_url(server.address).port or 0)
        for said in range(len(preamble) + 1):
            with socket.create_connection(place, timeout=10) as guest:
                guest.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                guest.sendall(preamble[:said])
        one = UcxTransport().connect(server.address, deadline_in(10))
        one.send([b"x"], deadline_in(10))
        for _ in range(5):
            with (
                contextlib.closing(server.accept(deadline_in(10))) as other,
                contextlib.suppress(TransportError),
            ):
                other.recv_into([memoryview(bytearray(1))], deadline_in(10))
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
            UcxTransport().connect(url, deadline_in(10))
        assert "no transport in common" in str(caught.value)
        assert "cma, posix" in str(caught.value)
        assert "tcp" in str(caught.value)
        assert "UCX_TLS" in str(caught.value)
    assert "no transport in common" in caplog.text


def test_what_two_ends_have_in_common() -> None:
    def preamble(host: str, *names: str) -> Preamble:
        return Preamble(host=host, ucx="1.21.0", transports=list(names))

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
    preamble = Preamble(host="h", ucx="1.21.0", transports=["tcp"], refused="no")
    data = pack_preamble(preamble)
    assert parse_prefix(data[: bootstrap.PREFIX_NBYTES]) == len(data) - bootstrap.PREFIX_NBYTES
    assert parse_body(data[bootstrap.PREFIX_NBYTES :]) == preamble


def test_address_carries_options_but_not_those_of_this_host() -> None:
    with contextlib.closing(UcxTransport().listen("ucx://127.0.0.1:0?tls=tcp&net_devices=lo")) as server:
        assert parse_url(server.address).options == {"tls": "tcp"}
        one = UcxTransport().connect(server.address, deadline_in(10))
        other = server.accept(deadline_in(10))
        one.close()
        with pytest.raises(ConnectionClosedError):
            other.recv_into([memoryview(bytearray(1))], deadline_in(10))
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
