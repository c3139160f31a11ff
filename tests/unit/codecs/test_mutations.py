"""Damaged frames (C093): an error or some values, no crash, no more memory than the slices explain."""

from __future__ import annotations

import contextlib
import tracemalloc

import numpy as np
import pytest

from kvferry.codecs import CodecPipeline, decode_frame
from kvferry.codecs import scratch as scratch_module
from kvferry.codecs.kernels import use_kernels
from kvferry.codecs.native import native
from kvferry.core.errors import CodecError
from kvferry.testing.codecs import assert_guard, fill_of, guarded, kv_layer, mutations

LAYER = kv_layer(16, 1, 48)
CAP_NBYTES = 1 << 20
PIPELINES = (
    "raw", "ebp", "ebp(bits=3)", "split", "int8", "int8(k=channel)", "int8(k=range)", "int4",
    "int4(k=token, group=7)", "fp8", "fp8(scaled=false)", "lz4", "zstd", "shuffle|zstd", "int4|lz4", "dedup",
    "dedup(inner=int8)",
)  # fmt: skip


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
    data = np.frombuffer(fill_of("values", LAYER.nbytes), np.uint8).copy()
    data.view(np.uint16)[[5, 900]] = 0x7F80  # groups that are kept, and escapes
    data[-200:] = 0
    dst = np.zeros(pipeline.max_encoded_nbytes(LAYER), np.uint8)
    with use_kernels(kernels):
        frame = bytes(dst[: pipeline.encode_into(data.data, LAYER, dst.data)])
        decoded = refused = 0
        tracemalloc.start()
        try:
            for mutated in mutations(frame, 1000):
                out, whole = guarded(LAYER.nbytes)
                with contextlib.suppress(CodecError):
                    refused += 1
                    decode_frame(memoryview(mutated), LAYER, out)
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
