"""Streams whose layers are encoded: what arrives, what is refused, and who waits for whom."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvferry.codecs import CodecPipeline
from kvferry.codecs.adaptive import AdaptiveChoice
from kvferry.core import DType, KVSpec, LayerSpec, TensorSpec, deadline_in
from kvferry.core.errors import CodecError, KVFerryError, ProtocolError
from kvferry.core.memory import MemoryStore
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.encoding import TierCodec
from kvferry.store.level import LevelOptions
from kvferry.store.policies import WriteThrough
from kvferry.store.tiered import TieredStore
from kvferry.streaming import LayerReceiver, LayerSender, LinkCodec, StreamCodec, codec_capabilities
from kvferry.streaming import encoding as encoding_module
from kvferry.testing.prompt_kv import PromptKV, kv_spec
from kvferry.testing.streams import DecodeEnd
from kvferry.wire.messages import Handoff, PutEncoded, StreamDone

SPEC = kv_spec(4, kv_heads=2, head_dim=32, dtype=DType.BFLOAT16)
ODD = KVSpec(  # padded slices, and a tensor without a token axis
    model="odd",
    revision="r1",
    layers=(
        LayerSpec(
            (
                TensorSpec("k", (16, 1, 5), DType.BFLOAT16),
                TensorSpec("state", (3,), DType.FLOAT32),
                TensorSpec("v", (16, 1, 7), DType.BFLOAT16),
            )
        ),
    )
    * 3,
    block_tokens=16,
)


@contextmanager
def _end(store: MemoryStore, spec: KVSpec, codec: StreamCodec | None) -> Iterator[DecodeEnd]:
    with DecodeEnd("inproc://coded", store, spec, codec=codec) as end:
        yield end


def _send(
    end: DecodeEnd,
    kv: PromptKV,
    codec: StreamCodec,
    handoff: Callable[[int], Handoff],
    check: Callable[[LayerReceiver], None],
) -> tuple[StreamDone, LinkCodec]:
    link = codec.link(end.address)
    assert link is not None
    channel = end.connect()
    sender = LayerSender(channel, kv.spec, codec=link)
    sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(20))
    sent: list[int] = []
    with end.receiver(deadline_in(20)) as receiver:
        for layer in range(len(kv.spec.layers)):
            sender.put_layer(layer, kv.put(layer), sent=partial(sent.append, layer))
        done = sender.finish(handoff(len(kv.tokens)), deadline_in(20))
        assert sorted(sent) == list(range(len(kv.spec.layers)))
        receiver.wait(deadline_in(20))
        check(receiver)
    channel.close()
    return done, link


def _equal(kv: PromptKV) -> Callable[[LayerReceiver], None]:
    def check(receiver: LayerReceiver) -> None:
        for layer in range(len(kv.spec.layers)):
            for block in range(kv.blocks):
                assert receiver.view(layer, block).tobytes() == kv.layer_bytes(layer, block), (layer, block)

    return check


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    """Threads of streams that tests of other files in this process left are not those of these tests."""
    _OTHERS[:] = threading.enumerate()
    yield
    _OTHERS.clear()


_OTHERS: list[threading.Thread] = []


def _threads_of_streams() -> set[str]:
    mine = [t.name for t in threading.enumerate() if t not in _OTHERS and "kvferry-stream-" in t.name]
    return {name.rsplit("-", 1)[0] for name in mine}


def _floats(raw: bytes) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("text", ["ebp", "split", "shuffle|zstd", "auto"])
@pytest.mark.parametrize("spec", [SPEC, ODD], ids=["even", "odd"])
def test_lossless_codecs_bring_every_bit(
    store: MemoryStore, handoff: Callable[[int], Handoff], spec: KVSpec, text: str, tokens: int
) -> None:
    kv = PromptKV(spec, tokens, normal=True)
    with _end(store, spec, StreamCodec()) as end:
        done, _ = _send(end, kv, StreamCodec(text), handoff, _equal(kv))
    blocks = tokens // 16
    tail = sum(len(kv.layer_bytes(layer, blocks)) for layer in range(len(spec.layers))) if tokens % 16 else 0
    assert done.kv_nbytes == blocks * spec.block_nbytes + tail
    assert done.stored_blocks == blocks


def test_layers_travel_encoded_and_a_frame_holds_several_blocks(
    store: MemoryStore, handoff: Callable[[int], Handoff], monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = PromptKV(SPEC, 16 * 20 + 5, normal=True)
    monkeypatch.setattr(encoding_module, "_CALL_NBYTES", 8 * SPEC.layers[0].nbytes)
    seen: list[tuple[tuple[int, ...], int]] = []
    original = LayerReceiver._take_layer

    def note(self: LayerReceiver, slots: object, incoming: object, message: object, deadline: float) -> None:
        assert isinstance(message, PutEncoded)
        seen.append((message.blocks, incoming.payload_nbytes))  # type: ignore[attr-defined]
        original(self, slots, incoming, message, deadline)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerReceiver, "_take_layer", note)
    with _end(store, SPEC, StreamCodec()) as end:
        _send(end, kv, StreamCodec("ebp"), handoff, _equal(kv))
    assert [blocks for blocks, _ in seen] == [
        tuple(range(8)),
        tuple(range(8, 16)),
        tuple(range(16, 20)),
        (20,),
    ] * 4
    full = [nbytes for blocks, nbytes in seen if len(blocks) == 8]
    assert max(full) < 0.8 * 8 * SPEC.layers[0].nbytes


def test_a_lossy_codec_is_near(store: MemoryStore, handoff: Callable[[int], Handoff]) -> None:
    kv = PromptKV(SPEC, 16 * 6 + 5, normal=True)

    def check(receiver: LayerReceiver) -> None:
        for layer in range(4):
            for block in range(kv.blocks):
                want = _floats(kv.layer_bytes(layer, block))
                got = _floats(receiver.view(layer, block).tobytes())
                assert np.array_equal(got, want) == (block == 0)  # the start of a prompt goes as it is
                assert np.linalg.norm(got - want) <= 0.02 * np.linalg.norm(want)

    with _end(store, SPEC, StreamCodec(allow_lossy=True)) as end:
        _send(end, kv, StreamCodec("int8"), handoff, check)


@pytest.mark.parametrize(("block_tokens", "kept"), [(1, 4), (3, 2), (16, 1)])
@pytest.mark.parametrize("tokens", [2, 40])
def test_the_first_tokens_of_a_prompt_are_exact_behind_a_lossy_codec(
    store: MemoryStore, handoff: Callable[[int], Handoff], block_tokens: int, kept: int, tokens: int
) -> None:
    spec = kv_spec(2, kv_heads=2, head_dim=32, dtype=DType.BFLOAT16, block_tokens=block_tokens)
    kv = PromptKV(spec, tokens, normal=True)

    def check(receiver: LayerReceiver) -> None:
        same = [receiver.view(1, block).tobytes() == kv.layer_bytes(1, block) for block in range(kv.blocks)]
        assert same == [block < kept for block in range(kv.blocks)]

    with _end(store, spec, StreamCodec(allow_lossy=True)) as end:
        _send(end, kv, StreamCodec("int8"), handoff, check)


@pytest.mark.parametrize("codec", ["int8", "ebp"])
def test_what_a_lossy_codec_brought_reaches_no_tier_that_takes_no_loss(
    tmp_path: Path, handoff: Callable[[int], Handoff], codec: str
) -> None:
    kv = PromptKV(SPEC, 16 * 6 + 5, normal=True)
    options = DiskOptions((str(tmp_path),), 8 << 20, direct="off")
    tier = DiskTier("disk", options, codec=TierCodec())
    levels = [(tier, LevelOptions(write=WriteThrough()))]
    with closing(TieredStore(64 * SPEC.block_nbytes, levels)) as store:
        with _end(store, SPEC, StreamCodec(allow_lossy=True)) as end:
            _send(end, kv, StreamCodec(codec), handoff, lambda _: None)
        assert store.flush(deadline=deadline_in(20))  # nothing counts as lost
        kept = {bytes(entry.key) for entry in tier.scan()}
    # the start of a prompt goes as it is
    assert kept == {bytes(key) for key in (kv.keys[:1] if codec == "int8" else kv.keys)}


def test_a_lossless_receiver_refuses_a_lossy_stream_by_name_before_any_kv(store: MemoryStore) -> None:
    kv = PromptKV(SPEC, 40, normal=True)
    codec = StreamCodec("int8(k=channel)")
    with _end(store, SPEC, StreamCodec("ebp")) as end:
        sender = LayerSender(end.connect(), SPEC, codec=codec.link(end.address))
        with pytest.raises(CodecError, match=r"int8\(k=channel\).*lossy.*stream\.allow_lossy=true"):
            sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(20))
        assert isinstance(end.error(deadline_in(20)), CodecError)


def test_an_end_that_decodes_nothing_gets_raw(
    store: MemoryStore, handoff: Callable[[int], Handoff], caplog: pytest.LogCaptureFixture
) -> None:
    kv = PromptKV(SPEC, 40, normal=True)
    with _end(store, SPEC, None) as end:
        _, link = _send(end, kv, StreamCodec("ebp"), handoff, _equal(kv))
        _send(end, PromptKV(SPEC, 40, seed=2), StreamCodec("ebp"), handoff, lambda _: None)
    assert link.status().chosen == "raw"
    assert "cannot decode 'ebp'" in link.status().line()
    assert caplog.text.count("go as they are") == 2  # once a link


def test_tensors_that_a_codec_does_not_know_go_raw(
    store: MemoryStore, handoff: Callable[[int], Handoff]
) -> None:
    spec = kv_spec(2, dtype=DType.FLOAT32)
    kv = PromptKV(spec, 40)
    with _end(store, spec, StreamCodec()) as end:
        _, link = _send(end, kv, StreamCodec("ebp"), handoff, _equal(kv))
    assert "needs bfloat16 or float16" in link.status().line()


def test_the_model_never_waits_and_encoding_goes_ahead_of_the_link_by_some_frames(
    store: MemoryStore, handoff: Callable[[int], Handoff], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver that stands still: everything is queued at once, and only a few frames are encoded."""
    kv = PromptKV(SPEC, 16 * 64, normal=True)
    monkeypatch.setattr(encoding_module, "_CALL_NBYTES", 1)
    go = threading.Event()
    original = LayerReceiver._take_layer

    def held(self: LayerReceiver, slots: object, incoming: object, message: object, deadline: float) -> None:
        assert go.wait(20)
        original(self, slots, incoming, message, deadline)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerReceiver, "_take_layer", held)
    codec = StreamCodec("ebp")
    link = codec.link("x")
    encoded = 0

    def count(self: CodecPipeline, src: memoryview, layer: LayerSpec, dst: memoryview) -> int:
        nonlocal encoded
        encoded += 1
        return encode(self, src, layer, dst)

    encode = CodecPipeline.encode_into
    monkeypatch.setattr(CodecPipeline, "encode_into", count)
    with _end(store, SPEC, StreamCodec()) as end:
        sender = LayerSender(end.connect(), SPEC, codec=link)
        sender.begin("s", kv.keys, 0, deadline=deadline_in(30))
        receiver = end.receiver(deadline_in(20))
        for layer in range(4):
            sender.put_layer(layer, kv.put(layer))
        limit = time.monotonic() + 20
        while encoded < 4:
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert encoded <= 8 + 3 + 2  # the ring, those ahead, one in hand at either end
        go.set()
        sender.finish(handoff(1), deadline_in(30))
        receiver.wait(deadline_in(20))
        _equal(kv)(receiver)
        receiver.close()


@pytest.mark.parametrize("error", [CodecError("broken for the test"), ValueError("a bug of others")])
@pytest.mark.parametrize("text", ["ebp", "int8"])
def test_what_a_codec_cannot_encode_goes_as_it_is(
    store: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    handoff: Callable[[int], Handoff],
    text: str,
    error: Exception,
) -> None:
    kv = PromptKV(SPEC, 16 * 40 + 3, normal=True)
    monkeypatch.setattr(encoding_module, "_CALL_NBYTES", 8 * SPEC.layers[0].nbytes)

    tried = []

    def fail(*_: object) -> int:
        tried.append(1)
        raise error

    monkeypatch.setattr(CodecPipeline, "encode_into", fail)
    codec = StreamCodec(text)
    with _end(store, SPEC, StreamCodec(allow_lossy=True)) as end:
        for _ in range(2):
            _send(end, kv, codec, handoff, _equal(kv))
    said = f"{text} failed and is not used any more; what it was to encode goes as it is"
    assert [record.getMessage() for record in caplog.records] == [f"streams to {end.address}: {said}"]
    assert len(tried) <= len(SPEC.layers) * 8  # what had its turn already; nothing of the second stream
    assert f"{text} is not used: it failed: {type(error).__name__}" in codec.status()[end.address]


def test_auto_goes_on_with_what_did_not_fail() -> None:
    link = StreamCodec("auto", candidates=("ebp", "split")).link("x")
    assert link is not None
    assert link.agree(codec_capabilities(), SPEC) == ("ebp", "split")
    ebp = link.failed("ebp", ValueError("a bug of others")).status()
    assert link.agree(codec_capabilities(), SPEC) == ("split",)
    assert "ebp" not in [one.name for one in ebp.candidates]
    assert link.choice is link.failed("ebp", ValueError("again"))


def test_a_codec_that_raises_for_a_model_is_not_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise ValueError("a bug of others")

    link = StreamCodec("ebp").link("x")
    assert link is not None
    monkeypatch.setattr(link.codec.pipelines["ebp"].codec, "unsupported", fail)
    assert link.agree(codec_capabilities(), SPEC) == ()
    assert "ebp is not used: codec 'ebp' failed: ValueError: a bug of others" in link.status().line()


def test_an_error_in_decoding_ends_the_stream_at_both_ends(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, handoff: Callable[[int], Handoff]
) -> None:
    kv = PromptKV(SPEC, 16 * 6, normal=True)

    def fail(*_: object) -> int:
        raise CodecError("broken for the test")

    monkeypatch.setattr(CodecPipeline, "decode_body", fail)
    with _end(store, SPEC, StreamCodec()) as end:
        sender = LayerSender(end.connect(), SPEC, codec=StreamCodec("ebp").link("x"))
        sender.begin("s", kv.keys, 0, deadline=deadline_in(20))
        with end.receiver(deadline_in(20)):
            for layer in range(4):
                sender.put_layer(layer, kv.put(layer))
            with pytest.raises(KVFerryError):
                sender.finish(handoff(1), deadline_in(20))
            assert sender.error is not None
            assert "broken for the test" in str(sender.error)
            end.error(deadline_in(20))
        assert end.namespace.lookup(kv.keys).prefix == 0


def test_a_frame_that_lies_ends_the_stream(store: MemoryStore) -> None:
    kv = PromptKV(SPEC, 40, normal=True)
    for message, payload, said in (
        (PutEncoded(layer=0, blocks=()), b"", "0 bytes|bytes are too few"),
        (PutEncoded(layer=0, blocks=(0,)), bytes(1 << 20), "it has .* at most"),
        (PutEncoded(layer=0, blocks=(1, 2)), b"x", "the tail block is encoded with others"),
        (PutEncoded(layer=0, blocks=(0,)), b"x" * 100, "magic"),
        (PutEncoded(layer=9, blocks=(0,)), b"x", "outside 0..3"),
    ):
        with _end(store, SPEC, StreamCodec()) as end:
            channel = end.connect()
            sender = LayerSender(channel, SPEC, codec=StreamCodec("ebp").link("x"))
            sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(20))
            with end.receiver(deadline_in(20)):
                with suppress(KVFerryError):  # the answer may end the channel before the call returns
                    channel.send(message, [payload] if payload else [], deadline=deadline_in(20))
                error = end.error(deadline_in(20))
            with pytest.raises(KVFerryError, match=said):
                raise error
            sender.abort("over")


def test_an_encoded_layer_that_was_not_agreed_is_refused(store: MemoryStore) -> None:
    kv = PromptKV(SPEC, 32, normal=True)
    with _end(store, SPEC, StreamCodec()) as end:
        channel = end.connect()
        sender = LayerSender(channel, SPEC)
        sender.begin("s", kv.keys, 0, deadline=deadline_in(20))
        with end.receiver(deadline_in(20)):
            channel.send(PutEncoded(layer=0, blocks=(0,)), [b"x"], deadline=deadline_in(20))
            with pytest.raises(ProtocolError, match="not agreed"):
                raise end.error(deadline_in(20))
        sender.abort("over")


def test_raw_has_no_thread_more_and_no_link(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, handoff: Callable[[int], Handoff]
) -> None:
    assert StreamCodec("raw").link("x") is None
    kv = PromptKV(SPEC, 32)
    with _end(store, SPEC, StreamCodec()) as end:
        sender = LayerSender(end.connect(), SPEC)
        sender.begin("s", kv.keys, 0, deadline=deadline_in(20))
        with end.receiver(deadline_in(20)) as receiver:
            assert _threads_of_streams() == {"kvferry-stream-send", "kvferry-stream-acks"}
            for layer in range(4):
                sender.put_layer(layer, kv.put(layer))
            sender.finish(handoff(1), deadline_in(20))
            receiver.wait(deadline_in(20))


def test_auto_that_sends_raw_has_no_thread_more_and_chooses_when_a_part_is_sent(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, handoff: Callable[[int], Handoff]
) -> None:
    """The receiver stands still, all layers are queued: only those under way are chosen for."""
    kv = PromptKV(SPEC, 16 * 12, normal=True)
    asked, sent = 0, threading.Event()

    def choose(_: AdaptiveChoice) -> str:
        nonlocal asked
        asked += 1
        sent.set()
        return "raw"

    monkeypatch.setattr(AdaptiveChoice, "choose", choose)
    monkeypatch.setattr(AdaptiveChoice, "probe", lambda _: "")
    go = threading.Event()
    original = LayerReceiver._take_layer

    def held(self: LayerReceiver, slots: object, incoming: object, message: object, deadline: float) -> None:
        assert go.wait(20)
        original(self, slots, incoming, message, deadline)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerReceiver, "_take_layer", held)
    with _end(store, SPEC, StreamCodec()) as end:
        sender = LayerSender(
            end.connect(), SPEC, codec=StreamCodec("auto").link(end.address), max_frame_nbytes=1
        )
        sender.begin("s", kv.keys, 0, deadline=deadline_in(20))
        receiver = end.receiver(deadline_in(20))
        for layer in range(4):
            sender.put_layer(layer, kv.put(layer))
        assert sent.wait(20)
        assert 1 <= asked <= 8  # the ring, of 48 frames
        assert _threads_of_streams() == {"kvferry-stream-send", "kvferry-stream-acks"}
        go.set()
        sender.finish(handoff(1), deadline_in(20))
        receiver.wait(deadline_in(20))
        _equal(kv)(receiver)
        receiver.close()
    assert asked == 48


def test_every_mix_of_ways_brings_every_bit(
    store: MemoryStore, handoff: Callable[[int], Handoff], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes beside raw, raw between encoded ones, and back."""
    kv = PromptKV(SPEC, 16 * 9 + 3, normal=True)
    ways = itertools.cycle(["raw", "raw", "ebp", "split", "raw", "ebp"])
    probes = itertools.cycle(["", "split", "", ""])
    monkeypatch.setattr(AdaptiveChoice, "choose", lambda _: next(ways))
    monkeypatch.setattr(AdaptiveChoice, "probe", lambda _: next(probes))
    seen: set[str] = set()
    encode = CodecPipeline.encode_into

    def note(self: CodecPipeline, src: memoryview, layer: LayerSpec, dst: memoryview) -> int:
        seen.add(self.text)
        return encode(self, src, layer, dst)

    monkeypatch.setattr(CodecPipeline, "encode_into", note)
    with _end(store, SPEC, StreamCodec()) as end:
        channel = end.connect()
        sender = LayerSender(channel, SPEC, codec=StreamCodec("auto").link(end.address), max_frame_nbytes=1)
        sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(20))
        with end.receiver(deadline_in(20)) as receiver:
            for layer in range(4):
                sender.put_layer(layer, kv.put(layer))
            done = sender.finish(handoff(1), deadline_in(20))
            receiver.wait(deadline_in(20))
            _equal(kv)(receiver)
        channel.close()
    assert done.stored_blocks == 9
    assert seen == {"ebp", "split"}
