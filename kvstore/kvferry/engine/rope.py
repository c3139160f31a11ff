"""Rotary position embedding: frequencies, and turning queries and keys by them.

Formulas: Su et al., RoFormer (arXiv 2104.09864); position interpolation, Chen et al. (arXiv
2306.15595) for ``linear``; the Llama 3 report (arXiv 2407.21783) for ``llama3``. As in the published
models angles are float32 whatever the model's dtype, so that all dtypes see the same positions.
"""

from __future__ import annotations

import math

import torch

from kvferry.engine.config import RopeConfig

__all__ = ["apply_rope", "inverse_frequencies", "rope_tables"]


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians a position for each pair of dimensions: float32, shape ``[head_dim / 2]``."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    freqs = 1.0 / (config.theta**exponent)
    if config.kind == "linear":
        return freqs / config.factor
    if config.kind == "llama3":
        return _llama3(freqs, config)
    return freqs


def _llama3(freqs: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Divide low frequencies by ``factor``, keep high ones, blend in between.

    ``keep`` is 1 where a turn takes fewer tokens than ``context / high_freq_factor``, 0 where it takes
    more than ``context / low_freq_factor``.
    """
    # In this order of operations, so that frequencies round as in the published code.
    turns = config.original_max_position_embeddings / (2 * math.pi / freqs)
    keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * freqs / config.factor + keep * freqs


def rope_tables(
    freqs: torch.Tensor, first: int, count: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine for positions ``first`` to ``first + count``: ``[count, 1, head_dim]`` each."""
    positions = torch.arange(first, first + count, dtype=torch.float32, device=freqs.device)
    angles = positions[:, None] * freqs
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn ``x`` (``[tokens, heads, head_dim]``); dimension ``i`` is paired with ``i + head_dim / 2``."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
