"""What a checkpoint's ``config.json`` says, in the words of this engine, and what it cannot run.

Read are the families Llama, Qwen2 and Qwen3 as Hugging Face writes them, in both spellings:
``rope_theta`` + ``rope_scaling`` / ``torch_dtype``, and ``rope_parameters`` / ``dtype`` of
transformers 5. Everything that would change the numbers and is not implemented is refused with the
field, its value and what is supported, rather than run wrongly.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from kvferry.core.errors import UnsupportedModelError

__all__ = ["FAMILIES", "Family", "ModelConfig", "RopeConfig"]

Family: TypeAlias = Literal["llama", "qwen2", "qwen3"]
RopeKind: TypeAlias = Literal["default", "linear", "llama3"]
_Json: TypeAlias = Mapping[str, Any]

FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")
_ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3")
_DEFAULT_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}
_QWEN3_HEAD_DIM = 128  # what the family means when its config does not say
_LARGEST = sys.float_info.max  # JSON has integers that no float holds
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    ``factor`` divides the frequencies: all of them for ``linear``, the low ones for ``llama3``.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder of the Llama family.

    Attributes:
        family: ``llama``, ``qwen2`` or ``qwen3``.
        qkv_bias: Whether the query, key and value projections have a bias.
        o_bias: Whether the attention's output projection has one.
        mlp_bias: Whether the projections of the MLP have one.
        qk_norm: Whether queries and keys are normalised per head (Qwen3).
        dtype: Element type the checkpoint names, or ``None``.
        eos_token_ids: Tokens that end a generation, from ``config.json`` and
            ``generation_config.json`` together.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Read ``config.json`` and, if there is one, ``generation_config.json`` of a model directory.

        Raises:
            UnsupportedModelError: If the directory has no readable configuration, or one that this
                engine cannot run.
        """
        folder = Path(path)
        if not os.path.isdir(folder):  # noqa: PTH112 - Path.is_dir raises for a name that is too long
            raise UnsupportedModelError(
                f"model {str(folder)!r} is not a directory; give one with a config.json"
            )
        raw = _read_json(folder / "config.json")
        generation: _Json = {}
        if (folder / "generation_config.json").exists():
            generation = _read_json(folder / "generation_config.json")
        try:
            return cls.from_dict(raw, generation)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{folder / 'config.json'}: {error}") from error

    @classmethod
    def from_dict(cls, raw: _Json, generation: _Json | None = None) -> ModelConfig:
        """As :meth:`from_dir`, from the parsed files."""
        family = _family(raw)
        _refuse_unsupported(raw)
        hidden, heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
        kv_heads = _positive(raw, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        head_dim = _positive(raw, "head_dim", _QWEN3_HEAD_DIM if family == "qwen3" else hidden // heads)
        if head_dim % 2:
            raise UnsupportedModelError(f"head_dim is {head_dim}; rotary embedding needs an even one")
        positions = _positive(raw, "max_position_embeddings", _DEFAULT_POSITIONS[family])
        attention_bias = family != "qwen2" and _flag(raw, "attention_bias")
        dtype = raw.get("dtype", raw.get("torch_dtype"))
        return cls(
            family=family,
            vocab_size=_positive(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_positive(raw, "intermediate_size"),
            num_layers=_positive(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=positions,
            rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
            rope=_rope(raw, positions),
            qkv_bias=attention_bias or family == "qwen2",
            o_bias=attention_bias,
            mlp_bias=family == "llama" and _flag(raw, "mlp_bias"),
            qk_norm=family == "qwen3",
            tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
            dtype=None if dtype is None else str(dtype).removeprefix("torch."),
            bos_token_id=raw["bos_token_id"] if isinstance(raw.get("bos_token_id"), int) else None,
            eos_token_ids=_eos_ids(raw, generation or {}),
        )


def _read_json(file: Path) -> _Json:
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UnsupportedModelError(f"{file} is missing; a model directory needs it") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise UnsupportedModelError(f"{file} holds a {type(loaded).__name__}, expected an object")
    return cast("_Json", loaded)


def _family(raw: _Json) -> Family:
    model_type = raw.get("model_type")
    for family in FAMILIES:
        if model_type == family:
            return family
    raise UnsupportedModelError(
        f"model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}"
    )


def _refuse_unsupported(raw: _Json) -> None:
    """Refuse what is not implemented and would change the numbers."""
    if raw.get("quantization_config") is not None:
        raise UnsupportedModelError(
            f"quantization_config is {raw['quantization_config']!r}; supported: unquantised weights (null)"
        )
    for field in _EXPERT_FIELDS:
        if raw.get(field):
            raise UnsupportedModelError(
                f"{field} is {raw[field]!r}; mixture of experts is not supported, only dense"
            )
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported; supported: 'silu'")
    _refuse_sliding_window(raw)
    rotary = raw.get("partial_rotary_factor")
    if rotary not in (None, 1, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor is {rotary!r}; supported: 1.0 (the whole head)")


def _refuse_sliding_window(raw: _Json) -> None:
    remedy = "sliding windows are not supported, only full attention"
    kinds = raw.get("layer_types")
    if kinds is not None:
        others = {str(kind) for kind in kinds} if isinstance(kinds, list) else {repr(kinds)}
        if not others <= {"full_attention"}:
            raise UnsupportedModelError(
                f"layer_types has {', '.join(sorted(others - {'full_attention'}))}; {remedy}"
            )
        return
    window = raw.get("sliding_window")
    llama = raw.get("model_type") == "llama"
    # Qwen says by use_sliding_window whether it means it, and from which layer on; Llama has no such
    # switch, so a window that is set is meant.
    if window is None or not raw.get("use_sliding_window", llama):
        return
    full_layers = raw.get("max_window_layers", 28)
    if llama or not isinstance(full_layers, int) or full_layers < _positive(raw, "num_hidden_layers"):
        raise UnsupportedModelError(f"sliding_window is {window!r} and in use; {remedy}")


def _rope(raw: _Json, positions: int) -> RopeConfig:
    """Both spellings: transformers 5 puts everything into ``rope_parameters``."""
    new = raw.get("rope_parameters")
    field = "rope_parameters" if new is not None else "rope_scaling"
    scaling: Any = new if new is not None else raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or any(isinstance(v, dict) for v in scaling.values()):
        raise UnsupportedModelError(f"{field} is {scaling!r}; supported: one flat object for all layers")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _ROPE_KINDS:
        raise UnsupportedModelError(
            f"{field}: rope_type {kind!r} is not supported; supported: {', '.join(_ROPE_KINDS)}"
        )
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"{field}: partial_rotary_factor is {scaling['partial_rotary_factor']!r}; supported: 1.0"
        )
    theta = _number(scaling, "rope_theta", _number(raw, "rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta)
    factor = _number(scaling, "factor", None, within=field)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    return RopeConfig(
        theta,
        "llama3",
        factor,
        _number(scaling, "low_freq_factor", None, within=field),
        _number(scaling, "high_freq_factor", None, within=field),
        _positive(scaling, "original_max_position_embeddings", positions),
    )


def _eos_ids(raw: _Json, generation: _Json) -> tuple[int, ...]:
    found: list[int] = []
    for source in (raw, generation):
        value = source.get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        found.extend(v for v in values if isinstance(v, int) and v not in found)
    return tuple(found)


def _positive(raw: _Json, field: str, default: int | None = None) -> int:
    value = raw.get(field)
    if value is None:
        value = default
    if value is None:
        raise UnsupportedModelError(f"{field} is missing; it is needed to run the model")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"{field} is {value!r}, must be a positive integer")
    return value


def _number(raw: _Json, field: str, default: float | None, *, within: str = "") -> float:
    value = raw.get(field)
    if value is None:
        value = default
    name = f"{within}.{field}" if within else field
    if value is None:
        raise UnsupportedModelError(f"{name} is missing; it is needed to run the model")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
        raise UnsupportedModelError(f"{name} is {value!r}, must be a positive number")
    return float(value)


def _flag(raw: _Json, field: str) -> bool:
    value = raw.get(field, False)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedModelError(f"{field} is {value!r}, must be true or false")
    return bool(value)
