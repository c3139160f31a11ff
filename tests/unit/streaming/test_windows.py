"""Streams whose sender writes into windows onto the receiver's slots, over a region transport."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial

import pytest

from kvferry.core import KVSpec, deadline_in
from kvferry.core.clock import time_left
from kvferry.core.errors import (
    KVFerryError,
    ProtocolError,
    RequestCancelledError,
    TransferTimeoutError,
    TransportError,
)
from kvferry.core.memory import MemoryStore
from kvferry.core.segments import Slot
from kvferry.streaming import LayerSender, delivery, windows
from kvferry.testing.memory_regions import MemoryRegions
from kvferry.testing.prompt_kv import PromptKV, kv_spec
from kvferry.testing.streams import DecodeEnd
from kvferry.transports.mooncake import MooncakeRegions, unavailable
from kvferry.transports.region import Access, RegionPart, RegionTransfer, RegionTransport, Window
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire.messages import (
    BeginStream,
    Failure,
    Handoff,
    LayerPlaced,
    StreamReady,
    StreamWindows,
)

TAIL = 2
"""The tail block of a prompt of 40 tokens."""


class Counted(MemoryRegions):
    """With the windows that are open, and transfers that can be held up or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[Window] = []
        self.opened = 0
        self.refuse_close = False
        self.refuse_write: KVFerryError | None = None
        self.go_on = threading.Event()
        self.go_on.set()
        self.writing = threading.Event()

    def open_window(self, view: memoryview, access: Access) -> Window:
        window = _Window(self, super().open_window(view, access))
        self.open.append(window)
        self.opened += 1
        return window

    def write(self, grant: bytes, parts: Sequence[RegionPart]) -> RegionTransfer:
        self.writing.set()
        if self.refuse_write is not None:
            raise TransportError(
                str(self.refuse_write)
            )  # a kept one would keep the frames that it went through
        return _Transfer(self, super().write(grant, parts))


class _Window(Window):
    def __init__(self, owner: Counted, window: Window) -> None:
        self._owner, self._window = owner, window

    @property
    def grant(self) -> bytes:
        return self._window.grant

    def close(self) -> None:
        if self._owner.refuse_close:
            raise TransportError("the library does not let go of it")
        self._window.close()
        if self in self._owner.open:
            self._owner.open.remove(self)


class _Transfer(RegionTransfer):
    def __init__(self, owner: Counted, transfer: RegionTransfer) -> None:
        self._owner, self._transfer = owner, transfer

    def poll(self) -> bool:
        return self._owner.go_on.is_set() and self._transfer.poll()

    def wait(self, deadline: float) -> None:
        if not self._owner.go_on.wait(time_left(deadline)):
            raise TransferTimeoutError("held up")
        self._transfer.wait(deadline)


@pytest.fixture
def kv(spec: KVSpec) -> PromptKV:
    return PromptKV(spec, 40)


@pytest.fixture
def regions() -> Iterator[Counted]:
    with closing(Counted()) as endpoint:
        yield endpoint
        endpoint.go_on.set()


@pytest.fixture
def end(store: MemoryStore, spec: KVSpec, regions: Counted) -> Iterator[DecodeEnd]:
    with DecodeEnd("tcp://127.0.0.1:0", store, spec, regions=regions) as end:
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


@pytest.fixture
def told(handoff: Callable[[int], Handoff]) -> Handoff:
    return handoff(40)


def begin(channel: Channel, kv: PromptKV, regions: RegionTransport | None) -> LayerSender:
    sender = LayerSender(channel, kv.spec, regions=regions)
    sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(20))
    return sender


def stream(
    channel: Channel, end: DecodeEnd, kv: PromptKV, regions: RegionTransport | None, told: Handoff
) -> None:
    """One whole stream; every byte is compared."""
    sender = begin(channel, kv, regions)
    for layer in range(len(kv.spec.layers)):
        sender.put_layer(layer, kv.put(layer))
    done = sender.finish(told, deadline_in(20))
    with end.receiver(deadline_in(20)) as receiver:
        assert receiver.wait(deadline_in(20)) == told
        for layer in range(len(kv.spec.layers)):
            for block in range(3):
                assert receiver.view(layer, block) == kv.layer_bytes(layer, block)
        assert done.kv_nbytes == receiver.kv_nbytes


def until(condition: Callable[[], bool]) -> None:
    limit = deadline_in(20)
    while not condition():
        assert time_left(limit), "it never came"
        time.sleep(0.002)


def settled(store: MemoryStore) -> None:
    """Nothing is held, and nothing waits for anybody."""

    def idle() -> bool:
        stats = store.stats()
        return not (stats.leases or stats.pinned_nbytes or stats.quarantined_nbytes)

    until(idle)


def test_only_the_tail_crosses_the_connection(
    channel: Channel,
    end: DecodeEnd,
    store: MemoryStore,
    kv: PromptKV,
    regions: Counted,
    told: Handoff,
    by_frame: list[int],
) -> None:
    stream(channel, end, kv, regions, told)
    assert set(by_frame) == {TAIL}
    assert end.namespace.lookup(kv.keys).prefix == 2
    assert regions.opened > 0
    assert not regions.open
    settled(store)


@pytest.mark.skipif(bool(unavailable()) and "CI" not in os.environ, reason=unavailable())
@pytest.mark.parametrize("trusted", [True, False])
def test_over_mooncake(
    store: MemoryStore, spec: KVSpec, told: Handoff, by_frame: list[int], *, trusted: bool
) -> None:
    """Only a sender that is trusted gets windows."""
    peers = ["127.0.0.1"] if trusted else ["10.9.9.9"]
    with (
        closing(MooncakeRegions(trusted_peers=peers)) as theirs,
        closing(MooncakeRegions(trusted_peers=["127.0.0.1"])) as mine,
        DecodeEnd("tcp://127.0.0.1:0", store, spec, regions=theirs) as end,
    ):
        channel = end.connect()
        for seed in range(3):
            stream(channel, end, PromptKV(spec, 40, seed=seed), mine, told)
        channel.abort()
        assert not theirs._windows
    assert set(by_frame) == ({TAIL} if trusted else {0, 1, TAIL})
    settled(store)


@pytest.mark.parametrize("why", ["no endpoint", "no capability", "no window", "another transport"])
def test_frames_where_there_are_no_windows(
    channel: Channel,
    end: DecodeEnd,
    kv: PromptKV,
    regions: Counted,
    told: Handoff,
    by_frame: list[int],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine: RegionTransport | None = regions
    other = Counted()
    monkeypatch.setattr(other, "name", "nixl")
    if why == "no endpoint":
        mine = None
        channel = Channel.connect(end.address, ChannelOptions(role="p", session="s"), deadline_in(20))
    elif why == "no capability":
        channel = Channel.connect(end.address, ChannelOptions(role="p", session="s"), deadline_in(20))
    elif why == "another transport":
        mine = other
    else:

        def refuse(view: memoryview, access: Access) -> Window:
            raise TransportError("no registration left")

        monkeypatch.setattr(regions, "open_window", refuse)
    stream(channel, end, kv, mine, told)
    assert set(by_frame) == {0, 1, TAIL}
    assert not regions.open
    channel.abort()
    other.close()


def test_padding_is_written_too(store: MemoryStore, regions: Counted, told: Handoff) -> None:
    spec = kv_spec(2, kv_heads=1, head_dim=1)
    with DecodeEnd("tcp://127.0.0.1:0", store, spec, regions=regions) as end:
        channel = end.connect()
        stream(channel, end, PromptKV(spec, 40), regions, told)
        channel.abort()


def test_a_transport_that_fails_is_replaced_by_frames(
    channel: Channel, end: DecodeEnd, kv: PromptKV, regions: Counted, told: Handoff, by_frame: list[int]
) -> None:
    """Memory of which nobody knows whether it was written is the stream's until it is over."""
    regions.refuse_write = TransportError("the peer is not reached")
    sender, sent = begin(channel, kv, regions), list[int]()
    sender.put_layer(0, kv.put(0), sent=partial(sent.append, 0))
    until(lambda: by_frame == [0, 1, TAIL])
    for layer in range(1, len(kv.spec.layers)):
        sender.put_layer(layer, kv.put(layer), sent=partial(sent.append, layer))
    until(lambda: sent == [1, 2, 3])
    sender.finish(told, deadline_in(20))
    assert sent == [1, 2, 3, 0]
    with end.receiver(deadline_in(10)) as receiver:
        receiver.wait(deadline_in(10))
        assert receiver.view(0, 1) == kv.layer_bytes(0, 1)
    assert set(by_frame) == {0, 1, TAIL}
    assert not regions.open


def test_neighbouring_slots_share_a_window(spec: KVSpec) -> None:
    page, one = 4096, 3 * 4096

    def slot(segment: int, offset: int) -> Slot:
        return Slot(segment, offset, one - 100, 1)

    slots = {5: slot(0, one), 1: slot(0, 2 * one), 0: slot(0, 0), 2: slot(0, 3 * one + page), 3: slot(1, 0)}
    assert [
        (first.segment, first.offset, nbytes, blocks) for first, nbytes, blocks in windows._runs(slots)
    ] == [
        (0, 0, 3 * one - 100, [0, 5, 1]),
        (0, 3 * one + page, one - 100, [2]),
        (1, 0, one - 100, [3]),
    ]


# -- ends before the end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["sender", "receiver", "connection"])
def test_windows_are_closed_however_the_stream_ends(
    channel: Channel,
    end: DecodeEnd,
    store: MemoryStore,
    kv: PromptKV,
    regions: Counted,
    who: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvferry.streaming.receiver._CLOSE_TIMEOUT_S", 1000.0)  # it is not what ends it
    regions.go_on.clear()
    sender = begin(channel, kv, regions)
    sender.put_layer(0, kv.put(0))
    assert regions.writing.wait(20)
    receiver = end.receiver(deadline_in(20))
    assert regions.open
    if who == "sender":
        sender.abort("no longer wanted")
    elif who == "receiver":
        receiver.close()
    else:
        channel.abort()
    with pytest.raises(KVFerryError):
        receiver.wait(deadline_in(20))
    until(lambda: not regions.open)
    settled(store)
    assert store.stats().used_nbytes == 0
    sender.abort("done")


def test_a_stream_that_expires_closes_its_windows(
    end: DecodeEnd, store: MemoryStore, kv: PromptKV, regions: Counted
) -> None:
    regions.go_on.clear()
    for limit in (0.4, 2.0, 10.0):  # longer where the machine was too slow to begin in time
        sender = LayerSender(end.connect(), kv.spec, regions=regions)
        with suppress(KVFerryError):
            sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(limit))
            break
    else:
        pytest.fail("no stream could be begun")
    sender.put_layer(0, kv.put(0))
    with pytest.raises(KVFerryError):
        end.receiver(deadline_in(20)).wait(deadline_in(20))
    until(lambda: not regions.open)
    settled(store)
    sender.abort("done")


def test_slots_stay_in_quarantine_while_a_window_cannot_be_closed(
    channel: Channel, end: DecodeEnd, store: MemoryStore, kv: PromptKV, regions: Counted
) -> None:
    regions.refuse_close = True
    sender = begin(channel, kv, regions)
    sender.put_layer(0, kv.put(0))
    sender.abort("enough")
    with pytest.raises(RequestCancelledError):
        end.receiver(deadline_in(20)).wait(deadline_in(20))
    until(lambda: end.keeper.reap() == 1)
    assert store.stats().quarantined_nbytes == store.stats().used_nbytes > 0
    regions.refuse_close = False
    assert end.keeper.reap() == 0
    settled(store)
    assert store.stats().used_nbytes == 0


def test_layers_are_only_taken_for_blocks_with_a_window(
    channel: Channel, end: DecodeEnd, store: MemoryStore, kv: PromptKV, regions: Counted
) -> None:
    opening = BeginStream(
        stream="s",
        spec=kv.spec,
        keys=b"".join(kv.keys),
        tail_tokens=kv.tail_tokens,
        timeout_s=20,
        tells_lossy=True,
    )
    channel.send(opening, deadline=deadline_in(20))
    message = channel.receive(deadline_in(20)).message
    assert isinstance(message, StreamWindows)
    assert message.transport == "memory"
    assert [block for block, _, _ in message.slots] == [0, 1]
    assert isinstance(channel.receive(deadline_in(20)).message, StreamReady)
    channel.send(LayerPlaced(layer=0, blocks=(0, TAIL)), deadline=deadline_in(20))
    failure = channel.receive(deadline_in(20)).message
    assert isinstance(failure, Failure)
    assert "not granted" in failure.message
    assert isinstance(end.error(deadline_in(20)), ProtocolError)
    until(lambda: not regions.open)
    settled(store)
