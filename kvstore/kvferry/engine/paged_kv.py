"""The paged KV cache of the engine: fixed pages of ``block_tokens`` tokens, handed out by number.

All pages lie in one region of a :class:`~kvferry.store.device.DevicePool`,
``[layers, 2, blocks, block_tokens, kv_heads, head_dim]`` with K before V, so that a layer's rows of one block
are two contiguous runs of bytes, which can be sent as they are, and a run of neighbouring pages is one view.
Rows of a page behind the end of its sequence hold whatever was there before; nothing here hands them out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Row
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import torch

from kvferry.core.arena import available_memory
from kvferry.core.buffers import Buf, ByteArray, as_bytes_view, copy_into
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CapacityError, ConfigError, DeviceError
from kvferry.core.spec import SLICE_ALIGNMENT, DType, KVSpec, LayerSpec, TensorSpec
from kvferry.device.cpu import CpuDevice, HostBytes
from kvferry.store.device import DevicePool, PoolOptions, PoolSpace

if TYPE_CHECKING:
    from kvferry.core.blockstore import Namespace
    from kvferry.core.keys import BlockKey
    from kvferry.device.base import Device, DeviceBytes, Event
    from kvferry.engine.config import ModelConfig

__all__ = ["PagedKV", "Sequence"]


_ON_HOST = PoolOptions()
_FLUSH_S: Final = 5.0


class PagedKV:
    """KV pages of one model in the memory of a device, by default the host's.

    Pages belong to whoever allocated them until they are freed. :meth:`allocate` and :meth:`free` are
    thread safe; a page is written and read by its owner only, without a lock.

    Args:
        config: Shape of the model.
        num_blocks: Pages; all of them are populated here.
        block_tokens: Tokens in a page.
        dtype: Element type of K and V.
        device: Where they are; the host if not given. If it is, what gives or takes bytes of pages on the
            host cannot be had (:meth:`tensor_views`, :meth:`write_slice`, :meth:`write_block`,
            :meth:`read_block`), and prefixes are kept.
        keep_prefixes: Keep the blocks of prompts when their sequences end, and share them with those that
            follow, until their pages are needed; then they go to the store below.
        options: Of the pool.

    Attributes:
        pool: Whose pages they are.
        keeps_prefixes: See ``keep_prefixes``.

    Raises:
        ConfigError: For sizes below 1, or above the memory that is available now, there or here.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_tokens: int = 16,
        dtype: torch.dtype = torch.float32,
        device: Device | None = None,
        keep_prefixes: bool = False,
        options: PoolOptions = _ON_HOST,
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
        self._layer_spec = LayerSpec(
            tuple(TensorSpec(name, (block_tokens, *self._row), self._dtype_name) for name in ("k", "v"))
        )
        self._on_host = device is None
        self.keeps_prefixes = keep_prefixes or not self._on_host
        if self._on_host:
            _check_memory(num_blocks, config.num_layers * 2 * num_blocks * page)
        self.pool = _pool(self.spec("paged KV", ""), num_blocks, device or CpuDevice(), options)
        assert self.pool.memory is not None
        try:
            flat = self._as_tensor(self.pool.memory.memory)
        except BaseException:
            self.pool.close()
            raise
        shape = (self.num_layers, 2, num_blocks, block_tokens, *self._row)
        self._pages = flat.view(dtype).view(shape)
        if self._on_host:
            array = cast("HostBytes", self.pool.memory.memory).array
            self._memory = array.data
            self._bytes: ByteArray = array.reshape(self.num_layers, 2, num_blocks, page)

    def _as_tensor(self, memory: DeviceBytes) -> torch.Tensor:
        """Device memory as torch computes on it, without a copy."""
        if isinstance(memory, HostBytes):
            return torch.frombuffer(memory.array.data, dtype=torch.uint8)
        if not isinstance(memory, torch.Tensor):
            raise ConfigError(f"torch cannot compute on {self.pool.device.name}: use musa, cuda or cpu")
        return memory

    @property
    def on_host(self) -> bool:
        """Whether the pages' bytes can be had here as they lie."""
        return self._on_host

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.pool.nbytes

    @property
    def tensor_device(self) -> torch.device:
        """Where the pages are, as torch calls it."""
        return self._pages.device

    @property
    def free_blocks(self) -> int:
        """Pages that nobody holds; some of them may keep prefixes that have to go first."""
        return self.pool.available_blocks

    def close(self) -> None:
        """Copy down what is kept, as far as a few seconds go, and end the pool's threads."""
        if self.keeps_prefixes:
            with contextlib.suppress(DeviceError):
                self.pool.flush(deadline=deadline_in(_FLUSH_S))
        self.pool.close()

    def space(self, namespace: Namespace) -> PoolSpace:
        """The prefixes that are kept of a namespace, over what it holds."""
        return self.pool.space(namespace)

    def publish(
        self, namespace: Namespace, sequence: Sequence, keys: Row[BlockKey], lossy: frozenset[int]
    ) -> int:
        """Share a sequence's first ``len(keys)`` blocks, up to the first that has lost something.

        Returns:
            Blocks that were not there yet.
        """
        whole = min(lossy, default=len(keys))
        return self.space(namespace).publish(keys[:whole], sequence.blocks[:whole], parent=None)

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
        return self.pool.allocate(n, after=after)

    def take(self, n: int) -> tuple[list[int], list[Event]]:
        """As :meth:`allocate`, for who copies into the pages too: behind the events of their last users."""
        pages, events = self.pool.take(n)
        self.pool.order(None, events)
        return pages, events

    def free(self, ids: list[int]) -> None:
        """Give pages back.

        Raises:
            ValueError: If one is unknown or free already; none is given back then.
        """
        self.pool.release(ids)

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
        k, v = self.tensor_views(layer, block, rows)
        k_rows, v_rows = self.halves(layer, as_bytes_view(data), rows)
        copy_into(k, k_rows)
        copy_into(v, v_rows)

    def halves(self, layer: int, source: memoryview, tokens: int) -> tuple[memoryview, memoryview]:
        """The first ``tokens`` rows of K and of V in what :meth:`write_slice` takes.

        Raises:
            ConfigError: See there.
        """
        size = tokens * self._row_nbytes
        if len(source) in (self._layer_spec.nbytes, self._layer_spec.data_nbytes):
            v_start = self.block_tokens * self._row_nbytes
        elif len(source) == 2 * size:
            v_start = size
        else:
            raise ConfigError(
                f"{len(source)} bytes for {tokens} tokens of layer {layer}: a layer slice has "
                f"{self._layer_spec.nbytes}, the rows alone {2 * size}"
            )
        return source[:size], source[v_start : v_start + size]

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
        if not self._on_host:
            self._write_pages(layer, sequence, first, k, v)
            return
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

    def _write_pages(
        self, layer: int, sequence: Sequence, first: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Page by page, as copies: they are ordered as kernels are, and touch no other page."""
        size, stop = self.block_tokens, first + k.shape[0]
        for number in range(first // size, -(-stop // size)):
            begin, end = max(first, number * size), min(stop, (number + 1) * size)
            page = self._pages[layer, :, sequence.blocks[number], begin - number * size : end - number * size]
            page[0].copy_(k[begin - first : end - first])
            page[1].copy_(v[begin - first : end - first])

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
    def allocate(cls, kv: PagedKV, tokens: int, shared: Row[int] = ()) -> Sequence:
        """A sequence with room for ``tokens`` tokens, empty but for what the caller says is in place.

        Args:
            kv: Whose pages.
            tokens: In all.
            shared: Pages of its first blocks, held by the caller, who hands them over.

        Raises:
            CapacityError: If there are not enough free pages; those in ``shared`` stay the caller's.
        """
        more = kv.allocate(kv.blocks_for(tokens) - len(shared), after=shared[-1] if shared else None)
        return cls(kv, [*shared, *more])

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
            self._index = torch.tensor(self.blocks, dtype=torch.int64, device=self.kv.tensor_device)
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

    def leave_behind(self) -> None:
        """Never give the pages back: a device may still write them."""
        self._released = True

    def _find_run(self) -> int | None:
        if not self.blocks:
            return None
        first = self.blocks[0]
        return first if self.blocks == list(range(first, first + len(self.blocks))) else None


def _check_memory(num_blocks: int, nbytes: int) -> None:
    available = available_memory()
    if nbytes > available:
        raise ConfigError(
            f"{num_blocks} KV blocks of {nbytes // num_blocks} bytes take {nbytes} bytes, {available} bytes "
            "of memory are available; configure fewer blocks"
        )


def _pool(spec: KVSpec, num_blocks: int, device: Device, options: PoolOptions) -> DevicePool:
    try:
        return DevicePool(spec, device, num_blocks=num_blocks, options=options)
    except CapacityError as error:
        raise ConfigError(f"{error}; configure fewer blocks") from error
