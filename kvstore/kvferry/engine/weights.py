"""Weights from safetensors files, single or sharded: checked by name and shape before any is loaded.

Files are mapped into memory. Tensors that are of the wanted dtype already and start on a 64-byte
boundary stay views of the mapping, shared by all processes on the machine; others get memory of their
own. (Matrix products round differently for operands that start off a boundary, so without that the
bits of a result would depend on how a checkpoint was cut into files.) Checkpoints that are read by
unpickling are not supported at all: they can run code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from kvferry.core.errors import ConfigError, UnsupportedModelError
from kvferry.core.spec import SLICE_ALIGNMENT
from kvferry.engine.config import ModelConfig
from kvferry.engine.model import Model
from kvferry.engine.revision import INDEX_FILE, SINGLE_FILE, read_index, revision, weight_files

__all__ = ["DTYPES", "expected_shapes", "load_model", "pick_dtype", "revision"]

Shape: TypeAlias = tuple[int, ...]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_STORED = {"F64", "F32", "F16", "BF16"}
_NAMES_SHOWN = 4


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every weight that a model of this shape has, by its Hugging Face name."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_out, kv_out = config.num_heads * dim, config.num_kv_heads * dim
    linears = {
        "self_attn.q_proj": (q_out, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_out, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_out, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_out, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        for name, size in norms.items():
            shapes[f"{prefix}{name}.weight"] = (size,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def pick_dtype(config: ModelConfig, dtype: str | torch.dtype = "auto") -> torch.dtype:
    """The dtype to compute in; ``auto`` takes the checkpoint's, float32 if it has none or float16.

    Raises:
        ConfigError: For a dtype that the engine does not compute in.
    """
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        # float16 overflows in the models of these families on a CPU; float32 holds all its values.
        name = "float32" if config.dtype in (None, "float16") else config.dtype
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported; supported: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def load_model(
    path: str | Path, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu"
) -> Model:
    """Load a model directory.

    Args:
        path: Directory with ``config.json`` and safetensors files.
        dtype: ``float32``, ``bfloat16``, ``float64`` or ``auto`` (see :func:`pick_dtype`).
        device: Only ``cpu`` for now.

    Raises:
        UnsupportedModelError: If the checkpoint is of another kind, or a file, a tensor or a shape is not
            as its configuration says; named in the message.
        ConfigError: For another dtype or device.
    """
    folder = Path(path)
    if torch.device(device).type != "cpu":
        raise ConfigError(f"device {str(device)!r} is not supported; supported: cpu")
    config = ModelConfig.from_dir(folder)
    wanted = pick_dtype(config, dtype)
    with ExitStack() as stack:
        handles = {file.name: stack.enter_context(_open(file)) for file in weight_files(folder)}
        where = _locate(folder, handles)
        if config.num_layers > len(where):  # before as many names are made
            raise UnsupportedModelError(
                f"{folder}: num_hidden_layers is {config.num_layers}, the files have only {len(where)} "
                "tensors"
            )
        expected = expected_shapes(config)
        _check_names(folder, where, expected, config)
        for name, shape in expected.items():
            _check_tensor(folder, name, shape, where[name])
        tensors = {name: _aligned(where[name].get_tensor(name).to(wanted)) for name in expected}
    return Model(config, tensors)


def _open(file: Path) -> Any:  # noqa: ANN401 (the handle's class is not public)
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UnsupportedModelError(
            f"{file} is no complete safetensors file: {error}; fetch it again"
        ) from error


def _locate(folder: Path, handles: dict[str, Any]) -> dict[str, Any]:
    """The open file of every tensor; an index must agree with what the shards hold."""
    where: dict[str, Any] = {}
    shard_of: dict[str, str] = {}
    for file_name, handle in handles.items():
        for name in handle.keys():  # noqa: SIM118 (not a mapping)
            if name in where:
                raise UnsupportedModelError(
                    f"{folder}: tensor {name} is in {shard_of[name]} and in {file_name}"
                )
            where[name], shard_of[name] = handle, file_name
    if SINGLE_FILE not in handles:
        for name, shard in read_index(folder).items():
            if shard_of.get(name) != shard:
                raise UnsupportedModelError(
                    f"{folder}: tensor {name} is not in {shard}, where {INDEX_FILE} has it"
                )
    return where


def _check_names(
    folder: Path, found: dict[str, Any], expected: dict[str, Shape], config: ModelConfig
) -> None:
    missing = [name for name in expected if name not in found]
    if missing:
        hint = "; is tie_word_embeddings meant to be true?" if missing == ["lm_head.weight"] else ""
        raise UnsupportedModelError(f"{folder}: missing {_listed(missing)} of {len(expected)} tensors{hint}")
    surplus = [name for name in sorted(found) if name not in expected and not _is_harmless(name, config)]
    if surplus:
        raise UnsupportedModelError(
            f"{folder}: surplus {_listed(surplus)}; no {config.family} model with this config.json has them"
        )


def _is_harmless(name: str, config: ModelConfig) -> bool:
    """Written by some tools and without effect: old frequency tables, the copy of a tied head."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _check_tensor(folder: Path, name: str, shape: Shape, handle: Any) -> None:  # noqa: ANN401
    stored = handle.get_slice(name)
    actual = tuple(stored.get_shape())
    if actual != shape:
        raise UnsupportedModelError(
            f"{folder}: tensor {name} has shape {actual}, config.json makes it {shape}"
        )
    kind = stored.get_dtype()
    if kind not in _STORED:
        raise UnsupportedModelError(
            f"{folder}: tensor {name} is stored as {kind}; supported: {', '.join(sorted(_STORED))}"
        )


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if it does not start on a boundary; torch's own memory always does."""
    return tensor if tensor.data_ptr() % SLICE_ALIGNMENT == 0 else tensor.clone()


def _listed(names: list[str]) -> str:
    shown: Iterator[str] = iter(names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{', '.join(shown)}{more}"
