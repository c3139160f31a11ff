"""The short ways of channels: they give what the long ways give, and leave to them what is unusual."""

from __future__ import annotations

import math
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, ConnectionClosedError, TransferTimeoutError
from kvferry.core.native import native
from kvferry.testing.threads import until_asleep
from kvferry.transports import lanes
from kvferry.transports.spin import DEFAULT_SPIN_S
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire import messages as m

pytestmark = pytest.mark.skipif(native().library is None, reason="needs the native library")

OPTIONS = ChannelOptions(role="test", session="s")


def message(rng: random.Random) -> m.PutLayer:
    """With as many bytes as chance will have."""
    return m.PutLayer(layer=rng.randrange(1 << rng.randrange(1, 30)), blocks=tuple(range(rng.randrange(9))))


@pytest.fixture(params=["tcp", "unix", "lanes"])
def two(request: pytest.FixtureRequest, pair: Any) -> tuple[Channel, Channel]:
    """Client and server."""
    made: tuple[Channel, Channel] = pair(request.param)
    return made


def the_long_way(channel: Channel) -> Channel:
    channel._short = None
    return channel


def test_sockets_have_them_and_others_do_not(pair: Any) -> None:
    for kind in ("tcp", "unix", "lanes", "auto"):
        assert all(channel._short is not None for channel in pair(kind))
    assert all(channel._short is None for channel in pair("inproc"))


def test_a_connection_that_was_closed_meanwhile_has_none(two: tuple[Channel, Channel]) -> None:
    """As by a server that ends while a handshake does; whoever uses it next hears of the end."""
    two[0].abort()
    two[0]._open()
    assert two[0]._short is None


@pytest.mark.parametrize("kind", ["tcp", "unix", "lanes", "auto"])
def test_who_waits_looks_first_where_frames_come_fast(pair: Any, kind: str) -> None:
    client, server = pair(kind)
    connection = server._connection.carrier
    for lane in getattr(connection, "bare_lanes", (connection,)):
        assert lane.spin_s == DEFAULT_SPIN_S
        lane.spin_s = 30.0  # so that every wait of a slow machine is short
    server._open()
    until = deadline_in(20)  # nobody looks for up to some seconds where others want the processor
    frames = 0
    while not server._short.looked():
        client.send(m.LayerAck(count=frames), deadline=until)
        received = server.receive(until)
        assert received.message == m.LayerAck(count=frames)
        frames += 1
    assert frames > 1, "it looked before it knew that frames come fast"


def test_who_is_not_to_look_does_not(pair: Any) -> None:
    for kind in ("unix", "tcp"):
        client, server = pair(kind)
        server._connection.spin_s = 0.0
        server._open()
        for number in range(20):
            client.send(m.LayerAck(count=number), deadline=deadline_in(20))
            assert server.receive(deadline_in(20)).message == m.LayerAck(count=number)
        assert server._short.looked() == 0


@pytest.mark.parametrize("kind", ["tcp", "unix", "lanes", "small stripes"])
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("long", ["", "client", "server"])
def test_both_ways_say_the_same(
    pair: Any, spawn: Any, monkeypatch: pytest.MonkeyPatch, kind: str, checksum: bool, long: str
) -> None:
    if kind == "small stripes":  # as small as may be
        kind = "lanes"
        monkeypatch.setattr(lanes, "STRIPE_NBYTES", 16_384)
    options = ChannelOptions(role="test", session="s", checksum=checksum)
    ends: dict[str, Channel] = dict(
        zip(("client", "server"), pair(kind, client=options, server=options), strict=True)
    )
    if long:
        the_long_way(ends[long])
    rng = random.Random(f"{kind}{checksum}{long}")
    sizes = [0, 1, 63, 8191, 8192, 8193, 16_384, 16_385, 65_536, 600_000]
    frames = [(message(rng), rng.randbytes(rng.choice(sizes))) for _ in range(60)]

    def send(channel: Channel) -> None:
        for number, (one, data) in enumerate(frames):
            cut = rng.randrange(len(data) + 1)
            channel.send(one, [data[:cut], data[cut:]], deadline=deadline_in(20), request_id=number)

    # both directions at once, all frames behind each other, and every third payload dropped
    done = [spawn(lambda end=end: send(end)) for end in ends.values()]
    for number, (one, data) in enumerate(frames):
        for channel in ends.values():
            incoming = channel.receive(deadline_in(20))
            assert (incoming.message, incoming.request_id, incoming.payload_nbytes) == (
                one,
                number,
                len(data),
            )
            if number % 3:
                place = memoryview(bytearray(len(data)))
                incoming.read_into([place[:7], place[7:]], deadline_in(20))
                assert place == data
            else:
                incoming.discard(deadline_in(20))
    for one_done in done:
        one_done.result(20)


def test_payloads_of_many_parts_take_the_long_way(two: tuple[Channel, Channel]) -> None:
    client, server = two
    data, place = bytes(range(100)) * 20, memoryview(bytearray(2000))
    places = [place[i : i + 10] for i in range(0, 2000, 10)]
    for _ in range(2):
        parts = [data[i : i + 10] for i in range(0, 2000, 10)]
        client.send(m.PutLayer(layer=0, blocks=()), parts, deadline=deadline_in(20))
        server.receive(deadline_in(20)).read_into(places, deadline_in(20))
        assert place == data
        place[:] = bytes(2000)


def begun(peer: Any, have: int) -> tuple[Channel, socket.socket]:
    """A channel to a peer that sent ``have`` bytes of a frame with 100,000 bytes of payload."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as executor:
        made = executor.submit(
            Channel.connect, f"tcp://127.0.0.1:{listener.getsockname()[1]}", OPTIONS, deadline_in(20)
        )
        sock, _ = listener.accept()
        peer.handshake_by_hand(sock)
        channel = made.result(20)
    sock.sendall(peer.raw(18, m.PutLayer(layer=0, blocks=(1,)), bytes(100_000))[:have])
    return channel, sock


@pytest.mark.parametrize("have", [5, 34])
def test_a_deadline_within_a_head(peer: Any, have: int) -> None:
    channel, sock = begun(peer, have)
    with sock, pytest.raises(TransferTimeoutError):
        channel.receive(deadline_in(0.2))
    assert channel.closed


def test_a_deadline_within_a_payload(peer: Any) -> None:
    channel, sock = begun(peer, 50_000)
    with sock:
        incoming = channel.receive(deadline_in(20))
        with pytest.raises(TransferTimeoutError, match=r"4\d+ of 100008 bytes had come"):
            incoming.read_into([memoryview(bytearray(100_000))], deadline_in(0.5))
    assert channel.closed


def test_an_end_within_a_payload(peer: Any) -> None:
    channel, sock = begun(peer, 50_000)
    sock.close()
    with pytest.raises(ConnectionClosedError, match=r"ended by the peer after 4\d+ of 100008 bytes"):
        channel.receive(deadline_in(20)).read_into([memoryview(bytearray(100_000))], deadline_in(20))


def test_an_end_of_another_lane_within_a_payload(pair: Any, peer: Any, spawn: Any) -> None:
    """What the lane that is due holds is taken, and then nothing is waited for."""
    client, server = pair("lanes")
    begun = peer.raw(18, m.PutLayer(layer=0, blocks=(1,)), bytes(100_000))[:50_000]
    client._connection.send([begun], deadline_in(20))
    incoming = server.receive(deadline_in(30))
    taking = spawn(lambda: incoming.read_into([memoryview(bytearray(100_000))], deadline_in(30)))
    client._connection._lanes[2].close()
    with pytest.raises(ConnectionClosedError, match=r"after 4\d+ of 100008 bytes"):
        taking.result(20)


def test_a_deadline_while_the_peer_takes_nothing(two: tuple[Channel, Channel]) -> None:
    client, _ = two
    data = bytes(16 << 20)
    with pytest.raises(TransferTimeoutError, match="sending"):
        client.send(m.PutLayer(layer=0, blocks=()), [data, data], deadline=deadline_in(0.3))
    assert client.closed


@pytest.mark.parametrize("doing", ["receiving", "sending"])
def test_an_abort_wakes_a_call(two: tuple[Channel, Channel], spawn: Any, until: Any, doing: str) -> None:
    client, _ = two
    data = bytes(16 << 20)
    call: Callable[[], object] = (
        (lambda: client.receive(deadline_in(30)))
        if doing == "receiving"
        else (lambda: client.send(m.PutLayer(layer=0, blocks=()), [data, data], deadline=deadline_in(30)))
    )
    done = spawn(call)
    connection: Any = client._connection
    sockets = getattr(connection, "bare_lanes", (connection,))
    until(lambda: any(one.bare.inside for one in sockets))
    client.abort()
    with pytest.raises(ConnectionClosedError, match="closed"):
        done.result(20)
    until(lambda: all(one.fileno() < 0 for one in sockets))  # the last one out closed the descriptor


def test_a_signal_reaches_its_handler(two: tuple[Channel, Channel], spawn: Any, until: Any) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    client, _ = two
    client.send(m.LayerAck(), deadline=deadline_in(20))
    connection: Any = client._connection
    sockets = getattr(connection, "bare_lanes", (connection,))

    def kill() -> None:
        until(lambda: any(one.bare.inside for one in sockets))
        main = threading.main_thread()
        until_asleep(main.native_id or 0, deadline_in(30))
        signal.pthread_kill(main.ident or 0, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        killed = spawn(kill)
        with pytest.raises(KeyboardInterrupt):
            client.receive(deadline_in(60))
        killed.result(20)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_send_goes_on_after_a_signal_in_what_was_hashed_ahead(pair: Any, spawn: Any, until: Any) -> None:
    client, server = pair("tcp")
    for channel, option in ((client, socket.SO_SNDBUF), (server, socket.SO_RCVBUF)):
        channel._connection.bare.sock.setsockopt(socket.SOL_SOCKET, option, 16_384)
        client.send(m.LayerAck(), deadline=deadline_in(20))  # which tells the kernel a limit
        server.receive(deadline_in(20))
    data, handled = random.Random(1).randbytes(2 << 20), threading.Event()

    def interrupt_and_receive() -> bool:
        until(lambda: client._connection.bare.inside)
        main = threading.main_thread()
        until_asleep(main.native_id or 0, deadline_in(30))
        signal.pthread_kill(main.ident or 0, signal.SIGALRM)
        assert handled.wait(20)
        place = memoryview(bytearray(len(data)))
        server.receive(deadline_in(20)).read_into([place], deadline_in(20))
        return place == data

    before = signal.signal(signal.SIGALRM, lambda *_: handled.set())
    try:
        received = spawn(interrupt_and_receive)
        client.send(
            m.PutLayer(layer=1, blocks=()), [data[:100_000], data[100_000:]], deadline=deadline_in(60)
        )
        assert received.result(40)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("given", [None, "1"])
def test_what_is_no_deadline_is_refused(two: tuple[Channel, Channel], given: float) -> None:
    client, server = two
    with pytest.raises(ConfigError, match="a deadline is"):
        client.send(m.LayerAck(), deadline=given)
    with pytest.raises(ConfigError, match="a deadline is"):
        server.receive(given)


def test_a_look_does_not_pass_the_deadline(pair: Any) -> None:
    client, server = pair("tcp")
    server._connection.spin_s = 60.0
    server._open()
    until = deadline_in(20)
    while not server._short.looked():
        client.send(m.LayerAck(), deadline=until)
        server.receive(until)
    start = time.monotonic()
    for seconds in (0.5, 0.01, 0.01):  # fits, and does not fit, what the kernel was told before
        assert server.receive_idle(deadline_in(seconds)) is None
    assert time.monotonic() - start < 30
    client.send(m.LayerAck(), deadline=deadline_in(20))
    assert server.receive(deadline_in(20)).message == m.LayerAck()


def test_a_signal_that_comes_during_a_look_reaches_its_handler(pair: Any, spawn: Any, until: Any) -> None:
    client, server = pair("tcp")
    server._connection.spin_s = 1.0  # long enough for the signal to come meanwhile
    server._connection._recv_limit = math.inf  # so that the kernel waits longer than the test
    server._open()
    until_then = deadline_in(20)
    while not server._short.looked():
        client.send(m.LayerAck(), deadline=until_then)
        server.receive(deadline_in(3600))
    handled = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        handled.set()
        raise KeyboardInterrupt

    def kill() -> bool:
        until(lambda: server._connection.bare.inside)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        told = handled.wait(20)
        if not told:
            client.abort()  # ends the wait that should have ended
        return told

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        killed = spawn(kill)
        with pytest.raises((KeyboardInterrupt, ConnectionClosedError)):
            server.receive(deadline_in(3600))
        assert killed.result(40)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_calls_hold_nothing(two: tuple[Channel, Channel]) -> None:
    client, server = two
    place, data, ack = memoryview(bytearray(30_000)), bytes(30_000), m.LayerAck(count=1 << 40)

    def counts() -> list[int]:
        return [sys.getrefcount(one) for one in (client, server, place, data, ack, None)]

    def talk() -> None:
        client.send(m.PutLayer(layer=0, blocks=()), [data], deadline=deadline_in(20))
        server.receive(deadline_in(20)).read_into([place], deadline_in(20))
        server.send(ack, deadline=deadline_in(20))
        client.expect(m.LayerAck, deadline_in(20))

    talk()
    least = [50] * len(counts())
    for _ in range(3):  # what is held is held each time; other threads of the process hold things by chance
        before = counts()
        for _ in range(50):
            talk()
        more = [after - then for then, after in zip(before, counts(), strict=True)]
        least = [min(one) for one in zip(least, more, strict=True)]
    assert all(one < 10 for one in least), least


def test_a_head_goes_before_a_large_payload(pair: Any) -> None:
    options = ChannelOptions(role="test", session="s", checksum=False)
    client, server = pair("tcp", client=options, server=options)
    sock = client._connection.bare.sock

    def sent() -> int:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
        return int(struct.unpack_from("@I", info, 156)[0])  # tcpi_data_segs_out

    def packets(nbytes: int) -> int:
        before = sent()
        client.send(m.PutLayer(layer=0, blocks=()), [bytes(nbytes)], deadline=deadline_in(20))
        server.receive(deadline_in(20)).read_into([memoryview(bytearray(nbytes))], deadline_in(20))
        return sent() - before

    pairs = [(packets((48 << 10) - 1), packets(48 << 10)) for _ in range(21)]
    assert statistics.median(large - small for small, large in pairs) == 1


FORKED = """
import os, sys
from kvferry import transports
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectionClosedError
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire.messages import LayerAck
from concurrent.futures import ThreadPoolExecutor
options = ChannelOptions(role="test", session="s")
listener = transports.listen("tcp://127.0.0.1:0")
with ThreadPoolExecutor(1) as executor:
    made = executor.submit(lambda: Channel.accept(listener.accept(deadline_in(9)), options, deadline_in(9)))
    client, server = Channel.connect(listener.address, options, deadline_in(9)), made.result(9)
client.send(LayerAck(), deadline=deadline_in(9))
child = os.fork()
if not child:
    late = deadline_in(9)
    for call in (lambda: client.send(LayerAck(), deadline=late), lambda: server.receive(late)):
        try:
            call()
        except ConnectionClosedError as error:
            if "forked" not in str(error):
                os._exit(1)
        else:
            os._exit(2)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert server.receive(deadline_in(9)).message == LayerAck()
"""


def test_a_forked_child_has_none() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
