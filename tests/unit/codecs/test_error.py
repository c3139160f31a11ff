from __future__ import annotations

import math

import numpy as np
import pytest

from kvferry.codecs.error import as_float32, slice_errors
from kvferry.codecs.kernels import use_kernels
from kvferry.codecs.native import native
from kvferry.core.spec import DType, LayerSpec, TensorSpec

LAYER = LayerSpec((TensorSpec("k", (4, 8), DType.FLOAT32), TensorSpec("v", (4, 8), DType.FLOAT32)))


def errors(before: list[float], after: list[float]) -> tuple[float, float]:
    x, y = np.zeros(64, np.float32), np.zeros(64, np.float32)
    x[: len(before)], y[: len(after)] = before, after
    k, v = slice_errors(x.view(np.uint8).data, y.view(np.uint8).data, LAYER)
    assert (k.tensor.name, v.tensor.name) == ("k", "v")
    assert v.relative_l2 == v.maximum == 0
    return k.relative_l2, k.maximum


def test_relative_and_largest_error() -> None:
    assert errors([3, 4], [3, 4]) == (0, 0)
    assert errors([3, 4], [3, 3]) == pytest.approx((1 / 5, 1))
    assert errors([1e30, 0], [0, 0]) == pytest.approx((1, 1e30))


def test_channels_that_stick_out_count_as_sixteen_of_the_median() -> None:
    layer = LayerSpec((TensorSpec("k", (2, 8), DType.FLOAT32),))
    x = np.ones((2, 8), np.float32)
    x[:, 3] = 100
    y = x + np.float32(0.1)
    (error,) = slice_errors(x.view(np.uint8).reshape(-1).data, y.view(np.uint8).reshape(-1).data, layer)
    assert error.relative_l2 == pytest.approx(0.4 / math.sqrt(14 + 2e4), rel=1e-3)
    assert error.bounded == pytest.approx(0.4 / math.sqrt(14 + 32), rel=1e-3)
    x[:, 4:] = 0  # channels of zeros are no median
    (error,) = slice_errors(x.view(np.uint8).reshape(-1).data, x.view(np.uint8).reshape(-1).data, layer)
    assert error.bounded == 0


def test_zeros_infinities_and_nan() -> None:
    assert errors([0], [1]) == (math.inf, 1)
    assert errors([math.inf, math.nan, 3, 4], [math.inf, math.nan, 3, 4]) == (0, 0)
    assert errors([math.inf, math.nan, 3, 4], [math.inf, math.nan, 3, 3]) == pytest.approx((1 / 5, 1))
    assert math.isnan(errors([3, 4], [3, math.nan])[0])
    assert errors([3, 4], [3, math.inf])[0] == math.inf


def test_types() -> None:
    raw = np.array([0x3FC0, 0xC000], np.uint16).view(np.uint8)
    assert as_float32(raw, DType.BFLOAT16).tolist() == [1.5, -2]
    assert as_float32(np.array([1.5, -2], np.float16).view(np.uint8), DType.FLOAT16).tolist() == [1.5, -2]
    assert as_float32(np.array([255], np.uint8), DType.INT8).tolist() == [-1]
    for dtype in (DType.FLOAT8_E4M3FN, DType.BOOL):
        with pytest.raises(ValueError, match="not compared"):
            as_float32(raw, dtype)
    layer = LayerSpec((TensorSpec("k", (64,), DType.FLOAT8_E4M3FN),))
    assert not list(slice_errors(memoryview(bytes(64)), memoryview(b"\1" * 64), layer))
    assert not list(slice_errors(memoryview(b""), memoryview(b""), LAYER))


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e6, 1e25])
def test_all_magnitudes_and_some_tokens(scale: float) -> None:
    layer = LayerSpec((TensorSpec("k", (256, 2, 8), DType.FLOAT32),))
    x = np.random.default_rng(1).standard_normal((3, 256, 16)).astype(np.float32) * np.float32(scale)
    y = x * np.float32(1.01)
    raw = [a.view(np.uint8).reshape(-1).data for a in (x, y)]
    for tokens in (None, 64, 100, 300):
        (error,) = slice_errors(raw[0], raw[1], layer, tokens)
        assert error.relative_l2 == pytest.approx(0.01, rel=1e-3)
        assert error.bounded == pytest.approx(0.01, rel=1e-3)
        assert 0.02 * scale < error.maximum < 0.06 * scale
    y[:, ::4] = x[:, ::4]
    assert [e.maximum for e in slice_errors(raw[0], raw[1], layer, 64)] == [0]
    y[1, 128, 3] = np.nan
    assert all(math.isnan(e.relative_l2) for e in slice_errors(raw[0], raw[1], layer, 64))


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize(("heads", "size"), [(3, 64), (1, 7), (2, 24), (1, 1)])
@pytest.mark.parametrize("tokens", [None, 5])
def test_native_kernels_find_what_numpy_finds(
    dtype: DType, heads: int, size: int, tokens: int | None
) -> None:
    if native().library is None:
        pytest.skip("there is no native library")
    layer = LayerSpec(tuple(TensorSpec(name, (17, heads, size), dtype) for name in ("k", "v")))
    rng = np.random.default_rng(size)
    x = rng.standard_normal(2 * layer.data_nbytes // 2).astype(np.float32)
    x[:: heads * size] *= 50  # a channel that sticks out
    both = []
    for values in (x, x + rng.standard_normal(len(x)).astype(np.float32) * np.float32(0.1)):
        halves = values.astype(np.float16).view(np.uint16)
        if dtype is DType.BFLOAT16:
            halves = (values.view(np.uint32) >> 16).astype(np.uint16)
        slices = np.zeros((2, layer.nbytes), np.uint8)
        slices[:, : layer.data_nbytes] = halves.view(np.uint8).reshape(2, -1)
        both.append(slices.reshape(-1).data)
    found = []
    for kernels in ("native", "numpy"):
        with use_kernels(kernels):
            found.append(list(slice_errors(both[0], both[1], layer, tokens)))
    for a, b in zip(*found, strict=True):
        assert a.relative_l2 > 0.001
        assert (a.relative_l2, a.bounded, a.maximum) == pytest.approx(
            (b.relative_l2, b.bounded, b.maximum), rel=1e-5
        )


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize("cols", [5, 40])
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_a_token_that_is_not_finite_hides_no_error(dtype: DType, cols: int, special: float) -> None:
    layer = LayerSpec((TensorSpec("k", (4, cols), dtype),))
    both = []
    for value in (1.0, 1.25):
        x = np.full((4, cols), value, np.float32)
        x[2] = special  # kept as it is by all codecs
        halves = x.view(np.uint32) >> 16 if dtype is DType.BFLOAT16 else x.astype(np.float16).view(np.uint16)
        slices = np.zeros(layer.nbytes, np.uint8)
        slices[: layer.data_nbytes] = halves.astype(np.uint16).reshape(-1).view(np.uint8)
        both.append(slices.data)
    for kernels in ("native", "numpy") if native().library is not None else ("numpy",):
        with use_kernels(kernels):
            (error,) = slice_errors(both[0], both[1], layer)
        assert (error.relative_l2, error.bounded, error.maximum) == pytest.approx((0.25, 0.25, 0.25)), kernels
