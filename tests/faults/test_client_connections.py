"""A client's sockets under load, idle, after the daemon's restart (case C072), and many that come at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvferry.client import Client, ClientOptions, link
from kvferry.core import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.core.blockstore import Namespace
from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError, OverloadedError, UnavailableError
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, wait_until
from kvferry.testing.processes import Command
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire.messages import Ping, Pong

SPEC = small_spec("client-connections")
MOST = 4
THREADS = 10


def flat_spec(nbytes: int) -> KVSpec:
    """Blocks of one token and so many bytes."""
    layer = LayerSpec((TensorSpec("k", (1, nbytes), DType.UINT8),))
    return KVSpec(model=f"flat-{nbytes}", revision="r1", layers=(layer,), block_tokens=1)


KILOBYTE, LARGE = flat_spec(1 << 10), flat_spec(100_000_000)
Serve = Callable[..., Command]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts a daemon without disk or HTTP port, that listens there; killed at the end."""
    with ExitStack() as stack:

        def serve(listen: str, *more: str) -> Command:
            on_socket = listen.startswith("unix://")
            words = ("--socket", listen.removeprefix("unix://")) if on_socket else ("--socket", "none")
            listens = "daemon.listen=none" if on_socket else f"daemon.listen={listen}"
            command = Command(
                "serve",
                *words,
                "--set",
                listens,
                "--capacity",
                "256MiB",
                "--disk",
                "none",
                "--http",
                "none",
                *more,
            )
            stack.enter_context(command)
            command.wait_ready()
            return command

        yield serve


@pytest.fixture(params=["unix", "tcp"])
def listen(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix://{tmp_path}/d.sock" if request.param == "unix" else "tcp://127.0.0.1:0"


def sockets(daemon: Command) -> int:
    found = 0
    for one in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found += str(one.readlink()).startswith("socket:")
    return found


def exchange(ns: Namespace, token: int) -> float:
    """Save a block and load it again, all of it; the seconds that this took."""
    keys = ns.keys([token] * ns.spec.block_tokens)
    data = block_bytes(keys[0], ns.spec.block_nbytes)
    started = time.monotonic()
    assert ns.save([(keys[0], data)], parent=None, deadline=deadline_in(60)) == 1
    with ns.load(keys, deadline=deadline_in(60)) as lease:
        took = time.monotonic() - started
        assert lease.view(0) == data
    return took


def load(client: Client, seconds: float) -> int:
    """What ten threads do for so long; the most connections that were seen."""
    until, most = deadline_in(seconds), 0
    ready = threading.Barrier(THREADS)

    def work(seed: int) -> int:
        ns, token, seen = client.namespace(SPEC), seed << 20, 0
        ready.wait(60)
        while time.monotonic() < until or token == seed << 20:
            token += 1
            exchange(ns, token)
            seen = max(seen, client.link.connections)
        return seen

    with ThreadPoolExecutor(THREADS) as workers:
        for done in [workers.submit(work, seed) for seed in range(1, THREADS + 1)]:
            most = max(most, done.result(timeout=180))
    return most


@pytest.mark.parametrize(
    ("seconds", "soon_s"),
    [(0.5, 20.0), pytest.param(60, 2.0, marks=[pytest.mark.soak, pytest.mark.timeout(240)])],
)
def test_c072_sockets_are_bounded_and_a_restart_of_the_daemon_alone_is_survived(
    serve: Serve, listen: str, monkeypatch: pytest.MonkeyPatch, seconds: float, soon_s: float
) -> None:
    monkeypatch.setattr(link, "_IDLE_CONNECTION_S", 0.2)
    first = serve(listen)
    address = first.wait_ready()["listen"]
    with Client(address, ClientOptions(max_connections=MOST)) as client:
        exchange(client.namespace(SPEC), 1)
        wait_until(lambda: client.link.connections == 1)
        at_first = sockets(first)
        assert 1 < load(client, seconds) <= MOST + 1, "one more may tell of the ends of leases"
        wait_until(lambda: client.link.connections == 1)
        wait_until(lambda: sockets(first) == at_first)
        assert client.counters.reconnects == 0
        first.kill()
        with serve(address) as again:
            small, large = client.namespace(KILOBYTE), client.namespace(LARGE)
            wait_until(lambda: takes_saves(small), soon_s)
            assert exchange(small, 1) < soon_s
            assert exchange(large, 1) < soon_s
            assert (client.counters.reconnects, client.counters.restarts) == (1, 1)
            load(client, 0.1)
            wait_until(lambda: client.link.connections == 1)
            again.kill()


def takes_saves(ns: Namespace) -> bool:
    try:
        return save_blocks(ns, ns.keys([7] * ns.spec.block_tokens)) >= 0
    except UnavailableError:
        return False


def test_connections_are_bounded_and_all_but_one_are_closed_when_idle(
    serve: Serve, listen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = serve(listen).wait_ready()["listen"]
    with Client(address, ClientOptions(max_connections=MOST)) as client:
        with ExitStack() as stack:
            for _ in range(MOST):
                stack.enter_context(client.link.line(deadline_in(20)))
            assert client.link.connections == MOST
            with pytest.raises(UnavailableError, match=f"all {MOST} connections were in use"):
                stack.enter_context(client.link.line(deadline_in(0.05)))
            with client.link.line(deadline_in(20), spare=True):
                assert client.link.connections == MOST + 1
            assert client.link.connections == MOST, "the spare one is closed at once"
        client.link._look_at_idle()
        assert client.link.connections == MOST, "they may be needed again in a moment"
        monkeypatch.setattr(link, "_IDLE_CONNECTION_S", 0.0)
        wait_until(lambda: client.link.connections == 1)
        assert len(client.link._idle) == 1
        exchange(client.namespace(SPEC), 1)
        assert (client.counters.connects, client.counters.reconnects) == (MOST + 1, 0)


def test_an_idle_client_notices_that_its_daemon_was_replaced(serve: Serve, listen: str) -> None:
    """Nobody calls; the thread of the client looks at the sockets, and reaches the new run by itself."""
    first = serve(listen)
    address = first.wait_ready()["listen"]
    with Client(address, ClientOptions(max_connections=MOST)) as client:
        with ExitStack() as stack:
            for _ in range(MOST):
                stack.enter_context(client.link.line(deadline_in(20)))
        first.kill()
        wait_until(lambda: bool(client.away))
        assert client.link.connections == 0
        serve(address)
        wait_until(lambda: not client.away and client.counters.restarts == 1)
        assert client.link.connections == 1
        assert (client.counters.reconnects, client.counters.missed_lookups) == (1, 0)


@pytest.mark.parametrize(("most", "served"), [(64, 50), (20, 20)])
def test_fifty_at_once_are_served_or_refused_by_name(
    serve: Serve, listen: str, most: int, served: int
) -> None:
    """None hangs, none is cut without a word; those that were refused find a place later."""
    address = serve(listen, "--set", f"wire.max_connections={most}").wait_ready()["listen"]
    together = threading.Barrier(50)

    def come(number: int) -> Channel | Exception:
        together.wait(60)
        try:
            channel = Channel.connect(address, ChannelOptions("client", f"s{number}"), deadline_in(20))
            channel.call(Ping(), Pong, deadline=deadline_in(20))
        except KVFerryError as error:
            return error
        return channel

    with ThreadPoolExecutor(50) as threads:
        came = list(threads.map(come, range(50), timeout=60))
    channels = [one for one in came if isinstance(one, Channel)]
    refused = [one for one in came if isinstance(one, Exception)]
    assert len(channels) == served
    assert all(
        isinstance(one, OverloadedError) and f"serves {most} connections" in str(one) for one in refused
    )
    for channel in channels:
        channel.call(Ping(), Pong, deadline=deadline_in(20))
        channel.close()
    with Client(address) as client:
        wait_until(lambda: takes_saves(client.namespace(KILOBYTE)))
