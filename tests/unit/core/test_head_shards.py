from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvferry.core import paged_copy
from kvferry.core.buffers import page_aligned
from kvferry.core.errors import ConfigError
from kvferry.core.head_shards import HeadShard, SharedHeads
from kvferry.core.paged_copy import HostCopier, Transfer
from kvferry.core.regions import LAYOUTS, Region, RegionPlan
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.testing.resharding import HostPlace, ShardedKV, check_loads, check_saves

SIZES = [(a, b) for a in (1, 2, 4, 8) for b in (1, 2, 4, 8)]
WITH_HEADS = [name for name, axes in LAYOUTS.items() if "h" in axes]
TOKENS = 4


@pytest.fixture(params=["native", "numpy"])
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HostPlace:
    if request.param == "numpy":
        monkeypatch.setattr(paged_copy, "pages_kernel", lambda: None)
    elif paged_copy.pages_kernel() is None:
        pytest.skip("there is no native library")
    return HostPlace()


@pytest.mark.parametrize(
    ("layout", "kv_heads"),
    [
        *((layout, 8) for layout in WITH_HEADS),
        *((layout, 2) for layout in ("nhd", "hnd", "stacked_nhd", "stacked_hnd")),
        *((layout, 1) for layout in ("nhd", "hnd")),
    ],
)
def test_every_head_lands_between_groups_of_all_sizes(host: HostPlace, layout: str, kv_heads: int) -> None:
    """C104: 1, 2, 4 and 8 ranks, either way, heads replicated where there are fewer than ranks."""
    kv = ShardedKV(kv_heads)
    for sizes in SIZES:
        check_loads(host, kv, layout, sizes)
        check_saves(host, kv, layout, sizes)


@pytest.mark.parametrize("wrong", ["first_in_pages", "first_in_blocks"])
def test_a_head_in_the_wrong_place_is_seen(
    host: HostPlace, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What these checks are worth: each fails where heads are taken from, or put, one place off."""
    right = HeadShard.shared

    def off_by_one(self: HeadShard, stored: KVSpec) -> SharedHeads | None:
        found = right(self, stored)
        assert found is not None
        return replace(found, **{wrong: getattr(found, wrong) ^ 1})

    monkeypatch.setattr(HeadShard, "shared", off_by_one)
    sizes = (8, 4) if wrong == "first_in_pages" else (4, 8)
    with pytest.raises(AssertionError):
        check_loads(host, ShardedKV(8), "nhd", sizes)
    with pytest.raises(AssertionError):
        check_saves(host, ShardedKV(8), "nhd", (sizes[1], sizes[0]))


def spec(heads: int = 8, rank: int = 0, size: int = 1, **fields: Any) -> KVSpec:
    layer = LayerSpec(tuple(TensorSpec(name, (TOKENS, heads, 2), DType.FLOAT16) for name in ("k", "v")))
    made = KVSpec(
        model="m", revision="r", layers=(layer,), block_tokens=TOKENS, tp_rank=rank, tp_size=size, pp_size=2
    )
    return replace(made, **fields)


def shard(kv_heads: int = 8, rank: int = 0, size: int = 1) -> HeadShard:
    return HeadShard(kv_heads=kv_heads, tp_rank=rank, tp_size=size)


def of_shape(*shape: int, name: str = "latent", **fields: Any) -> KVSpec:
    layer = LayerSpec((TensorSpec(name, shape, DType.FLOAT16),))
    return KVSpec(model="m", revision="r", layers=(layer,), block_tokens=TOKENS, **fields)


def test_replicas_share_out_what_they_load() -> None:
    """Ranks with the same head take it from different ones; a group of the same size from itself."""

    def ranks(kv_heads: int, size: int, stored: int) -> list[list[int]]:
        mine = [shard(kv_heads, rank, size) for rank in range(size)]
        from_spec = spec(len(mine[0].heads), 0, size)
        return [[found.tp_rank for found in one.sources(from_spec, stored)] for one in mine]

    assert ranks(2, 4, 4) == [[0], [1], [2], [3]]
    assert ranks(2, 8, 4) == [[0], [0], [1], [1], [2], [2], [3], [3]]
    assert ranks(2, 4, 8) == [[0], [2], [4], [6]]
    assert ranks(2, 1, 4) == [[0, 2]]
    assert ranks(3, 3, 1) == [[0], [0], [0]]


def test_the_rest_of_a_spec_stays() -> None:
    """All that other peers may differ in, e.g. the pipeline stage, is that of the spec given."""
    assert shard(8, 3, 4).spec_of(spec()) == spec(2, 3, 4)
    assert shard(8).spec_of(spec(1, 5, 8)) == spec()


def test_a_latent_is_the_same_on_every_rank() -> None:
    """One source, the spec that all ranks share, moved whole; also one that a rank stored for itself."""
    shared = of_shape(TOKENS, 7)
    for one in (shared, of_shape(TOKENS, 7, tp_rank=2, tp_size=4)):
        assert shard(1, 5, 8).sources(one, 4) == (shared,)
        pages = np.arange(3 * TOKENS * 7, dtype=np.float16).reshape(3, TOKENS, 7)
        region = Region.of(pages, layer=0, layout="nd")
        plan = RegionPlan(one, [region], shard=shard(1, 5, 8))
        assert plan.heads is None
        assert plan.whole_blocks
        assert plan.layers == RegionPlan(one, [region]).layers


def test_a_tensor_without_heads_goes_along() -> None:
    """A layer may have both kinds: the latent is whole in every rank's blocks."""
    k, mla = spec(4).layers[0].tensors[0], of_shape(TOKENS, 7).layers[0].tensors[0]
    both = replace(spec(4, 1, 2), layers=(LayerSpec((k, mla)),))
    heads, latent = np.zeros((1, TOKENS, 8, 2), np.float16), np.zeros((1, TOKENS, 7), np.float16)
    regions = [
        Region.of(heads, layer=0, layout="nhd", tensor="k"),
        Region.of(latent, layer=0, layout="nd", tensor="latent"),
    ]
    block = page_aligned(both.block_nbytes)
    np.frombuffer(block, np.float16)[:] = np.arange(1, 1 + both.block_nbytes // 2)
    transfer = Transfer(RegionPlan(both, regions, shard=shard()), [0], [block], to_pages=True)
    HostCopier().start(transfer, [0], 0, 1, None)
    assert not heads[0, :, :4].any()
    np.testing.assert_array_equal(heads[0, :, 4:].ravel(), np.arange(1, 33))
    np.testing.assert_array_equal(latent.ravel(), np.arange(33, 33 + 28))


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: shard(3, 0, 2), "3 KV heads cannot be shared out to 2 ranks"),
    (lambda: shard(8, 0, 12), "8 KV heads cannot be shared out to 12 ranks"),
    (lambda: shard().sources(spec(), 3), "8 KV heads cannot be shared out to 3 ranks"),
    (lambda: shard(8, 4, 4), r"tp_rank 4 is outside 0\.\.3 \(tp_size 4\)"),
    (lambda: shard(8, -1, 4), "tp_rank -1 is outside"),
    (lambda: shard(0), "kv_heads is 0"),
    (
        lambda: shard(8, 3, 4).shared(spec(4, 0, 2)),
        r"rank 3 of 4 has heads 6 to 7 of 8, .* rank 0 of 2 has heads 0 to 3",
    ),
    (lambda: shard(2, 1, 4).shared(spec(1, 3, 4)), r"has head 0 of 2, .* rank 3 of 4 has head 1 of 2"),
    (lambda: shard(8).shared(spec(3, 0, 2)), "'k' of layer 0 has 3 heads, but rank 0 of 2 has heads 0 to 3"),
    (lambda: shard(8).spec_of(spec(2, 0, 2)), "'k' of layer 0 has 2 heads"),
    (lambda: shard(8).shared(of_shape(9, 8, 2, name="s")), r"'s' of layer 0 has the shape \[9, 8, 2\]"),
    (lambda: shard(8).shared(of_shape(TOKENS, name="s")), r"neither \[4, heads, dim\] nor \[4, dim\]"),
    (lambda: shard(8).spec_of(spec(layout="engine-x")), "layout 'engine-x' are opaque"),
    (lambda: shard(8).shared(spec(layout="engine-x")), "layout 'engine-x' are opaque"),
]


@pytest.mark.parametrize(("make", "says"), REFUSED)
def test_what_cannot_be_meant_is_refused_with_the_numbers(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_pages_have_the_heads_of_their_shard() -> None:
    """Those of another rank's size, or of the stored blocks, are refused."""
    array = np.zeros((2, 3, TOKENS, 8, 2), np.float16)
    regions = [Region.of(array, layer=0, layout="stacked_nhd")]
    with pytest.raises(ConfigError, match=r"the shard ask for .*heads = 4"):
        RegionPlan(spec(), regions, shard=shard(8, 1, 2))
