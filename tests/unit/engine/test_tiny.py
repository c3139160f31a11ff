from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError, UnsupportedModelError
from kvferry.engine.config import ModelConfig
from kvferry.engine.local import LocalEngine
from kvferry.engine.tiny import make_tiny
from kvferry.engine.tokenizer import ByteTokenizer, load_tokenizer
from kvferry.engine.weights import load_model
from kvferry.wire.messages import SamplingParams


def test_the_same_arguments_write_the_same_bytes(tmp_path: Path) -> None:
    a, b, other = (
        make_tiny(tmp_path / name, layers=1, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    names = sorted(file.name for file in a.iterdir())
    assert names == ["config.json", "kvferry_tokenizer.json", "model.safetensors"]
    assert all((a / name).read_bytes() == (b / name).read_bytes() for name in names)
    assert (a / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_sizes_are_as_asked(tmp_path: Path) -> None:
    path = make_tiny(
        tmp_path,
        "qwen2",
        layers=24,
        hidden=32,
        heads=6,
        kv_heads=3,
        head_dim=8,
        intermediate=40,
        vocab=300,
        max_positions=128,
        tied=True,
        eos_token_id=257,
        rope_theta=500.0,
    )
    config = ModelConfig.from_dir(path)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (24, 32, 6, 3)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (8, 40, 300)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (128, True)
    assert (config.eos_token_ids, config.rope.theta) == ((257,), 500.0)
    assert isinstance(load_tokenizer(path), ByteTokenizer)
    load_model(path)


@pytest.mark.parametrize("layers", [4, 24])
def test_its_text_does_not_only_repeat_itself(tmp_path: Path, layers: int) -> None:
    model = load_model(make_tiny(tmp_path, layers=layers, max_positions=512))
    with LocalEngine(model) as engine:
        tokens = engine.generate(list(b"Once upon a time"), SamplingParams(max_tokens=64)).run()
    assert len(set(tokens)) > 16


def test_shapes_that_no_model_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="family 'gpt2'"):
        make_tiny(tmp_path, "gpt2")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="not a multiple"):
        make_tiny(tmp_path, heads=4, kv_heads=3)
    assert list(tmp_path.iterdir()) == []
