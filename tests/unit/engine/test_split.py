"""Prefill and decode with separate models, caches and samplers, joined only by what a handoff carries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvferry.core.memory import MemoryStore
from kvferry.engine.decode import DecodeSequence
from kvferry.engine.local import LocalEngine
from kvferry.engine.paged_kv import PagedKV, Sequence
from kvferry.engine.prefill import PrefillResult, prefill
from kvferry.engine.sampling import Sampler
from kvferry.engine.tiny import make_tiny
from kvferry.engine.weights import load_model
from kvferry.wire.messages import RngState, SamplingParams

BLOCK, CHUNK = 16, 32
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, top_k=50, top_p=0.95, seed=11)
GREEDY = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def path(models: Path) -> Path:
    return make_tiny(models / "split", "qwen3", layers=3, hidden=64, head_dim=16)


def _prompt(length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(length).integers(0, 256, length)]


class _Sent:
    """The layer slices that a prefill emits, as they would cross a wire; the tail without a gap."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, int, bytes]] = []

    def __call__(self, sequence: Sequence, layer: int, first: int, stop: int) -> None:
        for number in range(first // BLOCK, -(-stop // BLOCK)):
            rows = min(BLOCK, stop - number * BLOCK)
            k, v = sequence.kv.tensor_views(layer, sequence.blocks[number], rows)
            self.pieces.append((layer, number, rows, k.tobytes() + v.tobytes()))


def _decode_elsewhere(
    path: Path,
    length: int,
    sent: _Sent,
    first_token: int,
    state: RngState | None,
    params: SamplingParams,
    dtype: str,
) -> list[int]:
    model = load_model(path, dtype)
    kv = PagedKV(model.config, num_blocks=64, block_tokens=BLOCK, dtype=model.dtype)
    kv.free(kv.allocate(64)[::2])  # every other page: none are neighbours
    sequence = Sequence.allocate(kv, length)
    for layer, number, rows, data in sent.pieces:
        kv.write_slice(layer, sequence.blocks[number], data, rows)
    sequence.length = length
    decode = DecodeSequence(model, sequence, first_token, Sampler(params, state), params)
    while decode.step() is not None:
        pass
    return decode.tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("cached", [False, True])
def test_split_and_single_give_the_same_tokens(
    path: Path, params: SamplingParams, cached: bool, dtype: str, deadline: float
) -> None:
    prompt, earlier = _prompt(90), SamplingParams(max_tokens=1)
    model = load_model(path, dtype)

    kv = PagedKV(model.config, num_blocks=32, block_tokens=BLOCK, dtype=model.dtype)
    with LocalEngine(model, kv=kv, chunk_tokens=CHUNK) as engine:
        if cached:
            engine.generate(prompt[:50], earlier).run()
        generation = engine.generate(prompt, params)
        single = generation.run()
        assert generation.cached_tokens == (48 if cached else 0)

    store = MemoryStore(kv.nbytes)
    namespace = store.namespace(kv.spec("tiny", "r"))
    result: PrefillResult | None = None
    if cached:
        prefill(model, kv, prompt[:50], earlier, namespace=namespace, chunk_tokens=CHUNK, deadline=deadline)
    sent = _Sent()
    result = prefill(
        model, kv, prompt, params, namespace=namespace, chunk_tokens=CHUNK, emit=sent, deadline=deadline
    )
    split = _decode_elsewhere(path, 90, sent, result.first_token, result.sampler.state(), params, dtype)
    assert split == single
    assert len(set(single)) > 8


def test_a_sampled_answer_depends_on_the_state_that_is_handed_on(path: Path, deadline: float) -> None:
    """What the test above rests on: starting the generator anew would give other tokens."""
    model = load_model(path)
    kv = PagedKV(model.config, num_blocks=32, block_tokens=BLOCK)
    sent = _Sent()
    result = prefill(model, kv, _prompt(40), SAMPLED, emit=sent, deadline=deadline)
    right = _decode_elsewhere(path, 40, sent, result.first_token, result.sampler.state(), SAMPLED, "float32")
    anew = _decode_elsewhere(path, 40, sent, result.first_token, None, SAMPLED, "float32")
    assert right[0] == anew[0]
    assert right != anew


def test_kv_and_logits_are_the_same_bits_on_copied_scattered_pages(path: Path, deadline: float) -> None:
    model = load_model(path)
    here = PagedKV(model.config, num_blocks=32, block_tokens=BLOCK)
    sent = _Sent()
    result = prefill(model, here, _prompt(75), GREEDY, chunk_tokens=CHUNK, emit=sent, deadline=deadline)
    there = PagedKV(model.config, num_blocks=32, block_tokens=BLOCK)
    there.free(there.allocate(32)[::2])
    copy = Sequence.allocate(there, 80)
    for layer, number, rows, data in sent.pieces:
        there.write_slice(layer, copy.blocks[number], data, rows)
    copy.length = 75
    assert copy.run_start is None
    assert result.sequence.run_start is not None
    result.sequence.grow(80)
    for token in (3, 77, 200):
        ids = torch.tensor([token])
        a, b = model.forward(ids, result.sequence), model.forward(ids, copy)
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
    for layer in range(3):
        for x, y in zip(here.gather(layer, result.sequence, 78), there.gather(layer, copy, 78), strict=True):
            assert torch.equal(x, y)
