"""What had lost something at the sender of a stream: who takes it, and as what it is stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import CodecError, ProtocolError
from kvferry.core.memory import MemoryStore
from kvferry.core.spec import KVSpec
from kvferry.streaming import LayerSender, StreamCodec
from kvferry.testing.prompt_kv import PromptKV
from kvferry.testing.streams import DecodeEnd
from kvferry.wire.messages import BeginStream, Handoff, StreamReady

TOKENS = 16 * 3 + 5


def begun(end: DecodeEnd, kv: PromptKV) -> LayerSender:
    sender = LayerSender(end.connect(), kv.spec)
    sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(20))
    for layer in range(len(kv.spec.layers)):
        sender.put_layer(layer, kv.put(layer))
    return sender


def test_what_was_lost_before_stays_marked_at_a_receiver_that_takes_it(
    store: MemoryStore, spec: KVSpec, handoff: Callable[[int], Handoff]
) -> None:
    kv = PromptKV(spec, TOKENS)
    with DecodeEnd("inproc://loss", store, spec, codec=StreamCodec(allow_lossy=True)) as end:
        sender = begun(end, kv)
        assert sender.takes_lossy
        with end.receiver(deadline_in(20)) as receiver:
            assert sender.finish(handoff(TOKENS), deadline_in(20), lossy={1, 2}).stored_blocks == 3
            receiver.wait(deadline_in(20))
    assert store.namespace(spec).lookup(kv.keys).prefix == 1
    with store.namespace(spec, takes_lossy=True).load(kv.keys, deadline=deadline_in(20)) as lease:
        assert lease.lossy == {1, 2}


def test_a_sender_hands_nothing_lossy_over_to_a_receiver_that_takes_none(
    end: DecodeEnd, store: MemoryStore, spec: KVSpec, handoff: Callable[[int], Handoff]
) -> None:
    kv = PromptKV(spec, TOKENS)
    with begun(end, kv) as sender:
        assert not sender.takes_lossy
        with (
            end.receiver(deadline_in(20)),
            pytest.raises(ProtocolError, match="2 blocks have lost something, and the receiver takes no"),
        ):
            sender.finish(handoff(TOKENS), deadline_in(20), lossy={1, 2})
    assert store.stats().entries == 0


@pytest.mark.parametrize(
    ("takes_lossy", "lossy", "message"),
    [(False, (1,), "no loss is taken here"), (True, (1, 3), "number 3; there is none")],
)
def test_a_receiver_does_not_rely_on_that(
    store: MemoryStore,
    spec: KVSpec,
    handoff: Callable[[int], Handoff],
    takes_lossy: bool,
    lossy: tuple[int, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kv = PromptKV(spec, TOKENS)
    with DecodeEnd("inproc://loss", store, spec, codec=StreamCodec(allow_lossy=takes_lossy)) as end:
        monkeypatch.setattr("kvferry.streaming.sender.require_exact", lambda *_, **__: None)
        sender = begun(end, kv)
        with end.receiver(deadline_in(20)), pytest.raises(ProtocolError, match=message):
            sender.finish(handoff(TOKENS), deadline_in(20), lossy=lossy)
    assert store.stats().entries == 0


@pytest.mark.parametrize("takes_lossy", [False, True])
def test_a_sender_that_cannot_tell_is_taken_where_it_does_not_matter(
    store: MemoryStore, spec: KVSpec, takes_lossy: bool
) -> None:
    begin = BeginStream(stream="s", spec=spec, keys=bytes(32), tail_tokens=0, timeout_s=20)
    with DecodeEnd("inproc://loss", store, spec, codec=StreamCodec(allow_lossy=takes_lossy)) as end:
        channel = end.connect()
        if takes_lossy:
            assert channel.call(begin, StreamReady, deadline=deadline_in(20)).takes_lossy is True
        else:
            with pytest.raises(CodecError, match=r"too old to say what has lost something.*allow_lossy"):
                channel.call(begin, StreamReady, deadline=deadline_in(20))
        channel.abort()
