"""Any shape, any values: lossless pipelines give the bits back, lossy ones values within their bound."""

from __future__ import annotations

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
    ("ebp", "ebp(bits=3)", "ebp(bits=4)", "split", "shuffle|zstd", "ebp|lz4", "split|zstd")
)
GROUPS = st.integers(2, 127)
LOSSY = (
    st.builds("int8(k={}, group={})".format, st.sampled_from(("token", "channel")), GROUPS)
    | st.builds("int4(group={}, k={})".format, GROUPS, st.sampled_from(("token", "channel")))
    | st.builds("fp8(group={})".format, GROUPS)
    | st.sampled_from(("fp8(scaled=false)", "int8|zstd"))
)


@st.composite
def slices(draw: st.DrawFn) -> tuple[LayerSpec, ByteArray]:
    dtype = draw(st.sampled_from((DType.BFLOAT16, DType.FLOAT16)))
    shape = (draw(st.integers(0, 40)), draw(st.integers(1, 3)), draw(HEAD_DIMS))
    layer = LayerSpec((TensorSpec("k", shape, dtype), TensorSpec("v", shape[:2], dtype)))
    count = draw(st.integers(0, 3)) if layer.nbytes else 0
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    total = count * layer.nbytes // 2
    values = rng.standard_normal(total).astype(np.float32) * np.float32(10.0 ** draw(st.integers(-8, 4)))
    values *= np.exp(rng.standard_normal(total) * draw(st.floats(0, 3))).astype(np.float32)
    with np.errstate(over="ignore"):
        raw = values.astype(np.float16).view(np.uint16) if dtype is DType.FLOAT16 else bf16_of(values)
    if total:
        kind = draw(st.sampled_from(("values", "bits", "some bits", "zeros", "constant")))
        if kind == "bits":
            raw = rng.integers(0, 1 << 16, total).astype(np.uint16)
        elif kind == "some bits":
            raw[rng.integers(0, total, 1 + total // 100)] = rng.integers(0, 1 << 16)
        elif kind == "zeros":
            raw[rng.random(total) < 0.7] = rng.choice([0, 0x8000])
        elif kind == "constant":
            raw[:] = raw[0]
    found: ByteArray = raw.view(np.uint8)
    return layer, found


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
    layer, data = given_slices
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
        assert error.bounded <= pipeline.codec.error_bound(error.tensor)
    # NaN payloads are kept as they are, so readers agree to the bit
    assert all(np.array_equal(outs[0], out) for out in outs)
