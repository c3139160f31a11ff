"""Blocks for the benchmarks of stores: specs of any size, keys, and bytes that differ from page to page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.core.buffers import PAGE_NBYTES, page_aligned
from kvferry.core.errors import ConfigError
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec

__all__ = ["BLOCK_TOKENS", "BlockSource", "block_spec", "chain_tokens"]

BLOCK_TOKENS = 16
_LAYERS = 16
_HEAD_DIM = 64
_VALUES_NBYTES = 4 << 20
_LOSSY_ERROR = 0.2
_UNIT = _LAYERS * 2 * BLOCK_TOKENS * _HEAD_DIM * 2  # bytes of a block with one bfloat16 head


def block_spec(nbytes: int) -> KVSpec:
    """A spec whose blocks have exactly ``nbytes`` bytes.

    16 layers of K and V in bfloat16 where that comes out even (every 64 KiB), else one tensor of bytes.

    Raises:
        ConfigError: If it is not a multiple of 4 KiB above 0.
    """
    if nbytes < PAGE_NBYTES or nbytes % PAGE_NBYTES:
        raise ConfigError(f"a block of {nbytes} bytes: sizes are multiples of {PAGE_NBYTES} bytes")
    if nbytes % _UNIT:
        layers: tuple[LayerSpec, ...] = (
            LayerSpec((TensorSpec("kv", (BLOCK_TOKENS, nbytes // BLOCK_TOKENS), DType.UINT8),)),
        )
    else:
        shape = (BLOCK_TOKENS, nbytes // _UNIT, _HEAD_DIM)
        tensors = (TensorSpec("k", shape, DType.BFLOAT16), TensorSpec("v", shape, DType.BFLOAT16))
        layers = (LayerSpec(tensors),) * _LAYERS
    return KVSpec(model="bench", revision="1", layers=layers, block_tokens=BLOCK_TOKENS)


def chain_tokens(number: int, blocks: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Tokens of a prompt of ``blocks`` full blocks that shares no block with one of another number."""
    tokens = np.full(blocks * BLOCK_TOKENS, 7, np.uint32)
    tokens[0] = number
    return tokens


class BlockSource(Sequence[memoryview]):
    """Page-aligned blocks, taken round and round, that together walk through ``walk_nbytes``.

    Every page starts with its own number, so that a page out of place is seen when bytes are compared.

    Args:
        block_nbytes: Bytes of a block.
        walk_nbytes: Bytes of all.
        values: Fill them with normally distributed bfloat16, which codecs make as small as KV; else with
            random bytes, the same in each page.
    """

    def __init__(self, block_nbytes: int, walk_nbytes: int, *, values: bool = False) -> None:
        self._count = max(1, -(-walk_nbytes // block_nbytes))
        self._nbytes = block_nbytes
        self._whole = page_aligned(self._count * block_nbytes)
        pages = np.frombuffer(self._whole, np.uint64).reshape(-1, PAGE_NBYTES // 8)
        rng = np.random.default_rng(1)
        if values:  # as many different ones as no codec looks back over
            normal = rng.standard_normal(_VALUES_NBYTES // 2, np.float32)
            some = (normal.view(np.uint32) >> 16).astype(np.uint16)
            for start in range(0, len(self._whole), _VALUES_NBYTES):
                part = np.frombuffer(self._whole, np.uint16)[start // 2 : (start + _VALUES_NBYTES) // 2]
                part[:] = some[: len(part)]
        else:
            pages[:] = rng.integers(0, 1 << 63, PAGE_NBYTES // 8, np.uint64)
        pages[:, 0] = np.arange(len(pages), dtype=np.uint64)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> memoryview:  # type: ignore[override]
        """Block ``index``, counted round."""
        start = index % self._count * self._nbytes
        return self._whole[start : start + self._nbytes]

    def matches(self, index: int, found: memoryview) -> bool:
        """Whether ``found`` is block ``index``, byte for byte."""
        return np.array_equal(np.frombuffer(self[index], np.uint8), np.frombuffer(found, np.uint8))

    def resembles(self, index: int, found: memoryview) -> bool:
        """Whether the values of ``found`` are those of block ``index`` but for what a lossy codec may do."""
        x, y = (
            (np.frombuffer(view, np.uint16).astype(np.uint32) << 16).view(np.float32)
            for view in (self[index], found)
        )
        return bool(np.linalg.norm(x - y) <= _LOSSY_ERROR * np.linalg.norm(x))
