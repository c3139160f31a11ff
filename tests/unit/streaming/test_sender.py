"""The sender against a peer that this test drives message by message."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest

from kvferry.core import KVSpec, deadline_in
from kvferry.core.errors import (
    CapacityError,
    ConnectionClosedError,
    KVFerryError,
    ProtocolError,
    RequestCancelledError,
    TransferTimeoutError,
)
from kvferry.core.spec import DType, LayerSpec, TensorSpec
from kvferry.streaming import LayerSender
from kvferry.testing.blocks import wait_until
from kvferry.testing.prompt_kv import PromptKV
from kvferry.wire import Channel, ChannelOptions, ChannelServer
from kvferry.wire.messages import (
    AbortStream,
    BeginStream,
    Failure,
    FinishStream,
    Handoff,
    LayerAck,
    Message,
    PutLayer,
    SamplingParams,
    StreamDone,
    StreamReady,
)

HANDOFF = Handoff(prompt_tokens=40, cached_tokens=0, first_token=7, sampling=SamplingParams())
DONE = StreamDone(stored_blocks=2, kv_nbytes=1, wire_s=0.1)
_Array: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


class Peer:
    """The other end: hands its channel to the test and keeps the connection until told to end."""

    def __init__(self) -> None:
        options = ChannelOptions(role="decode", session="d")
        self._channels: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._end = threading.Event()
        self._server = ChannelServer("inproc://peer", options, self._serve, name="peer")

    def _serve(self, channel: Channel) -> None:
        self._channels.put(channel)
        self._end.wait(60)

    def connect(self) -> Channel:
        return Channel.connect(
            self._server.address, ChannelOptions(role="prefill", session="p"), deadline_in(20)
        )

    def channel(self) -> Channel:
        return self._channels.get(timeout=20)

    def close(self) -> None:
        self._end.set()
        self._server.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()
    limit = time.monotonic() + 20
    while any(t.name.startswith("kvferry-stream") for t in threading.enumerate()):
        assert time.monotonic() < limit, "threads left"
        time.sleep(0.01)


@pytest.fixture
def kv(spec: KVSpec) -> PromptKV:
    return PromptKV(spec, 40)


def _take(channel: Channel, kind: type[Message]) -> Message:
    incoming = channel.receive(deadline_in(20))
    incoming.discard(deadline_in(20))
    assert isinstance(incoming.message, kind), incoming.message
    return incoming.message


def _opened(peer: Peer, kv: PromptKV, *answers: Message, **options: float) -> tuple[LayerSender, Channel]:
    """A sender after begin, and the peer's channel."""
    sender = LayerSender(peer.connect(), kv.spec)
    channel = peer.channel()
    for answer in answers:
        channel.send(answer, deadline=deadline_in(20))
    sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(options.get("limit", 20)))
    _take(channel, BeginStream)
    return sender, channel


def _error_of(sender: LayerSender) -> Exception:
    limit = deadline_in(20)
    while sender.error is None:
        assert time.monotonic() < limit, "no error in time"
        time.sleep(0.005)
    return sender.error


def test_at_most_ring_frames_are_under_way_and_put_layer_never_waits(peer: Peer, spec: KVSpec) -> None:
    kv = PromptKV(spec, 10 * 16)
    sender, channel = _opened(peer, kv, StreamReady(missing=tuple(range(10)), ring=3))
    for block in range(10):
        for layer in range(4):
            sender.put_layer(layer, kv.put(layer, [block]))  # 40 frames, none acknowledged
    for _ in range(3):
        _take(channel, PutLayer)
    assert channel.receive_idle(deadline_in(0.3)) is None, "a fourth frame without an acknowledgement"
    channel.send(LayerAck(count=2), deadline=deadline_in(20))
    for _ in range(2):
        _take(channel, PutLayer)
    assert channel.receive_idle(deadline_in(0.2)) is None
    for _ in range(35):
        channel.send(LayerAck(), deadline=deadline_in(20))
        _take(channel, PutLayer)
    got: list[StreamDone] = []
    finisher = threading.Thread(target=lambda: got.append(sender.finish(HANDOFF, deadline_in(20))))
    finisher.start()
    assert channel.receive_idle(deadline_in(0.2)) is None, "finished with frames unacknowledged"
    channel.send(LayerAck(count=3), deadline=deadline_in(20))
    finish = _take(channel, FinishStream)
    assert isinstance(finish, FinishStream)
    assert finish.handoff == HANDOFF
    assert finish.wire_s > 0
    channel.send(DONE, deadline=deadline_in(20))
    finisher.join(20)
    assert got == [DONE]


def test_put_layer_returns_while_the_peer_reads_nothing(peer: Peer) -> None:
    """Frames of 8 MiB that nobody takes: the sending thread stands still, the model's thread does not."""
    layer = LayerSpec((TensorSpec("k", (16, 1 << 19), DType.UINT8),))
    kv = PromptKV(KVSpec(model="m", revision="r", layers=(layer,) * 3, block_tokens=16), 16)
    sender, channel = _opened(peer, kv, StreamReady(missing=(0,), ring=8))
    for i in range(3):
        sender.put_layer(i, kv.put(i))
    assert sender.error is None
    sender.abort("test")
    channel.abort()


def _fresh(kv: PromptKV, layer: int) -> tuple[list[tuple[int, list[_Array]]], list[weakref.ref[_Array]]]:
    copies = [(b, [t.copy() for t in tensors]) for b, tensors in kv.put(layer)]
    return copies, [weakref.ref(t) for _, tensors in copies for t in tensors]


def _put_all(sender: LayerSender, kv: PromptKV) -> list[weakref.ref[_Array]]:
    """Put copies that nobody else holds; returns how to see whether they are still held."""
    refs: list[weakref.ref[_Array]] = []
    for layer in range(len(kv.spec.layers)):
        copies, found = _fresh(kv, layer)
        sender.put_layer(layer, copies)
        refs += found
    return refs


def _held(refs: list[weakref.ref[_Array]]) -> int:
    return sum(ref() is not None for ref in refs)


def test_no_view_is_referenced_after_finish(peer: Peer, kv: PromptKV) -> None:
    sender, channel = _opened(peer, kv, StreamReady(missing=(0, 1)))
    refs = _put_all(sender, kv)
    for _ in range(4):
        _take(channel, PutLayer)
        channel.send(LayerAck(), deadline=deadline_in(20))
    thread = threading.Thread(target=_finish_peer, args=(channel,))
    thread.start()
    sender.finish(HANDOFF, deadline_in(20))
    assert _held(refs) == 0
    thread.join(20)


def _finish_peer(channel: Channel) -> None:
    _take(channel, FinishStream)
    channel.send(DONE, deadline=deadline_in(20))


def test_memory_is_given_back_when_it_was_sent(peer: Peer, kv: PromptKV) -> None:
    """Once a layer, not before, and also if nothing of it, or nothing more, is sent."""
    sender, channel = _opened(peer, kv, StreamReady(missing=(0, 1), ring=1))
    sent: list[int] = []
    for layer in range(4):
        sender.put_layer(layer, kv.put(layer), sent=partial(sent.append, layer))
    sender.put_layer(0, [], sent=partial(sent.append, 4))
    assert 4 in sent
    _take(channel, PutLayer)
    wait_until(lambda: sorted(sent) == [0, 4], 20)
    channel.send(LayerAck(), deadline=deadline_in(5))
    _take(channel, PutLayer)
    wait_until(lambda: sent[2:] == [1], 20)
    sender.abort("test")
    assert sorted(sent) == [0, 1, 2, 3, 4]
    sender.put_layer(3, kv.put(3), sent=partial(sent.append, 5))
    assert sent[-1] == 5


def test_no_view_is_referenced_after_abort(peer: Peer, kv: PromptKV) -> None:
    sender, channel = _opened(peer, kv, StreamReady(missing=(0, 1), ring=1))
    refs = _put_all(sender, kv)
    assert _held(refs) > 0
    _take(channel, PutLayer)
    sender.abort("enough")
    assert _held(refs) == 0
    assert "enough" in str(sender.error)
    said = _take(channel, AbortStream)
    assert isinstance(said, AbortStream)
    assert said.reason == "enough"
    refs = _put_all(sender, kv)
    assert _held(refs) == 0, "put_layer after abort held its views"


def test_no_view_is_referenced_after_an_error_in_mid_frame(peer: Peer) -> None:
    layer = LayerSpec((TensorSpec("k", (16, 1 << 19), DType.UINT8),))
    kv = PromptKV(KVSpec(model="m", revision="r", layers=(layer,) * 3, block_tokens=16), 16)
    sender, channel = _opened(peer, kv, StreamReady(missing=(0,), ring=8))
    refs = _put_all(sender, kv)
    assert isinstance(channel.receive(deadline_in(20)).message, PutLayer)  # its payload is never taken
    channel.abort()
    with pytest.raises(ConnectionClosedError):
        sender.finish(HANDOFF, deadline_in(20))
    assert _held(refs) == 0
    assert isinstance(sender.error, ConnectionClosedError)


def test_the_receivers_failure_is_the_error(peer: Peer, kv: PromptKV) -> None:
    sender, channel = _opened(peer, kv, StreamReady(missing=(0, 1)))
    sender.put_layer(0, kv.put(0))
    _take(channel, PutLayer)
    channel.send(Failure(code="capacity", message="no room left"), deadline=deadline_in(20))
    assert isinstance(_error_of(sender), CapacityError)
    sender.put_layer(1, kv.put(1))  # does nothing, does not raise
    with pytest.raises(CapacityError, match="the receiver failed: no room left"):
        sender.finish(HANDOFF, deadline_in(20))


def test_the_end_of_the_peer_is_seen_while_nothing_is_sent(peer: Peer, kv: PromptKV) -> None:
    sender, channel = _opened(peer, kv, StreamReady(missing=(0, 1)))
    channel.abort()
    assert isinstance(_error_of(sender), ConnectionClosedError)
    with pytest.raises(ConnectionClosedError):
        sender.finish(HANDOFF, deadline_in(20))


def test_the_deadline_of_begin_holds_while_acknowledgements_are_awaited(peer: Peer, kv: PromptKV) -> None:
    for limit in (0.3, 2.0, 10.0):  # longer where the machine was too slow to begin in time
        with suppress(TransferTimeoutError):
            sender, _channel = _opened(peer, kv, StreamReady(missing=(0, 1), ring=1), limit=limit)
            break
    else:
        pytest.fail("no stream could be begun")
    for layer in range(4):
        sender.put_layer(layer, kv.put(layer))
    with pytest.raises(TransferTimeoutError):  # of begin: that of finish is further than a test may last
        sender.finish(HANDOFF, deadline_in(1000))


def test_the_deadline_of_finish_holds(peer: Peer, kv: PromptKV) -> None:
    sender, _channel = _opened(peer, kv, StreamReady(missing=(0, 1), ring=1))
    refs = _put_all(sender, kv)
    with pytest.raises(TransferTimeoutError, match="deadline of finish"):
        sender.finish(HANDOFF, deadline_in(0.2))
    assert _held(refs) == 0


@pytest.mark.parametrize(
    "nonsense",
    [LayerAck(count=2), LayerAck(count=0), LayerAck(count=-1), DONE, StreamReady(missing=())],
    ids=["too many", "none", "negative", "done early", "other"],
)
def test_nonsense_from_the_receiver_ends_the_stream(peer: Peer, kv: PromptKV, nonsense: Message) -> None:
    sender, channel = _opened(peer, kv, StreamReady(missing=(0, 1)))
    sender.put_layer(0, kv.put(0))
    _take(channel, PutLayer)
    channel.send(nonsense, deadline=deadline_in(20))
    error = _error_of(sender)
    assert isinstance(error, KVFerryError)
    assert error.code == "protocol"
    with pytest.raises(ProtocolError):
        sender.finish(HANDOFF, deadline_in(20))


@pytest.mark.parametrize(
    "ready", [StreamReady(missing=(2,)), StreamReady(missing=(-1,)), StreamReady(missing=(), ring=0)]
)
def test_a_grant_that_makes_no_sense_is_refused(peer: Peer, kv: PromptKV, ready: StreamReady) -> None:
    with pytest.raises(KVFerryError) as caught:
        _opened(peer, kv, ready)
    assert caught.value.code == "protocol"


def test_abort_before_begin(peer: Peer, kv: PromptKV) -> None:
    sender = LayerSender(peer.connect(), kv.spec)
    sender.abort("never mind")
    assert isinstance(sender.error, RequestCancelledError)
    with pytest.raises(ProtocolError):
        sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(20))


def test_abort_while_begin_waits(peer: Peer, kv: PromptKV) -> None:
    sender = LayerSender(peer.connect(), kv.spec)
    channel = peer.channel()
    failed: list[KVFerryError] = []

    def begin() -> None:
        try:
            sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(20))
        except KVFerryError as exc:
            failed.append(exc)

    thread = threading.Thread(target=begin)
    thread.start()
    _take(channel, BeginStream)
    sender.abort("changed my mind")
    thread.join(20)
    assert len(failed) == 1
    assert isinstance(sender.error, RequestCancelledError)


def test_abort_ends_in_bounded_time_with_a_frame_half_sent(peer: Peer) -> None:
    layer = LayerSpec((TensorSpec("k", (16, 1 << 19), DType.UINT8),))
    kv = PromptKV(KVSpec(model="m", revision="r", layers=(layer,) * 3, block_tokens=16), 16)
    sender, channel = _opened(peer, kv, StreamReady(missing=(0,), ring=8), limit=1000)
    refs = _put_all(sender, kv)
    assert isinstance(channel.receive(deadline_in(20)).message, PutLayer)  # its payload is never taken
    sender.abort("test")  # else it would take until the stream's limit, and no test may last as long
    assert _held(refs) == 0


def test_finish_raises_when_another_thread_aborts(peer: Peer, kv: PromptKV) -> None:
    sender, channel = _opened(peer, kv, StreamReady(missing=(0, 1), ring=1))
    for layer in range(4):
        sender.put_layer(layer, kv.put(layer))
    failed: list[Exception] = []

    def finish() -> None:
        try:
            sender.finish(HANDOFF, deadline_in(20))
        except KVFerryError as exc:
            failed.append(exc)

    thread = threading.Thread(target=finish)
    thread.start()
    _take(channel, PutLayer)
    sender.abort("stopped by the user")
    thread.join(20)
    assert [type(e) for e in failed] == [RequestCancelledError]


def test_leaving_the_context_aborts(peer: Peer, kv: PromptKV) -> None:
    sender, channel = _opened(peer, kv, StreamReady(missing=(0, 1)))
    with pytest.raises(RuntimeError, match="the model failed"), sender:
        raise RuntimeError("the model failed")
    assert isinstance(sender.error, RequestCancelledError)
    _take(channel, AbortStream)


def test_errors_raised_by_finish_are_fresh(peer: Peer, kv: PromptKV) -> None:
    sender, channel = _opened(peer, kv, StreamReady(missing=(0, 1)))
    channel.abort()
    _error_of(sender)
    raised: list[Exception] = []
    for _ in range(2):
        with pytest.raises(ConnectionClosedError) as caught:
            sender.finish(HANDOFF, deadline_in(20))
        raised.append(caught.value)
    assert sender.error is not None
    assert sender.error.__traceback__ is None
    assert raised[0] is not raised[1]
