"""Sender and receiver against each other, over ``inproc`` and a real store: what arrives is what was put."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.core import DType, KeyScope, KVSpec, LayerSpec, TensorSpec, deadline_in
from kvferry.core.errors import (
    CapacityError,
    ConfigError,
    ProtocolError,
    RequestCancelledError,
    SpecMismatchError,
    TransferTimeoutError,
)
from kvferry.core.memory import MemoryStore
from kvferry.streaming import LayerReceiver, LayerSender
from kvferry.testing.prompt_kv import PromptKV, kv_spec, latent_spec
from kvferry.testing.streams import DecodeEnd
from kvferry.wire.messages import Handoff, SamplingParams, StreamDone

MakeHandoff: TypeAlias = Callable[[int], Handoff]


def _check(receiver: LayerReceiver, kv: PromptKV) -> None:
    for layer in range(len(kv.spec.layers)):
        receiver.wait_layer(layer, deadline_in(20))
        for block in range(kv.blocks):
            view = receiver.view(layer, block)
            assert view.readonly
            assert view.tobytes() == kv.layer_bytes(layer, block), (layer, block)


def _handoff(prompt_tokens: int) -> Handoff:
    return Handoff(
        prompt_tokens=prompt_tokens, cached_tokens=0, first_token=7, sampling=SamplingParams(seed=1)
    )


def _stream(
    end: DecodeEnd,
    kv: PromptKV,
    puts: Sequence[tuple[int, Sequence[int]]] | None = None,
    max_frame_nbytes: int = 1 << 20,
) -> tuple[frozenset[int], StreamDone]:
    """Stream ``kv``, check every byte and the handoff, give everything back."""
    channel = end.connect()
    sender = LayerSender(channel, kv.spec, kv.scope, max_frame_nbytes=max_frame_nbytes)
    missing = sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(20))
    receiver = end.receiver(deadline_in(20))
    for layer, blocks in puts or [(layer, range(kv.blocks)) for layer in range(len(kv.spec.layers))]:
        sender.put_layer(layer, kv.put(layer, blocks))
    done = sender.finish(_handoff(len(kv.tokens)), deadline_in(20))
    assert receiver.wait(deadline_in(20)) == _handoff(len(kv.tokens))
    _check(receiver, kv)
    receiver.close()
    channel.close()
    assert sender.error is None
    assert end.namespace.lookup(kv.keys).prefix == len(kv.keys)
    _check_stored(end, kv)
    return missing, done


def _check_stored(end: DecodeEnd, kv: PromptKV) -> None:
    with end.namespace.load(kv.keys, deadline=deadline_in(20)) as lease:
        assert [lease.view(b).tobytes() for b in range(len(lease))] == [
            kv.block_bytes(b) for b in range(len(kv.keys))
        ]


@pytest.mark.parametrize("prompt_tokens", [1, 3, 15, 16, 17, 32, 100])
def test_prompts_around_a_block(end: DecodeEnd, spec: KVSpec, prompt_tokens: int, store: MemoryStore) -> None:
    """Case C030: also a prompt shorter than a block completes, and nothing stays held."""
    kv = PromptKV(spec, prompt_tokens)
    missing, done = _stream(end, kv)
    assert missing == frozenset(range(prompt_tokens // 16))
    assert done.stored_blocks == prompt_tokens // 16
    assert done.kv_nbytes == kv.nbytes  # this spec needs no padding
    assert done.wire_s > 0
    assert done.complete_at > 0
    assert store.stats().entries == prompt_tokens // 16


def test_chunks_repeat_the_layers(end: DecodeEnd, spec: KVSpec) -> None:
    kv = PromptKV(spec, 16 * 6 + 5)
    chunks = [range(4), range(4, 7)]
    _stream(end, kv, [(layer, chunk) for chunk in chunks for layer in range(4)])


def test_layers_and_blocks_in_any_order(end: DecodeEnd, spec: KVSpec) -> None:
    kv = PromptKV(spec, 16 * 6 + 5)
    puts = [(layer, [block]) for layer, block in itertools.product(range(4), range(7))]
    random.Random(1).shuffle(puts)
    _stream(end, kv, puts)


@pytest.mark.parametrize("present", [[0, 1, 2], [2, 3], [0, 3], [5], [0, 1, 2, 3, 4, 5]])
def test_only_missing_blocks_travel(end: DecodeEnd, spec: KVSpec, present: list[int]) -> None:
    kv = PromptKV(spec, 16 * 6 + 5)
    end.namespace.save(
        [(kv.keys[b], kv.block_bytes(b)) for b in present], parent=None, deadline=deadline_in(20)
    )
    missing, done = _stream(end, kv)
    assert missing == frozenset(range(6)) - frozenset(present)
    assert done.stored_blocks == len(missing)
    sent = len(missing) * spec.block_nbytes + sum(len(kv.layer_bytes(la, 6)) for la in range(4))
    assert done.kv_nbytes == sent


def test_everything_stored_and_no_tail_sends_nothing(end: DecodeEnd, spec: KVSpec) -> None:
    kv = PromptKV(spec, 32)
    _stream(end, kv)
    missing, done = _stream(end, kv)
    assert missing == frozenset()
    assert (done.stored_blocks, done.kv_nbytes, done.wire_s) == (0, 0, 0.0)
    assert done.complete_at > 0


def test_an_empty_stream(end: DecodeEnd, spec: KVSpec) -> None:
    missing, done = _stream(end, PromptKV(spec, 0))
    assert (missing, done.kv_nbytes) == (frozenset(), 0)


def test_several_streams_over_one_channel(end: DecodeEnd, spec: KVSpec) -> None:
    channel = end.connect()
    for seed in range(3):
        kv = PromptKV(spec, 40, seed=seed)
        sender = LayerSender(channel, spec)
        sender.begin(f"s{seed}", kv.keys, kv.tail_tokens, deadline=deadline_in(20))
        for layer in range(4):
            sender.put_layer(layer, kv.put(layer))
        sender.finish(_handoff(40), deadline_in(20))
        with end.receiver(deadline_in(20)) as receiver:
            receiver.wait(deadline_in(20))
            _check(receiver, kv)
    channel.close()


def test_a_put_above_the_frame_limit_is_split(end: DecodeEnd, spec: KVSpec) -> None:
    _stream(end, PromptKV(spec, 16 * 9 + 3), max_frame_nbytes=2 * 1024 + 10)


def test_a_layer_without_bytes(store: MemoryStore) -> None:
    full = LayerSpec((TensorSpec("k", (16, 8), DType.FLOAT16),))
    empty = LayerSpec((TensorSpec("k", (16, 0), DType.FLOAT16),))
    spec = KVSpec(model="m", revision="r", layers=(full, empty, LayerSpec(())), block_tokens=16)
    with DecodeEnd("inproc://decode", store, spec) as end:
        _stream(end, PromptKV(spec, 40))


_TENSORS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 3), st.sampled_from(list(DType))), min_size=0, max_size=3
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    layers=st.lists(_TENSORS, min_size=1, max_size=4),
    block_tokens=st.integers(1, 20),
    prompt_tokens=st.integers(0, 60),
    chunk_blocks=st.integers(1, 5),
    shuffle=st.randoms(use_true_random=False),
)
def test_bytes_are_exact_for_any_spec(
    layers: list[list[tuple[int, int, DType]]],
    block_tokens: int,
    prompt_tokens: int,
    chunk_blocks: int,
    shuffle: random.Random,
) -> None:
    spec = KVSpec(
        model="m",
        revision="r",
        layers=tuple(
            LayerSpec(
                tuple(TensorSpec(f"t{i}", (block_tokens, a, b), d) for i, (a, b, d) in enumerate(tensors))
            )
            for tensors in layers
        ),
        block_tokens=block_tokens,
    )
    if spec.block_nbytes == 0:
        return  # a store has nothing to keep of it
    kv = PromptKV(spec, prompt_tokens)
    chunks = [range(i, min(i + chunk_blocks, kv.blocks)) for i in range(0, kv.blocks, chunk_blocks)]
    puts = [(layer, chunk) for chunk in chunks for layer in range(len(layers))]
    shuffle.shuffle(puts)
    store = MemoryStore(1 << 20)
    with DecodeEnd("inproc://decode", store, spec) as end:
        _stream(end, kv, puts)
    stats = store.stats()
    assert (stats.leases, stats.pinned_nbytes) == (0, 0)
    store.close()


def test_a_latent_of_one_tensor(store: MemoryStore) -> None:
    spec = latent_spec()
    with DecodeEnd("inproc://decode", store, spec) as end:
        _stream(end, PromptKV(spec, 50))


def test_scope_is_part_of_the_stream(store: MemoryStore, spec: KVSpec) -> None:
    scope = KeyScope(adapter="lora-a", salt=b"s")
    with DecodeEnd("inproc://decode", store, spec, scope=scope) as end:
        _stream(end, PromptKV(spec, 40, scope=scope))


def test_without_checksum(store: MemoryStore, spec: KVSpec) -> None:
    with DecodeEnd("inproc://decode", store, spec, checksum=False) as end:
        _stream(end, PromptKV(spec, 40))


# ---- refusals --------------------------------------------------------------------------------


def _other_specs() -> dict[str, KVSpec]:
    base = kv_spec()
    rope = TensorSpec("rope", (16, 4), DType.BFLOAT16)
    latent = TensorSpec("latent", (16, 24), DType.BFLOAT16)
    split = LayerSpec((latent, rope))
    return {
        "bytes a token": kv_spec(head_dim=7),
        "layers": kv_spec(5),
        "block_tokens": kv_spec(block_tokens=32),
        "dtype": kv_spec(dtype=DType.BFLOAT16),
        "mla split": KVSpec(model="test-mla", revision="r1", layers=(split,) * 4, block_tokens=16),
        "revision": KVSpec(model="test-model", revision="r2", layers=base.layers, block_tokens=16),
        "tp": KVSpec(
            model="test-model", revision="r1", layers=base.layers, block_tokens=16, tp_rank=1, tp_size=2
        ),
    }


@pytest.mark.parametrize(("what", "theirs"), list(_other_specs().items()), ids=list(_other_specs()))
def test_another_spec_is_refused_before_any_kv_moves(store: MemoryStore, what: str, theirs: KVSpec) -> None:
    """Case C109: both sides are shown, nothing is reserved."""
    ours = latent_spec() if what == "mla split" else kv_spec()
    with DecodeEnd("inproc://decode", store, ours) as end:
        kv = PromptKV(theirs, 40)
        sender = LayerSender(end.connect(), theirs)
        with pytest.raises(SpecMismatchError) as caught:
            sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(20))
        assert theirs.describe() in str(caught.value)
        assert ours.describe() in str(caught.value)
        assert isinstance(sender.error, SpecMismatchError)
        assert isinstance(end.error(deadline_in(20)), SpecMismatchError)
        stats = store.stats()
        assert (stats.used_nbytes, stats.leases, stats.lookups) == (0, 0, 0)
        sender.put_layer(0, kv.put(0))  # the model's thread is not broken
        with pytest.raises(SpecMismatchError):
            sender.finish(_handoff(40), deadline_in(20))


def test_another_scope_is_refused(end: DecodeEnd, spec: KVSpec) -> None:
    sender = LayerSender(end.connect(), spec, KeyScope(adapter="a"))
    with pytest.raises(SpecMismatchError, match="adapter 'a' against None"):
        sender.begin("s", [], 3, deadline=deadline_in(20))


def test_no_room_is_refused_and_nothing_is_held(spec: KVSpec) -> None:
    store = MemoryStore(4 * 4096)
    with DecodeEnd("inproc://decode", store, spec) as end:
        kv = PromptKV(spec, 16 * 6)
        end.namespace.save([(kv.keys[0], kv.block_bytes(0))], parent=None, deadline=deadline_in(20))
        sender = LayerSender(end.connect(), spec)
        with pytest.raises(CapacityError):
            sender.begin("s", kv.keys, 0, deadline=deadline_in(20))
        assert store.stats().leases == 0
        assert store.stats().pinned_nbytes == 0
        _stream(end, PromptKV(spec, 16 * 4, seed=5))
    store.close()


@pytest.mark.parametrize("tail_tokens", [-1, 16])
def test_a_tail_is_shorter_than_a_block(end: DecodeEnd, spec: KVSpec, tail_tokens: int) -> None:
    channel = end.connect()
    with pytest.raises(ConfigError, match=r"must be 0\.\.15"):
        LayerSender(channel, spec).begin("s", [], tail_tokens, deadline=deadline_in(20))
    channel.close()


# ---- use out of order ------------------------------------------------------------------------


def test_misuse_of_a_sender(end: DecodeEnd, spec: KVSpec) -> None:
    kv = PromptKV(spec, 40)
    sender = LayerSender(end.connect(), spec)
    with pytest.raises(ProtocolError, match="before begin"):
        sender.put_layer(0, kv.put(0))
    with pytest.raises(ProtocolError, match="before begin"):
        sender.finish(_handoff(40), deadline_in(20))
    sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(20))
    with pytest.raises(ProtocolError, match="one stream a sender"):
        sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(20))
    sender.put_layer(0, kv.put(0))
    with pytest.raises(ProtocolError, match="block 0 of layer 0 was put twice"):
        sender.put_layer(0, kv.put(0))
    with pytest.raises(ConfigError, match=r"layer 4 is outside 0\.\.3"):
        sender.put_layer(4, [])
    with pytest.raises(ConfigError, match=r"block 3 of layer 1 is outside 0\.\.2"):
        sender.put_layer(1, [(3, kv.tensors(1, 0))])
    with pytest.raises(ConfigError, match="the spec says"):
        sender.put_layer(1, [(0, kv.tensors(1, 0)[:1])])
    with pytest.raises(ConfigError, match="the spec says"):
        sender.put_layer(1, [(2, kv.tensors(1, 0))])
    for layer in range(1, 4):
        sender.put_layer(layer, kv.put(layer))
    sender.finish(_handoff(40), deadline_in(20))
    with pytest.raises(ProtocolError, match="after finish"):
        sender.put_layer(0, [])
    sender.abort("too late to matter")
    assert sender.error is None
    end.receiver(deadline_in(20)).close()


def test_finish_with_a_layer_never_put_aborts(end: DecodeEnd, spec: KVSpec) -> None:
    kv = PromptKV(spec, 40)
    sender = LayerSender(end.connect(), spec)
    sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(20))
    for layer in (0, 1, 3):
        sender.put_layer(layer, kv.put(layer))
    with pytest.raises(ProtocolError, match="block 0 of layer 2 was never put"):
        sender.finish(_handoff(40), deadline_in(20))
    assert isinstance(end.error(deadline_in(20)), RequestCancelledError)
    assert end.namespace.lookup(kv.keys).prefix == 0


def test_views_before_the_end(end: DecodeEnd, spec: KVSpec) -> None:
    """Decode may start with the layers that have arrived; what it asks for too early is refused."""
    kv = PromptKV(spec, 40)
    channel = end.connect()
    sender = LayerSender(channel, spec)
    sender.begin("s", kv.keys, kv.tail_tokens, deadline=deadline_in(20))
    receiver = end.receiver(deadline_in(20))
    sender.put_layer(2, kv.put(2))
    receiver.wait_layer(2, deadline_in(20))
    early = [receiver.view(2, b) for b in range(3)]
    assert [v.tobytes() for v in early] == [kv.layer_bytes(2, b) for b in range(3)]
    with pytest.raises(ProtocolError, match="not in place yet"):
        receiver.view(1, 0)
    with pytest.raises(IndexError):
        receiver.view(2, 3)
    with pytest.raises(IndexError):
        receiver.wait_layer(4, deadline_in(20))
    with pytest.raises(TransferTimeoutError, match="1 of 4 layers complete"):
        receiver.wait_layer(1, deadline_in(0.01))
    with pytest.raises(TransferTimeoutError):
        receiver.wait(deadline_in(0.01))
    assert end.namespace.lookup(kv.keys).prefix == 0, "visible before all layers are in place"
    assert receiver.complete_at == 0
    for layer in (0, 1, 3):
        sender.put_layer(layer, kv.put(layer))
    sender.finish(_handoff(40), deadline_in(20))
    receiver.wait(deadline_in(20))
    assert [v.tobytes() for v in early] == [kv.layer_bytes(2, b) for b in range(3)]
    assert receiver.complete_at > 0
    receiver.close()
    channel.close()
