"""Streams whose sender writes into the receiver's slots itself: over ``unix``, on one machine."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvferry.core import KVSpec, deadline_in
from kvferry.core.buffers import write_into
from kvferry.core.clock import time_left
from kvferry.core.errors import CapacityError, KVFerryError, ProtocolError, RequestCancelledError
from kvferry.core.memory import MemoryStore
from kvferry.streaming import LayerReceiver, LayerSender, delivery
from kvferry.streaming.arrivals import Arrivals
from kvferry.testing.prompt_kv import PromptKV, kv_spec
from kvferry.testing.streams import DecodeEnd
from kvferry.wire import Channel, ChannelOptions, SharedArena
from kvferry.wire.messages import (
    AbortStream,
    ArenaSegments,
    BeginStream,
    Failure,
    Handoff,
    LayerPlaced,
    StreamReady,
    StreamSlots,
)

TAIL = 2
"""The tail block of a prompt of 40 tokens."""


@pytest.fixture
def kv(spec: KVSpec) -> PromptKV:
    return PromptKV(spec, 40)


@pytest.fixture
def end(store: MemoryStore, spec: KVSpec) -> Iterator[DecodeEnd]:
    with (
        tempfile.TemporaryDirectory(prefix="kvf-") as folder,
        DecodeEnd(f"unix://{folder}/kv", store, spec, segments=True) as end,
    ):
        yield end


@pytest.fixture
def channel(end: DecodeEnd) -> Iterator[Channel]:
    channel = end.connect()
    yield channel
    channel.abort()


@pytest.fixture
def by_frame(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks whose payload went through the connection."""
    sent: list[int] = []
    original = delivery.FrameDelivery.send

    def counted(self: delivery.FrameDelivery, part: delivery.LayerPart, deadline: float) -> None:
        sent.extend(part.blocks)
        original(self, part, deadline)

    monkeypatch.setattr(delivery.FrameDelivery, "send", counted)
    return sent


def begin(channel: Channel, kv: PromptKV, arena: SharedArena | None, name: str = "s") -> LayerSender:
    sender = LayerSender(channel, kv.spec, arena=arena)
    sender.begin(name, kv.keys, kv.tail_tokens, deadline=deadline_in(20))
    return sender


def stream(
    channel: Channel, end: DecodeEnd, kv: PromptKV, arena: SharedArena | None, handoff: Handoff
) -> None:
    """One whole stream; every byte is compared."""
    sender = begin(channel, kv, arena)
    for layer in range(len(kv.spec.layers)):
        sender.put_layer(layer, kv.put(layer))
    done = sender.finish(handoff, deadline_in(20))
    with end.receiver(deadline_in(20)) as receiver:
        assert receiver.wait(deadline_in(20)) == handoff
        for layer in range(len(kv.spec.layers)):
            for block in range(3):
                assert receiver.view(layer, block) == kv.layer_bytes(layer, block)
        assert done.kv_nbytes == receiver.kv_nbytes


@pytest.fixture
def told(handoff: Callable[[int], Handoff]) -> Handoff:
    return handoff(40)


def settled(store: MemoryStore) -> None:
    """Nothing is held, and nothing waits for anybody."""
    limit = time.monotonic() + 20
    while (stats := store.stats()).leases or stats.pinned_nbytes or stats.quarantined_nbytes:
        assert time.monotonic() < limit, stats
        time.sleep(0.005)


def test_only_the_tail_crosses_the_connection(
    channel: Channel, end: DecodeEnd, store: MemoryStore, kv: PromptKV, told: Handoff, by_frame: list[int]
) -> None:
    stream(channel, end, kv, SharedArena(), told)
    assert set(by_frame) == {TAIL}
    assert end.namespace.lookup(kv.keys).prefix == 2
    settled(store)


def test_streams_follow_each_other_over_channels_and_as_the_arena_grows(
    channel: Channel, end: DecodeEnd, spec: KVSpec, told: Handoff, by_frame: list[int]
) -> None:
    arena = SharedArena()
    other = end.connect()
    for seed, one in enumerate((channel, channel, other)):
        kv = PromptKV(spec, 40, seed=seed)
        stream(one, end, kv, arena, told)
    assert set(by_frame) == {TAIL}
    other.abort()


def test_stored_blocks_are_not_written_again(
    channel: Channel, end: DecodeEnd, kv: PromptKV, told: Handoff, by_frame: list[int]
) -> None:
    arena = SharedArena()
    stream(channel, end, kv, arena, told)
    sender = begin(channel, kv, arena)
    assert sender.missing == {TAIL}
    sender.abort("enough")
    with pytest.raises(RequestCancelledError):
        end.receiver(deadline_in(20)).wait(deadline_in(20))


@pytest.mark.parametrize("why", ["no map", "other capabilities", "a map that was dropped", "too large"])
def test_frames_where_slots_cannot_be_written(
    channel: Channel, end: DecodeEnd, kv: PromptKV, told: Handoff, by_frame: list[int], why: str
) -> None:
    arena: SharedArena | None = SharedArena()
    if why == "no map":
        arena = None
        channel = Channel.connect(end.address, ChannelOptions(role="p", session="s"), deadline_in(20))
    elif why == "other capabilities":
        options = ChannelOptions(role="p", session="s", capabilities=("shared_arena",))
        channel = Channel.connect(end.address, options, deadline_in(20))
    elif why == "too large":
        arena = SharedArena(max_nbytes=4096)
    else:
        stream(channel, end, PromptKV(kv.spec, 40, seed=9), SharedArena(), told)
        by_frame.clear()
    stream(channel, end, kv, arena, told)
    assert set(by_frame) == {0, 1, TAIL}
    channel.abort()


def test_padding_is_written_too(store: MemoryStore, told: Handoff) -> None:
    spec = kv_spec(2, kv_heads=1, head_dim=1)  # slices that end between two 64-byte borders
    assert spec.layers[0].nbytes > spec.layers[0].data_nbytes or spec.layers[0].nbytes % 64 == 0
    with (
        tempfile.TemporaryDirectory(prefix="kvf-") as folder,
        DecodeEnd(f"unix://{folder}/kv", store, spec, segments=True) as end,
    ):
        channel = end.connect()
        stream(channel, end, PromptKV(spec, 40), SharedArena(), told)
        channel.abort()


# -- ends before the end ---------------------------------------------------------------------------------


class Held:
    """A copy into slots that waits in the middle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()

        def write(dst: Any, offset: int, source: memoryview) -> None:
            self.inside.set()
            assert self.go_on.wait(20)
            write_into(dst, offset, source)

        monkeypatch.setattr("kvferry.streaming.delivery.write_into", write)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    yield held
    held.go_on.set()


def test_slots_come_back_when_the_sender_gives_up(
    channel: Channel, end: DecodeEnd, store: MemoryStore, kv: PromptKV
) -> None:
    sender = begin(channel, kv, SharedArena())
    sender.put_layer(0, kv.put(0))
    sender.abort("no longer wanted")
    with pytest.raises(RequestCancelledError, match="no longer wanted"):
        end.receiver(deadline_in(20)).wait(deadline_in(20))
    settled(store)
    assert store.stats().used_nbytes == 0


def test_slots_wait_for_the_senders_word_when_the_receiver_gives_up(
    channel: Channel, end: DecodeEnd, store: MemoryStore, kv: PromptKV, held: Held
) -> None:
    sender = begin(channel, kv, SharedArena())
    sender.put_layer(0, kv.put(0))
    assert held.inside.wait(20)
    receiver = end.receiver(deadline_in(20))
    closing = threading.Thread(target=receiver.close)
    closing.start()
    limit = deadline_in(20)
    while not store.stats().quarantined_nbytes:
        assert time_left(limit)
        time.sleep(0.002)
    assert store.arena.used_nbytes, "the slots are not used again while a copy runs"
    held.go_on.set()
    closing.join(20)
    assert not closing.is_alive()
    settled(store)
    assert store.stats().used_nbytes == 0
    assert isinstance(sender.error, KVFerryError)
    sender.abort("done")


def test_the_senders_word_comes_whatever_ended_the_stream(
    channel: Channel, end: DecodeEnd, store: MemoryStore, kv: PromptKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Arrivals, message: object) -> int:
        raise CapacityError("no room after all")

    monkeypatch.setattr(Arrivals, "check", refuse)
    sender = begin(channel, kv, SharedArena())
    sender.put_layer(0, kv.put(0))
    assert isinstance(end.error(deadline_in(20)), CapacityError)
    settled(store)
    assert end.watch.reap() == 0
    assert isinstance(sender.error, CapacityError)
    sender.abort("done")


def test_a_copy_that_outlives_the_patience_of_the_receiver_keeps_the_slots(
    channel: Channel,
    end: DecodeEnd,
    store: MemoryStore,
    kv: PromptKV,
    held: Held,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvferry.streaming.segments._SETTLE_S", 0.1)
    sender = begin(channel, kv, SharedArena())
    sender.put_layer(0, kv.put(0))
    assert held.inside.wait(20)
    end.receiver(deadline_in(20)).close()
    assert end.watch.reap() == 1  # this process, which goes on
    assert store.stats().quarantined_nbytes == store.stats().used_nbytes > 0
    held.go_on.set()
    sender.abort("done")
    assert store.stats().quarantined_nbytes > 0, "only the end of the process frees them now"
    end.watch.close()
    settled(store)


def test_a_sender_that_never_wrote_gives_its_word_too(
    channel: Channel, end: DecodeEnd, store: MemoryStore, kv: PromptKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LayerSender, ready: StreamReady, codecs: object) -> frozenset[int]:
        raise ProtocolError("that makes no sense")

    monkeypatch.setattr(LayerSender, "_accepted", fail)
    with pytest.raises(ProtocolError, match="no sense"):
        begin(channel, kv, SharedArena())
    with pytest.raises(RequestCancelledError, match="no sense"):
        end.receiver(deadline_in(20)).wait(deadline_in(20))
    settled(store)
    assert end.watch.reap() == 0


def test_closed_between_start_and_run(
    store: MemoryStore, kv: PromptKV, monkeypatch: pytest.MonkeyPatch, end: DecodeEnd, channel: Channel
) -> None:
    original = LayerReceiver.run

    def closed_first(self: LayerReceiver, deadline: float) -> Handoff:
        self.close()
        return original(self, deadline)

    monkeypatch.setattr(LayerReceiver, "run", closed_first)
    sender = begin(channel, kv, SharedArena())
    assert isinstance(end.error(deadline_in(20)), RequestCancelledError)
    settled(store)
    assert end.watch.reap() == 0
    sender.abort("done")


def opened(channel: Channel, kv: PromptKV) -> tuple[SharedArena, StreamSlots]:
    """A stream begun by hand."""
    opening = BeginStream(
        stream="s",
        spec=kv.spec,
        keys=b"".join(kv.keys),
        tail_tokens=kv.tail_tokens,
        timeout_s=20,
        tells_lossy=True,
    )
    arena, slots = SharedArena(), None
    channel.send(opening, deadline=deadline_in(20))
    while not isinstance((incoming := channel.receive(deadline_in(20))).message, StreamReady):
        if isinstance(incoming.message, ArenaSegments):
            arena.take(channel, incoming, deadline_in(20))
        elif isinstance(incoming.message, StreamSlots):
            slots = incoming.message
    assert slots is not None
    return arena, slots


def test_layers_are_only_taken_for_slots_that_were_granted(
    channel: Channel, end: DecodeEnd, store: MemoryStore, kv: PromptKV
) -> None:
    _, slots = opened(channel, kv)
    assert [placed.block for placed in slots.slots] == [0, 1]
    assert slots.epoch == store.arena.epoch
    channel.send(LayerPlaced(layer=0, blocks=(0, TAIL)), deadline=deadline_in(20))
    failure = channel.receive(deadline_in(20)).message
    assert isinstance(failure, Failure)
    assert "not granted" in failure.message
    channel.send(AbortStream(), deadline=deadline_in(20))
    settled(store)
    assert end.watch.reap() == 0


def test_a_process_that_leaves_without_a_word_too_often_gets_no_more_slots(
    end: DecodeEnd, store: MemoryStore, kv: PromptKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.streaming.segments._EXIT_S", 0.0)
    for left in range(1, 5):
        channel = end.connect()
        opened(channel, kv)
        channel.abort()
        end.error(deadline_in(20))
        assert end.watch.reap() == left
    channel = end.connect()
    opening = BeginStream(
        stream="s", spec=kv.spec, keys=b"".join(kv.keys), tail_tokens=0, timeout_s=20, tells_lossy=True
    )
    ready = channel.call(opening, StreamReady, deadline=deadline_in(20))
    assert ready.missing == (0, 1)
    channel.abort()
    end.error(deadline_in(20))
    end.watch.close()
    settled(store)
