from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.core import paged_copy
from kvferry.core.buffers import page_aligned
from kvferry.core.errors import ConfigError
from kvferry.core.paged_copy import HostCopier, Transfer
from kvferry.core.regions import LAYOUTS, Region, RegionPlan
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec

LAYERS, PAGES, TOKENS, HEADS, DIM = 2, 5, 3, 2, 4
SIZES = {"b": PAGES, "s": 2, "n": TOKENS, "h": HEADS, "d": DIM, "c": 2 * DIM}
IDS = [3, 0, 4]
Array = npt.NDArray[Any]


def spec(*names: str, shape: tuple[int, ...] = (TOKENS, HEADS, DIM), layout: str = "kvferry") -> KVSpec:
    layer = LayerSpec(tuple(TensorSpec(name, shape, DType.FLOAT16) for name in names or ("k", "v")))
    return KVSpec(model="m", revision="r", layers=(layer,) * LAYERS, block_tokens=TOKENS, layout=layout)


def value(layer: int, tensor: int, page: int, token: int, head: int, dim: int) -> int:
    """What an element holds, all of them different."""
    return ((((layer * 2 + tensor) * PAGES + page) * TOKENS + token) * HEADS + head) * DIM + dim + 1


def element(array: Array, axes: str, tensor: int, page: int, token: int, head: int, dim: int) -> Array:
    """One element as an array of no axes, by what the letters of the layout mean."""
    at = {"b": page, "s": tensor, "n": token, "h": head, "d": dim, "c": tensor * DIM + dim}
    where = tuple(slice(at[axis], at[axis] + 1) for axis in axes)
    return array[where].reshape(())


def every() -> list[tuple[int, int, int, int, int]]:
    return [tuple(index) for index in np.ndindex(2, PAGES, TOKENS, HEADS, DIM)]


def paged(layout: str, *, filled: bool) -> tuple[list[list[Array]], list[Region]]:
    """The arrays of each layer, written and read element by element, and their regions."""
    axes = LAYOUTS[layout]
    both = "s" in axes or "c" in axes
    layers: list[list[Array]] = []
    regions = []
    for layer in range(LAYERS):
        shape = tuple(SIZES[axis] for axis in axes)
        arrays = [np.zeros(shape, np.float16) for _ in range(1 if both else 2)]
        for where in every() if filled else []:
            element(arrays[0 if both else where[0]], axes, *where)[...] = value(layer, *where)
        layers.append(arrays)
        for array, name in zip(arrays, ("",) if both else ("k", "v"), strict=True):
            regions.append(Region.of(array, layer=layer, layout=layout, tensor=name))
    return layers, regions


def move(plan: RegionPlan, ids: Sequence[int], memory: memoryview, *, to_pages: bool) -> None:
    nbytes = plan.spec.block_nbytes
    slots = [memory[n * nbytes : (n + 1) * nbytes] for n in range(len(ids))]
    transfer = Transfer(plan, ids, slots, to_pages=to_pages)
    assert HostCopier().start(transfer, range(len(plan.layers)), 0, len(ids), None) is None


@pytest.fixture(params=["native", "numpy"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(paged_copy, "pages_kernel", lambda: None)
    elif paged_copy.pages_kernel() is None:
        pytest.skip("there is no native library")
    return str(request.param)


DECLARED = [name for name in LAYOUTS if name != "nd"]


@pytest.mark.parametrize("layout", DECLARED)
def test_a_layout_goes_round_element_for_element(layout: str, kernel: str) -> None:
    """C006: to the store's own order, and from there into every other layout; padding is zeros."""
    _, regions = paged(layout, filled=True)
    plan = RegionPlan(spec(), regions)
    assert plan.blocks == PAGES
    memory = page_aligned(len(IDS) * plan.spec.block_nbytes)
    memory[:] = b"\xee" * len(memory)
    move(plan, IDS, memory, to_pages=False)
    for number, page in enumerate(IDS):
        for layer in range(LAYERS):
            start = number * plan.spec.block_nbytes + plan.spec.layer_slice(layer).start
            held = plan.spec.layers[layer].data_nbytes
            stored = np.frombuffer(memory[start : start + held], np.float16).reshape(2, TOKENS, HEADS, DIM)
            for where in np.ndindex(2, TOKENS, HEADS, DIM):
                assert stored[where] == value(layer, where[0], page, *where[1:])
            assert not any(memory[start + held : start + plan.spec.layers[layer].nbytes])
    for other in DECLARED:
        arrays, regions = paged(other, filled=False)
        axes = LAYOUTS[other]
        both = len(arrays[0]) == 1
        back = [1, 3, 2]
        move(RegionPlan(spec(), regions), back, memory, to_pages=True)
        for layer in range(LAYERS):
            for where in every():
                tensor, page = where[:2]
                found = element(arrays[layer][0 if both else tensor], axes, *where)
                expected = 0
                if page in back:
                    expected = value(layer, tensor, IDS[back.index(page)], *where[2:])
                assert found == expected, (other, where)


def test_views_with_any_strides_are_taken_as_they_lie(kernel: str) -> None:
    """All layers in one storage, a block outermost, as some engines have it; what lies between stays."""
    storage = np.zeros((PAGES, HEADS, LAYERS, TOKENS, 2 * DIM), np.float16)
    views = [storage[:, :, layer] for layer in range(LAYERS)]
    for layer, view in enumerate(views):
        for where in every():
            element(view, "bhnc", *where)[...] = value(layer, *where)
    plan = RegionPlan(spec(), [Region.of(view, layer=n, layout="packed_hnd") for n, view in enumerate(views)])
    memory = page_aligned(len(IDS) * plan.spec.block_nbytes)
    move(plan, IDS, memory, to_pages=False)
    before = storage.copy()
    storage[IDS] = 0
    move(plan, IDS, memory, to_pages=True)
    np.testing.assert_array_equal(storage, before)
    _, dense = paged("nhd", filled=True)
    same = page_aligned(len(memory))
    move(RegionPlan(spec(), dense), IDS, same, to_pages=False)
    assert same == memory


def test_an_opaque_layout_is_moved_as_whole_bytes(kernel: str) -> None:
    name = "engine-x-cpu-vec"
    mine = spec("bytes", shape=(TOKENS, HEADS * DIM * 2), layout=name)
    rng = np.random.default_rng(1)
    arrays = [rng.integers(0, 255, (PAGES, HEADS, TOKENS, 2 * DIM * 2), np.uint8) for _ in range(LAYERS)]
    plan = RegionPlan(mine, [Region.of(a, layer=n, layout=name) for n, a in enumerate(arrays)])
    memory = page_aligned(len(IDS) * mine.block_nbytes)
    move(plan, IDS, memory, to_pages=False)
    assert bytes(memory[: mine.layers[0].data_nbytes]) == arrays[0][IDS[0]].tobytes()
    before = [a.copy() for a in arrays]
    for array in arrays:
        array[IDS] = 0
    move(plan, IDS, memory, to_pages=True)
    for array, kept in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, kept)


def test_a_latent_has_a_layout_of_its_own(kernel: str) -> None:
    mine = spec("latent", shape=(TOKENS, 7))
    arrays = [np.arange(PAGES * TOKENS * 7, dtype=np.float16).reshape(PAGES, TOKENS, 7) + n for n in range(2)]
    plan = RegionPlan(mine, [Region.of(a, layer=n, layout="nd") for n, a in enumerate(arrays)])
    memory = page_aligned(mine.block_nbytes)
    move(plan, [2], memory, to_pages=False)
    arrays[1][2] = -1
    move(plan, [2], memory, to_pages=True)
    assert arrays[1][2, 0, 0] == 2 * TOKENS * 7 + 1


def test_runs_are_as_long_as_they_can_be() -> None:
    """A stacked layout is two runs a layer, whatever its shape: not one a token."""
    _, regions = paged("block_stacked_nhd", filled=False)
    for layer in RegionPlan(spec(), regions).layers:
        assert [len(part.loops) for part in layer if part.address] == [0, 0]
        assert sum(part.run for part in layer if part.address) == 2 * TOKENS * HEADS * DIM * 2


def test_a_stop_ends_a_copy_after_the_block_that_it_is_at(kernel: str) -> None:
    _, regions = paged("nhd", filled=True)
    plan = RegionPlan(spec(), regions)
    memory = page_aligned(plan.spec.block_nbytes)
    transfer = Transfer(plan, [1], [memory], to_pages=False)
    transfer.stop.value = 1
    HostCopier().start(transfer, [0, 1], 0, 1, None)
    assert not any(memory)


def with_shape(*shape: int, dtype: Any = np.float16) -> Callable[[], list[Region]]:
    return lambda: [Region.of(np.zeros(shape, dtype), layer=n, layout="stacked_nhd") for n in range(LAYERS)]


def broadcast() -> list[Region]:
    base = np.zeros((2, 1, TOKENS, HEADS, DIM), np.float16)
    view = np.lib.stride_tricks.as_strided(
        base, (2, PAGES, TOKENS, HEADS, DIM), (*base.strides[:1], 0, *base.strides[2:])
    )
    return [Region.of(view, layer=n, layout="stacked_nhd") for n in range(LAYERS)]


def read_only() -> list[Region]:
    array = np.zeros((2, PAGES, TOKENS, HEADS, DIM), np.float16)
    array.setflags(write=False)
    return [Region.of(array, layer=0, layout="stacked_nhd")]


def same_twice() -> list[Region]:
    array = np.zeros((2, PAGES, TOKENS, HEADS, DIM), np.float16)
    return [Region.of(array, layer=n, layout="stacked_nhd") for n in range(LAYERS)]


def named(layout: str) -> Callable[[], list[Region]]:
    return lambda: [Region.of(np.zeros((1,), np.float16), layer=0, layout=layout)]


def of_sizes() -> list[Region]:
    return [
        Region.of(np.zeros((2, 3 + n, TOKENS, HEADS, DIM), np.float16), layer=n, layout="stacked_nhd")
        for n in range(LAYERS)
    ]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (list, "no region"),
        (named("stacked_ndh"), "'stacked_ndh'.*unknown layout.*did you mean stacked_nhd.*packed_hnd"),
        (named(""), "unknown layout"),
        (named("kvferry"), "unknown layout"),
        (with_shape(2, PAGES, HEADS, TOKENS, DIM), r"\[2, blocks, block_tokens = 3, heads = 2, dim = 4\]"),
        (with_shape(2, PAGES, TOKENS, HEADS), "block_tokens = 3"),
        (with_shape(2, PAGES, TOKENS, HEADS, DIM, dtype=np.float32), "'k' is float16"),
        (with_shape(2, PAGES, TOKENS, HEADS, DIM, dtype=np.int8), "'k' is float16"),
        (lambda: paged("stacked_nhd", filled=False)[1][:1], "'k' of layer 1 is in no region"),
        (lambda: paged("nhd", filled=False)[1][:3], "'v' of layer 1 is in no region"),
        (lambda: 2 * paged("nhd", filled=False)[1], "'k' is in another region already"),
        (same_twice, "same memory as"),
        (of_sizes, r"number of blocks: \[3, 4\]"),
        (broadcast, "over each other"),
        (read_only, "read-only"),
        (lambda: [Region.of(np.zeros((1,)), layer=7, layout="nhd")], "has 2 layers"),
        (lambda: [Region.of(np.zeros((1,)), layer=0, layout="nhd")], r"say which tensor of k, v"),
        (lambda: [Region.of(np.zeros((1,)), layer=0, layout="nhd", tensor="w")], "tensors .* are k, v"),
    ],
)
def test_what_is_not_declared_is_refused_by_name(make: Callable[[], list[Region]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RegionPlan(spec(), make())


def test_an_opaque_layout_is_not_turned_into_another() -> None:
    mine = spec("bytes", shape=(TOKENS, 8), layout="engine-x")
    array = np.zeros((PAGES, TOKENS, 8), np.float16)
    for layout, says in (("nhd", "not turned into another"), ("engine-y", "have the layout 'engine-x'")):
        with pytest.raises(ConfigError, match=says):
            RegionPlan(mine, [Region.of(array, layer=0, layout=layout)])
    with pytest.raises(ConfigError, match="bytes a block"):
        RegionPlan(mine, [Region.of(array[:, :2], layer=0, layout="engine-x")])


@pytest.mark.parametrize("ids", [[PAGES], [-1], [0.5], [[1]]])
def test_pages_that_are_none_are_refused(ids: Any) -> None:
    plan = RegionPlan(spec(), paged("nhd", filled=False)[1])
    memory = page_aligned(plan.spec.block_nbytes)
    with pytest.raises(ConfigError):
        Transfer(plan, ids, [memory], to_pages=True)


def test_torch_tensors_need_no_numpy() -> None:
    torch = pytest.importorskip("torch")
    layer = LayerSpec((TensorSpec("k", (TOKENS, HEADS, DIM), DType.BFLOAT16),))
    mine = KVSpec(model="m", revision="r", layers=(layer,), block_tokens=TOKENS)
    tensor = torch.arange(PAGES * math.prod((TOKENS, HEADS, DIM))).to(torch.bfloat16)
    tensor = tensor.view(PAGES, HEADS, TOKENS, DIM)
    plan = RegionPlan(mine, [Region.of(tensor, layer=0, layout="hnd")])
    memory = page_aligned(mine.block_nbytes)
    move(plan, [4], memory, to_pages=False)
    stored = torch.frombuffer(memory, dtype=torch.bfloat16)[: tensor[4].numel()]
    assert torch.equal(stored.view(TOKENS, HEADS, DIM), tensor[4].transpose(0, 1))
