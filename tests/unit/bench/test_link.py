"""The ends of the transport benchmarks count what arrived, leave out what failed, and see wrong bytes."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.bench.link.bare import BareLink, BareServer, Certificates, Kind
from kvferry.bench.link.channel import Link
from kvferry.bench.link.ends import LinkEnds, make_certificates
from kvferry.bench.link.memory import LinkMemory, MemoryPool, parts_at_once, timed
from kvferry.bench.link.mooncake import MooncakeTe
from kvferry.bench.link.peer import bare_ports, open_servers
from kvferry.bench.link.requests import Operation, Request
from kvferry.bench.link.serve import serve_link
from kvferry.bench.link.service import LinkService
from kvferry.bench.registry import Options
from kvferry.bench.results import Sample
from kvferry.bench.scenarios.transport import SCENARIOS, TransportOptions
from kvferry.bench.scenarios.transport_link import with_options
from kvferry.core import deadline_in
from kvferry.core.config import Config
from kvferry.core.errors import (
    ConfigError,
    CorruptBlockError,
    KVFerryError,
    PluginUnavailableError,
    ProtocolError,
    TransportError,
    UnknownPluginError,
)
from kvferry.transports import registry
from kvferry.wire import Channel, ChannelOptions, ChannelServer
from kvferry.wire.channel import Incoming
from kvferry.wire.messages import LayerAck, Ping, PutLayer

NBYTES = 8192


def registry_has_ucx() -> bool:
    try:
        registry.load("ucx")
    except ConfigError:
        return False
    return importlib.util.find_spec("ucxx") is not None


WALK = 4 * NBYTES


class Serving:
    """A service behind a channel server, for the length of a test."""

    def __init__(self, service: LinkService) -> None:
        self.service = service
        options = ChannelOptions(role="bench", session="peer", checksum=False)
        self.server = ChannelServer("tcp://127.0.0.1:0", options, service.serve, name="bench-test")

    def link(self, *, checksum: bool = True) -> Link:
        return Link(self.server.address, LinkMemory(NBYTES, WALK), checksum=checksum)


@pytest.fixture
def serve() -> Iterator[Callable[[LinkService], Serving]]:
    found: list[Serving] = []

    def make(service: LinkService) -> Serving:
        found.append(Serving(service))
        return found[-1]

    yield make
    for one in found:
        one.server.close()


@pytest.mark.parametrize("checksum", [False, True])
def test_bytes_are_those_that_the_receiver_counted(
    serve: Callable[[LinkService], Serving], checksum: bool
) -> None:
    serving = serve(LinkService())
    link = serving.link(checksum=checksum)
    put = link.put(3, 5)
    assert put.nbytes == 15 * NBYTES == serving.service.received_nbytes
    assert len(put.latencies) == 5
    assert put.seconds == pytest.approx(sum(put.latencies))
    assert link.get(2, 4).nbytes == 8 * NBYTES
    assert link.echo(6).nbytes == 12 * NBYTES
    assert (link.operations, link.failed) == (15, 0)
    for operation in Operation:
        assert link.verify(operation, 1 if operation is Operation.ECHO else 3, 4)
    assert link.checked == 3 * 4 + 3 * 4 + 4
    link.close()
    link.close()


class Dropping(LinkService):
    """Drops one operation in four."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = 0

    def _answer(self, channel: Channel, incoming: Incoming, request: Request, memory: LinkMemory) -> None:
        self._seen += 1
        if self._seen % 4 == 0:
            incoming.discard(deadline_in(20))
            raise TransportError("dropped by the test")
        super()._answer(channel, incoming, request, memory)


def test_operations_that_fail_are_left_out_and_counted(serve: Callable[[LinkService], Serving]) -> None:
    serving = serve(Dropping())
    link = serving.link()
    sample = link.put(2, 16)
    assert (link.operations, link.failed) == (16, 4)
    assert sample.nbytes == 12 * 2 * NBYTES == serving.service.received_nbytes
    assert len(sample.latencies) == 12
    link.close()


class Short(LinkService):
    """Acknowledges less than it was sent."""

    def _answer(self, channel: Channel, incoming: Incoming, request: Request, memory: LinkMemory) -> None:
        incoming.discard(deadline_in(20))
        channel.reply(incoming, LayerAck(count=incoming.payload_nbytes // 2), deadline=deadline_in(20))


def test_a_peer_that_takes_half_is_not_paid_in_full(serve: Callable[[LinkService], Serving]) -> None:
    link = serve(Short()).link()
    assert link.put(1, 4).nbytes == 2 * NBYTES
    with pytest.raises(CorruptBlockError, match="4096 of 8192"):
        link.verify(Operation.PUT, 1, 1)
    link.close()


def _first(incoming: Incoming) -> int:
    assert isinstance(incoming.message, PutLayer)
    return incoming.message.layer


class Wrong(LinkService):
    """One byte of what it receives, or sends, is another one."""

    def _answer(self, channel: Channel, incoming: Incoming, request: Request, memory: LinkMemory) -> None:
        np.frombuffer(memory.source[_first(incoming)], np.uint8)[NBYTES // 2] ^= 1
        super()._answer(channel, incoming, request, memory)


@pytest.mark.parametrize("operation", [Operation.PUT, Operation.GET])
def test_other_bytes_are_seen(serve: Callable[[LinkService], Serving], operation: Operation) -> None:
    link = serve(Wrong()).link()
    with pytest.raises(CorruptBlockError, match="other bytes"):
        link.verify(operation, 1, 1)
    link.close()


def test_memory_walks_and_compares() -> None:
    memory = LinkMemory(NBYTES, WALK)
    assert [memory.parts(1)[0] for _ in range(6)] == [0, 1, 2, 3, 0, 1]
    first, parts = memory.parts(3)
    assert first == 2
    assert len({bytes(part[:8]) for part in parts}) == 3
    places = memory.places(3)
    for place, part in zip(places, parts, strict=True):
        place[:] = part
    memory.compare(first, places)
    places[1][100] ^= 1
    with pytest.raises(CorruptBlockError, match="part 3 "):
        memory.compare(first, places)
    assert not any(memory.places(1, clear=True)[0])
    with pytest.raises(ConfigError, match="multiples"):
        LinkMemory(1000, WALK)


def test_connections_that_take_turns_find_the_same_memory() -> None:
    pool = MemoryPool()
    one, other = pool.of(NBYTES, WALK), pool.of(NBYTES, WALK)
    memory = one.take()
    assert other.take() is not memory  # both at once
    one.give_back(memory)
    assert other.take() is memory
    assert pool.of(2 * NBYTES, WALK).take().nbytes == 2 * NBYTES
    del one, other, memory
    assert not pool._sizes  # nobody uses it any more


def test_a_bare_socket_and_channels_of_one_peer_use_the_same_memory() -> None:
    made: list[LinkMemory] = []

    class Counted(LinkMemory):
        def __init__(self, nbytes: int, walk_nbytes: int) -> None:
            super().__init__(nbytes, walk_nbytes)
            made.append(self)

    server = open_servers("tcp://127.0.0.1:0?lanes=2", bare_walk_nbytes=WALK)
    own = LinkMemory(NBYTES, WALK)
    one, two = (Link(with_options(server.address, lanes=n), own, checksum=False) for n in ("1", "2"))
    channel = Channel.connect(server.address, ChannelOptions(role="b", session="b"), deadline_in(20))
    bare = BareLink("tcp", ("127.0.0.1", bare_ports(channel)["tcp"]), own)
    channel.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvferry.bench.link.memory.LinkMemory", Counted)
        for _ in range(2):
            for put in (one.put, two.put, bare.put):
                assert put(1, 3).nbytes == 3 * NBYTES
    assert len(made) == 1
    for close in (one.close, two.close, bare.close):
        close()
    server.close()


def test_parts_at_once_fit_into_the_walk() -> None:
    assert parts_at_once(16 << 20, 32, 256 << 20) == 16
    assert parts_at_once(64 << 10, 32, 256 << 20) == 32
    assert parts_at_once(1 << 20, 32, 1 << 20) == 1


def test_timed_leaves_failures_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("kvferry.bench.link.memory.time", SimpleNamespace(perf_counter=lambda: now))

    def takes(seconds: float) -> int:
        nonlocal now
        now += seconds
        return int(seconds)

    def slow_failure() -> int:
        takes(50.0)
        raise TransportError("no")

    failures: list[KVFerryError] = []
    sample = timed(iter([lambda: takes(5.0), slow_failure, lambda: takes(7.0)]), failures.append)
    assert (sample.nbytes, len(sample.latencies), len(failures)) == (12, 2, 1)
    assert sample.latencies == (5.0, 7.0)
    assert sample.seconds == 12.0


@pytest.mark.parametrize("kind", ["tcp", "unix", "tls"])
def test_bare_sockets_move_the_same(kind: Kind, tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path) if kind == "tls" else None
    where: tuple[str, int] | str = str(tmp_path / "s") if kind == "unix" else ("127.0.0.1", 0)
    server = BareServer(kind, where, WALK, certificates)
    address = where if isinstance(where, str) else ("127.0.0.1", server.port)
    bare = BareLink(kind, address, LinkMemory(NBYTES, WALK), certificates=certificates)
    sample = bare.put(3, 5)
    assert isinstance(sample, Sample)
    assert sample.nbytes == 15 * NBYTES
    assert bare.get(4, 2).nbytes == 8 * NBYTES
    assert bare.echo(3).nbytes == 6 * NBYTES
    # what came is what the other end sends
    places = bare._memory.places(4)  # the ones that come next hold what was received before
    sent = LinkMemory(NBYTES, WALK)
    assert {bytes(place) for place in places} <= {bytes(part) for part in sent.numbered(0, 4)}
    bare.close()
    server.close()


def test_bare_tls_needs_its_files() -> None:
    assert Certificates("a", "b", "c").options == "cert=a&key=b&ca=c"
    server = BareServer("tcp", ("127.0.0.1", 0), WALK)
    with pytest.raises(ConfigError, match="certificates"):
        BareLink("tls", ("127.0.0.1", server.port), LinkMemory(NBYTES, WALK))
    server.close()


def test_a_peer_names_the_port_of_its_bare_socket() -> None:
    server = open_servers("tcp://127.0.0.1:0", bare_walk_nbytes=WALK)
    channel = Channel.connect(server.address, ChannelOptions(role="b", session="b"), deadline_in(20))
    ports = bare_ports(channel)
    channel.close()
    bare = BareLink("tcp", ("127.0.0.1", ports["tcp"]), LinkMemory(NBYTES, WALK))
    assert bare.put(1, 1).nbytes == NBYTES
    bare.close()
    server.close()


def test_requests_are_checked() -> None:
    request = Request(Operation.GET, NBYTES, WALK, 3, verify=True)
    assert Request.of(request.message(7)) == request
    assert request.message(7).layer == 7
    for message in (Ping(), PutLayer(layer=0, blocks=(1,)), PutLayer(layer=0, blocks=(9, 1, 1, 1, 0))):
        with pytest.raises(ProtocolError):
            Request.of(message)


def test_a_request_for_too_much_is_refused(serve: Callable[[LinkService], Serving]) -> None:
    serving = serve(LinkService())
    options = ChannelOptions(role="bench", session="b")
    channel = Channel.connect(serving.server.address, options, deadline_in(20))
    request = Request(Operation.GET, 1 << 30, WALK, 1 << 20).message(0)
    with pytest.raises(ProtocolError, match="that a benchmark moves at once"):
        channel.call(request, LayerAck, deadline=deadline_in(20))
    channel.close()


def test_serving_the_world_needs_a_trusted_network() -> None:
    with pytest.raises(ConfigError, match=r"wire\.trusted_network"):
        serve_link("tcp://0.0.0.0:0", None, Config())


def options(**params: str | int) -> TransportOptions:
    return TransportOptions.of(Options(runs=3, params=params))


def test_options() -> None:
    assert options(scheme="tcp").scenarios == tuple(
        f"transport.tcp.{kind}" for kind in ("put", "get", "roundtrip", "batch", "rate")
    )
    assert options(scenario="transport.unix.arena").scenarios == ("transport.unix.arena",)
    assert options(connect="10.0.0.1").scenarios == tuple(
        f"transport.tcp.{kind}" for kind in ("put", "get", "roundtrip", "batch")
    )
    assert set(options().scenarios) <= set(SCENARIOS)
    found = options(
        sizes="64KiB,1MiB", batch="1,8", lanes="4", checksum="off", walk="2MiB", **{"with": "none"}
    )
    assert (found.sizes, found.batches, found.lanes) == ((65536, 1 << 20), (1, 8), (4,))
    assert (found.checksums, found.walk_nbytes, found.run_nbytes) == (("off",), 2 << 20, 1 << 19)
    assert found.alternatives == ("none",)
    assert options(scheme="tcp,unix", lanes="1,2").lanes == (1, 2)  # for tcp
    assert options(scheme="unix", lanes="1").lanes == (1,)
    assert options(sizes="64KiB", walk="1MiB").batches == (1, 32)  # as many as go in: nobody asked for 32


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ({"scenario": "transport.tcp.putt"}, UnknownPluginError, "transport.tcp.put"),
        ({"scheme": "tpc"}, ConfigError, "tcp"),
        ({"sizes": "1000"}, ConfigError, "multiples"),
        ({"sizes": "4MiB", "walk": "1MiB"}, ConfigError, "up to the walk"),
        ({"batch": "0"}, ConfigError, "from 1 on"),
        ({"lanes": "x"}, ConfigError, "--lanes"),
        ({"lanes": "1,17"}, ConfigError, "--lanes 17: a connection has 1 to 16 lanes"),
        ({"lanes": "1,2", "scheme": "unix,ucx"}, ConfigError, "--lanes 2: no lanes over unix, ucx, only tcp"),
        ({"lanes": "2", "scenario": "transport.unix.put"}, ConfigError, "--lanes 2: no lanes over unix,"),
        ({"batch": "1,33", "sizes": "64KiB,1MiB", "walk": "2MiB"}, ConfigError, "take at most 32, or raise"),
        ({"checksum": "md5"}, ConfigError, "off, xxh3"),
        ({"rate": "fast"}, ConfigError, "fast"),
        ({"block": "1PiB"}, ConfigError, "--block 1125899906842624: it is held 3 times, for which"),
        ({"with": "memcached"}, ConfigError, "mooncake, ucxx, redis"),
    ],
)
def test_options_that_cannot_be_used(params: dict[str, str], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        options(**params)


@pytest.mark.skipif(not MooncakeTe.problem(), reason="Mooncake can be measured here")
def test_an_alternative_that_is_not_installed_is_said_to_be_so() -> None:
    with pytest.raises(PluginUnavailableError, match="mooncake"):
        options(**{"with": "mooncake"})


ENGINE = """
import itertools, os
class TransferEngine:
    calls = itertools.count(1)
    def initialize(self, name, metadata, protocol, device):
        return 0 if len(os.sched_getaffinity(0)) == int(os.environ["EXPECTED_CPUS"]) else -1
    def register_memory(self, address, nbytes): return 0
    def get_rpc_port(self): return 4321
    def transfer_sync_write(self, peer, mine, theirs, nbytes):
        assert (peer, type(mine), type(theirs), nbytes) == ("127.0.0.1:4321", int, int, 8192)
        return -1 if next(self.calls) % 4 == 0 else 0
    def batch_transfer_sync_read(self, peer, mine, theirs, sizes):
        assert len(mine) == len(theirs) == 3 and sizes == [8192] * 3
        return 0
"""


@pytest.mark.parametrize("pinned", [False, True])
def test_mooncake_is_driven_as_its_engine_wants_and_its_failures_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, pinned: bool
) -> None:
    """Against a stand-in for the library, which is not installed everywhere."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("print('noise of the library')")
    (tmp_path / "mooncake" / "engine.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    own = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("EXPECTED_CPUS", str(1 if pinned else len(own)))
    mooncake = MooncakeTe(NBYTES, WALK, (own[0], own[-1]) if pinned else (None, None))
    try:
        sample = mooncake.put(1, 16)
        assert (sample.nbytes, mooncake.failed) == (12 * NBYTES, 4)
        assert mooncake.get(3, 2).nbytes == 6 * NBYTES
    finally:
        mooncake.close()


@pytest.mark.skipif(not registry_has_ucx(), reason="ucxx is not installed")
@pytest.mark.parametrize("tls", ["posix,cma", "tcp"])
def test_bare_ucxx_moves_the_same(tls: str) -> None:
    with LinkEnds(WALK) as peers:
        bare = peers.of("ucx").bare_ucxx(tls, LinkMemory(NBYTES, WALK))
        assert bare.put(2, 3).nbytes == 6 * NBYTES
        assert bare.get(2, 3).nbytes == 6 * NBYTES
        places = bare._memory.places(4)
        sent = LinkMemory(NBYTES, WALK)
        assert {bytes(place) for place in places} == {bytes(part) for part in sent.numbered(0, 4)}
        bare.close()
