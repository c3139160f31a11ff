"""Damaged frames (C093): an error or some values, no crash, no more memory than the slices explain."""

from __future__ import annotations

import contextlib
import tracemalloc

import numpy as np
import pytest

from kvferry.codecs import CodecPipeline, decode_frame
from kvferry.codecs import scratch as scratch_module
from kvferry.codecs.frame import parse_frame
from kvferry.codecs.kernels import use_kernels
from kvferry.codecs.native import native
from kvferry.core.errors import CodecError
from kvferry.core.spec import DType
from kvferry.testing.codecs import assert_guard, fill_of, guarded, kv_layer, mutations

LAYER, FLOAT32_LAYER = kv_layer(16, 1, 48), kv_layer(16, 1, 48, DType.FLOAT32)
CAP_NBYTES = 1 << 20
PIPELINES = (
    "raw", "ebp", "ebp(bits=3)", "split", "int8", "int8(k=channel)", "int8(k=range)", "int8(k=keep)", "int4",
    "int4(k=token, group=7)", "fp8", "fp8(scaled=false)", "lz4", "zstd", "shuffle|zstd", "int4|lz4", "dedup",
    "dedup(inner=int8)", "cast", "cast|ebp", "cast|int8", "cast(to=float16)|int8(k=range)",
    "cast(to=float16)|int8(k=keep)",
)  # fmt: skip

NOT_SMALLER = ("raw", "fp8(scaled=false)")
"""Their frames hold the slices as they are (unscaled, float8 has no infinity)."""


@pytest.mark.parametrize("kernels", ["native", "numpy"])
@pytest.mark.parametrize("text", PIPELINES)
def test_a_thousand_mutations_of_a_frame(text: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels == "native" and native().library is None:
        pytest.skip(f"no native kernels: {native().reason}")
    asked = [0]

    def counted(nbytes: int) -> memoryview:
        asked.append(nbytes)
        return memoryview(bytearray(nbytes))

    monkeypatch.setattr(scratch_module, "page_aligned", counted)
    pipeline = CodecPipeline.parse(text)
    layer = FLOAT32_LAYER if text.startswith("cast") else LAYER
    data = np.frombuffer(fill_of("values", layer.nbytes), np.uint8).copy()
    if "float16" not in text:  # which holds no infinity
        data.view(np.uint16)[[5, 901]] = 0x7F80  # groups that are kept, and escapes
    data[-200:] = 0
    dst = np.zeros(pipeline.max_encoded_nbytes(layer), np.uint8)
    with use_kernels(kernels):
        frame = bytes(dst[: pipeline.encode_into(data.data, layer, dst.data)])
        assert parse_frame(memoryview(frame)).stored_raw == (text in NOT_SMALLER)
        decoded = refused = 0
        tracemalloc.start()
        try:
            for mutated in mutations(frame, 1000):
                out, whole = guarded(layer.nbytes)
                with contextlib.suppress(CodecError):
                    refused += 1
                    decode_frame(memoryview(mutated), layer, out)
                    refused -= 1
                    decoded += 1
                assert_guard(whole, len(out))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert decoded
    assert refused
    assert peak < CAP_NBYTES
    assert max(asked) < CAP_NBYTES
