"""KV of a model as each rank of any tensor-parallel group has it, by slicing: what resharding must give."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in, is_past
from kvferry.core.head_shards import HeadShard
from kvferry.core.paged_copy import BlockCopier, HostCopier, Transfer
from kvferry.core.regions import LAYOUTS, Region, RegionPlan
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.device.block_copier import DeviceCopier
from kvferry.device.copy_engine import CopyEngine

__all__ = ["DevicePlace", "HostPlace", "Place", "ShardedKV", "check_loads", "check_saves"]

_LAYERS: Final = 2
_TOKENS: Final = 5
_DIM: Final = 3
_PAGES: Final = 4
_TABLE: Final = (2, 0, 3)  # pages of three blocks, in no order
_UNTOUCHED: Final = 0xEEEE
_AMPLE_S: Final = 20.0

Array = npt.NDArray[Any]


class ShardedKV:
    """K and V of three blocks, each element another number.

    Args:
        kv_heads: Of the model.

    Attributes:
        whole: ``[layers, K and V, blocks, tokens, kv_heads, dim]``.
    """

    def __init__(self, kv_heads: int) -> None:
        self.kv_heads = kv_heads
        shape = (_LAYERS, 2, len(_TABLE), _TOKENS, kv_heads, _DIM)
        self.whole = np.arange(1, 1 + int(np.prod(shape)), dtype=np.uint16).reshape(shape)

    def heads(self, rank: int, size: int) -> list[int]:
        """Of a rank, as the ranks of engines have them."""
        each = np.repeat(np.arange(self.kv_heads), max(1, size // self.kv_heads))
        return [int(head) for head in each.reshape(size, -1)[rank]]

    def spec(self, rank: int, size: int) -> KVSpec:
        """Of a rank's blocks."""
        shape = (_TOKENS, len(self.heads(rank, size)), _DIM)
        layer = LayerSpec(tuple(TensorSpec(name, shape, DType.FLOAT16) for name in ("k", "v")))
        layers = (layer,) * _LAYERS
        return KVSpec(
            model="m", revision="r", layers=layers, block_tokens=_TOKENS, tp_rank=rank, tp_size=size
        )

    def blocks(self, rank: int, size: int) -> list[bytes]:
        """As that rank stores them."""
        spec, mine = self.spec(rank, size), self.whole[..., self.heads(rank, size), :]
        return [
            b"".join(
                mine[layer, :, block].tobytes().ljust(spec.layers[layer].nbytes, b"\0")
                for layer in range(_LAYERS)
            )
            for block in range(len(_TABLE))
        ]

    def pages(self, rank: int, size: int, layout: str, *, filled: bool) -> list[Region]:
        """A rank's pages in host memory, with its KV in them or without."""
        mine = self.whole[..., self.heads(rank, size), :]
        regions = []
        for layer in range(_LAYERS):
            pages = np.full((2, _PAGES, *mine.shape[3:]), _UNTOUCHED, np.uint16)  # sbnhd
            if filled:
                pages[:, list(_TABLE)] = mine[layer]
            axes = LAYOUTS[layout]
            if "c" in axes:
                packed = np.concatenate(tuple(pages), axis=-1)  # bnhc
                regions.append(_region(packed, "bnhc", axes, layer, layout, ""))
            elif "s" in axes:
                regions.append(_region(pages, "sbnhd", axes, layer, layout, ""))
            else:
                regions += [
                    _region(page, "bnhd", axes, layer, layout, name)
                    for page, name in zip(pages, "kv", strict=True)
                ]
        return regions


def _region(array: Array, have: str, axes: str, layer: int, layout: str, tensor: str) -> Region:
    ordered = np.ascontiguousarray(array.transpose([have.index(axis) for axis in axes])).view(np.float16)
    return Region.of(ordered, layer=layer, layout=layout, tensor=tensor)


class Place(Protocol):
    """Where pages are."""

    copier: BlockCopier

    def put(self, region: Region) -> Region:
        """Pages there, with what those in host memory hold."""
        ...

    def get(self, region: Region) -> bytes:
        """What pages there hold."""
        ...


class HostPlace:
    """Pages in host memory."""

    def __init__(self) -> None:
        self.copier: BlockCopier = HostCopier()

    def put(self, region: Region) -> Region:
        """See :class:`Place`."""
        return region

    def get(self, region: Region) -> bytes:
        """See :class:`Place`."""
        return _owned(region).tobytes()


class DevicePlace:
    """Pages on the device of a copy engine."""

    def __init__(self, engine: CopyEngine) -> None:
        self.copier: BlockCopier = DeviceCopier(engine)
        self._engine = engine

    def put(self, region: Region) -> Region:
        """See :class:`Place`."""
        device, here = self._engine.device, _owned(region).view(np.uint8).reshape(-1)
        memory = device.empty(here.nbytes)
        self._engine.copy_in([(memory, here.data)]).wait(deadline_in(_AMPLE_S))
        _, address = device.memory_of(memory)
        return replace(region, address=address, device=device.kind, owner=memory)

    def get(self, region: Region) -> bytes:
        """See :class:`Place`."""
        memory: Any = region.owner
        here = page_aligned(memory.numel())
        self._engine.copy_out([(memory, here)]).wait(deadline_in(_AMPLE_S))
        return bytes(here)


def _owned(region: Region) -> Array:
    assert isinstance(region.owner, np.ndarray)
    return region.owner


def check_loads(place: Place, kv: ShardedKV, layout: str, sizes: tuple[int, int]) -> None:
    """Blocks stored by a group of the first size fill the pages of all ranks of one of the second."""
    stored, size = sizes
    for rank in range(size):
        shard = HeadShard(kv_heads=kv.kv_heads, tp_rank=rank, tp_size=size)
        assert list(shard.heads) == kv.heads(rank, size)
        regions = [place.put(region) for region in kv.pages(rank, size, layout, filled=False)]
        sources = shard.sources(kv.spec(0, size), stored)
        assert len(sources) == max(1, len(shard.heads) // len(kv.heads(0, stored)))
        for spec in sources:
            assert spec == kv.spec(spec.tp_rank, stored)
            blocks = [_writable(block) for block in kv.blocks(spec.tp_rank, stored)]
            _move(place.copier, RegionPlan(spec, regions, shard=shard), blocks, to_pages=True)
        found = [place.get(region) for region in regions]
        due = [_owned(region).tobytes() for region in kv.pages(rank, size, layout, filled=True)]
        assert found == due, f"{layout}: rank {rank} of {size} from blocks of {stored}"


def check_saves(place: Place, kv: ShardedKV, layout: str, sizes: tuple[int, int]) -> None:
    """Pages of a group of the first size fill the blocks of all ranks of one of the second, padding too."""
    held, size = sizes
    for rank in range(size):
        spec = kv.spec(rank, size)
        blocks = [_writable(bytes([0xEE]) * spec.block_nbytes) for _ in _TABLE]
        mine = HeadShard(kv_heads=kv.kv_heads, tp_rank=rank, tp_size=size)
        sources = mine.sources(spec, held)
        for source in sources:
            pages = [place.put(region) for region in kv.pages(source.tp_rank, held, layout, filled=True)]
            shard = HeadShard(kv_heads=kv.kv_heads, tp_rank=source.tp_rank, tp_size=held)
            plan = RegionPlan(spec, pages, shard=shard)
            assert plan.whole_blocks == (len(sources) == 1)
            _move(place.copier, plan, blocks, to_pages=False)
        assert [bytes(block) for block in blocks] == kv.blocks(rank, size), (
            f"{layout}: {rank} of {size}, {held}"
        )


def _writable(block: bytes) -> memoryview:
    made = page_aligned(len(block))
    made[:] = block
    return made


def _move(copier: BlockCopier, plan: RegionPlan, blocks: Sequence[memoryview], *, to_pages: bool) -> None:
    transfer = Transfer(plan, _TABLE, blocks, to_pages=to_pages)
    copying = copier.start(transfer, range(_LAYERS), 0, len(blocks), None)
    deadline = deadline_in(_AMPLE_S)
    while copying is not None and not copying.query():
        assert not is_past(deadline)
        time.sleep(0.0002)
