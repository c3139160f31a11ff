"""The receiver against a peer that this test drives message by message."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from kvferry.core import KVSpec, deadline_in
from kvferry.core.clock import is_past
from kvferry.core.errors import (
    ConnectionClosedError,
    KVFerryError,
    LeaseExpiredError,
    ProtocolError,
    RequestCancelledError,
    SpecMismatchError,
    TransferTimeoutError,
)
from kvferry.core.memory import MemoryStore
from kvferry.streaming import LayerReceiver
from kvferry.testing.prompt_kv import PromptKV
from kvferry.testing.streams import DecodeEnd
from kvferry.wire import Channel
from kvferry.wire.messages import (
    AbortStream,
    BeginStream,
    Failure,
    FinishStream,
    Handoff,
    LayerAck,
    Message,
    Ping,
    PutLayer,
    SamplingParams,
    StreamDone,
    StreamReady,
)

HANDOFF = Handoff(prompt_tokens=40, cached_tokens=0, first_token=7, sampling=SamplingParams())


@pytest.fixture
def kv(spec: KVSpec) -> PromptKV:
    return PromptKV(spec, 40)


@pytest.fixture
def channel(end: DecodeEnd) -> Iterator[Channel]:
    channel = end.connect()
    yield channel
    channel.abort()


def _begin(kv: PromptKV, timeout_s: float = 20.0) -> BeginStream:
    return BeginStream(
        stream="s",
        spec=kv.spec,
        keys=b"".join(kv.keys),
        tail_tokens=kv.tail_tokens,
        timeout_s=timeout_s,
        tells_lossy=True,
    )


def _opened(channel: Channel, end: DecodeEnd, kv: PromptKV, timeout_s: float = 20.0) -> LayerReceiver:
    ready = channel.call(_begin(kv, timeout_s), StreamReady, deadline=deadline_in(20))
    assert ready.missing == (0, 1)
    return end.receiver(deadline_in(20))


def _put(channel: Channel, kv: PromptKV, layer: int, blocks: tuple[int, ...], *, cut: int = 0) -> None:
    data = b"".join(kv.layer_bytes(layer % len(kv.spec.layers), min(b, 2)) for b in blocks)
    message = PutLayer(layer=layer, blocks=blocks)
    channel.send(message, [data[: len(data) - cut]], deadline=deadline_in(20))


def _refused(channel: Channel) -> Failure:
    """The failure that the peer reports in the end."""
    while True:
        message = channel.receive(deadline_in(20)).message
        if isinstance(message, Failure):
            return message
        assert isinstance(message, LayerAck)


def _nothing_left(end: DecodeEnd, store: MemoryStore, kv: PromptKV) -> None:
    """Nothing is visible, and all is given back: who waits may learn of the end before the last of that."""
    assert end.namespace.lookup(kv.keys).tiers == (None, None)
    limit = deadline_in(20)  # earlier than a lease would run out
    while (stats := store.stats()).used_nbytes or stats.leases or stats.pinned_nbytes:
        assert not is_past(limit), stats
        time.sleep(0.002)
    assert stats.quarantined_nbytes == 0


def test_each_frame_is_acknowledged(channel: Channel, end: DecodeEnd, kv: PromptKV) -> None:
    with _opened(channel, end, kv) as receiver:
        for layer in range(4):
            for block in range(3):
                _put(channel, kv, layer, (block,))
                assert channel.expect(LayerAck, deadline_in(20)) == LayerAck()
            receiver.wait_layer(layer, deadline_in(0))
        channel.send(FinishStream(handoff=HANDOFF), deadline=deadline_in(20))
        done = channel.expect(StreamDone, deadline_in(20))
        assert receiver.wait(deadline_in(20)) == HANDOFF
        assert (done.stored_blocks, done.kv_nbytes) == (2, receiver.kv_nbytes)
        assert (done.wire_s, done.complete_at) == (receiver.wire_s, receiver.complete_at)


@pytest.mark.parametrize(
    ("puts", "says"),
    [
        ([(0, (0, 1)), (0, (1,))], "came before"),
        ([(0, (0, 0))], "came before"),
        ([(0, (3,))], "not asked for"),
        ([(4, (0,))], r"layer 4 is outside 0\.\.3"),
    ],
    ids=["twice", "twice in one frame", "no such block", "no such layer"],
)
def test_frames_outside_the_stream_end_it(
    channel: Channel,
    end: DecodeEnd,
    store: MemoryStore,
    kv: PromptKV,
    puts: list[tuple[int, tuple[int, ...]]],
    says: str,
) -> None:
    receiver = _opened(channel, end, kv)
    for layer, blocks in puts:
        _put(channel, kv, layer, blocks)
    assert _refused(channel).code == "protocol"
    with pytest.raises(ProtocolError, match=says):
        receiver.wait(deadline_in(20))
    _nothing_left(end, store, kv)


@pytest.mark.parametrize("cut", [1, 64])
def test_a_payload_of_another_size_ends_the_stream(
    channel: Channel, end: DecodeEnd, store: MemoryStore, kv: PromptKV, cut: int
) -> None:
    receiver = _opened(channel, end, kv)
    _put(channel, kv, 0, (0, 1), cut=cut)
    assert _refused(channel).code == "protocol"
    with pytest.raises(ProtocolError, match="the spec says"):
        receiver.wait_layer(0, deadline_in(20))
    _nothing_left(end, store, kv)


def test_a_present_block_is_not_taken(channel: Channel, end: DecodeEnd, kv: PromptKV) -> None:
    end.namespace.save([(kv.keys[0], kv.block_bytes(0))], parent=None, deadline=deadline_in(20))
    ready = channel.call(_begin(kv), StreamReady, deadline=deadline_in(20))
    assert ready.missing == (1,)
    _put(channel, kv, 0, (0,))
    assert _refused(channel).code == "protocol"


@pytest.mark.parametrize("message", [Ping(), StreamDone(stored_blocks=0, kv_nbytes=0, wire_s=0.0)])
def test_other_messages_end_the_stream(
    channel: Channel, end: DecodeEnd, store: MemoryStore, kv: PromptKV, message: Message
) -> None:
    receiver = _opened(channel, end, kv)
    channel.send(message, deadline=deadline_in(20))
    with pytest.raises(ProtocolError, match=type(message).__name__):
        receiver.wait(deadline_in(20))
    _nothing_left(end, store, kv)


def test_finish_with_gaps_publishes_nothing(
    channel: Channel, end: DecodeEnd, store: MemoryStore, kv: PromptKV
) -> None:
    receiver = _opened(channel, end, kv)
    _put(channel, kv, 0, (0, 1, 2))
    channel.send(FinishStream(handoff=HANDOFF), deadline=deadline_in(20))
    assert "1 of 4 layers complete" in _refused(channel).message
    with pytest.raises(ProtocolError, match="first gap: block 0 of layer 1"):
        receiver.wait(deadline_in(20))
    _nothing_left(end, store, kv)


def test_the_senders_failure_is_passed_on(channel: Channel, end: DecodeEnd, kv: PromptKV) -> None:
    receiver = _opened(channel, end, kv)
    channel.send(Failure(code="lease_expired", message="too slow"), deadline=deadline_in(20))
    with pytest.raises(LeaseExpiredError, match="the sender failed: too slow"):
        receiver.wait(deadline_in(20))


@pytest.mark.parametrize("put_first", [False, True])
def test_an_abort_wakes_waiting_threads(
    channel: Channel, end: DecodeEnd, store: MemoryStore, kv: PromptKV, *, put_first: bool
) -> None:
    receiver = _opened(channel, end, kv)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            receiver.wait_layer(1, deadline_in(60))
        except KVFerryError as exc:
            raised.append(exc)

    waiting = threading.Thread(target=wait)
    waiting.start()
    if put_first:
        _put(channel, kv, 0, (0, 1, 2))
    channel.send(AbortStream(reason="user left"), deadline=deadline_in(20))
    waiting.join(20)
    assert [type(e) for e in raised] == [RequestCancelledError]
    assert "user left" in str(raised[0])
    end.error(deadline_in(20))
    _nothing_left(end, store, kv)
    with pytest.raises(LeaseExpiredError, match="after the end"):
        receiver.view(0, 0)
    receiver.close()


def test_the_end_of_the_connection_is_seen_at_once(
    channel: Channel, end: DecodeEnd, store: MemoryStore, kv: PromptKV
) -> None:
    receiver = _opened(channel, end, kv)
    channel.abort()
    with pytest.raises(ConnectionClosedError):
        receiver.wait(deadline_in(20))
    _nothing_left(end, store, kv)


def test_the_deadline_of_the_opening_holds(end: DecodeEnd, store: MemoryStore, kv: PromptKV) -> None:
    for timeout_s in (0.4, 2.0, 10.0):  # longer where the machine was too slow to put a layer in time
        channel = end.connect()
        with contextlib.suppress(TransferTimeoutError, ConnectionClosedError):
            receiver = _opened(channel, end, kv, timeout_s=timeout_s)
            _put(channel, kv, 3, (0, 1, 2))
            receiver.wait_layer(3, deadline_in(20))
            with pytest.raises(TransferTimeoutError, match="layer 0 did not arrive in time"):
                receiver.wait_layer(0, deadline_in(0))
            if receiver.error is None:  # only the wait has timed out
                break
        channel.abort()
    else:
        pytest.fail("the stream was over each time")
    with pytest.raises(TransferTimeoutError, match="1 of 4 layers complete"):
        receiver.wait(deadline_in(20))
    assert isinstance(receiver.error, TransferTimeoutError)
    _nothing_left(end, store, kv)
    channel.abort()


# ---- the opening message -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "timeout_s", "stream", "says"),
    [
        (b"x" * 64, 5.0, "s", "1 keys are named twice"),
        (b"", 0.0, "s", "timeout_s is 0.0"),
        (b"", -1.0, "s", "timeout_s is -1.0"),
        (b"", 5.0, "s" * 257, "name of 257 characters"),
    ],
    ids=["keys twice", "no time", "negative time", "long name"],
)
def test_an_opening_that_makes_no_sense_is_refused(
    channel: Channel, store: MemoryStore, spec: KVSpec, keys: bytes, timeout_s: float, stream: str, says: str
) -> None:
    """What the messages themselves refuse is tested with them."""
    begin = BeginStream(
        stream=stream, spec=spec, keys=keys, tail_tokens=3, timeout_s=timeout_s, tells_lossy=True
    )
    with pytest.raises(ProtocolError, match=says):
        channel.call(begin, StreamReady, deadline=deadline_in(20))
    assert store.stats().leases == 0


# ---- close ---------------------------------------------------------------------------------------


def test_close_before_start(end: DecodeEnd, store: MemoryStore, kv: PromptKV, channel: Channel) -> None:
    receiver = LayerReceiver(channel, end.namespace, _begin(kv))
    receiver.close()
    receiver.close()
    with pytest.raises(RequestCancelledError):
        receiver.start()
    with pytest.raises(RequestCancelledError):
        receiver.wait(deadline_in(20))
    _nothing_left(end, store, kv)


def test_run_before_start(end: DecodeEnd, kv: PromptKV, channel: Channel) -> None:
    with pytest.raises(ProtocolError, match="before start"):
        LayerReceiver(channel, end.namespace, _begin(kv)).run(deadline_in(20))


def test_close_between_start_and_run(
    end: DecodeEnd, store: MemoryStore, kv: PromptKV, channel: Channel
) -> None:
    receiver = LayerReceiver(channel, end.namespace, _begin(kv))
    receiver.start()  # the answer goes to a peer that did not ask; this test ends before it reads it
    assert store.stats().leases == 1
    receiver.close()
    _nothing_left(end, store, kv)
    with pytest.raises(RequestCancelledError):
        receiver.run(deadline_in(20))


def test_close_in_mid_stream(end: DecodeEnd, store: MemoryStore, kv: PromptKV, channel: Channel) -> None:
    receiver = _opened(channel, end, kv)
    _put(channel, kv, 0, (0, 1, 2))
    receiver.wait_layer(0, deadline_in(20))
    receiver.close()
    _nothing_left(end, store, kv)
    assert isinstance(end.error(deadline_in(20)), RequestCancelledError)
    with pytest.raises(RequestCancelledError):
        receiver.wait(deadline_in(20))


def test_close_in_mid_frame(end: DecodeEnd, store: MemoryStore, kv: PromptKV, channel: Channel) -> None:
    """The slot that is being received into goes back only when nobody writes into it any more."""
    receiver = _opened(channel, end, kv)
    # A frame whose second half never comes: the header promises more than is sent.
    frame = channel._protocol.encode(PutLayer(layer=0, blocks=(0, 1, 2)), 2 * 512 + 256, 0)
    channel._connection.send([frame, bytes(100)], deadline_in(20))
    receiver.close()
    _nothing_left(end, store, kv)


def test_close_after_the_end(end: DecodeEnd, store: MemoryStore, kv: PromptKV, channel: Channel) -> None:
    receiver = _opened(channel, end, kv)
    for layer in range(4):
        _put(channel, kv, layer, (0, 1, 2))
    channel.send(FinishStream(handoff=HANDOFF), deadline=deadline_in(20))
    receiver.wait(deadline_in(20))
    assert store.stats().pinned_nbytes > 0
    receiver.close()
    receiver.close()
    assert store.stats().pinned_nbytes == 0
    assert end.namespace.lookup(kv.keys).prefix == 2
    with pytest.raises(LeaseExpiredError):
        receiver.view(0, 0)
    with pytest.raises(LeaseExpiredError):
        receiver.view(0, 2)
    assert receiver.wait(deadline_in(20)) == HANDOFF


def test_a_mismatch_shows_both_sides_here_too(end: DecodeEnd, channel: Channel, kv: PromptKV) -> None:
    other = PromptKV(KVSpec(model="m2", revision="r", layers=kv.spec.layers, block_tokens=16), 3)
    receiver = LayerReceiver(channel, end.namespace, _begin(other))
    with pytest.raises(SpecMismatchError) as caught:
        receiver.start()
    assert other.spec.describe() in str(caught.value)
    assert kv.spec.describe() in str(caught.value)
