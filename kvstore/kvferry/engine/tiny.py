"""Makes small random checkpoints, real in all but sense: safetensors, ``config.json``, byte tokens.

For tests and for ``--model tiny``: no download, no transformers, the same weights for the same
arguments. Weights are spread widely, so that greedy text is not the same token over and over.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvferry.core.errors import ConfigError
from kvferry.engine.config import FAMILIES, Family, ModelConfig
from kvferry.engine.revision import INDEX_FILE, SINGLE_FILE
from kvferry.engine.tokenizer import BYTE_MARKER
from kvferry.engine.weights import DTYPES, expected_shapes

__all__ = ["make_tiny"]

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def make_tiny(
    path: str | Path,
    family: Family = "llama",
    *,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 256,
    vocab: int = 272,
    max_positions: int = 32768,
    dtype: str = "float32",
    initializer_range: float = 0.3,
    tied: bool = False,
    shards: int = 1,
    eos_token_id: int | None = None,
    **fields: object,
) -> Path:
    """Write a checkpoint directory.

    Args:
        path: Directory; created if needed.
        family: ``llama``, ``qwen2`` or ``qwen3``.
        seed: Of the weights.
        layers: Layers.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads; a divisor of ``heads``.
        head_dim: Width of a head.
        intermediate: Width inside the MLP.
        vocab: Size of the vocabulary; ids 0 to 255 are bytes.
        max_positions: Longest sequence.
        dtype: ``float32``, ``bfloat16`` or ``float64``.
        initializer_range: Standard deviation of the weights.
        tied: Whether input and output embeddings are the same.
        shards: Files to spread the weights over; more than one come with an index.
        eos_token_id: A token that ends a generation; none by default, so that answers have full length.
        fields: More fields of ``config.json`` (``attention_bias``, ``rope_parameters``, …).

    Returns:
        The directory.

    Raises:
        ConfigError: For a shape that no such model has.
    """
    if family not in FAMILIES or dtype not in DTYPES or shards < 1:
        raise ConfigError(f"no tiny model of family {family!r}, dtype {dtype!r} in {shards} shards")
    raw: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "dtype": dtype,
        **fields,
    }
    if "rope_theta" not in raw:
        raw.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0})
    config = ModelConfig.from_dict(raw)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    _save(folder, _random(config, seed, initializer_range, DTYPES[dtype]), shards)
    (folder / BYTE_MARKER).write_text(json.dumps({"kind": "byte"}) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    return folder


def _random(config: ModelConfig, seed: int, spread: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(config).items():
        values = torch.randn(shape, generator=generator, dtype=torch.float32) * spread
        # Scales of a normalisation lie around 1.
        tensors[name] = (values * 0.1 + 1 if "norm" in name else values).to(dtype)
    return tensors


def _save(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number::shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
