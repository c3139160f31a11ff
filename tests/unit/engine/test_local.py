from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from kvferry.core.errors import CapacityError, RequestCancelledError, RequestError, TransferTimeoutError
from kvferry.core.memory import MemoryStore
from kvferry.engine.local import LocalEngine
from kvferry.engine.model import Model
from kvferry.engine.paged_kv import PagedKV
from kvferry.engine.tiny import make_tiny
from kvferry.engine.weights import load_model
from kvferry.wire.messages import SamplingParams

BLOCK = 16


@pytest.fixture(scope="module")
def model(models: Path) -> Model:
    return load_model(make_tiny(models / "local", layers=2, hidden=64, head_dim=16), "float64")


@pytest.fixture
def kv(model: Model) -> PagedKV:
    return PagedKV(model.config, num_blocks=32, block_tokens=BLOCK, dtype=model.dtype)


def _prompt(length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(length).integers(0, 256, length)]


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_c026_a_prompt_that_is_cached_whole_still_computes_its_end(
    model: Model, kv: PagedKV, n: int, over: int
) -> None:
    prompt, params = _prompt(n * BLOCK + over), SamplingParams(max_tokens=8)
    with LocalEngine(model, kv=kv) as engine:
        cold = engine.generate(prompt, params)
        cold.run()
        assert (cold.cached_tokens, cold.computed_tokens) == (0, len(prompt))
        warm = engine.generate(prompt, params)
        assert warm.run() == cold.tokens
    assert warm.cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
    assert warm.cached_tokens + warm.computed_tokens == len(prompt)
    assert kv.free_blocks == kv.num_blocks


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=1.0, seed=5)]
)
def test_a_conversation_goes_on_from_what_is_cached(
    model: Model, kv: PagedKV, params: SamplingParams
) -> None:
    with LocalEngine(model, kv=kv) as engine:
        first = _prompt(70)
        answer = engine.generate(first, params).run()
        second = [*first, *answer, *_prompt(9)]
        warm = engine.generate(second, params)
        warm.run()
        assert warm.cached_tokens == 64
    with LocalEngine(model, kv=kv) as engine:
        cold = engine.generate(second, params)
        assert cold.run() == warm.tokens
        assert cold.cached_tokens == 0


def test_tokens_come_one_by_one_and_nothing_runs_before_the_first(model: Model, kv: PagedKV) -> None:
    with LocalEngine(model, kv=kv) as engine:
        generation = engine.generate(_prompt(20), SamplingParams(max_tokens=3))
        assert (generation.prefill, generation.computed_tokens) == (None, 0)
        seen: list[int] = []
        for token in generation:
            seen.append(token)
            assert generation.tokens == seen
            assert kv.free_blocks < kv.num_blocks
        assert (len(seen), generation.finish_reason) == (3, "length")
        with pytest.raises(RuntimeError, match="iterated over once"):
            generation.run()
        assert generation.started_at <= generation.first_token_at
        assert kv.free_blocks == kv.num_blocks


def test_pages_come_back_from_an_answer_that_is_dropped_cancelled_or_late(model: Model, kv: PagedKV) -> None:
    params = SamplingParams(max_tokens=50)
    with LocalEngine(model, kv=kv) as engine:
        for _ in engine.generate(_prompt(20), params):
            break
        assert kv.free_blocks == kv.num_blocks
        late = engine.generate(_prompt(20), params, deadline=time.monotonic() + 1000)
        tokens = iter(late)
        next(tokens)
        assert kv.free_blocks < kv.num_blocks
        cancelled = engine.generate(_prompt(20), params, should_stop=lambda: len(cancelled.tokens) == 4)
        with pytest.raises(RequestCancelledError, match="after 4 tokens"):
            cancelled.run()
        del late, tokens
        assert kv.free_blocks == kv.num_blocks
        with pytest.raises(TransferTimeoutError):
            engine.generate(_prompt(20), params, deadline=time.monotonic() - 1).run()
        with pytest.raises(CapacityError):
            engine.generate(_prompt(20), SamplingParams(max_tokens=1000)).run()
        with pytest.raises(RequestError, match="max_tokens"):
            engine.generate(_prompt(20), SamplingParams(max_tokens=0))
    assert kv.free_blocks == kv.num_blocks


def test_the_engine_makes_its_own_pages_and_store_and_leaves_a_given_store_open(model: Model) -> None:
    with LocalEngine(model, block_tokens=8, chunk_tokens=64) as engine:
        assert engine.kv.num_blocks * 8 == 8192
        assert engine.kv.dtype == model.dtype
    store = MemoryStore(1 << 22)
    with LocalEngine(model, store=store) as engine:
        engine.generate(_prompt(33), SamplingParams(max_tokens=1)).run()
    assert store.stats().entries == 2
    store.close()
