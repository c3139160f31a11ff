"""Peers that restart, move, or come back smaller, as the channels to them see it."""

# ruff: noqa: SIM117 - nested: the inner one ends first

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trustme

from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError, ProtocolError, SpecMismatchError, TransportError
from kvferry.core.memory import MemoryStore
from kvferry.streaming import LayerSender
from kvferry.testing.prompt_kv import PromptKV, kv_spec
from kvferry.testing.streams import DecodeEnd
from kvferry.transports import lanes
from kvferry.wire import Channel, ChannelOptions, ChannelPool, ChannelServer
from kvferry.wire import messages as m

OPTIONS = ChannelOptions(role="test", session="s")
PUT = m.PutLayer(layer=0, blocks=(0,))


class Store:
    """Keeps the sizes of what is put, and answers each put with its size."""

    def __init__(self, url: str) -> None:
        self.most = 0
        self.accepted = 0
        self._serving = 0
        self._lock = threading.Lock()
        self.server = ChannelServer(url, OPTIONS, self._serve, name="restart-test")

    @property
    def address(self) -> str:
        return self.server.address

    def _serve(self, channel: Channel) -> None:
        with self._lock:
            self.accepted += 1
            self._serving += 1
            self.most = max(self.most, self._serving)
        try:
            while True:
                request = channel.receive(deadline_in(60))
                request.discard(deadline_in(60))
                pong = m.Pong(at=float(request.payload_nbytes))
                channel.reply(request, pong, deadline=deadline_in(20))
        finally:
            with self._lock:
                self._serving -= 1

    def close(self) -> None:
        self.server.close()


def put(pool: ChannelPool, data: bytes, timeout_s: float = 60.0) -> None:
    reply = pool.call(PUT, m.Pong, payload=[data], deadline=deadline_in(timeout_s))
    assert reply.at == len(data)


STRIPE_NBYTES = 16 << 10
"""Of lanes in quick tests."""
EVERY_LANE = bytes(3 * STRIPE_NBYTES + 1000)
"""Has stripes for each of three lanes."""


@pytest.fixture(params=["tcp", "lanes", "tls"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tls":
        ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        ca.cert_pem.write_to_path(tmp_path / "ca")
        ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "own")
        return f"tls://127.0.0.1:0?cert={tmp_path}/own&ca={tmp_path}/ca"
    monkeypatch.setattr(lanes, "STRIPE_NBYTES", STRIPE_NBYTES)
    return "tcp://127.0.0.1:0" + ("?lanes=3" if request.param == "lanes" else "")


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    def wait(condition: Callable[[], object]) -> None:
        limit = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < limit, "did not come true"
            time.sleep(0.005)

    return wait


@pytest.mark.parametrize("soon_s", [20.0, pytest.param(2.0, marks=pytest.mark.soak)])
def test_c061_a_restart_is_noticed_at_the_next_use(url: str, soon_s: float) -> None:
    """Works again at once, what was put while nobody was there failed, one reconnect is counted."""
    first = Store(url)
    address = first.address
    with contextlib.closing(ChannelPool(address, OPTIONS)) as pool:
        put(pool, EVERY_LANE)
        first.close()
        for data in (b"lost", EVERY_LANE):
            with pytest.raises(TransportError):
                put(pool, data, timeout_s=1)
        assert pool.reconnects == 0
        with contextlib.closing(Store(address)) as second:
            started = time.monotonic()
            put(pool, EVERY_LANE)
            put(pool, b"z")
            assert time.monotonic() - started < soon_s
            assert (pool.reconnects, second.accepted) == (1, 1)


def test_c061_a_peer_that_restarted_meanwhile_costs_no_error(url: str) -> None:
    first = Store(url)
    address = first.address
    with contextlib.closing(ChannelPool(address, OPTIONS)) as pool:
        put(pool, EVERY_LANE)
        first.close()
        with contextlib.closing(Store(address)) as second:
            put(pool, EVERY_LANE)
            put(pool, b"z" * 500_000)
            assert (pool.reconnects, second.accepted) == (1, 1)


def test_an_end_that_shows_while_sending_is_made_good_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer ends the channel between the look at it and the request."""
    with contextlib.closing(Store("tcp://127.0.0.1:0")) as store:
        with contextlib.closing(ChannelPool(store.address, OPTIONS)) as pool:
            put(pool, b"x")
            monkeypatch.setattr(Channel, "readable", lambda self: self._connection.close() and None)
            put(pool, b"y" * 100)
            assert (pool.reconnects, store.accepted) == (1, 2)


def test_a_request_that_was_sent_is_not_repeated(until: Callable[[Callable[[], object]], None]) -> None:
    asked: list[m.Message] = []

    def leave(channel: Channel) -> None:
        asked.append(channel.receive(deadline_in(60)).message)
        if len(asked) == 1:
            channel.send(m.Pong(at=0.0), deadline=deadline_in(20))
            asked.append(channel.receive(deadline_in(60)).message)
        channel.abort()

    with contextlib.closing(ChannelServer("tcp://127.0.0.1:0", OPTIONS, leave, name="leaves")) as server:
        with contextlib.closing(ChannelPool(server.address, OPTIONS)) as pool:
            pool.call(m.Ping(), m.Pong, deadline=deadline_in(60))
            with pytest.raises(TransportError):
                pool.call(m.Ping(), m.Pong, deadline=deadline_in(60))
            until(lambda: server.connections == 0)
            assert len(asked) == 2


def test_c066_a_peer_that_moved_is_found_and_the_others_notice_nothing() -> None:
    stores = [Store("tcp://127.0.0.1:0") for _ in range(3)]
    where = {n: store.address for n, store in enumerate(stores)}

    def locate(n: int) -> Callable[[], str]:
        return lambda: where[n]

    pools = [ChannelPool(locate(n), OPTIONS) for n in range(3)]
    with contextlib.ExitStack() as stack:
        for pool in pools:
            stack.callback(pool.close)
            put(pool, b"x" * 100)
        stores[0].close()
        with pytest.raises(TransportError):  # it is not back yet
            put(pools[0], b"lost", timeout_s=1)
        for pool in pools[1:]:
            started = time.monotonic()
            put(pool, b"y" * 100_000)
            assert time.monotonic() - started < 20
        stores.append(Store("tcp://127.0.0.1:0"))
        where[0] = stores[-1].address
        assert where[0] != pools[0].address
        put(pools[0], b"z" * 100_000)
        assert pools[0].address == where[0]
        assert [pool.reconnects for pool in pools[1:]] == [0, 0]
        for store in stores:
            store.close()


def _load(pool: ChannelPool, threads: int, until_s: float, nbytes: Sequence[int]) -> None:
    def work(seed: int) -> None:
        n = seed
        while time.monotonic() < until_s:
            n += 1
            put(pool, bytes(nbytes[n % len(nbytes)]))

    with ThreadPoolExecutor(threads) as workers:
        for done in [workers.submit(work, seed) for seed in range(threads)]:
            done.result(timeout=180)


@pytest.mark.parametrize(
    "seconds", [0.7, pytest.param(60, marks=[pytest.mark.soak, pytest.mark.timeout(240)])]
)
def test_c072_sockets_are_bounded_and_a_one_sided_restart_is_survived(
    seconds: float, until: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """10-way load: no more channels than users, then ``max_idle`` of them; 1 KB and much after a restart."""
    sizes, soon_s = [100, 1000, 300_000], 20.0
    if seconds > 1:  # stripes as they are, and the machine has nothing else to do
        sizes, soon_s = [*sizes, 3_000_000], 2.0
    else:
        monkeypatch.setattr(lanes, "STRIPE_NBYTES", STRIPE_NBYTES)
    store = Store("tcp://127.0.0.1:0?lanes=2")
    address = store.address
    large = bytes(100_000_000 if seconds > 1 else 20_000_000)
    with contextlib.closing(ChannelPool(address, OPTIONS, max_idle=4)) as pool:
        _load(pool, 10, deadline_in(seconds), sizes)
        assert 1 < store.most <= 10
        until(lambda: store.server.connections <= 4)
        assert pool.idle <= 4
        store.close()
        with contextlib.closing(Store(address)) as again:
            started = time.monotonic()
            put(pool, bytes(1000))
            assert time.monotonic() - started < soon_s
            started = time.monotonic()
            put(pool, large)
            assert time.monotonic() - started < soon_s
            assert again.accepted == 1
            _load(pool, 4, deadline_in(0.1), sizes)


def _stream(end: DecodeEnd, kv: PromptKV) -> None:
    with contextlib.closing(end.connect()) as channel:
        sender = LayerSender(channel, kv.spec)
        sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(60))
        for layer in range(len(kv.spec.layers)):
            sender.put_layer(layer, kv.put(layer))
        sampling = m.SamplingParams(seed=1)
        handoff = m.Handoff(prompt_tokens=16, cached_tokens=0, first_token=7, sampling=sampling)
        sender.finish(handoff, deadline_in(60))
        end.receiver(deadline_in(60)).close()  # gives up its leases


def _assert_holds(end: DecodeEnd, kv: PromptKV) -> None:
    with end.namespace.load(kv.keys, deadline=deadline_in(20)) as lease:
        assert [bytes(lease.view(n)) for n in range(len(kv.keys))] == [
            kv.block_bytes(n) for n in range(len(kv.keys))
        ]


def test_c111_a_peer_that_comes_back_with_fewer_blocks() -> None:
    """Transfers are right on both sides of the restart; what no longer fits, or lies beyond, is refused."""
    spec = kv_spec()
    tokens = spec.block_tokens
    with contextlib.closing(MemoryStore(10 * 4096)) as large:
        with DecodeEnd("tcp://127.0.0.1:0", large, spec) as end:
            address = end.address
            ten = PromptKV(spec, 10 * tokens)
            _stream(end, ten)
            _assert_holds(end, ten)
    with contextlib.closing(MemoryStore(9 * 4096)) as small:
        with DecodeEnd(address, small, spec) as end:
            with pytest.raises(CapacityError):
                _stream(end, PromptKV(spec, 10 * tokens, seed=2))
            nine = PromptKV(spec, 9 * tokens, seed=3)
            _stream(end, nine)
            _assert_holds(end, nine)
            _refuses_block(end, PromptKV(spec, 9 * tokens, seed=4), 9)
            stats = small.stats()
            assert (stats.leases, stats.pinned_nbytes) == (0, 0)


def test_c111_ranks_of_one_peer_with_other_numbers_of_blocks() -> None:
    """Each takes what its own store holds; none takes the other's for its own."""
    specs = [dataclasses.replace(kv_spec(), tp_rank=rank, tp_size=2) for rank in range(2)]
    counts = [10, 4]
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(contextlib.closing(MemoryStore(n * 4096))) for n in counts]
        ends = [
            stack.enter_context(DecodeEnd("tcp://127.0.0.1:0", store, spec))
            for store, spec in zip(stores, specs, strict=True)
        ]
        for end, spec, count in zip(ends, specs, counts, strict=True):
            kv = PromptKV(spec, count * spec.block_tokens, seed=count)
            _stream(end, kv)
            _assert_holds(end, kv)
        with pytest.raises(CapacityError):
            _stream(ends[1], PromptKV(specs[1], 10 * specs[1].block_tokens, seed=5))
        _refuses_block(ends[1], PromptKV(specs[1], 4 * specs[1].block_tokens, seed=6), 4)
        with pytest.raises(SpecMismatchError):
            _stream(ends[0], PromptKV(specs[1], specs[1].block_tokens, seed=7))
        assert [(s.stats().leases, s.stats().pinned_nbytes) for s in stores] == [(0, 0)] * 2


def _refuses_block(end: DecodeEnd, kv: PromptKV, block: int) -> None:
    with contextlib.closing(end.connect()) as channel:
        begin = m.BeginStream(
            stream="t", spec=kv.spec, keys=b"".join(kv.keys), tail_tokens=0, tells_lossy=True
        )
        channel.call(begin, m.StreamReady, deadline=deadline_in(60))
        receiver = end.receiver(deadline_in(60))
        put = m.PutLayer(layer=0, blocks=(block,))
        channel.send(put, [kv.layer_bytes(0, 0)], deadline=deadline_in(60))
        with pytest.raises(ProtocolError, match="not asked for"):
            channel.expect(m.StreamDone, deadline_in(60))
        receiver.close()
