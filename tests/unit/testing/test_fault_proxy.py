"""Each fault does what it says, starts and stops while bytes are on their way, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, TransferTimeoutError
from kvferry.testing.fault_proxy import Direction, FaultProxy, Faults
from kvferry.testing.transports_common import open_descriptors, random_bytes

SOON_S = 20.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.settimeout(SOON_S)
        yield sock


@pytest.fixture
def proxy(listener: socket.socket) -> Iterator[FaultProxy]:
    with FaultProxy(f"tcp://127.0.0.1:{listener.getsockname()[1]}") as proxy:
        yield proxy


def dial(proxy: FaultProxy) -> socket.socket:
    host, _, port = proxy.address.removeprefix("tcp://").partition(":")
    return socket.create_connection((host, int(port)), SOON_S)


@contextlib.contextmanager
def meet(
    proxy: FaultProxy, listener: socket.socket, count: int = 1
) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    with contextlib.ExitStack() as stack:
        pairs = []
        for _ in range(count):
            client = stack.enter_context(dial(proxy))
            server = stack.enter_context(listener.accept()[0])
            server.settimeout(SOON_S)
            pairs.append((client, server))
        yield pairs


def receive(sock: socket.socket, nbytes: int) -> bytes:
    got = bytearray()
    while len(got) < nbytes:
        piece = sock.recv(min(1 << 20, nbytes - len(got)))
        if not piece:
            raise EOFError(f"{len(got)} of {nbytes}")
        got += piece
    return bytes(got)


def nothing_comes(sock: socket.socket) -> None:
    sock.settimeout(0.15)
    with pytest.raises(TimeoutError):
        sock.recv(1)
    sock.settimeout(SOON_S)


def sent_by_thread(sock: socket.socket, data: bytes) -> threading.Thread:
    thread = threading.Thread(target=sock.sendall, args=(data,))
    thread.start()
    return thread


def test_a_good_link_passes_everything_both_ways(proxy: FaultProxy, listener: socket.socket) -> None:
    data = random_bytes(8 << 20).tobytes()
    with meet(proxy, listener, 3) as pairs:
        assert proxy.connections == proxy.accepted == 3
        for client, server in pairs:
            for one, other in ((client, server), (server, client)):
                sending = sent_by_thread(one, data)
                assert receive(other, len(data)) == data
                sending.join()
        client, server = pairs[0]
        client.sendall(b"last")
        client.shutdown(socket.SHUT_WR)
        assert receive(server, 4) == b"last"
        assert server.recv(1) == b""
        server.sendall(b"answer to the last")
        assert receive(client, 18) == b"answer to the last"
        server.close()
        assert client.recv(1) == b""
        proxy.wait_for_connections(2, deadline_in(SOON_S))
        assert proxy.forwarded_each("to_server") == [len(data)] * 2
    assert proxy.forwarded("to_server") == 3 * len(data) + 4


def test_delay_is_a_pipe_that_keeps_its_bandwidth(proxy: FaultProxy, listener: socket.socket) -> None:
    data = random_bytes(16 << 20).tobytes()
    with meet(proxy, listener) as [(client, server)]:
        proxy.faults = Faults(delay_s=0.1)
        started = time.monotonic()
        client.sendall(b"x")
        receive(server, 1)
        assert time.monotonic() - started >= 0.1
        proxy.faults = Faults(delay_s=0.5)
        started = time.monotonic()
        sending = sent_by_thread(client, data)
        assert receive(server, len(data)) == data
        sending.join()
        # in 64 chunks: were each waited for, it took 32 s
        assert 0.5 <= time.monotonic() - started < 20
        proxy.faults = Faults(delay_s=0.1, only="to_client")
        started = time.monotonic()
        server.sendall(b"x")
        receive(client, 1)
        assert time.monotonic() - started >= 0.1
        proxy.faults = Faults(delay_s=1000.0, only="to_client")
        client.sendall(b"x")
        assert receive(server, 1) == b"x"
        server.sendall(b"x")
        nothing_comes(client)


def test_rate(proxy: FaultProxy, listener: socket.socket) -> None:
    proxy.faults = Faults(rate=10e6)
    data = random_bytes(3_000_000).tobytes()
    with meet(proxy, listener) as [(client, server)]:
        started = time.monotonic()
        sending = sent_by_thread(client, data)
        assert receive(server, len(data)) == data
        sending.join()
        assert 0.28 <= time.monotonic() - started < 6
        proxy.faults = Faults()
        assert proxy.faults == Faults()
        sending = sent_by_thread(client, data * 10)
        assert receive(server, len(data) * 10) == data * 10
        sending.join()


def test_cut_loses_nothing_and_heals(proxy: FaultProxy, listener: socket.socket) -> None:
    with meet(proxy, listener) as [(client, server)]:
        proxy.faults = Faults(link="cut")
        client.sendall(b"to server")
        server.sendall(b"to client")
        nothing_comes(server)
        nothing_comes(client)
        with dial(proxy) as later:  # the kernel takes it, the proxy does not
            later.sendall(b"later")
            listener.settimeout(0.1)
            with pytest.raises(TimeoutError):
                listener.accept()
            listener.settimeout(SOON_S)
            proxy.faults = Faults()
            assert receive(server, 9) == b"to server"
            assert receive(client, 9) == b"to client"
            with listener.accept()[0] as accepted:
                assert receive(accepted, 5) == b"later"


def test_cut_for_a_time(proxy: FaultProxy, listener: socket.socket) -> None:
    with meet(proxy, listener) as [(client, server)]:
        started = time.monotonic()
        proxy.cut(0.3)
        client.sendall(b"x")
        assert receive(server, 1) == b"x"
        assert 0.29 <= time.monotonic() - started < 5


def test_cut_in_one_direction(proxy: FaultProxy, listener: socket.socket) -> None:
    with meet(proxy, listener) as [(client, server)]:
        proxy.faults = Faults(link="cut", only="to_client")
        client.sendall(b"x")
        assert receive(server, 1) == b"x"


def test_reset_link(proxy: FaultProxy, listener: socket.socket) -> None:
    with meet(proxy, listener) as [(client, server)]:
        proxy.faults = Faults(link="reset")
        for sock in (client, server):
            with pytest.raises(ConnectionResetError):
                sock.recv(1)
        proxy.wait_for_connections(0, deadline_in(SOON_S))
        with pytest.raises(ConnectionResetError), dial(proxy) as new:  # as it connects, or then
            new.recv(1)
        proxy.faults = Faults()
    with meet(proxy, listener) as [(client, server)]:
        client.sendall(b"good again")
        assert receive(server, 10) == b"good again"


def test_reset_of_the_connections_there_are(proxy: FaultProxy, listener: socket.socket) -> None:
    with meet(proxy, listener) as [(client, _)]:
        proxy.reset_connections()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    with meet(proxy, listener) as [(client, server)]:
        client.sendall(b"x")
        assert receive(server, 1) == b"x"


def test_half_open_swallows_and_resets_when_it_heals(proxy: FaultProxy, listener: socket.socket) -> None:
    with meet(proxy, listener, 2) as [(client, server), (quiet, quiet_server)]:
        proxy.faults = Faults(link="half_open")
        sending = sent_by_thread(client, bytes(32 << 20))  # it takes whatever comes
        sending.join(SOON_S)
        assert not sending.is_alive()
        nothing_comes(server)
        limit = deadline_in(SOON_S)
        while proxy.swallowed < 32 << 20:
            assert time.monotonic() < limit
            time.sleep(0.01)
        proxy.faults = Faults()
        with pytest.raises(ConnectionResetError):
            server.recv(1)
        quiet.sendall(b"lost nothing")
        assert receive(quiet_server, 12) == b"lost nothing"


def test_half_open_in_one_direction(proxy: FaultProxy, listener: socket.socket) -> None:
    with meet(proxy, listener) as [(client, server)]:
        proxy.faults = Faults(link="half_open", only="to_client")
        client.sendall(b"question")
        assert receive(server, 8) == b"question"
        server.sendall(b"answer")
        nothing_comes(client)


def test_lanes_arrive_out_of_order(proxy: FaultProxy, listener: socket.socket) -> None:
    with meet(proxy, listener, 2) as [(slow, slow_server), (fast, fast_server)]:
        proxy.faults = Faults(lane_delays_s=(0.1, 0.0))
        started = time.monotonic()
        slow.sendall(b"1")
        assert receive(slow_server, 1) == b"1"
        assert time.monotonic() - started >= 0.1
        proxy.faults = Faults(lane_delays_s=(1000.0, 0.0))
        slow.sendall(b"1")
        fast.sendall(b"2")
        assert receive(fast_server, 1) == b"2"
        nothing_comes(slow_server)


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_flips_at_positions(proxy: FaultProxy, listener: socket.socket, direction: Direction) -> None:
    data = bytes(1_000_000)
    proxy.faults = Faults(flip_at=(0, 1000, 999_999), only=direction)
    with meet(proxy, listener) as [(client, server)]:
        for way, one, other in (("to_server", client, server), ("to_client", server, client)):
            sending = sent_by_thread(one, data)
            got = np.frombuffer(receive(other, len(data)), np.uint8)
            sending.join()
            assert np.flatnonzero(got).tolist() == ([0, 1000, 999_999] if way == direction else [])
    assert proxy.flipped == 3


def test_flips_at_random(proxy: FaultProxy, listener: socket.socket) -> None:
    proxy.faults = Faults(flip_rate=1e-4)
    with meet(proxy, listener) as [(client, server)]:
        sending = sent_by_thread(client, bytes(1_000_000))
        got = np.frombuffer(receive(server, 1_000_000), np.uint8)
        sending.join()
    assert 30 < np.count_nonzero(got) <= proxy.flipped < 300


def test_nobody_behind_it(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    with FaultProxy(f"tcp://127.0.0.1:{port}") as proxy:
        with pytest.raises(ConnectionResetError), dial(proxy) as client:  # as it connects, or then
            client.recv(1)
        proxy.wait_for_connections(0, deadline_in(SOON_S))


def test_unix_sockets(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server_socket:
        server_socket.bind(str(tmp_path / "target"))
        server_socket.listen()
        with FaultProxy(f"unix://{tmp_path}/target") as proxy, socket.socket(socket.AF_UNIX) as client:
            path = Path(proxy.address.removeprefix("unix://"))
            client.connect(str(path))
            with server_socket.accept()[0] as server:
                client.sendall(b"x")
                assert receive(server, 1) == b"x"
        assert not path.parent.exists()


def test_address_keeps_scheme_and_options() -> None:
    with FaultProxy("tls://localhost:1?ca=x") as proxy:
        assert proxy.address.startswith("tls://127.0.0.1:")
        assert proxy.address.endswith("?ca=x")
        assert proxy.address in repr(proxy)
    with pytest.raises(ConfigError, match="sockets only"):
        FaultProxy("inproc://name")


def test_waiting_for_connections_has_a_deadline(proxy: FaultProxy) -> None:
    with pytest.raises(TransferTimeoutError, match="0 connections, not 1"):
        proxy.wait_for_connections(1, deadline_in(0.05))


def test_nothing_is_left_after_close(listener: socket.socket) -> None:
    url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    before = open_descriptors()
    for _ in range(5):
        with FaultProxy(url) as proxy, meet(proxy, listener, 5) as pairs:
            pairs[0][0].sendall(b"x")
            proxy.close()
            proxy.close()
            with pytest.raises(ConnectionResetError):
                pairs[1][1].recv(1)
    assert open_descriptors() <= before
    assert not [t for t in threading.enumerate() if t.name == "kvferry-fault-proxy"]


def test_many_connections_come_and_go(proxy: FaultProxy, listener: socket.socket) -> None:
    for _ in range(100):
        with meet(proxy, listener) as [(client, server)]:
            client.sendall(b"x")
            assert receive(server, 1) == b"x"
    proxy.wait_for_connections(0, deadline_in(SOON_S))
    assert proxy.accepted == proxy.forwarded("to_server") == 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"link": "half-open"}, {"only": "client"}, {"rate": -1}, {"rate": 0}, {"delay_s": -1},
        {"delay_s": float("nan")}, {"lane_delays_s": (0.0, -1)}, {"flip_rate": 2}, {"flip_at": (-1,)},
    ],
)  # fmt: skip
def test_a_fault_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    """It would make a good link, and a test that cannot fail."""
    with pytest.raises(ConfigError, match="write"):
        Faults(**wrong)


@pytest.mark.parametrize("target", ["ucx://127.0.0.1:9", "auto://127.0.0.1:9"])
def test_what_does_not_pass_through_a_socket_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="cannot stand between"):
        FaultProxy(target)
