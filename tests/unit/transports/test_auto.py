from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, ConnectError, ConnectionClosedError, TransportError
from kvferry.transports import explain, get_transport, recent_choices
from kvferry.transports.auto import AutoListener, AutoSharedConnection, place, port, side, transport
from kvferry.transports.auto.choosing import rank
from kvferry.transports.auto.offers import MAGIC, Ask, Offer, Offers, pack
from kvferry.transports.auto.options import parse_auto
from kvferry.transports.base import Connection, SharedMemoryConnection
from kvferry.transports.choices import announce_region, withdraw_region
from kvferry.transports.ucx import rdma
from kvferry.wire import Channel, ChannelOptions, ChannelServer
from kvferry.wire.messages import Describe

_URL = "auto://127.0.0.1:0"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(rdma, "_DEVICES", tmp_path / "no-infiniband")


def _soon() -> float:
    return deadline_in(20.0)


@contextlib.contextmanager
def _listening(options: str = "") -> Iterator[AutoListener]:
    with contextlib.closing(get_transport("auto").listen(_URL + options)) as listener:
        assert isinstance(listener, AutoListener)
        yield listener


@contextlib.contextmanager
def _met(url: str, listener: AutoListener) -> Iterator[tuple[Connection, Connection]]:
    scheme = url.partition("://")[0]
    with contextlib.closing(get_transport(scheme).connect(url, _soon())) as one:
        one.send([b"word"], _soon())
        with contextlib.closing(listener.accept(_soon())) as other:
            received = bytearray(4)
            other.recv_into([memoryview(received)], _soon())
            assert received == b"word"
            other.send([b"answer"], _soon())
            answer = bytearray(6)
            one.recv_into([memoryview(answer)], _soon())
            assert answer == b"answer"
            yield one, other


def _scheme(connection: Connection) -> str:
    choice = explain(connection)
    assert choice is not None
    return choice.scheme


# -- what is chosen ------------------------------------------------------------------------------------


def test_one_host_takes_unix_and_both_ends_can_say_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvferry.transports")
    with _listening() as listener:
        assert listener.offered == ["unix", "tcp"]
        for _ in range(3):
            with _met(listener.address, listener) as (one, other):
                assert isinstance(one, AutoSharedConnection)
                assert isinstance(other, SharedMemoryConnection)
                assert one.peer_credentials[0] == os.getpid()
                assert (_scheme(one), _scheme(other)) == ("unix", "unix")
                choice = explain(one)
                assert choice is not None
                assert choice.reason == "both ends are on one host"
                assert {one.scheme for one in choice.rejected} == {"ucx", "tcp"}
                assert not choice.fell_back
                assert other.peer_address.startswith("unix://")
        assert recent_choices()[listener.address].scheme == "unix"
        lines = [
            r.getMessage() for r in caplog.records if f"{listener.address}: unix, both" in r.getMessage()
        ]
        assert len(lines) == 1, "a choice is said once"
        assert "no RDMA" in lines[0]


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [("other-boot/mnt/net", "on different hosts"), ("", "cannot tell which host"), ("same", "containers")],
)
def test_another_host_or_container_takes_tcp(
    monkeypatch: pytest.MonkeyPatch, theirs: str, reason: str
) -> None:
    boot = place.host_identity().partition("/")[0]
    identity = f"{boot}/mnt:[1]/net:[1]" if theirs == "same" else theirs
    monkeypatch.setattr(transport, "host_identity", lambda: identity)
    with _listening() as listener, _met(listener.address, listener) as (one, other):
        assert (_scheme(one), _scheme(other)) == ("tcp", "tcp")
        assert not isinstance(one, SharedMemoryConnection)
        assert reason in str(explain(one))


_DIALLER = """
import sys, time
from kvferry.transports import connect, explain
connection = connect(sys.argv[1], time.monotonic() + 20)
connection.send([b"word"], time.monotonic() + 20)
print(explain(connection))
"""


@pytest.mark.parametrize("namespaces", [["--user", "--map-root-user"], ["--mount"], ["--pid", "--fork"]])
def test_a_process_in_other_namespaces_takes_tcp(namespaces: list[str]) -> None:
    """The socket's file can be seen and opened from there, but that says nothing of the container."""
    words = ["unshare", *namespaces, sys.executable, "-c"]
    with contextlib.suppress(OSError):
        if subprocess.run([*words, ""], check=False, capture_output=True, timeout=60).returncode == 0:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            with _listening() as listener:
                done = subprocess.run(
                    [*words, _DIALLER, listener.address],
                    check=True, capture_output=True, text=True, timeout=60, env=environment,
                )  # fmt: skip
                listener.accept(_soon()).close()
            assert done.stdout.startswith("tcp, ")
            assert "not unix: they are in different containers" in done.stdout
            return
    pytest.skip(f"this user may not unshare {' '.join(namespaces)}")


@pytest.mark.parametrize("options", ["?require=tcp", "?require=tcp&lanes=3", "?require=tcp&rate=1GB/s"])
def test_tcp_that_was_asked_for_keeps_its_options(options: str) -> None:
    with _listening(options) as listener, _met(listener.address, listener) as (one, other):
        assert _scheme(one) == _scheme(other) == "tcp"
        assert ("3 lanes" in getattr(one, "_inner")._name) == ("lanes" in options)  # noqa: B009


@pytest.mark.skipif(sys.platform != "linux", reason="ucxx has wheels for Linux only")
def test_ucx_is_taken_where_it_is_asked_for() -> None:
    with _listening("?require=ucx&fallback=tcp") as listener:
        assert listener.offered == ["ucx", "tcp"]
        with _met(listener.address, listener) as (one, other):
            assert (_scheme(one), _scheme(other)) == ("ucx", "ucx")
            assert other.peer_address == one.local_address


def test_who_dials_by_tcp_is_served_on_the_same_port() -> None:
    with _listening() as listener:
        for options in ("", "?lanes=2"):
            url = listener.address.replace("auto://", "tcp://") + options
            with _met(url, listener) as (one, other):
                assert explain(one) is None
                assert "without asking" in str(explain(other))


def test_a_listener_of_tcp_can_be_dialled() -> None:
    """It closes the connection on a question that it does not know; the next one is a plain one."""
    options = ChannelOptions(role="test", session="s")

    def serve(channel: Channel) -> None:
        while True:
            channel.receive(_soon())

    for scheme in ("tcp", "auto"):
        with contextlib.closing(ChannelServer(f"{scheme}://127.0.0.1:0", options, serve, name="t")) as server:
            for dialled in ("tcp", "auto"):
                url = server.address.replace(f"{scheme}://", f"{dialled}://")
                channel = Channel.connect(url, options, _soon())
                channel.send(Describe(), deadline=_soon())
                assert channel.shares_memory == (scheme == dialled == "auto")
                channel.close()
            if scheme == "tcp":
                assert "no auto listener" in str(recent_choices()[url])


def test_regions_of_both_ends_are_named_beside_the_choice() -> None:
    announce_region("suite")
    try:
        with _listening() as listener, _met(listener.address, listener) as ends:
            for end in ends:
                choice = explain(end)
                assert choice is not None
                assert choice.regions == ("suite",)
    finally:
        withdraw_region("suite")


# -- wishes that cannot be had (C119) --------------------------------------------------------------------


def test_rdma_without_any_is_refused_with_asked_found_and_remedy() -> None:
    with pytest.raises(ConfigError) as caught:
        get_transport("auto").listen(f"{_URL}?require=rdma")
    text = str(caught.value)
    assert "asked for rdma" in text
    assert "found tcp" in text
    assert "RDMA device" in text
    assert "fallback=tcp" in text
    with _listening() as listener, pytest.raises(ConnectError) as refused:
        get_transport("auto").connect(f"{listener.address}?require=rdma", _soon())
    assert "asked for rdma, found unix, tcp" in str(refused.value)
    assert "RDMA device" in str(refused.value)
    assert "fallback=tcp" in str(refused.value)


def test_rdma_with_a_fallback_runs_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with _listening("?require=rdma&fallback=tcp") as listener:
        assert listener.offered == ["tcp"]
        for _ in range(3):
            with _met(listener.address, listener) as (one, _):
                choice = explain(one)
                assert choice is not None
                assert choice.scheme == "tcp"
                assert choice.fell_back
        said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert len(said) == 2, "once for listening, once for dialling"
        assert all("fell back to tcp" in line and "RDMA device" in line for line in said)


@pytest.mark.parametrize("fallback", ["", "?fallback=tcp"])
def test_what_was_chosen_and_fails_is_replaced_only_if_allowed(
    monkeypatch: pytest.MonkeyPatch, fallback: str
) -> None:
    monkeypatch.setattr(side.Tickets, "take", lambda _self, _ticket: None)
    with _listening() as listener:
        if fallback:
            with _met(listener.address + fallback, listener) as (one, _):
                choice = explain(one)
                assert choice is not None
                assert choice.fell_back
                assert choice.scheme == "tcp"
                assert "it failed" in choice.rejected[0].reason
            return
        with pytest.raises(ConnectError, match=r"chose unix, but it failed.*fallback=tcp"):
            get_transport("auto").connect(listener.address, _soon())


@pytest.mark.parametrize(
    "options",
    [
        "?require=infiniband",
        "?fallback=unix,inproc",
        "?fallback=tcp,tcp",
        "?lanes=99",
        "?rate=fast",
        "?requires=rdma",
    ],
)
def test_wrong_options_are_refused_by_name(options: str) -> None:
    with pytest.raises(ConfigError, match=options[1:].partition("=")[0]):
        parse_auto(_URL + options)


# -- the ranking itself ----------------------------------------------------------------------------------

_HERE = "boot/mnt/net"


def _answer(*offers: Offer) -> Offers:
    return Offers(host=_HERE, offers=list(offers))


@pytest.mark.parametrize(
    ("options", "rdma_here", "rdma_there", "first"),
    [
        ("", "", True, "ucx"),
        ("", "none here", True, "tcp"),
        ("", "", False, "tcp"),
        ("?rate=1GB/s", "", True, "tcp"),
        ("?require=rdma", "", True, "ucx"),
        ("?require=rdma", "", False, None),
        ("?require=rdma&fallback=tcp", "none here", True, "tcp"),
        ("?require=ucx", "", False, "ucx"),
    ],
)
def test_ucx_is_taken_where_both_have_rdma(
    options: str, rdma_here: str, rdma_there: bool, first: str | None
) -> None:
    answer = _answer(Offer(scheme="ucx", port=1, rdma=rdma_there), Offer(scheme="tcp"))
    ranking = rank(answer, "elsewhere", parse_auto("auto://h:1" + options)[1], lambda _require: rdma_here)
    assert (ranking.usable[0][0].scheme if ranking.usable else None) == first


def test_unix_needs_the_same_file_and_user(tmp_path: Path) -> None:
    here = tmp_path / "s"
    here.touch()
    found = here.stat()
    good = Offer(scheme="unix", path=str(here), inode=(found.st_dev, found.st_ino), uid=os.geteuid())
    options = parse_auto(_URL)[1]
    assert rank(_answer(good), _HERE, options).usable
    for bad, reason in (
        (Offer(scheme="unix", path=good.path, inode=(1, 1), uid=good.uid), "another file"),
        (Offer(scheme="unix", path=f"{here}x", inode=good.inode, uid=good.uid), "cannot be found"),
        (Offer(scheme="unix", path=good.path, inode=good.inode, uid=good.uid + 1), "as uid"),
    ):
        ranking = rank(_answer(bad), _HERE, options)
        assert not ranking.usable
        assert reason in ranking.rejected[0].reason


def test_what_a_peer_writes_cannot_forge_lines_of_the_log() -> None:
    answer = Offers(host=_HERE, offers=[], lacking={"tcp": "no\nforged\x1b[2J" + "x" * 1000})
    (*_, tcp) = rank(answer, _HERE, parse_auto(_URL)[1]).rejected
    assert tcp.reason.isprintable()
    assert len(tcp.reason) < 600
    evil = Offer(scheme="unix", path="/x\0y", inode=(1, 1), uid=os.geteuid())
    assert "is no path" in rank(_answer(evil), _HERE, parse_auto(_URL)[1]).rejected[0].reason


# -- the port --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _raw(listener: AutoListener) -> Iterator[socket.socket]:
    number = int(listener.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", number), timeout=20) as sock:
        yield sock


@pytest.mark.parametrize(
    "said",
    [
        struct.pack("<8sHI", MAGIC, 1, 1 << 20),
        struct.pack("<8sHI", MAGIC, 9, 1),
        struct.pack("<8sHI", MAGIC, 1, 3) + b"\xc1\xc1\xc1",
        struct.pack("<8sHI", MAGIC, 1, 1) + b"\x80",
    ],
)
def test_a_question_that_is_none_is_turned_away(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(port, "_SAY_S", 1000.0)  # at once, not when its time is over
    with _listening() as listener, _raw(listener) as sock:
        sock.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
        with _met(listener.address, listener):
            pass


def test_a_question_byte_by_byte_is_answered() -> None:
    with _listening() as listener, _raw(listener) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in pack(Ask(host="x")):
            sock.sendall(bytes([byte]))
        assert sock.recv(8) == MAGIC


@pytest.mark.parametrize("said", [b"", MAGIC[:3]])
def test_a_peer_that_waits_for_the_first_word_is_a_plain_one(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(port, "_SAY_S", 0.1)
    with _listening() as listener, _raw(listener) as sock:
        sock.sendall(said)
        with contextlib.closing(listener.accept(_soon())) as other:
            other.send([b"hello"], _soon())
            assert sock.recv(5) == b"hello"


def test_a_stream_that_ends_within_its_first_word_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "_SAY_S", 1000.0)
    with _listening() as listener, _raw(listener) as sock:
        sock.sendall(MAGIC[:3])
        sock.shutdown(socket.SHUT_WR)
        other = listener.accept(_soon())
        with contextlib.closing(other), pytest.raises(ConnectionClosedError, match="3 of 4"):
            other.recv_into([memoryview(bytearray(4))], _soon())


def test_one_broken_connection_does_not_end_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    real = port.Port._find_out
    broken: list[port._Guest] = []

    def fail_once(self: port.Port, guest: port._Guest) -> bool:
        if not broken:
            broken.append(guest)
            raise OSError("from the kernel")
        return real(self, guest)

    monkeypatch.setattr(port.Port, "_find_out", fail_once)
    with _listening() as listener:
        with _raw(listener) as sock, contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
        with _met(listener.address, listener):
            assert broken


def test_a_listener_whose_thread_failed_is_closed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_self: port.Port) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(port.Port, "turn", fail)
    listener = get_transport("auto").listen(_URL)
    with pytest.raises(ConnectionClosedError):
        listener.accept(_soon())
    listener.close()
    assert not list(Path(os.environ["XDG_RUNTIME_DIR"], "kvferry").glob("auto-*"))
    assert not [one for one in threading.enumerate() if one.name.startswith("kvferry-auto")]


def test_a_half_asked_question_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "_SAY_S", 0.1)
    with _listening() as listener, _raw(listener) as sock:
        sock.sendall(MAGIC)
        assert sock.recv(1) == b""


def test_the_socket_beside_the_port_is_closed_to_who_has_no_ticket() -> None:
    with _listening() as listener:
        (path,) = Path(os.environ["XDG_RUNTIME_DIR"], "kvferry").glob("auto-*")
        assert path.stat().st_mode & 0o777 == 0o600
        with contextlib.closing(get_transport("unix").connect(f"unix://{path}", _soon())) as one:
            one.send([b"0123456789abcdef"], _soon())
            with pytest.raises(TransportError):
                one.recv_into([memoryview(bytearray(1))], _soon())
        with _met(listener.address, listener):
            pass
    assert not path.exists()


def test_a_folder_that_others_may_use_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "kvferry").mkdir(mode=0o755)
    with _listening() as listener, _met(listener.address, listener) as (one, _):
        assert _scheme(one) == "tcp"
        assert "not a folder that only uid" in str(explain(one))


def test_sockets_of_killed_processes_are_removed(tmp_path: Path) -> None:
    old = time.time() - 3600
    with _listening():
        folder = tmp_path / "kvferry"
        dead, young = folder / "auto-1-dead", folder / "auto-1-young"
        for path in (dead, young):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(str(path))
        os.utime(dead, (old, old))
        for path in folder.iterdir():
            if path not in (dead, young):
                os.utime(path, (old, old))  # alive, however old
        with _listening() as second, _met(second.address, second):
            assert not dead.exists()
            assert young.exists()
            assert len(list(folder.iterdir())) == 3


def test_the_advertised_port_is_the_one_that_was_bound() -> None:
    """C156: a taken port is an error, never another one under the name of the one asked."""
    with _listening() as listener:
        with pytest.raises(ConnectError, match="choose another"):
            get_transport("auto").listen(listener.address)
        with _raw(listener) as sock:
            assert sock.getpeername()[1] == int(listener.address.rpartition(":")[2])
