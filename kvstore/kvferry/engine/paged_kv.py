"""The paged KV cache of the engine: fixed pages of ``block_tokens`` tokens, handed out by number.

All pages lie in one page-aligned region, ``[layers, 2, blocks, block_tokens, kv_heads, head_dim]``
with K before V, so that a layer's rows of one block are two contiguous runs of bytes, which can be
sent as they are, and a run of neighbouring pages is one view. Rows of a page behind the end of its
sequence hold whatever was there before; nothing here hands them out.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvferry.core.arena import available_memory
from kvferry.core.buffers import Buf, ByteArray, as_bytes_view, copy_into, page_aligned
from kvferry.core.errors import CapacityError, ConfigError
from kvferry.core.spec import SLICE_ALIGNMENT, DType, KVSpec, LayerSpec, TensorSpec

if TYPE_CHECKING:
    from kvferry.engine.config import ModelConfig

__all__ = ["PagedKV", "Sequence"]


class PagedKV:
    """KV pages of one model in host memory.

    Pages belong to whoever allocated them until they are freed. :meth:`allocate` and :meth:`free` are
    thread safe; a page is written and read by its owner only, without a lock.

    Args:
        config: Shape of the model.
        num_blocks: Pages; all of them are populated here.
        block_tokens: Tokens in a page.
        dtype: Element type of K and V.

    Raises:
        ConfigError: For sizes below 1, or above the memory that is available now.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_tokens: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if num_blocks < 1 or block_tokens < 1:
            raise ConfigError(f"{num_blocks} KV blocks of {block_tokens} tokens: both must be at least 1")
        self.num_blocks, self.block_tokens, self.dtype = num_blocks, block_tokens, dtype
        self.num_layers = config.num_layers
        self._row = (config.num_kv_heads, config.head_dim)
        self._dtype_name = DType(str(dtype).removeprefix("torch."))
        self._row_nbytes = config.num_kv_heads * config.head_dim * self._dtype_name.itemsize
        page = block_tokens * self._row_nbytes
        self._pages_aligned = page % SLICE_ALIGNMENT == 0
        nbytes = config.num_layers * 2 * num_blocks * page
        self._memory = _memory(num_blocks, nbytes)
        self._bytes: ByteArray = np.frombuffer(self._memory, np.uint8).reshape(
            self.num_layers, 2, num_blocks, page
        )
        shape = (self.num_layers, 2, num_blocks, block_tokens, *self._row)
        self._pages = torch.frombuffer(self._memory, dtype=torch.uint8).view(dtype).view(shape)
        self._layer_spec = LayerSpec(
            tuple(TensorSpec(name, (block_tokens, *self._row), self._dtype_name) for name in ("k", "v"))
        )
        self._free = list(range(num_blocks))  # sorted, so that runs of neighbours are found and lead to views
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return len(self._memory)

    @property
    def free_blocks(self) -> int:
        """Pages that nobody holds."""
        with self._lock:
            return len(self._free)

    def spec(self, model_name: str, revision: str) -> KVSpec:
        """The blocks as they are named, stored and sent: one page in all layers is one block."""
        return KVSpec(
            model=model_name,
            revision=revision,
            layers=(self._layer_spec,) * self.num_layers,
            block_tokens=self.block_tokens,
        )

    def blocks_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens take."""
        return -(-tokens // self.block_tokens)

    def allocate(self, n: int, *, after: int | None = None) -> list[int]:
        """Take ``n`` pages, in ascending order, neighbours where possible.

        Args:
            n: How many.
            after: A page that the caller holds already: prefer those that follow it.

        Raises:
            CapacityError: If there are fewer; none is taken.
        """
        with self._lock:
            if n > len(self._free):
                raise CapacityError(
                    f"{n} KV blocks of {self.block_tokens} tokens asked, {len(self._free)} of "
                    f"{self.num_blocks} are free; wait for a request to end, or configure more blocks"
                )
            start = self._find_run(n, after)
            taken = self._free[start : start + n]
            del self._free[start : start + n]
            return taken

    def _find_run(self, n: int, after: int | None) -> int:
        """Index in the free list where ``n`` neighbouring pages start; the head if there is no such run."""
        if n == 0:
            return 0
        if after is not None:
            for start, block in enumerate(self._free[: len(self._free) - n + 1]):
                if block == after + 1 and self._free[start + n - 1] == block + n - 1:
                    return start
        for start in range(len(self._free) - n + 1):
            if self._free[start + n - 1] - self._free[start] == n - 1:
                return start
        return 0

    def free(self, ids: list[int]) -> None:
        """Give pages back.

        Raises:
            ValueError: If one is unknown or free already; none is given back then.
        """
        with self._lock:
            held = set(range(self.num_blocks)).difference(self._free)
            wrong = [i for i in ids if i not in held]
            if wrong or len(set(ids)) != len(ids):
                raise ValueError(f"KV blocks {wrong or ids} are freed twice or do not exist")
            self._free = sorted([*self._free, *ids])

    def tensor_views(
        self, layer: int, block: int, tokens: int | None = None
    ) -> tuple[memoryview, memoryview]:
        """The bytes of K and V of one page in one layer, without a copy: their first ``tokens`` rows.

        The views show the page itself: they are good as long as the caller holds the page.
        """
        rows = self._check_rows(tokens)
        size = rows * self._row_nbytes
        page = self.block_tokens * self._row_nbytes
        k = ((layer * 2) * self.num_blocks + block) * page
        v = ((layer * 2 + 1) * self.num_blocks + block) * page
        return self._memory[k : k + size], self._memory[v : v + size]

    def write_slice(self, layer: int, block: int, data: Buf, tokens: int) -> None:
        """Fill ``tokens`` rows of one page in one layer.

        Args:
            layer: Layer.
            block: Page.
            data: A layer slice (V starts where it does in a full block; with or without the padding), or
                the rows of K and then those of V without a gap.
            tokens: Rows to take.

        Raises:
            ConfigError: If ``data`` is of neither size.
        """
        rows = self._check_rows(tokens)
        size = rows * self._row_nbytes
        source = as_bytes_view(data)
        if len(source) in (self._layer_spec.nbytes, self._layer_spec.data_nbytes):
            v_start = self.block_tokens * self._row_nbytes
        elif len(source) == 2 * size:
            v_start = size
        else:
            raise ConfigError(
                f"{len(source)} bytes for {tokens} tokens of layer {layer}: a layer slice has "
                f"{self._layer_spec.nbytes}, the rows alone {2 * size}"
            )
        k, v = self.tensor_views(layer, block, rows)
        copy_into(k, source[:size])
        copy_into(v, source[v_start : v_start + size])

    def write_block(self, block: int, data: Buf) -> None:
        """Fill one page, all layers, from a block as :meth:`spec` describes it."""
        slices = np.frombuffer(as_bytes_view(data), np.uint8).reshape(
            self.num_layers, self._layer_spec.nbytes
        )
        used = slices[:, : self._layer_spec.data_nbytes]
        np.copyto(self._bytes[:, :, block], used.reshape(self.num_layers, 2, -1))

    def read_block(self, block: int, out: memoryview) -> None:
        """Copy one full page, all layers, into ``out``, a block as :meth:`spec` describes it."""
        slices = np.frombuffer(out, np.uint8).reshape(self.num_layers, self._layer_spec.nbytes)
        half = self._layer_spec.data_nbytes // 2
        np.copyto(slices[:, :half], self._bytes[:, 0, block])
        np.copyto(slices[:, half : 2 * half], self._bytes[:, 1, block])
        slices[:, 2 * half :] = 0

    def _check_rows(self, tokens: int | None) -> int:
        rows = self.block_tokens if tokens is None else tokens
        if not 0 <= rows <= self.block_tokens:
            raise ConfigError(f"{rows} tokens of a KV block of {self.block_tokens}")
        return rows

    def write_rows(
        self, layer: int, sequence: Sequence, first: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write K and V of consecutive tokens, ``[tokens, kv_heads, head_dim]`` each, from ``first`` on."""
        count = k.shape[0]
        flat = self._pages[layer].view(2, -1, *self._row)
        if (start := sequence.run_start) is not None:
            where = start * self.block_tokens + first
            flat[0, where : where + count] = k
            flat[1, where : where + count] = v
            return
        rows = sequence.row_index(first, count)
        flat[0].index_copy_(0, rows, k)
        flat[1].index_copy_(0, rows, v)

    def gather(self, layer: int, sequence: Sequence, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first ``length`` tokens of a sequence: ``[1, kv_heads, length, head_dim]`` each.

        Views of the pages where they are neighbours, else copies with the same strides and alignment, so
        that the attention computes the same bits either way.
        """
        pages, count = self._pages[layer], self.blocks_for(length)
        if (start := sequence.run_start) is not None and self._pages_aligned:
            held = pages[:, start : start + count]
        else:
            held = pages.index_select(1, sequence.block_index()[:count])
        rows = held.reshape(2, -1, *self._row)[:, :length].transpose(1, 2)
        return rows[0:1], rows[1:2]


class Sequence:
    """The pages of one request, and how many tokens are in place in them in all layers.

    Owned by one thread at a time. :meth:`release` gives the pages back.
    """

    def __init__(self, kv: PagedKV, blocks: list[int], length: int = 0) -> None:
        self.kv = kv
        self.blocks = list(blocks)
        self.length = length
        self._released = False
        self._index: torch.Tensor | None = None
        self._run_start = self._find_run()

    @classmethod
    def allocate(cls, kv: PagedKV, tokens: int) -> Sequence:
        """An empty sequence with room for ``tokens`` tokens.

        Raises:
            CapacityError: If there are not enough free pages.
        """
        return cls(kv, kv.allocate(kv.blocks_for(tokens)))

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the pages held have room for."""
        return len(self.blocks) * self.kv.block_tokens

    @property
    def run_start(self) -> int | None:
        """First page, if all pages are neighbours in order; else ``None``."""
        return self._run_start

    def grow(self, tokens: int) -> None:
        """Take pages until there is room for ``tokens`` tokens in all.

        Raises:
            CapacityError: If there are not enough free pages; none is taken.
        """
        more = self.kv.blocks_for(tokens) - len(self.blocks)
        if more > 0:
            self.blocks += self.kv.allocate(more, after=self.blocks[-1] if self.blocks else None)
            self._index = None
            self._run_start = self._find_run()

    def block_index(self) -> torch.Tensor:
        """The page numbers as an index tensor."""
        if self._index is None:
            self._index = torch.tensor(self.blocks, dtype=torch.int64)
        return self._index

    def row_index(self, first: int, count: int) -> torch.Tensor:
        """Row numbers, over all pages of a layer, of ``count`` tokens from ``first`` on."""
        size = self.kv.block_tokens
        positions = torch.arange(first, first + count)
        return self.block_index()[positions // size] * size + positions % size

    def release(self) -> None:
        """Give the pages back; a second call does nothing."""
        if not self._released:
            self._released = True
            self.kv.free(self.blocks)

    def _find_run(self) -> int | None:
        if not self.blocks:
            return None
        first = self.blocks[0]
        return first if self.blocks == list(range(first, first + len(self.blocks))) else None


def _memory(num_blocks: int, nbytes: int) -> memoryview:
    available = available_memory()
    figures = f"{num_blocks} KV blocks of {nbytes // num_blocks} bytes take {nbytes} bytes"
    if nbytes > available:
        raise ConfigError(f"{figures}, {available} bytes of memory are available; configure fewer blocks")
    try:
        return page_aligned(nbytes)
    except OSError as error:
        raise ConfigError(f"{figures}, which the system refuses: {error}; configure fewer blocks") from error
