from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.core.errors import ConfigError, UnsupportedModelError
from kvferry.engine.config import ModelConfig
from kvferry.engine.paged_kv import PagedKV, Sequence
from kvferry.engine.tiny import make_tiny
from kvferry.engine.weights import expected_shapes, load_model, pick_dtype

SMALL: dict[str, Any] = {
    "layers": 2,
    "hidden": 32,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "intermediate": 48,
}
Change = Callable[[dict[str, torch.Tensor]], None]


def _changed(path: Path, change: Change, file: str = "model.safetensors") -> None:
    tensors = load_file(path / file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / file)


def _logits(path: Path, dtype: str = "auto") -> torch.Tensor:
    model = load_model(path, dtype)
    kv = PagedKV(model.config, num_blocks=1, dtype=model.dtype)
    logits = model.forward(torch.tensor([3, 5, 7]), Sequence.allocate(kv, 3))
    assert logits is not None
    return logits


def test_shards_give_the_same_model_as_one_file(tmp_path: Path) -> None:
    one, many = make_tiny(tmp_path / "one", **SMALL), make_tiny(tmp_path / "many", shards=3, **SMALL)
    assert len(list(many.glob("*.safetensors"))) == 3
    assert torch.equal(_logits(one), _logits(many))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_tensor_of_a_family_is_expected_and_used(tmp_path: Path, family: Any) -> None:
    path = make_tiny(tmp_path, family, **SMALL)
    before = _logits(path)
    for name in expected_shapes(ModelConfig.from_dir(path)):
        keep = load_file(path / "model.safetensors")[name].clone()

        def perturb(tensors: dict[str, torch.Tensor], name: str = name) -> None:
            tensors[name] = tensors[name] + torch.linspace(-1, 1, tensors[name].numel()).view_as(
                tensors[name]
            )

        def restore(tensors: dict[str, torch.Tensor], name: str = name, keep: torch.Tensor = keep) -> None:
            tensors[name] = keep

        _changed(path, perturb)
        assert not torch.equal(_logits(path), before), name
        _changed(path, restore)
    assert torch.equal(_logits(path), before)


def test_dtypes_are_converted(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, dtype="bfloat16", **SMALL)
    assert _logits(path).dtype == torch.bfloat16
    assert _logits(path, "float32").dtype == torch.float32
    assert torch.allclose(_logits(path, "float32").double(), _logits(path, "float64"), rtol=1e-3, atol=1e-3)


def test_auto_dtype_is_the_checkpoints() -> None:
    raw = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    raw |= {"num_hidden_layers": 1, "num_attention_heads": 1}
    for written, picked in (
        (None, "float32"),
        ("float16", "float32"),
        ("bfloat16", "bfloat16"),
        ("torch.float64", "float64"),
    ):
        assert pick_dtype(ModelConfig.from_dict({**raw, "torch_dtype": written})) == getattr(torch, picked)
    with pytest.raises(ConfigError, match="dtype 'float16' is not supported; supported: auto, float32"):
        pick_dtype(ModelConfig.from_dict(raw), torch.float16)


def test_other_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device 'cuda' is not supported; supported: cpu"):
        load_model(make_tiny(tmp_path, **SMALL), device="cuda")


def _drop(name: str) -> Change:
    return lambda tensors: tensors.__delitem__(name)


def _put(name: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: tensors.__setitem__(name, tensor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("model.norm.weight"), "missing model.norm.weight of 21 tensors"),
        (_drop("lm_head.weight"), r"missing lm_head\.weight .* tie_word_embeddings"),
        (
            _put("model.layers.2.input_layernorm.weight", torch.ones(32)),
            r"surplus model\.layers\.2\.input_layernorm",
        ),
        (
            _put("model.layers.0.self_attn.q_proj.bias", torch.ones(32)),
            r"surplus model\.layers\.0\.self_attn\.q_proj",
        ),
        (
            _put("model.layers.1.mlp.up_proj.weight", torch.ones(48, 31)),
            r"tensor model\.layers\.1\.mlp\.up_proj\.weight has shape \(48, 31\), config\.json makes it",
        ),
        (_put("model.norm.weight", torch.ones(32, dtype=torch.int8)), "model.norm.weight is stored as I8"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path, change: Change, message: str) -> None:
    path = make_tiny(tmp_path, **SMALL)
    _changed(path, change)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(path)


def test_harmless_surplus_is_ignored(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, tied=True, **SMALL)
    before = _logits(path)
    _changed(path, _put("lm_head.weight", torch.zeros(272, 32)))
    _changed(path, _put("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(8)))
    assert torch.equal(_logits(path), before)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, shards=3, **SMALL)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        UnsupportedModelError, match=r"shard model-00002-of-00003.safetensors of .* is missing .*7 tensors"
    ):
        load_model(path)


def test_an_index_that_does_not_agree_is_refused(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, shards=2, **SMALL)
    index = path / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    name, file = next(iter(raw["weight_map"].items()))
    other = next(f for f in raw["weight_map"].values() if f != file)
    index.write_text(json.dumps({"weight_map": {**raw["weight_map"], name: other}}))
    with pytest.raises(UnsupportedModelError, match=f"tensor {name} is not in {other}"):
        load_model(path)
    for wrong in ("../evil.safetensors", "weights.bin", 7):
        index.write_text(json.dumps({"weight_map": {**raw["weight_map"], name: wrong}}))
        with pytest.raises(UnsupportedModelError, match=r"is no \.safetensors file there"):
            load_model(path)
    for text in ("{", "[]", "{}", '{"weight_map": 3}', "[" * 100_000):
        index.write_text(text)
        with pytest.raises(UnsupportedModelError, match="no readable weight_map"):
            load_model(path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, shards=2, **SMALL)
    first = load_file(path / "model-00001-of-00002.safetensors")
    name = next(iter(first))
    _changed(path, _put(name, first[name]), "model-00002-of-00002.safetensors")
    with pytest.raises(
        UnsupportedModelError, match=rf"tensor {name} is in model-00001-of-00002\.safetensors and in"
    ):
        load_model(path)


def test_truncated_files_are_named(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, **SMALL)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for count in (0, 7, 100, len(whole) - 1):
        file.write_bytes(whole[:count])
        with pytest.raises(
            UnsupportedModelError, match=r"model\.safetensors is no complete safetensors file"
        ):
            load_model(path)


def test_pickled_checkpoints_are_not_touched(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, **SMALL)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(
        UnsupportedModelError, match=r"pytorch_model\.bin cannot be read, convert to safetensors"
    ):
        load_model(path)


@pytest.mark.parametrize("layers", [10**9, 10**30])
def test_more_layers_than_there_are_tensors_are_refused_at_once(tmp_path: Path, layers: int) -> None:
    path = make_tiny(tmp_path, **SMALL)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": layers}))
    with pytest.raises(UnsupportedModelError, match=f"num_hidden_layers is {layers}, the files have only 2"):
        load_model(path)
