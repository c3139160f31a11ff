"""Any shape, any values: lossless pipelines give the bits back, lossy ones values within their bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.codecs import CodecPipeline, decode_frame
from kvferry.codecs.error import slice_errors
from kvferry.codecs.fallback.floats import bf16_of
from kvferry.codecs.frame import parse_frame
from kvferry.codecs.kernels import use_kernels
from kvferry.codecs.native import native
from kvferry.core.buffers import ByteArray, page_aligned
from kvferry.core.spec import DType, LayerSpec, TensorSpec

KERNELS = ("numpy", *(("native",) if native().library is not None else ()))
HEAD_DIMS = st.sampled_from((1, 2, 7, 31, 33, 64, 80, 96, 112, 128, 576)) | st.integers(1, 150)
LOSSLESS = st.sampled_from(
    ("ebp", "ebp(bits=3)", "ebp(bits=4)", "split", "shuffle|zstd", "ebp|lz4", "split|zstd", "dedup")
) | st.builds("dedup(inner={})".format, st.sampled_from(("split", "raw")))
GROUPS = st.integers(2, 127)
INT8 = st.builds(
    "int8(k={}, group={})".format, st.sampled_from(("token", "channel", "range", "keep")), GROUPS
)
LOSSY = (
    INT8
    | st.builds("int4(group={}, k={})".format, GROUPS, st.sampled_from(("token", "channel")))
    | st.builds("fp8(group={})".format, GROUPS)
    | st.sampled_from(("fp8(scaled=false)", "int8|zstd", "dedup(inner=int8)", "dedup(inner=int8(k=range))"))
)
CAST = st.builds(
    "{}{}".format,
    st.sampled_from(("cast", "cast(to=float16)")),
    st.just("") | st.sampled_from(("|ebp", "|split|zstd")) | INT8.map("|{}".format),
)
HALVES = (DType.BFLOAT16, DType.FLOAT16)


@st.composite
def slices(draw: st.DrawFn, dtypes: tuple[DType, ...] = HALVES) -> tuple[LayerSpec, ByteArray]:
    dtype = draw(st.sampled_from(dtypes))
    shape = (draw(st.integers(0, 40)), draw(st.integers(1, 3)), draw(HEAD_DIMS))
    layer = LayerSpec((TensorSpec("k", shape, dtype), TensorSpec("v", shape[:2], dtype)))
    count = draw(st.integers(0, 3)) if layer.nbytes else 0
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    total = count * layer.nbytes // dtype.itemsize
    values = rng.standard_normal(total).astype(np.float32) * np.float32(10.0 ** draw(st.integers(-8, 4)))
    values *= np.exp(rng.standard_normal(total) * draw(st.floats(0, 3))).astype(np.float32)
    raw = bits_of(values, dtype)
    if total:
        kind = draw(st.sampled_from(("values", "bits", "some bits", "zeros", "constant", "repeated rows")))
        bits = 8 * dtype.itemsize
        if kind == "bits":
            raw = rng.integers(0, 1 << bits, total).astype(raw.dtype)
        elif kind == "some bits":
            raw[rng.integers(0, total, 1 + total // 100)] = rng.integers(0, 1 << bits)
        elif kind == "zeros":
            raw[rng.random(total) < 0.7] = rng.choice([0, 1 << bits - 1])
        elif kind == "constant":
            raw[:] = raw[0]
        elif kind == "repeated rows":
            raw = np.resize(raw[: shape[1] * shape[2] * draw(st.integers(1, 5))], total)
    found: ByteArray = raw.view(np.uint8)
    return layer, found


def bits_of(values: Any, dtype: DType) -> Any:
    """float32 values as ``dtype``, as integers."""
    if dtype is DType.FLOAT32:
        return values.view(np.uint32).copy()
    with np.errstate(over="ignore"):
        return values.astype(np.float16).view(np.uint16) if dtype is DType.FLOAT16 else bf16_of(values)


def encoded(text: str, layer: LayerSpec, data: ByteArray, kernels: str) -> tuple[CodecPipeline, memoryview]:
    pipeline = CodecPipeline.parse(text, check="always")
    dst = page_aligned(pipeline.max_encoded_nbytes(layer, data.size // layer.nbytes if layer.nbytes else 0))
    with use_kernels(kernels):
        return pipeline, dst[: pipeline.encode_into(data.data, layer, dst)]


@pytest.mark.parametrize("reader", KERNELS)
@pytest.mark.parametrize("writer", KERNELS)
@settings(max_examples=300)
@given(slices(), LOSSLESS)
def test_lossless(writer: str, reader: str, given_slices: tuple[LayerSpec, ByteArray], text: str) -> None:
    layer, data = given_slices
    _, frame = encoded(text, layer, data, writer)
    out = np.full(data.size, 0xA5, np.uint8)
    with use_kernels(reader):
        found = decode_frame(frame, layer, out.data, lossless_only=True)
    assert not found.lossy
    assert np.array_equal(out, data)


@pytest.mark.parametrize("writer", KERNELS)
@settings(max_examples=400)
@given(slices(), LOSSY)
def test_lossy(writer: str, given_slices: tuple[LayerSpec, ByteArray], text: str) -> None:
    assert_within_bound(writer, *given_slices, text)


@pytest.mark.parametrize("writer", KERNELS)
@settings(max_examples=300)
@given(slices((DType.FLOAT32,)), CAST)
def test_cast(writer: str, given_slices: tuple[LayerSpec, ByteArray], text: str) -> None:
    assert_within_bound(writer, *given_slices, text)


def assert_within_bound(writer: str, layer: LayerSpec, data: ByteArray, text: str) -> None:
    pipeline, frame = encoded(text, layer, data, writer)
    assert len(frame) <= data.size + 128
    outs = [np.full(data.size, 0xA5, np.uint8) for _ in KERNELS]
    found = parse_frame(frame)
    for reader, out in zip(KERNELS, outs, strict=True):
        with use_kernels(reader):
            decode_frame(frame, layer, out.data)
    counts = pipeline.counts
    assert counts["calls"] == 1
    assert counts["stored_raw"] == found.stored_raw != found.lossy
    if found.stored_raw:
        assert np.array_equal(outs[0], data)
    else:
        assert counts["out_of_bound"] == 0
    for error in slice_errors(data.data, outs[0].data, layer):
        bound = sum(stage.error_bound(error.tensor) for stage in pipeline.arrays)
        assert error.bounded <= pipeline.codec.error_bound(error.tensor) + bound
    # NaN payloads are kept as they are, so readers agree to the bit
    assert all(np.array_equal(outs[0], out) for out in outs)
