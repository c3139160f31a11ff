"""int8, int4 and fp8: the error of each value, head sizes, constants, what is not finite."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.codecs.base import Codec
from kvferry.codecs.error import as_float32, slice_errors
from kvferry.codecs.fallback.floats import bf16_of
from kvferry.codecs.quantised import Fp8Codec, Int4Codec, Int8Codec
from kvferry.core.buffers import ByteArray, page_aligned
from kvferry.core.spec import DType, LayerSpec, TensorSpec

pytestmark = pytest.mark.usefixtures("both_kernels")

TOKENS = 16
CODECS = {
    "int8": Int8Codec(),
    "int8 by channel": Int8Codec(k="channel", group=11),
    "int8 over a range": Int8Codec(k="range"),
    "int8 over a range of 10": Int8Codec(k="range", group=5),
    "int8 of 48": Int8Codec(group=48),
    "int4": Int4Codec(),
    "int4 by token": Int4Codec(k="token"),
    "int4 of 64": Int4Codec(group=64),
    "int4 of 7": Int4Codec(group=7, k="token"),
    "int4 of 5 rows": Int4Codec(group=5),
    "fp8": Fp8Codec(),
    "fp8 of 48": Fp8Codec(group=48),
    "fp8 as it is": Fp8Codec(scaled=False),
}
HEAD_DIMS = (64, 80, 96, 112, 128, 576)


def layer_of(shape: tuple[int, ...], dtype: DType) -> LayerSpec:
    return LayerSpec((TensorSpec("k", shape, dtype), TensorSpec("v", shape, dtype)))


def raw_of(values: npt.NDArray[np.float32], dtype: DType) -> ByteArray:
    as_float16 = dtype is DType.FLOAT16
    found: ByteArray = (
        (values.astype(np.float16) if as_float16 else bf16_of(values)).view(np.uint8).reshape(-1)
    )
    return found


def through(codec: Codec, layer: LayerSpec, data: ByteArray) -> tuple[ByteArray, int]:
    dst = page_aligned(codec.max_encoded_nbytes(layer, data.size // layer.nbytes))
    used = codec.encode_into(data.data, layer, dst)
    out = np.full(data.size, 0xA5, np.uint8)
    codec.decode_into(dst[:used], layer, out.data)
    return out, used


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", sorted(CODECS))
def test_head_sizes_and_groups_that_do_not_divide_them(name: str, head_dim: int, dtype: DType) -> None:
    codec, layer = CODECS[name], layer_of((TOKENS, 2, head_dim), dtype)
    values = np.random.default_rng(head_dim).standard_normal(2 * layer.nbytes // 2).astype(np.float32)
    data = raw_of(values * np.float32(3), dtype)
    out, used = through(codec, layer, data)
    assert used < data.size * 0.85  # nothing was kept as it is; groups of 5 gain little
    for error in slice_errors(data.data, out.data, layer):
        assert 0 < error.bounded <= codec.error_bound(error.tensor)


def steps_of(name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The largest error of one value, for groups of constants."""
    if name.startswith("int4"):
        return np.zeros_like(values)
    share = 1 / 127 if name.startswith("int8") else 1 / 16
    steps: npt.NDArray[np.float32] = np.abs(values) * np.float32(share)
    return steps


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize("name", sorted(set(CODECS) - {"fp8 as it is"}))
def test_constants_come_back_within_one_step(name: str, dtype: DType) -> None:
    """Groups of one value, whatever it is, with scales that are finite: by token and by channel."""
    codec = CODECS[name]
    constants = np.array([0, 1, -3, 6e4, 1e-8, -1e-8, 0.1, 448], np.float32)
    by_token = constants.repeat(TOKENS // 8)[:, None].repeat(512, 1)
    by_channel = constants.repeat(64)[None].repeat(TOKENS, 0)
    k = by_channel if getattr(codec, "k", "token") in ("channel", "range") else by_token
    data = raw_of(np.stack([k, by_token]), dtype)
    out, _ = through(codec, layer_of((TOKENS, 8, 64), dtype), data)
    x, y = as_float32(data, dtype), as_float32(out, dtype)
    assert np.isfinite(y).all()
    # the smallest float16 is as far from a zero as a step
    smallest = np.float32(6e-8 if dtype is DType.FLOAT16 else 0)
    assert (np.abs(x - y) <= steps_of(name, x) + smallest).all()


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize("mean", [0.0, 300.0])
def test_keys_of_the_first_token_are_all_but_exact(mean: float, dtype: DType) -> None:
    """Where the other keys of a channel are finer than its values: those are off by half a step, as ever."""
    rows = 64
    layer = LayerSpec((TensorSpec("k", (rows, 3, 48), dtype),))
    values = np.random.default_rng(3).standard_normal((rows, 144)).astype(np.float32) + np.float32(mean)
    values[0, ::2] = mean + 6  # the first token beyond the range of the others, as real ones are
    data = raw_of(values, dtype)
    out, _ = through(Int4Codec(), layer, data)
    x, y = (as_float32(a, dtype).reshape(2, 32, 144) for a in (data, out))
    steps = (x.max(axis=1) - x.min(axis=1)) / 15
    coarse = np.abs(x).max() * np.float32(2.0 ** (-8 if dtype is DType.BFLOAT16 else -11))  # of one value
    off = np.abs(x - y).max(axis=1)
    assert (off <= 0.57 * steps + coarse).all()
    if mean == 0:
        assert (np.abs(x - y)[0, 0] <= 0.07 * steps[0]).all()


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", sorted(CODECS))
def test_what_is_not_finite_harms_no_neighbour(name: str, wrong: float, dtype: DType) -> None:
    """Its own group is kept bit for bit; every other group decodes as it does without it."""
    codec, layer = CODECS[name], layer_of((TOKENS, 2, 64), dtype)
    values = np.random.default_rng(1).standard_normal(layer.nbytes // 2).astype(np.float32)
    data = raw_of(values, dtype)
    spoilt = data.copy()
    at = [5, 2048 + 700]  # in K and in V
    spoilt.view(np.uint16)[at] = raw_of(np.full(2, wrong, np.float32), dtype).view(np.uint16)
    before, _ = through(codec, layer, data)
    after, used = through(codec, layer, spoilt)
    x, y, z = (a.view(np.uint16) for a in (spoilt, before, after))
    kept = z == x
    assert kept[at].all()
    assert (kept | (z == y)).all()
    if name != "fp8 as it is":  # which has no groups
        groups = 3 if "over a range" in name else 2  # its keys have groups twice as long
        assert (z != y).sum() <= groups * (
            codec.group if isinstance(codec, Int8Codec | Int4Codec | Fp8Codec) else 0
        )
        assert used < 0.85 * data.size


def test_not_even_fp8_without_a_scale_gives_values_up() -> None:
    """Above 448 the tensor is kept as it is, up to it there is no infinity."""
    layer = layer_of((TOKENS, 1, 64), DType.BFLOAT16)
    values = np.random.default_rng(1).uniform(-448, 448, layer.nbytes // 2).astype(np.float32)
    values[0] = 448
    assert np.isfinite(
        as_float32(through(Fp8Codec(scaled=False), layer, raw_of(values, DType.BFLOAT16))[0], DType.BFLOAT16)
    ).all()
    values[0] = 450
    data = raw_of(values, DType.BFLOAT16)
    out, _ = through(Fp8Codec(scaled=False), layer, data)
    assert np.array_equal(out[: layer.nbytes // 2], data[: layer.nbytes // 2])
    assert not np.array_equal(out, data)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_zeros_and_subnormals(name: str) -> None:
    """Zeros stay zeros; what lies far below the largest of its group is at most a step away."""
    layer = layer_of((TOKENS, 1, 64), DType.BFLOAT16)
    raw = np.random.default_rng(1).integers(0, 128, layer.nbytes // 2).astype(np.uint16)  # subnormals
    raw[::3] = 0x8000
    out, _ = through(CODECS[name], layer, raw.view(np.uint8))
    y = as_float32(out, DType.BFLOAT16)
    assert np.isfinite(y).all()
    assert (np.abs(y) < 1e-30).all()
    zeros = np.zeros(layer.nbytes, np.uint8)
    assert not as_float32(through(CODECS[name], layer, zeros)[0], DType.BFLOAT16).any()


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_keys_may_stay_as_they_are(dtype: DType) -> None:
    layer = LayerSpec(tuple(TensorSpec(name, (TOKENS, 2, 64), dtype) for name in ("k", "v")))
    codec, half = Int8Codec(k="keep"), layer.nbytes // 2
    values = np.random.default_rng(3).normal(size=layer.nbytes // 2).astype(np.float32)
    data = (bf16_of(values) if dtype is DType.BFLOAT16 else values.astype(np.float16)).tobytes()
    out, again = page_aligned(codec.max_encoded_nbytes(layer)), page_aligned(layer.nbytes)
    used = codec.encode_into(memoryview(data), layer, out)
    assert used < 0.8 * layer.nbytes
    codec.decode_into(out[:used], layer, again)
    assert again[:half] == data[:half]
    assert again[half:] != data[half:]
    assert max(error.relative_l2 for error in slice_errors(memoryview(data), again, layer)) < 0.01


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_a_range_has_half_the_error_of_a_scale_at_the_same_size(dtype: DType) -> None:
    """Of keys as models have them: channels with a mean of their own, and little around it."""
    layer, rng = layer_of((300, 1, 64), dtype), np.random.default_rng(5)
    values = rng.standard_normal((2, 300, 64)).astype(np.float32)
    values += 4 * rng.standard_normal((2, 1, 64)).astype(np.float32)
    data = raw_of(values, dtype)
    found = {}
    for k in ("channel", "range"):
        out, used = through(Int8Codec(k=k), layer, data)
        assert data.size / used >= 1.93
        found[k] = next(iter(slice_errors(data.data, out.data, layer))).relative_l2
    assert found["range"] < found["channel"] * 0.6, found
    assert found["range"] < 0.006, found


def test_the_whole_range_has_codes() -> None:
    """The step is rounded up: the highest value is at most half a step away, not at the other end."""
    layer = layer_of((256, 1, 64), DType.FLOAT16)
    tops = np.geomspace(1e-4, 6e4, 64, dtype=np.float32)
    values = np.linspace(-0.5, 1, 256, dtype=np.float32)[:, None] * tops
    data = raw_of(np.stack([values, values]), DType.FLOAT16)
    out, _ = through(Int8Codec(k="range"), layer, data)
    x, y = (as_float32(raw, DType.FLOAT16).reshape(2, 256, 64)[0] for raw in (data, out))
    assert (np.abs(x - y) <= tops * np.float32(0.76 / 255 + 0.0005) + np.float32(6e-8)).all()
