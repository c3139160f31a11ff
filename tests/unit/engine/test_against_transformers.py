"""The same text as transformers, on checkpoints that transformers made and wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engine.config import ModelConfig
from kvferry.engine.decode import DecodeSequence
from kvferry.engine.paged_kv import PagedKV, Sequence
from kvferry.engine.prefill import prefill
from kvferry.engine.weights import load_model
from kvferry.wire.messages import SamplingParams

COMMON: dict[str, Any] = {
    "hidden_size": 96,  # not heads * head_dim, so that an explicit head_dim matters
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
FAMILIES = ("llama", "qwen2", "qwen3")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear-rope": ("qwen3", {"rope_parameters": LINEAR}),
    "theta": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "llama-biases-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    "llama-all-kv-heads": ("llama", {"num_key_value_heads": 4}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
}
Made = tuple[Path, Any]
Maker = Callable[[str], Made]


def make_reference(path: Path, family: str, **fields: Any) -> Any:
    """A random model of transformers, saved in ``path``."""
    import transformers

    made: Any = transformers
    prefix = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    config = getattr(made, f"{prefix}Config")(**{**COMMON, **fields})
    torch.manual_seed(0)
    model = getattr(made, f"{prefix}ForCausalLM")(config).to(torch.float64).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)  # transformers starts them at 0
            elif "norm" in name:
                parameter.normal_(1, 0.2)
    model.save_pretrained(path)
    return model


@pytest.fixture(scope="session")
def made(models: Path) -> Maker:
    """Checkpoints by name, each made once."""
    done: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in done:
            family, fields = VARIANTS.get(name, (name, {}))
            done[name] = models / name, make_reference(models / name, family, **fields)
        return done[name]

    return make


def _prompt(length: int) -> list[int]:
    return [int(t) for t in torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(length))]


def _reference_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return [int(t) for t in out[0, len(prompt) :]]


def _tokens(path: Path, prompt: list[int], count: int, deadline: float, chunk_tokens: int = 256) -> list[int]:
    model = load_model(path, "float64")
    kv = PagedKV(model.config, num_blocks=32, dtype=model.dtype)
    params = SamplingParams(max_tokens=count)
    result = prefill(model, kv, prompt, params, chunk_tokens=chunk_tokens, deadline=deadline)
    decode = DecodeSequence(model, result.sequence, result.first_token, result.sampler, params)
    while decode.step() is not None:
        pass
    return decode.tokens


def _assert_same_logits(path: Path, reference: Any, prompt: list[int]) -> None:
    model = load_model(path, "float64")
    kv = PagedKV(model.config, num_blocks=32, dtype=model.dtype)
    logits = model.forward(torch.tensor(prompt), Sequence.allocate(kv, len(prompt)))
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 200])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_same(made: Maker, family: str, length: int, deadline: float) -> None:
    path, reference = made(family)
    prompt = _prompt(length)
    expected = _reference_tokens(reference, prompt, 64)
    assert len(set(expected)) > 16  # a text that only repeats itself would prove little
    assert _tokens(path, prompt, 64, deadline) == expected


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_logits_are_the_same(made: Maker, name: str) -> None:
    path, reference = made(name)
    _assert_same_logits(path, reference, _prompt(150))


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_give_the_same_text(made: Maker, name: str, deadline: float) -> None:
    path, reference = made(name)
    prompt = _prompt(70)
    assert _tokens(path, prompt, 16, deadline) == _reference_tokens(reference, prompt, 16)


@pytest.mark.parametrize("chunk_tokens", [16, 48, 192, 208])
def test_in_chunks_it_is_the_same_text(made: Maker, chunk_tokens: int, deadline: float) -> None:
    path, reference = made("qwen3")
    prompt = _prompt(200)
    assert _tokens(path, prompt, 16, deadline, chunk_tokens) == _reference_tokens(reference, prompt, 16)


def test_a_sharded_checkpoint_is_the_same_model(made: Maker, tmp_path: Path, deadline: float) -> None:
    path, reference = made("qwen2")
    reference.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    prompt = _prompt(20)
    assert _tokens(tmp_path, prompt, 16, deadline) == _tokens(path, prompt, 16, deadline)


@pytest.mark.parametrize("name", ["llama3-rope", "linear-rope", "theta"])
def test_the_older_spelling_of_the_configuration_is_the_same_model(made: Maker, name: str) -> None:
    path, _ = made(name)
    raw = json.loads((path / "config.json").read_text())
    assert "dtype" in raw
    rope = raw.pop("rope_parameters")
    raw["torch_dtype"] = raw.pop("dtype")
    raw["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    raw["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    assert ModelConfig.from_dict(raw) == ModelConfig.from_dir(path)


def test_bfloat16_is_close_to_the_reference(made: Maker, deadline: float) -> None:
    """Same numbers, not same text: 8 bits of a sum depend on its order."""
    path, reference = made("llama")
    model = load_model(path, "bfloat16")
    kv = PagedKV(model.config, num_blocks=8, dtype=model.dtype)
    prompt = _prompt(40)
    logits = model.forward(torch.tensor(prompt), Sequence.allocate(kv, len(prompt)))
    assert logits is not None
    assert logits.dtype == torch.bfloat16
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, -1]
    correlation = torch.corrcoef(torch.stack([logits.double(), expected]))[0, 1]
    assert correlation > 0.98


@pytest.mark.real_model
def test_smollm2_gives_the_same_greedy_text(deadline: float) -> None:
    import transformers

    from kvferry.engine.demo.smollm2 import ensure_smollm2

    path = ensure_smollm2(print)  # $KVFERRY_SMOLLM2_DIR, or the demo's cache
    auto: Any = transformers.AutoModelForCausalLM
    reference = auto.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)
    prompt = list(tokenizer("The key value cache of a language model holds, for every layer,").input_ids)
    model = load_model(path, "float32")
    kv = PagedKV(model.config, num_blocks=16, dtype=model.dtype)
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    result = prefill(model, kv, prompt, params, deadline=deadline)
    decode = DecodeSequence(model, result.sequence, result.first_token, result.sampler, params)
    while decode.step() is not None:
        pass
    ids = torch.tensor([prompt])
    out = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, min_new_tokens=64, do_sample=False
    )
    expected = [int(t) for t in out[0, len(prompt) :]]
    assert decode.tokens == expected
