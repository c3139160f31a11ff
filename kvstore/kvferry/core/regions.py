"""An engine's own paged memory, as it says that it lies: regions, their layouts, and how blocks map to them.

A **region** is one array of the engine, with an axis of pages (its own blocks, by number) and those of one
layer's tensors. Its layout is declared by name and checked against the spec, never guessed. From all
regions of a namespace a :class:`RegionPlan` knows, for every layer of a block, which runs of bytes of a page
are which of the block's layer slice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

import numpy as np

from kvferry.core.errors import ConfigError
from kvferry.core.head_shards import HeadShard, SharedHeads
from kvferry.core.nearest import did_you_mean
from kvferry.core.spec import DType, KVSpec, TensorSlot, TensorSpec
from kvferry.core.values import require_whole

__all__ = ["LAYOUTS", "Part", "Region", "RegionPlan"]

LAYOUTS: Final = {
    "nhd": "bnhd",
    "hnd": "bhnd",
    "nd": "bnd",
    "stacked_nhd": "sbnhd",
    "stacked_hnd": "sbhnd",
    "block_stacked_nhd": "bsnhd",
    "block_stacked_hnd": "bshnd",
    "packed_nhd": "bnhc",
    "packed_hnd": "bhnc",
}
"""Axes of a region by its layout: blocks, s: K and V, n: tokens, heads, dim, c: dim of K, then of V."""

_AXES: Final = {
    "b": "blocks", "s": "2", "n": "block_tokens", "h": "heads", "d": "dim", "c": "2 * dim",
}  # fmt: skip
_NATIVE: Final = "kvferry"
_MOST_LOOPS: Final = 3
_NAMES: Final = frozenset(dtype.value for dtype in DType)


@dataclass(frozen=True, kw_only=True)
class Region:
    """One array of an engine's paged memory.

    Attributes:
        layer: Number of the layer in the spec.
        layout: A name of :data:`LAYOUTS`; the spec's own where that is opaque, and the first axis is then
            that of the pages, all others are moved as they come.
        address: Of its first element.
        shape: Elements along each axis.
        strides: Bytes from one to the next along each.
        itemsize: Bytes of an element.
        dtype: Of an element, as in :class:`DType`; empty if that is not known, e.g. of plain bytes.
        tensor: Which tensor of the layer it is, where a layer has several regions.
        device: Where the memory is: ``cpu``, or a kind of device.
        owner: Kept alive with the registration.
    """

    layer: int
    layout: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str = ""
    tensor: str = ""
    device: str = "cpu"
    owner: object = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, array: Any, *, layer: int, layout: str, tensor: str = "") -> Region:  # noqa: ANN401
        """A region of a torch tensor, a numpy array or a buffer with a shape, without a copy.

        Views are welcome: only the shape and the strides count.

        Raises:
            ConfigError: If it is read-only, or ``layer`` is no number.
            TypeError: If it is none of these.
        """
        require_whole("layer", layer)
        common: dict[str, Any] = {"layer": layer, "layout": layout, "tensor": tensor, "owner": array}
        if hasattr(array, "data_ptr"):  # torch, which need not be imported for this
            item = int(array.element_size())
            return cls(
                address=int(array.data_ptr()), shape=tuple(array.shape), itemsize=item,
                strides=tuple(step * item for step in array.stride()),
                dtype=str(array.dtype).removeprefix("torch."), device=str(array.device.type), **common,
            )  # fmt: skip
        found = array if isinstance(array, np.ndarray) else np.asarray(memoryview(array))
        if not found.flags.writeable:
            raise ConfigError(f"layer {layer}: a region is filled by loads, this array is read-only")
        name = found.dtype.name
        return cls(
            address=cast("int", found.__array_interface__["data"][0]), shape=found.shape,
            strides=found.strides, itemsize=found.itemsize, dtype=name if name in _NAMES else "", **common,
        )  # fmt: skip

    @property
    def extent(self) -> int:
        """Bytes from its first to behind its last."""
        reach = sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        return self.itemsize + reach if all(self.shape) else 0

    def describe(self) -> str:
        """For messages."""
        which = f" {self.tensor!r}" if self.tensor else ""
        return f"region{which} of layer {self.layer} ({self.layout!r}, {list(self.shape)} {self.dtype})"


class Loop(NamedTuple):
    """So many times, so many bytes further in the page and in the slot."""

    times: int
    page_step: int
    slot_step: int


@dataclass(frozen=True, slots=True)
class Part:
    """Runs of bytes that a page and its block have in common: in a tensor, or zeros that pad a slice.

    Attributes:
        address: Of page 0's first byte; 0 for padding.
        page_nbytes: From one page to the next.
        offset: In the block.
        run: Bytes at a time.
        loops: Around that, the outermost first, at most three.
        region: Whose it is.
    """

    address: int
    page_nbytes: int
    offset: int
    run: int
    loops: tuple[Loop, ...] = ()
    region: Region | None = None

    @property
    def runs(self) -> int:
        """How many runs it is."""
        return math.prod(loop.times for loop in self.loops)

    @property
    def extent(self) -> int:
        """Bytes of a page from its first to behind its last."""
        return self.run + sum((loop.times - 1) * loop.page_step for loop in self.loops)


class RegionPlan:
    """Where each layer of a block lies in the regions of an engine.

    Args:
        spec: Of the blocks.
        regions: All of them; together they hold every tensor of every layer once.
        shard: Which KV heads the regions have, where that is not what ``spec`` says: pages of one
            tensor-parallel rank, blocks of one of a group of another size. What moves are the heads that both
            have. A page that needs several ranks' blocks is filled by as many plans; tensors without heads
            are the same in all of them.

    Attributes:
        heads: What both have of the heads; ``None`` without a shard, and where no tensor has heads.
        blocks: Pages of each region: their numbers are below it.
        device: Where all regions are.
        layers: The parts of each layer.
        derived: What a copier has made of each, for itself.

    Raises:
        ConfigError: If a layout is not known by name, or a region is not what its layout and the spec (and
            the shard) say; if blocks and pages have no head in common, and as :meth:`HeadShard.shared`.
    """

    def __init__(self, spec: KVSpec, regions: Sequence[Region], *, shard: HeadShard | None = None) -> None:
        if not regions:
            raise ConfigError("no region is given; register one a layer at least")
        self.spec, self.shard = spec, shard
        self.heads = None if shard is None else shard.shared(spec)
        self.derived: dict[int, Any] = {}
        self.regions = tuple(regions)
        self.device = _same("device", [region.device for region in regions])
        found: list[dict[str, Part]] = [{} for _ in spec.layers]
        for region in regions:
            if not 0 <= region.layer < len(spec.layers):
                raise ConfigError(f"{region.describe()}: the spec has {len(spec.layers)} layers")
            for name, part in _parts(spec, region, self.heads).items():
                if name in found[region.layer]:
                    raise ConfigError(f"{region.describe()}: tensor {name!r} is in another region already")
                found[region.layer][name] = part
        for layer, parts in enumerate(found):
            for tensor in spec.layers[layer].tensors:
                if tensor.name not in parts:
                    raise ConfigError(f"tensor {tensor.name!r} of layer {layer} is in no region")
        _refuse_twice(regions)
        self.blocks = int(_same("number of blocks", [_blocks_of(spec, region) for region in regions]))
        self.layers = tuple(
            (*(part for part in parts.values() if part.run), *_padding(spec, layer))
            for layer, parts in enumerate(found)
        )

    @property
    def whole_blocks(self) -> bool:
        """Whether the pages have all that a block has, so that it can be saved from them."""
        return self.heads is None or self.heads.count == self.heads.in_blocks


def _same(what: str, values: Sequence[Any]) -> Any:  # noqa: ANN401
    if len(set(values)) > 1:
        raise ConfigError(f"regions of one registration differ in their {what}: {sorted(set(values))}")
    return values[0]


def _refuse_twice(regions: Sequence[Region]) -> None:
    seen: dict[tuple[object, ...], Region] = {}
    for region in regions:
        place = (region.address, region.shape, region.strides)
        if place in seen and region.extent:
            raise ConfigError(f"{region.describe()} is the same memory as {seen[place].describe()}")
        seen[place] = region


def _blocks_of(spec: KVSpec, region: Region) -> int:
    axes = LAYOUTS[region.layout] if spec.layout == _NATIVE else "b"
    return region.shape[axes.index("b")]


def _padding(spec: KVSpec, layer: int) -> list[Part]:
    held, whole = spec.layers[layer].data_nbytes, spec.layers[layer].nbytes
    start = spec.layer_slice(layer).start
    return [Part(0, 0, start + held, whole - held)] if whole > held else []


def _parts(spec: KVSpec, region: Region, heads: SharedHeads | None) -> dict[str, Part]:
    """The parts of one region by the name of their tensor."""
    _check_strides(region)
    slots = {slot.spec.name: slot for slot in spec.layers[region.layer].slots()}
    if region.tensor and region.tensor not in slots:
        raise ConfigError(f"{region.describe()}: the tensors of the layer are {', '.join(slots)}")
    start = spec.layer_slice(region.layer).start
    if spec.layout != _NATIVE:
        if region.layout != spec.layout:
            raise ConfigError(
                f"{region.describe()}: blocks of this spec have the layout {spec.layout!r}, their bytes are "
                "not turned into another"
            )
        name = _only_tensor(region, list(slots))
        return {name: _opaque(region, slots[name].spec, start + slots[name].offset)}
    axes = LAYOUTS.get(region.layout)
    if axes is None:
        near = did_you_mean(region.layout, list(LAYOUTS))
        raise ConfigError(f"{region.describe()}: unknown layout{near}; there are: {', '.join(LAYOUTS)}")
    both = "s" in axes or "c" in axes
    if both and (region.tensor or len(slots) != 2):
        raise ConfigError(f"{region.describe()}: holds two tensors, the layer has {', '.join(slots)}")
    names = list(slots) if both else [_only_tensor(region, list(slots))]
    return {
        name: _declared(region, axes, TensorSlot(slots[name].spec, start + slots[name].offset), number, heads)
        for number, name in enumerate(names)
    }


def _only_tensor(region: Region, names: Sequence[str]) -> str:
    if region.tensor:
        return region.tensor
    if len(names) != 1:
        raise ConfigError(f"{region.describe()}: say which tensor of {', '.join(names)} it is (tensor=…)")
    return names[0]


def _declared(region: Region, axes: str, slot: TensorSlot, number: int, heads: SharedHeads | None) -> Part:
    tensor, offset = slot
    letters = "nhd" if "h" in axes else "nd"
    if len(tensor.shape) != len(letters):
        raise ConfigError(f"{region.describe()}: tensor {tensor.name!r} has the shape {list(tensor.shape)}")
    moved = dict(zip(letters, tensor.shape, strict=True))
    in_slot = dict(zip(letters, _dense_steps(tensor.shape, tensor.dtype.itemsize), strict=True))
    sizes = dict(moved)
    if heads is not None and "h" in axes:
        sizes["h"], moved["h"] = heads.in_pages, heads.count
    sizes |= {"s": 2, "c": 2 * sizes["d"]}
    _check_shape(region, axes, sizes, heads)
    if region.itemsize != tensor.dtype.itemsize or region.dtype not in ("", tensor.dtype.value):
        raise ConfigError(f"{region.describe()}: tensor {tensor.name!r} is {tensor.dtype.value}")
    steps = dict(zip(axes, region.strides, strict=True))
    address = region.address + number * steps.get("s", 0)
    if "c" in axes:
        steps["d"] = steps["c"]
        address += number * sizes["d"] * steps["c"]
    if heads is not None and "h" in axes:
        address += heads.first_in_pages * steps["h"]
        offset += heads.first_in_blocks * in_slot["h"]
    return _part(region, address, steps["b"], offset, [(moved[a], steps[a], in_slot[a]) for a in letters])


def _check_shape(region: Region, axes: str, sizes: Mapping[str, int], heads: SharedHeads | None) -> None:
    named = dict(zip(axes, region.shape, strict=False))
    if len(axes) != len(region.shape) or any(named[a] != sizes[a] for a in axes if a != "b"):
        due = ", ".join(f"{_AXES[a]}" + (f" = {sizes[a]}" if a in "nhdc" else "") for a in axes)
        who = "the spec" if heads is None else "the shard"
        raise ConfigError(f"{region.describe()}: its layout and {who} ask for [{due}]")


def _dense_steps(shape: Sequence[int], itemsize: int) -> list[int]:
    """Bytes from one to the next along each axis of a dense array."""
    return [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _opaque(region: Region, tensor: TensorSpec, offset: int) -> Part:
    if not region.shape:
        raise ConfigError(f"{region.describe()}: the first axis is that of the blocks")
    nbytes = region.itemsize
    for size in region.shape[1:]:
        nbytes *= size
    if nbytes != tensor.nbytes:
        raise ConfigError(
            f"{region.describe()}: {nbytes} bytes a block, tensor {tensor.name!r} has {tensor.nbytes}"
        )
    in_slot = _dense_steps(region.shape[1:], region.itemsize)
    dims = list(zip(region.shape[1:], region.strides[1:], in_slot, strict=True))
    return _part(region, region.address, region.strides[0], offset, dims)


def _part(
    region: Region, address: int, page_nbytes: int, offset: int, dims: Sequence[tuple[int, int, int]]
) -> Part:
    """As few loops as there can be around runs as long as they can be.

    ``dims``: how many there are along each axis, and the bytes between them in a page and in the slot.
    """
    run = region.itemsize
    loops: list[Loop] = []
    for size, step, slot_step in reversed(dims):
        if size == 0:
            return Part(address, page_nbytes, offset, 0, (), region)
        last = loops[-1] if loops else None
        if size > 1 and last is None and step == slot_step == run:
            run *= size
        elif (
            size > 1
            and last
            and (step, slot_step)
            == (
                last.page_step * last.times,
                last.slot_step * last.times,
            )
        ):
            loops[-1] = last._replace(times=last.times * size)
        elif size > 1:
            loops.append(Loop(size, step, slot_step))
    if len(loops) > _MOST_LOOPS:
        raise ConfigError(
            f"{region.describe()}: strides {list(region.strides)} are too scattered to be moved"
        )
    return Part(address, page_nbytes, offset, run, tuple(reversed(loops)), region)


def _check_strides(region: Region) -> None:
    if len(region.shape) != len(region.strides):
        raise ConfigError(f"{region.describe()} has {len(region.strides)} strides")
    reach = region.itemsize
    for step, size in sorted(zip(region.strides, region.shape, strict=True)):
        if size > 1:
            if step < reach:
                raise ConfigError(
                    f"{region.describe()}: elements lie over each other, strides {list(region.strides)}"
                )
            reach += (size - 1) * step
