from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import UnsupportedModelError
from kvferry.engine.config import ModelConfig, RopeConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _read(**fields: Any) -> ModelConfig:
    return ModelConfig.from_dict({**LLAMA, **fields})


def _without(field: str) -> dict[str, Any]:
    return {name: value for name, value in LLAMA.items() if name != field}


def test_llama_as_published() -> None:
    config = _read(rope_theta=5e5, rope_scaling=None)
    assert config == ModelConfig(
        family="llama",
        vocab_size=320,
        hidden_size=96,
        intermediate_size=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope=RopeConfig(5e5),
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_what_a_family_means_when_its_config_does_not_say() -> None:
    llama, qwen2, qwen3 = (_read(model_type=family) for family in ("llama", "qwen2", "qwen3"))
    assert (llama.qkv_bias, llama.o_bias, llama.qk_norm, llama.head_dim) == (False, False, False, 24)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, False, 24)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)
    assert ModelConfig.from_dict(_without("num_key_value_heads")).num_kv_heads == 4
    assert ModelConfig.from_dict(_without("max_position_embeddings")).max_position_embeddings == 2048


def test_fields_that_other_families_do_not_read_change_nothing() -> None:
    assert _read(model_type="qwen2", attention_bias=True) == _read(model_type="qwen2")
    assert _read(model_type="qwen3", mlp_bias=True) == _read(model_type="qwen3")


@pytest.mark.parametrize("head_dim", [32, None])
def test_an_explicit_head_dim_counts_and_null_does_not(head_dim: int | None) -> None:
    assert _read(head_dim=head_dim).head_dim == (head_dim or 24)


def test_both_spellings_of_rope_and_dtype() -> None:
    scaling = {**LLAMA3, "original_max_position_embeddings": 512}
    old = _read(rope_theta=5e5, rope_scaling=scaling)
    new = ModelConfig.from_dict(
        {**_without("torch_dtype"), "dtype": "bfloat16", "rope_parameters": {**scaling, "rope_theta": 5e5}}
    )
    assert old == new
    assert new.rope == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 512)
    assert _read(rope_scaling={"type": "linear", "factor": 2}).rope == RopeConfig(1e4, "linear", 2.0)
    assert _read(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope == RopeConfig(7.0)
    assert _read(rope_parameters={"rope_type": "default"}, rope_theta=7.0).rope == RopeConfig(7.0)
    assert _read().rope == RopeConfig(10000.0)


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": [2, 5]}))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (2, 5)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (2, 5, 9)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": None}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (7,)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mistral"}, "model_type 'mistral' is not supported; supported: llama, qwen2, qwen3"),
    ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' is not supported"),
    ({"model_type": None}, "model_type None is not supported"),
    ({"num_experts": 8}, "num_experts is 8; mixture of experts is not supported, only dense"),
    ({"num_local_experts": 8}, "num_local_experts is 8; mixture of experts"),
    ({"quantization_config": {"bits": 4}}, r"quantization_config is \{'bits': 4\}; supported: unquantised"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: 'silu'"),
    ({"sliding_window": 4096}, "sliding_window is 4096 and in use; sliding windows are not supported"),
    (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
        "sliding_window is 64 and in use",
    ),
    (
        {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types has sliding_attention; sliding windows are not supported",
    ),
    ({"layer_types": 3}, "layer_types has 3; sliding windows are not supported"),
    (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": None},
        "sliding_window is 64 and in use",
    ),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5; supported: 1.0"),
    (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_scaling: rope_type 'dynamic' is not supported; supported: default, linear, llama3",
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        "rope_parameters: rope_type 'yarn' is not supported",
    ),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one flat object for all layers"),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; supported: one flat object"),
    ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    ({"rope_scaling": {**LLAMA3, "factor": "8"}}, "rope_scaling.factor is '8', must be a positive number"),
    ({"rope_scaling": {**LLAMA3, "factor": 0}}, "rope_scaling.factor is 0, must be a positive number"),
    ({"rope_theta": -1}, "rope_theta is -1, must be a positive number"),
    ({"rope_theta": 10**400}, "rope_theta is 1000*, must be a positive number"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, must be a positive number"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0, must be a positive integer"),
    ({"vocab_size": True}, "vocab_size is True, must be a positive integer"),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ({"head_dim": 33}, "head_dim is 33; rotary embedding needs an even one"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', must be true or false"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_would_change_the_numbers_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        _read(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"quantization_config": None},
        {"num_experts": None},
        {"sliding_window": None},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 0},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 4},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": None},
        {"model_type": "qwen3", "layer_types": ["full_attention"] * 4, "sliding_window": 4096},
        {"rope_scaling": {"rope_type": "default"}},
    ],
)
def test_what_is_there_but_not_in_use_is_accepted(fields: dict[str, Any]) -> None:
    assert _read(**fields).num_layers == 4


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="nowhere' is not a directory"):
        ModelConfig.from_dir(tmp_path / "nowhere")
    with pytest.raises(UnsupportedModelError, match=r"config\.json is missing"):
        ModelConfig.from_dir(tmp_path)
    for text, message in (
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "holds a list, expected an object"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UnsupportedModelError, match=message):
            ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UnsupportedModelError, match=r"config\.json: model_type 'gpt2'"):
        ModelConfig.from_dir(tmp_path)
