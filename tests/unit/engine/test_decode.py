from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.engine.decode import DecodeSequence
from kvferry.engine.paged_kv import PagedKV
from kvferry.engine.prefill import prefill
from kvferry.engine.tiny import make_tiny
from kvferry.engine.weights import load_model
from kvferry.wire.messages import SamplingParams


def _generate(path: Path, params: SamplingParams, deadline: float, **fields: Any) -> DecodeSequence:
    model = load_model(make_tiny(path, layers=2, hidden=32, heads=2, head_dim=16, **fields))
    kv = PagedKV(model.config, num_blocks=8, block_tokens=4)
    result = prefill(model, kv, [1, 2, 3], params, chunk_tokens=4, deadline=deadline)
    decode = DecodeSequence(model, result.sequence, result.first_token, result.sampler, params)
    while decode.step() is not None:
        assert decode.finish_reason is None or decode.step() is None
    result.sequence.release()
    assert kv.free_blocks == 8
    return decode


def test_ends_at_max_tokens(tmp_path: Path, deadline: float) -> None:
    for count in (1, 2, 9):
        decode = _generate(tmp_path, SamplingParams(max_tokens=count), deadline)
        assert len(decode.tokens) == count
        assert decode.finish_reason == "length"


def test_ends_at_a_stop_token_which_is_the_last(tmp_path: Path, deadline: float) -> None:
    free = _generate(tmp_path, SamplingParams(max_tokens=8), deadline).tokens
    for stop in (free[0], free[4]):
        decode = _generate(tmp_path, SamplingParams(max_tokens=8, stop_token_ids=(stop,)), deadline)
        assert decode.tokens == free[: free.index(stop) + 1]
        assert decode.finish_reason == "stop"


@pytest.mark.parametrize("ignore", [False, True])
def test_ends_at_the_models_own_end_token_unless_told_otherwise(
    tmp_path: Path, deadline: float, ignore: bool
) -> None:
    free = _generate(tmp_path, SamplingParams(max_tokens=8), deadline).tokens
    eos = free[3]
    decode = _generate(tmp_path, SamplingParams(max_tokens=8, ignore_eos=ignore), deadline, eos_token_id=eos)
    assert decode.tokens == (free if ignore else free[: free.index(eos) + 1])
    assert decode.finish_reason == ("length" if ignore else "stop")


def test_ends_where_the_model_ends(tmp_path: Path, deadline: float) -> None:
    decode = _generate(tmp_path, SamplingParams(max_tokens=100), deadline, max_positions=10)
    assert decode.finish_reason == "length"
    assert len(decode.tokens) == 8  # 3 of the prompt and 7 put in, and the one drawn after that
