from __future__ import annotations

import array
import contextlib
import logging
import os
import resource
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    AuthError,
    ConfigError,
    ConnectError,
    ConnectionClosedError,
    ProtocolError,
    TransferTimeoutError,
    TransportError,
)
from kvferry.testing.transports_common import open_descriptors
from kvferry.transports import connect, listen, unix, unix_options, unix_path
from kvferry.transports.base import Listener
from kvferry.transports.unix import UnixConnection

LONG_S = 30.0
STRANGER = 4242


def soon() -> float:
    return deadline_in(LONG_S)


@pytest.fixture
def folder() -> Iterator[Path]:
    # not tmp_path: a socket's path has at most 107 bytes
    with tempfile.TemporaryDirectory(prefix="kvf-") as name:
        yield Path(name)


@pytest.fixture
def url(folder: Path) -> str:
    return f"unix://{folder}/s"


def end(connection: object) -> UnixConnection:
    assert isinstance(connection, UnixConnection)
    return connection


@contextlib.contextmanager
def connected(url: str) -> Iterator[tuple[UnixConnection, UnixConnection]]:
    with contextlib.closing(listen(url)) as listener, contextlib.ExitStack() as stack:
        one = stack.enter_context(contextlib.closing(connect(listener.address, soon())))
        other = stack.enter_context(contextlib.closing(listener.accept(soon())))
        yield end(one), end(other)


def files(count: int) -> list[int]:
    return [os.memfd_create("test") for _ in range(count)]


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


# -- the file --------------------------------------------------------------------------------------


def test_the_file_is_for_the_own_user_and_goes_with_the_listener(folder: Path, url: str) -> None:
    old = os.umask(0)
    try:
        with contextlib.closing(listen(url)) as listener:
            assert stat.S_IMODE((folder / "s").stat().st_mode) == 0o600
            assert listener.address == url
    finally:
        os.umask(old)
    assert not (folder / "s").exists()


def test_a_stale_file_is_replaced(folder: Path, url: str) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "s"))
        dead.listen()
    with connected(url) as (one, other):
        one.send([b"x"], soon())
        other.recv_into([memoryview(bytearray(1))], soon())
        assert (folder / "s").exists()


def test_a_live_listener_is_left_alone(folder: Path, url: str) -> None:
    with contextlib.closing(listen(url)) as listener:
        with pytest.raises(ConnectError, match=rf"process {os.getpid()} of uid {os.geteuid()} listens there"):
            listen(url)
        assert (folder / "s").exists()
        with contextlib.closing(connect(url, soon())), contextlib.closing(listener.accept(soon())):
            pass


def test_a_live_listener_whose_queue_is_full_is_left_alone(folder: Path, url: str) -> None:
    with socket.socket(socket.AF_UNIX) as busy, contextlib.ExitStack() as stack:
        busy.bind(str(folder / "s"))
        busy.listen(0)
        waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
        waiting.connect(str(folder / "s"))
        with pytest.raises(ConnectError, match="listens there; stop it"):
            listen(url)
        started = time.monotonic()
        with pytest.raises(ConnectError, match="queue is full"):
            connect(url, deadline_in(0.1))
        assert time.monotonic() - started >= 0.09


def test_something_else_in_its_place_is_left_alone(folder: Path, url: str) -> None:
    (folder / "s").write_text("mine")
    with pytest.raises(ConnectError, match="no socket lies there; choose another path"):
        listen(url)
    assert (folder / "s").read_text() == "mine"


def test_close_leaves_the_file_of_another_listener(folder: Path, url: str) -> None:
    with contextlib.closing(listen(url)):
        (folder / "s").unlink()
        with contextlib.closing(listen(url)) as second:
            pass
        second.close()
        third = listen(url)
    assert (folder / "s").exists(), "the first one's close came after the third one had the name"
    third.close()


def test_many_listeners_start_at_once_and_one_wins(
    folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "s"))
    original = unix_path._clear

    def slow(path: str) -> None:
        original(path)
        time.sleep(0.01)  # what the lock on the folder has to cover

    monkeypatch.setattr(unix_path, "_clear", slow)

    def attempt(_: int) -> Listener | None:
        try:
            return listen(url)
        except ConnectError:
            return None

    with ThreadPoolExecutor(8) as pool:
        winners = [found for found in pool.map(attempt, range(8)) if found is not None]
    assert len(winners) == 1
    with contextlib.closing(winners[0]), contextlib.closing(connect(url, soon())):
        pass


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("unix:///no/such/folder/s", "make the folder first"),
        ("unix:///proc/s", "cannot listen on unix:///proc/s"),
    ],
)
def test_folders_that_cannot_be_used(text: str, match: str) -> None:
    with pytest.raises(ConnectError, match=match):
        listen(text)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("unix://" + "/x" * 60, "at most 107 bytes"),
        ("unix://relative", "not absolute"),
        ("unix:///s?speed=1", "'speed' is not an option of unix"),
        ("unix:///s?rate=fast", "rate"),
        ("unix:///s?spin=1s", "may be 0.01 s at most"),
        ("unix:///s?spin=quick", "not a time"),
        ("unix:///s?allow_uid=root", "write numbers"),
        ("unix:///s?allow_gid=1,,2", "write numbers"),
        ("unix:///s?allow_uid=4294967295", "write numbers"),
        ("unix://@abstract", "abstract names have no permissions, write unix:///path"),
    ],
)
def test_addresses_that_make_no_sense(text: str, match: str) -> None:
    for call in (lambda: listen(text), lambda: connect(text, soon())):
        with pytest.raises(ConfigError, match=match):
            call()


def test_dialling_nobody(folder: Path, url: str) -> None:
    with pytest.raises(ConnectError, match="no such socket"):
        connect(url, soon())
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "s"))
    with pytest.raises(ConnectError, match="nobody listens there"):
        connect(url, soon())


@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_SEQPACKET])
def test_a_socket_of_another_kind_is_named_and_left_alone(folder: Path, url: str, kind: int) -> None:
    with socket.socket(socket.AF_UNIX, kind) as other:
        other.bind(str(folder / "s"))
        if kind == socket.SOCK_SEQPACKET:
            other.listen()
        with pytest.raises(ConnectError, match=r"that is a socket of another kind, .*; check the path"):
            connect(url, soon())
        with pytest.raises(ConnectError, match=r"a socket of another kind is there, .*; choose another path"):
            listen(url)
        assert (folder / "s").exists()


def test_dialling_what_is_no_socket(folder: Path) -> None:
    (folder / "file").touch()
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    for name in ("file", "folder", "fifo"):
        with pytest.raises(ConnectError, match=f"{name}: that is no socket; check the path"):
            connect(f"unix://{folder / name}", soon())


# -- who may connect -----------------------------------------------------------------------------------


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every peer is another user, as the listener sees it."""
    monkeypatch.setattr(unix, "peer_credentials", lambda _: (1, STRANGER, STRANGER))


def refused(url: str, *, send_first: bool) -> str:
    """What a client is told that its listener does not let in."""
    with (
        contextlib.closing(listen(url)) as listener,
        ThreadPoolExecutor(1) as pool,
        contextlib.closing(_dial(url)) as client,
    ):
        into = [memoryview(bytearray(4))]
        waiting = None if send_first else pool.submit(client.recv_into, into, soon())
        with pytest.raises(TransferTimeoutError):
            listener.accept(deadline_in(0.05))
        call = (
            partial(client.send, [b"hello"], soon()) if waiting is None else partial(waiting.result, LONG_S)
        )
        with pytest.raises(AuthError) as caught:
            call()
        return str(caught.value)


def _dial(url: str) -> UnixConnection:
    """A client that trusts whoever listens."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(url.removeprefix("unix://").partition("?")[0])
    return UnixConnection(
        sock,
        local_address="a",
        peer_address="b",
        credentials=(1, 0, 0),
        admitted=False,
    )


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize("send_first", [False, True])
def test_strangers_are_told_why_and_logged(
    url: str,
    caplog: pytest.LogCaptureFixture,
    send_first: bool,
) -> None:
    before = open_descriptors()
    with caplog.at_level(logging.WARNING, unix.__name__):
        text = refused(url, send_first=send_first)
    assert f"lets in uid {os.geteuid()} and root" in text
    assert f"allow_uid={STRANGER}" in text
    assert f"uid {STRANGER}" in caplog.text
    assert open_descriptors() <= before


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize("option", ["allow_uid=7", "allow_gid=7,8"])
def test_others_must_be_named(url: str, option: str) -> None:
    assert option.replace("allow_", "").replace("=", " ").replace(",", ", ") in refused(
        f"{url}?{option}", send_first=False
    )


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize("option", [f"allow_uid=7,{STRANGER}", f"allow_gid={STRANGER}"])
def test_named_users_and_groups_are_let_in(folder: Path, url: str, option: str) -> None:
    with contextlib.closing(listen(f"{url}?{option}&spin=20us")) as listener:
        assert stat.S_IMODE((folder / "s").stat().st_mode) == 0o666
        # who dials that must trust this user in turn
        assert set(listener.address.removeprefix(f"{url}?").split("&")) == {
            f"allow_uid={os.geteuid()}",
            "spin=20us",
        }
        with (
            contextlib.closing(connect(f"{url}?{option}", soon())) as one,
            contextlib.closing(listener.accept(soon())) as other,
        ):
            one.send([b"x"], soon())
            other.recv_into([memoryview(bytearray(1))], soon())


def test_further_groups_count() -> None:
    if not (groups := set(os.getgroups()) - {os.getgid()}):
        pytest.skip("this process has no further group")
    one, other = socket.socketpair()
    with one, other:
        assert groups <= set(unix_options.peer_groups(one))


@pytest.mark.usefixtures("stranger")
def test_an_impostor_is_not_talked_to(url: str) -> None:
    with contextlib.closing(listen(url)):
        with pytest.raises(AuthError, match=f"uid {STRANGER}, gid {STRANGER} listens"):
            connect(url, soon())
        connect(f"{url}?allow_uid={STRANGER}", soon()).close()


_AS_NOBODY = """
import os, socket, sys
os.setgroups([])
os.setuid(65534)
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
s.settimeout(20)
print(s.recv(2000)[16:].decode())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_of_this_machine(url: str, folder: Path) -> None:
    """The permissions of this socket open it to all: what holds is who the peer is."""
    folder.chmod(0o755)
    with contextlib.closing(listen(f"{url}?allow_uid=7")) as listener, ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(listener.accept, soon())
        child = subprocess.run(
            [sys.executable, "-c", _AS_NOBODY, str(folder / "s")],
            capture_output=True,
            text=True,
            timeout=LONG_S,
            check=True,
        )
        listener.close()
        with pytest.raises(ConnectionClosedError):
            accepting.result(LONG_S)
    assert "has uid 65534" in child.stdout


# -- descriptors ---------------------------------------------------------------------------------------


def attach(connection: UnixConnection, data: bytes, fds: list[int]) -> None:
    """Send descriptors as a peer does that knows no rules."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    connection._guard.sock.sendmsg([data], rights)


@pytest.mark.parametrize("parts", [1, 3])
def test_descriptors_among_ordinary_bytes_are_closed_and_end_the_connection(url: str, parts: int) -> None:
    fds = files(3)
    with connected(url) as (one, other):
        before = open_descriptors()
        one.send([b"good"], soon())
        attach(one, b"bad!", fds)
        views = [memoryview(bytearray(8 // parts + 1))[: 8 // parts] for _ in range(parts)]
        with pytest.raises(ProtocolError, match="attached descriptors where none are due") as caught:
            other.recv_into(views, soon())
        assert caught.value.remote
        started = time.monotonic()
        for end in (one, other):
            with pytest.raises(ConnectionClosedError):
                end.recv_into([memoryview(bytearray(1))], soon())
        assert time.monotonic() - started < 5
        assert open_descriptors() <= before
    close_all(fds)


@pytest.mark.parametrize("marker", [b"\x02", b"\x00", b"\xff"])
def test_a_marker_that_lies(url: str, marker: bytes) -> None:
    fds = files(3)
    with connected(url) as (one, other):
        before = open_descriptors()
        attach(one, marker, fds)
        with pytest.raises(ProtocolError, match="3 are due"):
            other.recv_descriptors(3, soon())
        assert open_descriptors() <= before
    close_all(fds)


def test_too_few_files_may_be_open(url: str) -> None:
    fds = files(20)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connected(url) as (one, other):
        one.send_descriptors(fds, soon())
        before = open_descriptors()
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(fds) + 8, hard))
            with pytest.raises(TransportError, match="ulimit -n"):
                other.recv_descriptors(20, soon())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert open_descriptors() <= before
    close_all(fds)


def test_an_end_in_mid_way_leaves_none_open(url: str) -> None:
    fds = files(2)
    with connected(url) as (one, other):
        before = open_descriptors()
        attach(one, bytes([253]), fds * 126 + fds[:1])
        one.close()
        with pytest.raises(ConnectionClosedError, match="after 253 of 300 descriptors"):
            other.recv_descriptors(300, soon())
        assert open_descriptors() <= before
    close_all(fds)


def test_numbers_of_descriptors_that_make_no_sense(url: str) -> None:
    with connected(url) as (one, other):
        with pytest.raises(ValueError, match="no descriptors"):
            one.send_descriptors([], soon())
        with pytest.raises(ValueError, match="0 descriptors"):
            other.recv_descriptors(0, soon())


# -- the rest ------------------------------------------------------------------------------------------


def test_rate_holds_for_both_ends(url: str) -> None:
    with connected(f"{url}?rate=20MB/s") as ends, ThreadPoolExecutor(1) as pool:
        for one, other in (ends, ends[::-1]):
            received = memoryview(bytearray(2_000_000))
            started = time.monotonic()
            sending = pool.submit(one.send, [bytes(2_000_000)], soon())
            other.recv_into([received], soon())
            sending.result(LONG_S)
            assert time.monotonic() - started >= 0.08


def test_peers_are_named_by_their_process(url: str) -> None:
    with connected(url) as (one, other):
        assert one.peer_address == url
        assert one.local_address == other.peer_address == f"{url}?uid={os.geteuid()}&pid={os.getpid()}"
        assert one.peer_credentials == (os.getpid(), os.geteuid(), os.getegid())


def test_a_refusal_is_only_heard_at_the_start(url: str) -> None:
    """Payload is whatever it is: later bytes that look like a refusal are just bytes."""
    data = unix._REFUSED + b"text"
    with connected(url) as (one, other):
        for sender, receiver in ((one, other), (other, one), (other, one)):
            sender.send([b"first"], soon())
            got = bytearray(5)
            receiver.recv_into([memoryview(got)], soon())
            sender.send([data], soon())
            got = bytearray(len(data))
            receiver.recv_into([memoryview(got)], soon())
            assert got == data


def test_credentials_are_three_numbers() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert unix_path.peer_credentials(one) == (os.getpid(), os.geteuid(), os.getegid())
        assert struct.calcsize("3i") == 12
