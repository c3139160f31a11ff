"""Random KV of one prompt: what a test or a benchmark streams, and the truth it compares with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.core.buffers import ByteArray
from kvferry.core.keys import BlockKey, block_keys
from kvferry.core.spec import DType, KeyScope, KVSpec, LayerSpec, TensorSpec, namespace_id

__all__ = ["PromptKV", "kv_spec", "latent_spec"]


def kv_spec(
    layers: int = 4,
    *,
    block_tokens: int = 16,
    kv_heads: int = 2,
    head_dim: int = 8,
    dtype: DType = DType.FLOAT16,
    model: str = "test-model",
) -> KVSpec:
    """A spec with K and V of ``[block_tokens, kv_heads, head_dim]`` in every layer."""
    shape = (block_tokens, kv_heads, head_dim)
    layer = LayerSpec((TensorSpec("k", shape, dtype), TensorSpec("v", shape, dtype)))
    return KVSpec(model=model, revision="r1", layers=(layer,) * layers, block_tokens=block_tokens)


def latent_spec(
    layers: int = 4, *, block_tokens: int = 16, latent_dim: int = 24, rope_dim: int = 4
) -> KVSpec:
    """A spec as of multi-head latent attention: one tensor a layer, latent and rotary part together."""
    tensor = TensorSpec("latent", (block_tokens, latent_dim + rope_dim), DType.BFLOAT16)
    layer = LayerSpec((tensor,))
    return KVSpec(model="test-mla", revision="r1", layers=(layer,) * layers, block_tokens=block_tokens)


class PromptKV:
    """Seeded random bytes for every tensor of every layer of every block of a prompt.

    The same seed gives the same bytes in every process. The tensors of a block lie in memory one after
    the other, as an engine's would.

    Args:
        spec: Shape of the blocks; tensors with a token axis have it first.
        prompt_tokens: Length of the prompt; what is beyond the last full block is the tail.
        seed: Of the tokens and the bytes.
        scope: Adapter and salt of the keys.
        normal: Normally distributed bfloat16, which codecs make smaller, rather than any bytes.
    """

    def __init__(
        self,
        spec: KVSpec,
        prompt_tokens: int,
        *,
        seed: int = 0,
        scope: KeyScope = KeyScope(),  # noqa: B008 - frozen
        normal: bool = False,
    ) -> None:
        self.spec = spec
        self.scope = scope
        rng = np.random.default_rng(seed)
        self.tokens = rng.integers(0, 1 << 16, prompt_tokens, dtype=np.uint32)
        self.keys: list[BlockKey] = block_keys(namespace_id(spec, scope), self.tokens, spec.block_tokens)
        self.tail_tokens = prompt_tokens % spec.block_tokens
        self._tensors: list[list[tuple[ByteArray, ...]]] = [
            [
                tuple(_values(rng, n, normal=normal) for n in self._sizes(layer, block))
                for block in range(self.blocks)
            ]
            for layer in range(len(spec.layers))
        ]

    @property
    def blocks(self) -> int:
        """Number of blocks, the tail included."""
        return len(self.keys) + (self.tail_tokens > 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole prompt's KV, without padding."""
        return sum(t.nbytes for layer in self._tensors for block in layer for t in block)

    def _sizes(self, layer: int, block: int) -> list[int]:
        rows = self.spec.block_tokens if block < len(self.keys) else self.tail_tokens
        found = []
        for tensor in self.spec.layers[layer].tensors:
            has_tokens = bool(tensor.shape) and tensor.shape[0] == self.spec.block_tokens
            found.append(tensor.nbytes // self.spec.block_tokens * rows if has_tokens else tensor.nbytes)
        return found

    def tensors(self, layer: int, block: int) -> tuple[ByteArray, ...]:
        """The buffers of one layer of one block, one a tensor; the tail block has only its rows."""
        return self._tensors[layer][block]

    def put(self, layer: int, blocks: Sequence[int] | None = None) -> list[tuple[int, tuple[ByteArray, ...]]]:
        """One layer of some blocks (of all, by default) as ``LayerSender.put_layer`` takes it."""
        return [(b, self.tensors(layer, b)) for b in (range(self.blocks) if blocks is None else blocks)]

    def layer_bytes(self, layer: int, block: int) -> bytes:
        """What the receiver must see: the padded layer slice, or the bare rows of the tail block."""
        data = b"".join(t.tobytes() for t in self.tensors(layer, block))
        return data if block == len(self.keys) else data.ljust(self.spec.layers[layer].nbytes, b"\0")

    def block_bytes(self, block: int) -> bytes:
        """A whole full block."""
        return b"".join(self.layer_bytes(layer, block) for layer in range(len(self.spec.layers)))


def _values(rng: np.random.Generator, nbytes: int, *, normal: bool) -> ByteArray:
    if not normal:
        return rng.integers(0, 256, nbytes, dtype=np.uint8)
    bits = rng.standard_normal(nbytes // 2, dtype=np.float32).view(np.uint32) >> 16
    return bits.astype("<u2").view(np.uint8)
