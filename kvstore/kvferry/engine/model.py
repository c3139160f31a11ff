"""A decoder of the Llama family, written to be read: Llama, Qwen2 and Qwen3 as one forward pass.

KV goes into the paged cache first and attention reads it back from there, so that a prompt that is
prefilled in one go, one that starts from cached blocks and a decode step run the same code.
Normalisation is float32 whatever the dtype, as the published models have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from kvferry.core.errors import CapacityError, RequestError
from kvferry.engine.rope import apply_rope, inverse_frequencies, rope_tables

if TYPE_CHECKING:
    from kvferry.engine.config import ModelConfig
    from kvferry.engine.paged_kv import Sequence

__all__ = ["Model"]


class Model:
    """The weights of a decoder and its forward pass. Read-only once built, so usable from any thread.

    Args:
        config: Shape of the model.
        tensors: Weights by their Hugging Face names, of one dtype, all there (see ``weights``).
    """

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self._tensors = tensors
        self._embedding = tensors["model.embed_tokens.weight"]
        self._head = self._embedding if config.tie_word_embeddings else tensors["lm_head.weight"]
        self._norm = tensors["model.norm.weight"]
        self._layers = [_Layer(config, tensors, f"model.layers.{i}.") for i in range(config.num_layers)]
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(self._embedding.device)

    def to(self, device: torch.device | str) -> Model:
        """The same model on another device."""
        return Model(self.config, {name: tensor.to(device) for name, tensor in self._tensors.items()})

    @property
    def device(self) -> torch.device:
        """Where the weights are, and where KV has to be."""
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Element type of weights, activations and KV."""
        return self._embedding.dtype

    @property
    def max_model_len(self) -> int:
        """Tokens that a sequence may have at most."""
        return self.config.max_position_embeddings

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        sequence: Sequence,
        *,
        on_layer: Callable[[int], None] | None = None,
        want_logits: bool = True,
        every_token: bool = False,
    ) -> torch.Tensor | None:
        """Append ``tokens`` to a sequence.

        Args:
            tokens: Token ids, ``[count]`` int64, in the vocabulary.
            sequence: Where their KV goes, behind what is there; must have room. Its length is raised
                when all layers are done.
            on_layer: Called with the number of each layer right after its KV was written and before its
                attention runs. An exception from it ends the pass; the length stays as it was.
            want_logits: Whether the caller needs them.
            every_token: Whether those of each token are wanted, not only of the last one.

        Returns:
            Logits of the last token, ``[vocab_size]``, of each one, ``[count, vocab_size]``, or ``None`` if
            they are not wanted.

        Raises:
            RequestError: If the sequence would get longer than the model can take.
            CapacityError: If the sequence has no pages for the tokens.
        """
        first, count = sequence.length, tokens.shape[0]
        self._check_room(first + count, sequence)
        cos, sin = rope_tables(self._frequencies, first, count, self.dtype)
        mask = self._mask(first, count)
        x = F.embedding(tokens.to(self.device), self._embedding)
        for index, layer in enumerate(self._layers):
            q, k, v = layer.project(x, cos, sin)
            sequence.kv.write_rows(index, sequence, first, k, v)
            if on_layer is not None:
                on_layer(index)
            if not want_logits and index == len(self._layers) - 1:
                break  # what follows would only make logits
            keys, values = sequence.kv.gather(index, sequence, first + count)
            attended = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None and count > 1,
                enable_gqa=layer.grouped,
            )
            x = layer.finish(x, attended[0].transpose(0, 1).reshape(count, -1))
        sequence.length = first + count
        if not want_logits:
            return None
        wanted = x if every_token else x[-1:]
        logits = F.linear(_rms_norm(wanted, self._norm, self.config.rms_norm_eps), self._head)
        return logits if every_token else logits[0]

    def _check_room(self, length: int, sequence: Sequence) -> None:
        if length > self.max_model_len:
            raise RequestError(
                f"a sequence of {length} tokens is longer than the model's limit of {self.max_model_len}"
            )
        if length > sequence.capacity_tokens:
            raise CapacityError(
                f"the sequence has room for {sequence.capacity_tokens} tokens, not {length}: grow it first"
            )

    def _mask(self, first: int, count: int) -> torch.Tensor | None:
        """What is added to the scores: each token sees itself and all before it.

        Not needed for a single token, which sees everything, nor at the start, where the attention's own
        causal mode does it (that one starts at the upper left, so it cannot serve behind a prefix).
        """
        if count == 1 or first == 0:
            return None
        hidden = torch.full((count, first + count), float("-inf"), dtype=self.dtype, device=self.device)
        return hidden.triu_(first + 1)


class _Layer:
    """One decoder layer: projections before the attention, and all that follows it."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor], prefix: str) -> None:
        def linear(name: str) -> _Linear:
            return _Linear(tensors[f"{prefix}{name}.weight"], tensors.get(f"{prefix}{name}.bias"))

        self._eps, self._head_dim = config.rms_norm_eps, config.head_dim
        self.grouped = config.num_kv_heads != config.num_heads
        self._input_norm = tensors[f"{prefix}input_layernorm.weight"]
        self._q, self._k, self._v = (linear(f"self_attn.{name}_proj") for name in "qkv")
        self._q_norm = tensors.get(f"{prefix}self_attn.q_norm.weight")
        self._k_norm = tensors.get(f"{prefix}self_attn.k_norm.weight")
        self._o = linear("self_attn.o_proj")
        self._mlp_norm = tensors[f"{prefix}post_attention_layernorm.weight"]
        self._gate, self._up, self._down = (linear(f"mlp.{name}_proj") for name in ("gate", "up", "down"))

    def project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys, values, ``[tokens, heads, head_dim]``; the first two turned to their positions."""
        normed = _rms_norm(x, self._input_norm, self._eps)
        heads = (x.shape[0], -1, self._head_dim)
        q, k, v = (projection(normed).view(heads) for projection in (self._q, self._k, self._v))
        if self._q_norm is not None and self._k_norm is not None:
            q, k = _rms_norm(q, self._q_norm, self._eps), _rms_norm(k, self._k_norm, self._eps)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Residual sum with the attention's result (``[tokens, heads * head_dim]``), then the MLP."""
        x = x + self._o(attended)
        normed = _rms_norm(x, self._mlp_norm, self._eps)
        return x + self._down(F.silu(self._gate(normed)) * self._up(normed))


class _Linear:
    """``x @ weight.T + bias``."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
