from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

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
