"""Layers travel while the next ones are computed, over a link as fast as the computer."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import pytest

from kvferry.core import DType, KVSpec, deadline_in
from kvferry.core.buffers import Buf
from kvferry.core.errors import KVFerryError
from kvferry.core.memory import MemoryStore
from kvferry.streaming import LayerReceiver, LayerSender
from kvferry.streaming.slots import BlockSlots
from kvferry.testing.prompt_kv import PromptKV, kv_spec
from kvferry.testing.streams import DecodeEnd
from kvferry.transports import streams
from kvferry.transports.sockets import SocketConnection
from kvferry.wire.messages import Handoff, SamplingParams, StreamDone

LAYERS = 24
COMPUTE_S = 1.5
# The promise. What sends only after the last layer takes 2.0.
BOUND = 1.15
SPEC = kv_spec(LAYERS, kv_heads=4, head_dim=64, dtype=DType.FLOAT32)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore(64 << 20)
    yield store
    assert store.stats().leases == 0
    store.close()


class SendsAtTheEnd(LayerSender):
    """The mutant: nothing leaves before the last layer is there."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._kept: list[tuple[int, Sequence[tuple[int, Sequence[Buf]]]]] = []

    def put_layer(
        self,
        layer: int,
        blocks: Sequence[tuple[int, Sequence[Buf]]],
        *,
        sent: Callable[[], None] | None = None,
    ) -> None:
        del sent
        self._kept.append((layer, blocks))

    def finish(self, handoff: Handoff, deadline: float, *, lossy: Collection[int] = ()) -> StreamDone:
        for layer, blocks in self._kept:
            super().put_layer(layer, blocks)
        return super().finish(handoff, deadline, lossy=lossy)


def _ratio(store: MemoryStore, kind: type[LayerSender], chunks: int = 1) -> float:
    """Time of the whole over the longer of compute and transfer, both ``COMPUTE_S``."""
    kv = PromptKV(SPEC, 16 * 16 + 5)
    with DecodeEnd("tcp://127.0.0.1:0", store, SPEC) as end:
        channel = end.connect(f"{end.address}?rate={kv.nbytes / COMPUTE_S:.0f}B/s")
        sender = kind(channel, SPEC)
        sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(60))
        receiver = end.receiver(deadline_in(20))
        computing = threading.Event()  # never set: a wait on it is the time that a layer computes
        size = -(-kv.blocks // chunks)
        started = time.monotonic()
        for chunk in range(chunks):
            for layer in range(LAYERS):
                computing.wait(
                    max(
                        0.0,
                        started
                        + COMPUTE_S * (chunk * LAYERS + layer + 1) / LAYERS / chunks
                        - time.monotonic(),
                    )
                )
                sender.put_layer(
                    layer, kv.put(layer, range(chunk * size, min((chunk + 1) * size, kv.blocks)))
                )
        handoff = Handoff(prompt_tokens=261, cached_tokens=0, first_token=1, sampling=SamplingParams())
        sender.finish(handoff, deadline_in(60))
        took = time.monotonic() - started
        _check(receiver, kv)
        assert receiver.wire_s == pytest.approx(COMPUTE_S, rel=0.35)
        channel.close()
    return took / COMPUTE_S


class Clock:
    """The time of a model and of a link as fast as that, which goes on while either is busy, and only then.

    The real threads stream real bytes, as slowly as the machine is; what they would have waited for the link
    is added up instead.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.computed = self.link = self._started = time.monotonic()
        monkeypatch.setattr(streams, "time", self)
        monkeypatch.setattr(SocketConnection, "_sleep", self._sleep)
        self._model = threading.current_thread()

    def monotonic(self) -> float:
        """What the sender's pacer sees: the link is idle until a layer is computed."""
        self.link = max(self.link, self.computed)
        return self.link

    def _sleep(self, seconds: float) -> bool:
        assert threading.current_thread() is not self._model, "the model waits for the link"
        self.link += seconds
        return False

    @property
    def passed(self) -> float:
        return max(self.link, self.computed) - self._started


def _ratio_of_a_quiet_machine(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, kind: type[LayerSender], chunks: int = 1
) -> float:
    """As :func:`_ratio`, by a clock that knows of nothing else the machine does."""
    kv = PromptKV(SPEC, 16 * 16 + 5)
    with DecodeEnd("tcp://127.0.0.1:0", store, SPEC) as end:
        channel = end.connect(f"{end.address}?rate={kv.nbytes / COMPUTE_S:.0f}B/s")
        sender = kind(channel, SPEC)
        sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(60))
        receiver = end.receiver(deadline_in(20))
        size = -(-kv.blocks // chunks)
        clock, nbytes = Clock(monkeypatch), 0
        for chunk in range(chunks):
            blocks = range(chunk * size, min((chunk + 1) * size, kv.blocks))
            for layer in range(LAYERS):
                clock.computed += COMPUTE_S / LAYERS / chunks
                sender.put_layer(layer, kv.put(layer, blocks))
                nbytes += sum(len(kv.layer_bytes(layer, block)) for block in blocks)
                if kind is LayerSender:  # nothing else than that this layer is computed makes it travel
                    _until(lambda: receiver.kv_nbytes == nbytes)  # noqa: B023
        handoff = Handoff(prompt_tokens=261, cached_tokens=0, first_token=1, sampling=SamplingParams())
        sender.finish(handoff, deadline_in(60))
        _check(receiver, kv)
        channel.close()
    return clock.passed / COMPUTE_S


def _until(holds: Callable[[], bool]) -> None:
    limit = deadline_in(30)
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.0005)


def _check(receiver: LayerReceiver, kv: PromptKV) -> None:
    with receiver:
        receiver.wait(deadline_in(20))
        for layer in range(LAYERS):
            for block in range(kv.blocks):
                assert receiver.view(layer, block).tobytes() == kv.layer_bytes(layer, block)


@pytest.mark.parametrize("chunks", [1, 3])
def test_transfer_hides_behind_compute(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    assert _ratio_of_a_quiet_machine(store, monkeypatch, LayerSender, chunks) <= BOUND


def test_a_sender_that_waits_for_the_last_layer_breaks_the_bound(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _ratio_of_a_quiet_machine(store, monkeypatch, SendsAtTheEnd) > BOUND


@pytest.mark.soak
@pytest.mark.parametrize("chunks", [1, 3])
def test_transfer_hides_behind_compute_on_a_machine_that_does_nothing_else(
    store: MemoryStore, chunks: int
) -> None:
    assert _ratio(store, LayerSender, chunks) <= BOUND


def test_time_on_a_paced_wire_counts_the_pauses_of_small_frames(store: MemoryStore) -> None:
    """Frames smaller than what a link carries in a few milliseconds arrive whole, after waiting to leave."""
    kv = PromptKV(kv_spec(LAYERS, kv_heads=1, head_dim=8), 16)
    seconds = 0.5
    with DecodeEnd("tcp://127.0.0.1:0", store, kv.spec) as end:
        channel = end.connect(f"{end.address}?rate={kv.nbytes / seconds:.0f}B/s")
        sender = LayerSender(channel, kv.spec)
        sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(60))
        for layer in range(LAYERS):
            sender.put_layer(layer, kv.put(layer))
        handoff = Handoff(prompt_tokens=16, cached_tokens=0, first_token=1, sampling=SamplingParams())
        done = sender.finish(handoff, deadline_in(60))
        assert done.kv_nbytes / done.wire_s < 1.2 * kv.nbytes / seconds
        with end.receiver(deadline_in(20)) as receiver:
            receiver.wait(deadline_in(20))
        channel.close()


def test_decode_uses_layers_before_the_last_has_arrived(store: MemoryStore) -> None:
    kv = PromptKV(SPEC, 64)
    with DecodeEnd("tcp://127.0.0.1:0", store, SPEC) as end:
        channel = end.connect()
        sender = LayerSender(channel, SPEC)
        sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(60))
        with end.receiver(deadline_in(20)) as receiver:
            for layer in range(LAYERS):
                sender.put_layer(layer, kv.put(layer))
                receiver.wait_layer(layer, deadline_in(20))  # would time out if anything waited for the whole
                assert receiver.view(layer, 0).tobytes() == kv.layer_bytes(layer, 0)
            sender.abort("seen enough")
        channel.close()


def _slow_stream(store: MemoryStore, kv: PromptKV, spec: KVSpec, seconds: float) -> None:
    with DecodeEnd("tcp://127.0.0.1:0", store, spec) as end:
        channel = end.connect(f"{end.address}?rate={kv.nbytes / seconds:.0f}B/s")
        sender = LayerSender(channel, spec)
        sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(60))
        for layer in range(LAYERS):
            sender.put_layer(layer, kv.put(layer))
        handoff = Handoff(prompt_tokens=64, cached_tokens=0, first_token=1, sampling=SamplingParams())
        try:
            sender.finish(handoff, deadline_in(60))
        finally:
            channel.abort()
        with end.receiver(deadline_in(20)) as receiver:
            receiver.wait(deadline_in(20))


def test_a_stream_outlasts_the_lease_of_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = PromptKV(SPEC, 64)
    for lease_s in (0.9, 3.0, 12.0):  # longer where the machine stood still for two thirds of it
        store = MemoryStore(64 << 20, lease_s=lease_s)
        with contextlib.suppress(KVFerryError):
            _slow_stream(store, kv, SPEC, 2 * lease_s)
            break
        store.close()
    else:
        pytest.fail("the leases ran out")
    store.lease_s = 0.9
    namespace = store.namespace(SPEC)
    assert namespace.lookup(kv.keys).prefix == 4
    namespace.clear()
    monkeypatch.setattr(BlockSlots, "renew", lambda _slots: None)
    with pytest.raises(Exception, match="lease"):  # so it is the renewal that makes the difference
        _slow_stream(store, kv, SPEC, 1.8)
    assert namespace.lookup(kv.keys).prefix == 0
    store.close()
