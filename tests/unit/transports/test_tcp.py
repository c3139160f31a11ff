from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from kvferry.core.address import parse_url
from kvferry.core.clock import deadline_in
from kvferry.core.errors import (
    ConfigError,
    ConnectError,
    ConnectionClosedError,
    TransferTimeoutError,
    TransportError,
)
from kvferry.testing.threads import Blocked
from kvferry.transports import connect, ip, listen, streams, tcp
from kvferry.transports.base import Connection, Listener
from kvferry.transports.hashed_socket import HashedSocketConnection
from kvferry.transports.sockets import GuardedSocket, SocketConnection

LOCAL = "tcp://127.0.0.1:0"
LONG_S = 30.0


@contextlib.contextmanager
def connected(url: str = LOCAL) -> Iterator[tuple[Connection, Connection]]:
    with contextlib.closing(listen(url)) as listener, contextlib.ExitStack() as stack:
        one = stack.enter_context(contextlib.closing(connect(listener.address, deadline_in(LONG_S))))
        other = stack.enter_context(contextlib.closing(listener.accept(deadline_in(LONG_S))))
        yield one, other


def socket_of(end: Connection | Listener) -> socket.socket:
    assert isinstance(end, SocketConnection | tcp.TcpListener)
    return end._guard.sock


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


# -- the socket ----------------------------------------------------------------------------------------


def test_socket_options() -> None:
    with connected() as ends:
        for sock in map(socket_of, ends):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
            assert fcntl.fcntl(sock, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            assert not sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr")


class _Sock:
    """As much of a socket as says who is at its ends, and what its congestion control is."""

    def __init__(self, peer: str, control: bytes) -> None:
        self._peer, self.control = peer, control

    def getsockname(self) -> tuple[str, int]:
        return "10.0.0.1", 1

    def getpeername(self) -> tuple[str, int]:
        if not self._peer:
            raise OSError(errno.ENOTCONN, "not connected")
        return self._peer, 2

    def getsockopt(self, level: int, option: int, nbytes: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        return self.control.ljust(nbytes, b"\0")

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        self.control = value


@pytest.mark.parametrize(
    ("peer", "control", "then"),
    [
        ("10.0.0.1", b"bbr", b"reno"),
        ("10.0.0.1", b"bbr2", b"reno"),
        ("10.0.0.1", b"cubic", b"cubic"),
        ("10.0.0.2", b"bbr", b"bbr"),
        ("", b"bbr", b"bbr"),
    ],
)
def test_no_bbr_within_one_machine(peer: str, control: bytes, then: bytes) -> None:
    sock = _Sock(peer, control)
    ip.avoid_bbr_on_loopback(cast("socket.socket", sock))
    assert sock.control == then


def test_listener_is_not_inherited() -> None:
    with contextlib.closing(listen(LOCAL)) as listener:
        assert fcntl.fcntl(socket_of(listener), fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_abort_resets() -> None:
    with contextlib.closing(listen(LOCAL)) as listener:
        address = parse_url(listener.address)
        assert address.port is not None
        with socket.create_connection((address.host, address.port)) as peer:
            peer.settimeout(LONG_S)
            listener.accept(deadline_in(LONG_S)).abort()
            with pytest.raises(ConnectionResetError):
                peer.recv(1)


def test_reset_by_the_peer_is_an_end() -> None:
    with contextlib.closing(listen(LOCAL)) as listener:
        address = parse_url(listener.address)
        assert address.port is not None
        with socket.create_connection((address.host, address.port)) as peer:
            accepted = listener.accept(deadline_in(LONG_S))
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.closing(accepted):
            with pytest.raises(ConnectionClosedError):
                accepted.recv_into([memoryview(bytearray(1))], deadline_in(LONG_S))
            with pytest.raises(ConnectionClosedError):
                accepted.send([b"x"], deadline_in(LONG_S))


def test_descriptor_stays_while_a_thread_is_inside() -> None:
    one, other = socket.socketpair()
    with other:
        guard = GuardedSocket(one)
        guard.enter("x")
        assert guard.begin_close()
        assert not guard.begin_close()
        guard.leave()
        assert one.fileno() >= 0, "the number could go to another file under the thread's feet"
        assert guard.reenter(), "abort still reaches it"
        guard.leave()
        guard.leave()
        assert one.fileno() < 0
        assert not guard.reenter()
        with pytest.raises(ConnectionClosedError, match="the line is closed"):
            guard.enter("the line")


def test_foreign_error_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected() as (one, _):
        assert isinstance(one, SocketConnection)
        error = one._failed(OSError(errno.ENOBUFS, "No buffer space"), "sending")
        assert type(error) is TransportError
        assert "No buffer space" in str(error)
        assert one.local_address in str(error)


def test_close_is_bounded_though_the_peer_floods(pool: ThreadPoolExecutor) -> None:
    with connected() as (one, other):
        stop = threading.Event()

        def flood() -> None:
            while not stop.is_set():
                other.send([bytes(1 << 20)], deadline_in(LONG_S))

        flooding = pool.submit(flood)
        filling = Blocked(pool, lambda: one.send([bytes(96 << 20)], deadline_in(LONG_S)))
        started = time.monotonic()
        one.close()
        taken = time.monotonic() - started  # a quarter of a second for what is unsent
        filling.assert_ends_with(ConnectionClosedError)
        stop.set()
        assert isinstance(flooding.exception(timeout=20), ConnectionClosedError | None)
        assert taken < 10


def test_close_waits_for_what_is_unsent(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """With bytes of the peer under way, closing at once would reset what the kernel still holds."""
    monkeypatch.setattr("kvferry.transports.sockets._FLUSH_S", 20.0)
    data = random.Random(1).randbytes(1_000_000)
    received = bytearray(len(data))
    with connected() as (one, other):
        socket_of(one).setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        flooding = pool.submit(one.send, [bytes(96 << 20)], deadline_in(LONG_S))
        other.send([data], deadline_in(LONG_S))
        closing = Blocked(pool, other.close)
        one.recv_into([memoryview(received)], deadline_in(LONG_S))
        closing.future.result(timeout=LONG_S)
        assert isinstance(flooding.exception(timeout=LONG_S), ConnectionClosedError | None)
    assert received == data


def test_abort_cuts_a_close_short(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.transports.sockets._FLUSH_S", 20.0)
    with connected() as (one, _):
        filling = Blocked(pool, lambda: one.send([bytes(96 << 20)], deadline_in(60)))
        closing = Blocked(pool, one.close)
        one.abort()
        filling.assert_ends_with(ConnectionClosedError)
        closing.future.result(timeout=20)


# -- addresses -----------------------------------------------------------------------------------------


def test_advertised_port_is_the_bound_one() -> None:
    with contextlib.closing(listen("tcp://localhost:0")) as listener:
        host, port = socket_of(listener).getsockname()[:2]
        assert listener.address == f"tcp://{'[::1]' if host == '::1' else host}:{port}"


def test_port_in_use_is_an_error_not_another_port() -> None:
    """Case C156: nothing else may be bound while the asked port is advertised."""
    with socket.create_server(("127.0.0.1", 0)) as occupier:
        port = occupier.getsockname()[1]
        with pytest.raises(ConnectError) as caught:
            listen(f"tcp://127.0.0.1:{port}")
    message = str(caught.value)
    assert f"tcp://127.0.0.1:{port}" in message
    assert "choose another port (0 takes a free one)" in message
    listener = listen(f"tcp://127.0.0.1:{port}")
    listener.close()
    assert parse_url(listener.address).port == port


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "[::]"])  # what it advertises is what is under test
def test_wildcard_is_advertised_as_a_host_that_can_be_dialled(wildcard: str) -> None:
    try:
        listener = listen(f"tcp://{wildcard}:0")
    except ConnectError as error:
        pytest.skip(f"no such address family here: {error}")
    with contextlib.closing(listener):
        address = parse_url(listener.address)
        assert address.host not in ("0.0.0.0", "::")
        assert address.port == socket_of(listener).getsockname()[1]
        connect(listener.address, deadline_in(LONG_S)).close()


def test_wildcard_on_a_machine_without_a_network_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ip, "_ROUTED", {socket.AF_INET: "255.255.255.255"})
    assert ip._outgoing_host(socket.AF_INET) == "127.0.0.1"


def test_address_this_machine_does_not_have() -> None:
    with pytest.raises(ConnectError, match="this machine has no such address"):
        listen("tcp://192.0.2.1:0")


def test_zone_of_a_link_local_address() -> None:
    index = socket.if_nametoindex("lo")
    [(family, sockaddr)] = ip.addresses_of(parse_url("tcp://[fe80::1%lo]:9"), deadline_in(20))
    assert family == socket.AF_INET6
    assert sockaddr[3] == index
    assert ip.url_of("tcp", ("fe80::1", 9, 0, index)) == "tcp://[fe80::1%25lo]:9"
    assert ip._host_text(("fe80::1", 9, 0, 99999)) == "fe80::1%99999"


def test_port_0_cannot_be_dialled() -> None:
    with pytest.raises(ConfigError, match="port 0"):
        connect(LOCAL, deadline_in(LONG_S))


@pytest.mark.parametrize("rate", ["fast", "0", "10G", "-1"])
def test_malformed_rate(rate: str) -> None:
    with pytest.raises(ConfigError) as caught:
        listen(f"{LOCAL}?rate={rate}")
    assert f"rate={rate}" in str(caught.value)
    assert "10Gbit" in str(caught.value)


def test_misspelt_option() -> None:
    with pytest.raises(ConfigError, match="did you mean rate"):
        listen(f"{LOCAL}?raet=1")


@pytest.mark.parametrize("spin", ["quick", "11ms", "-1us"])
def test_malformed_spin(spin: str) -> None:
    with pytest.raises(ConfigError, match=r"spin|time") as caught:
        listen(f"{LOCAL}?spin={spin}")
    assert f"spin={spin}" in str(caught.value)


def test_spin_is_part_of_the_address() -> None:
    with connected(f"{LOCAL}?spin=20us") as pair:
        assert [one.spin_s for one in pair if isinstance(one, HashedSocketConnection)] == [20e-6] * 2
        assert "spin=20us" in pair[0].peer_address


def test_rate_is_part_of_the_address() -> None:
    with contextlib.closing(listen(f"{LOCAL}?rate=1GB/s")) as listener:
        assert listener.address.endswith("?rate=1GB/s")


# -- dialling ------------------------------------------------------------------------------------------


def test_unknown_host() -> None:
    with pytest.raises(ConnectError, match="check its spelling"):
        connect(f"tcp://{'a' * 64}:9", deadline_in(LONG_S))


def _resolve_to(monkeypatch: pytest.MonkeyPatch, *sockaddrs: tuple[str, int]) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", a) for a in sockaddrs]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: found)


@contextlib.contextmanager
def _closed_port(host: str) -> Iterator[int]:
    """Taken, so that nobody else listens there."""
    with socket.socket() as holder:
        holder.bind((host, 0))
        port: int = holder.getsockname()[1]
        yield port


def test_every_address_of_a_host_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(listen(LOCAL)) as listener, _closed_port("127.0.0.2") as closed:
        port = socket_of(listener).getsockname()[1]
        _resolve_to(monkeypatch, ("127.0.0.2", closed), ("127.0.0.1", port))
        connect("tcp://host:9", deadline_in(LONG_S)).close()


def test_message_has_each_address_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with _closed_port("127.0.0.2") as one, _closed_port("127.0.0.3") as other:
        _resolve_to(monkeypatch, ("127.0.0.2", one), ("127.0.0.3", other))
        with pytest.raises(ConnectError) as caught:
            connect("tcp://host:9", deadline_in(LONG_S))
    for part in ("tcp://host:9", "127.0.0.2: Connection refused", "127.0.0.3: Connection refused"):
        assert part in str(caught.value)


def test_deadline_covers_all_addresses_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def no_answer(_family: int, sockaddr: Any, deadline: float) -> socket.socket:
        tried.append(sockaddr)
        time.sleep(max(0.0, deadline - time.monotonic()))
        raise TimeoutError

    monkeypatch.setattr(ip, "_connect_one", no_answer)
    _resolve_to(monkeypatch, ("127.0.0.2", 9), ("127.0.0.3", 9))
    with pytest.raises(ConnectError, match=r"127\.0\.0\.2: no answer by the deadline; the deadline passed"):
        connect("tcp://host:9", deadline_in(0.05))
    assert len(tried) == 1


class _SelfConnecting(socket.socket):
    def connect(self, address: Any, /) -> None:
        self.bind(address)
        super().connect(address)


def test_connection_to_itself_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may give a socket the very port that it dials."""
    host = f"127.77.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"  # where nobody else takes the port
    with _closed_port(host) as port:
        pass
    monkeypatch.setattr(socket, "socket", _SelfConnecting)
    with pytest.raises(ConnectError, match="nobody listens"):
        connect(f"tcp://{host}:{port}", deadline_in(LONG_S))


def test_accept_without_descriptors_left() -> None:
    with contextlib.closing(listen(LOCAL)) as listener:
        one = connect(listener.address, deadline_in(LONG_S))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            with pytest.raises(TransportError, match="ulimit -n"):
                listener.accept(deadline_in(LONG_S))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        listener.accept(deadline_in(LONG_S)).close()
        one.close()


def test_several_threads_may_accept(pool: ThreadPoolExecutor) -> None:
    with contextlib.closing(listen(LOCAL)) as listener:
        accepting = [Blocked(pool, lambda: listener.accept(deadline_in(LONG_S))) for _ in range(2)]
        with pytest.raises(TransferTimeoutError):
            listener.accept(deadline_in(0.05))
        for _ in accepting:
            connect(listener.address, deadline_in(LONG_S)).close()
        for one in accepting:
            accepted = one.future.result(timeout=20)
            assert isinstance(accepted, Connection)
            accepted.close()


# -- rate ----------------------------------------------------------------------------------------------


class Clock:
    """The clock of senders that pace, which moves on when they sleep, and too far each time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late_s: float) -> None:
        self._now = self._started = time.monotonic()
        self._late_s = late_s
        monkeypatch.setattr(streams, "time", self)
        monkeypatch.setattr(SocketConnection, "_sleep", lambda _, seconds: self._sleep(seconds))

    def monotonic(self) -> float:
        return self._now

    def _sleep(self, seconds: float) -> bool:
        self._now += seconds + self._late_s
        return False

    @property
    def passed(self) -> float:
        return self._now - self._started


@pytest.mark.parametrize("late_s", [0.0, 0.005], ids=["idle", "busy"])
def test_rate_is_kept(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, late_s: float) -> None:
    """Small messages mixed with large ones; also while others hold the processors."""
    clock, sizes = Clock(monkeypatch, late_s), random.Random(1)
    parts = [bytes(sizes.choice([1, 40, 1000, 30_000, 1_000_000])) for _ in range(120)]
    nbytes = sum(map(len, parts))
    with connected(f"{LOCAL}?rate=20MB/s") as (one, other):
        receiving = pool.submit(other.recv_into, [memoryview(bytearray(nbytes))], deadline_in(LONG_S))
        for part in parts:
            one.send([part[:20], part[20:]], deadline_in(LONG_S))
        receiving.result(timeout=LONG_S)
    assert clock.passed == pytest.approx(nbytes / 20e6, rel=0.03, abs=0.01)


def test_rate_is_one_of_the_real_clock(pool: ThreadPoolExecutor) -> None:
    with connected(f"{LOCAL}?rate=20MB/s") as (one, other):
        receiving = pool.submit(other.recv_into, [memoryview(bytearray(4_000_000))], deadline_in(LONG_S))
        started = time.monotonic()
        for _ in range(4):
            one.send([bytes(1_000_000)], deadline_in(LONG_S))
        receiving.result(timeout=LONG_S)
        assert time.monotonic() - started >= 0.97 * 0.2 - 0.01


def test_each_end_sends_at_the_rate_of_its_url(pool: ThreadPoolExecutor) -> None:
    with connected(f"{LOCAL}?rate=10MB/s") as ends:
        started = time.monotonic()
        for end in ends:
            pool.submit(end.send, [bytes(2_000_000)], deadline_in(LONG_S))
        for end in ends:
            end.recv_into([memoryview(bytearray(2_000_000))], deadline_in(LONG_S))
        assert 0.18 <= time.monotonic() - started < 8


def test_deadline_while_pacing() -> None:
    with connected(f"{LOCAL}?rate=1MB/s") as (one, _):
        started = time.monotonic()
        with pytest.raises(TransferTimeoutError, match="rate"):
            one.send([bytes(10_000_000)], deadline_in(0.2))
        assert 0.19 <= time.monotonic() - started < 8  # its rate would take 10 s


def test_close_wakes_a_paced_sender(pool: ThreadPoolExecutor) -> None:
    with connected(f"{LOCAL}?rate=1kB/s") as (one, _):
        sending = Blocked(pool, lambda: one.send([bytes(100_000)], deadline_in(60)))
        one.close()
        sending.assert_ends_with(ConnectionClosedError)


def test_paced_bytes_are_the_same_bytes(pool: ThreadPoolExecutor) -> None:
    data = random.Random(2).randbytes(3_000_000)
    received = bytearray(len(data))
    with connected(f"{LOCAL}?rate=100MB/s") as (one, other):
        receiving = pool.submit(other.recv_into, [memoryview(received)], deadline_in(LONG_S))
        one.send([data[:7], b"", data[7:1_000_001], data[1_000_001:]], deadline_in(LONG_S))
        receiving.result(timeout=LONG_S)
    assert received == data
