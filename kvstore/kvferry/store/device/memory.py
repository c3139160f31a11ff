"""Device memory in pages: which regions a pool of one spec consists of, in one allocation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvferry.core.errors import CapacityError, ConfigError
from kvferry.core.regions import Region
from kvferry.core.spec import KVSpec, TensorSpec
from kvferry.core.units import format_nbytes
from kvferry.device.base import Device, DeviceBytes

__all__ = ["PagedMemory", "page_nbytes_of"]

_NATIVE: Final = "kvferry"


@dataclass(frozen=True)
class _Place:
    """One array of the pool."""

    layer: int
    tensor: str
    layout: str
    shape: tuple[int, ...]
    first: TensorSpec

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.first.dtype.itemsize


def page_nbytes_of(spec: KVSpec) -> int:
    """Bytes that a page takes in all layers."""
    return sum(place.nbytes for place in _places(spec, 1))


class PagedMemory:
    """Pages for the blocks of one spec, all layers after each other in one allocation.

    A layer of K and V of one shape is ``[2, blocks, block_tokens, heads, dim]``, any other tensor
    ``[blocks, *its shape]``.

    Args:
        spec: Of the blocks.
        num_blocks: Pages.
        device: Where.

    Attributes:
        memory: All of it.
        regions: The arrays, as engines declare theirs.
        starts: Where each begins in ``memory``.

    Raises:
        ConfigError: If a tensor has a shape that no layout is known for.
        CapacityError: If the device has not got so much memory.
    """

    def __init__(self, spec: KVSpec, num_blocks: int, device: Device) -> None:
        places, starts, at = _places(spec, num_blocks), list[int](), 0
        for place in places:
            item = place.first.dtype.itemsize
            at = -(-at // item) * item
            starts.append(at)
            at += place.nbytes
        try:
            self.memory: DeviceBytes = device.empty(at)
        except CapacityError as error:
            one, free = page_nbytes_of(spec), device.memory().free_nbytes
            raise CapacityError(
                f"{device.name}: a pool of {num_blocks} blocks of {one} bytes takes {format_nbytes(at)}, "
                f"{format_nbytes(free)} are free: configure at most {free // max(one, 1)} blocks, or leave "
                "more beside the model's weights"
            ) from error
        _, address = device.memory_of(self.memory)
        self.starts = tuple(starts)
        self.regions = tuple(
            _region(place, self.memory, address + start, device.kind)
            for place, start in zip(places, starts, strict=True)
        )


def _region(place: _Place, memory: DeviceBytes, address: int, kind: str) -> Region:
    item, strides = place.first.dtype.itemsize, list[int]()
    step = item
    for size in reversed(place.shape):
        strides.append(step)
        step *= size
    return Region(
        layer=place.layer, layout=place.layout, tensor=place.tensor, address=address, shape=place.shape,
        strides=tuple(reversed(strides)), itemsize=item, dtype=place.first.dtype.value, device=kind,
        owner=memory,
    )  # fmt: skip


def _places(spec: KVSpec, num_blocks: int) -> list[_Place]:
    found: list[_Place] = []
    for number, layer in enumerate(spec.layers):
        tensors: Sequence[TensorSpec] = layer.tensors
        kinds = {(tensor.shape, tensor.dtype) for tensor in tensors}
        if spec.layout == _NATIVE and len(tensors) == 2 and len(kinds) == 1 and len(tensors[0].shape) == 3:
            shape = (2, num_blocks, *tensors[0].shape)
            found.append(_Place(number, "", "stacked_nhd", shape, tensors[0]))
            continue
        for tensor in tensors:
            layout = _layout(spec, number, tensor)
            found.append(_Place(number, tensor.name, layout, (num_blocks, *tensor.shape), tensor))
    return found


def _layout(spec: KVSpec, layer: int, tensor: TensorSpec) -> str:
    if spec.layout != _NATIVE:
        return spec.layout
    if len(tensor.shape) not in (2, 3):
        raise ConfigError(
            f"tensor {tensor.name!r} of layer {layer} has the shape {list(tensor.shape)}: a pool has pages "
            "of [tokens, heads, dim] or [tokens, dim]; register the engine's own regions for others"
        )
    return "nhd" if len(tensor.shape) == 3 else "nd"
