from __future__ import annotations

import numpy as np
import pytest

from kvferry.codecs import CodecPipeline, decode_frame
from kvferry.codecs.base import UnfitValuesError
from kvferry.codecs.cast import CastStage
from kvferry.core.buffers import page_aligned
from kvferry.core.errors import CodecError
from kvferry.core.spec import DType, LayerSpec, TensorSpec
from kvferry.testing.codecs import kv_layer

LAYER = kv_layer(32, 2, 64, DType.FLOAT32)


def through(text: str, values: np.ndarray, layer: LayerSpec = LAYER) -> np.ndarray:
    pipeline = CodecPipeline.parse(text, check="always")
    src = values.astype("<f4").view(np.uint8)
    frame = np.zeros(pipeline.max_encoded_nbytes(layer, len(src) // layer.nbytes), np.uint8)
    used = pipeline.encode_into(src.data, layer, frame.data)
    assert pipeline.counts["stored_raw"] == 0
    out = np.zeros_like(src)
    decode_frame(frame[:used].data, layer, out.data)
    return out.view("<f4")


def normal(count: int) -> np.ndarray:
    return np.random.default_rng(4).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize(
    ("text", "error"), [("cast", 0.004), ("cast(to=float16)", 0.001), ("cast|int8", 0.02)]
)
def test_float32_comes_back_within_the_bound(text: str, error: float) -> None:
    values = normal(3 * LAYER.nbytes // 4)
    back = through(text, values)
    assert np.linalg.norm(back - values) <= error * np.linalg.norm(values)


def test_what_bfloat16_holds_comes_back_as_it_was_and_cast_ebp_loses_no_more_than_cast() -> None:
    values = normal(LAYER.nbytes // 4)
    exact = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert np.array_equal(through("cast", exact), exact)
    assert np.array_equal(through("cast|ebp", values), through("cast", values))


def test_what_rounds_up_to_infinity_stays_finite() -> None:
    values = normal(LAYER.nbytes // 4)
    values[[1, 5, 9]] = [3.402e38, -3.402e38, np.inf]
    stage, out = CastStage(), np.zeros(LAYER.nbytes, np.uint8)
    narrow = np.zeros(stage.encoded_layer(LAYER).nbytes, np.uint8)
    stage.encode_into(values.view(np.uint8).data, LAYER, narrow.data)
    stage.decode_into(narrow.data, LAYER, out.data)
    back = out.view("<f4")
    assert back[[1, 5, 9]].tolist() == pytest.approx([3.3895e38, -3.3895e38, np.inf], rel=1e-4)


def test_values_that_are_not_finite_stay_what_they_are() -> None:
    values = normal(LAYER.nbytes // 4)
    values[[1, 5, 9]] = [np.inf, -np.inf, np.nan]
    values[2] = np.uint32(0x7F800001).view(np.float32)  # a NaN whose payload is below bfloat16's
    back = CastStage()
    src, out = values.view(np.uint8), np.zeros(LAYER.nbytes, np.uint8)
    narrow = np.zeros(back.encoded_layer(LAYER).nbytes, np.uint8)
    back.encode_into(src.data, LAYER, narrow.data)
    back.decode_into(narrow.data, LAYER, out.data)
    found = out.view("<f4")
    assert found[1] == np.inf
    assert found[5] == -np.inf
    assert np.isnan(found[[2, 9]]).all()


@pytest.mark.parametrize("value", [1e6, np.inf, np.nan])
def test_what_float16_cannot_hold_is_stored_as_it_is(value: float) -> None:
    values = normal(LAYER.nbytes // 4)
    values[3] = value
    narrow = np.zeros(LAYER.nbytes, np.uint8)
    stage = CastStage("float16")
    with pytest.raises(UnfitValuesError, match="65504"):
        stage.encode_into(values.data.cast("B"), LAYER, narrow.data[: stage.encoded_layer(LAYER).nbytes])
    pipeline = CodecPipeline.parse("cast(to=float16)|int8(k=keep)")
    dst = page_aligned(pipeline.max_encoded_nbytes(LAYER))
    nbytes = pipeline.encode_into(values.data.cast("B"), LAYER, dst)
    found = decode_frame(dst[:nbytes], LAYER, narrow.data, lossless_only=True)
    assert found.stored_raw
    assert narrow.tobytes() == values.tobytes()
    assert pipeline.counts["stored_raw"] == 1


def test_other_tensors_stay_and_padding_is_zero() -> None:
    layer = LayerSpec((TensorSpec("k", (3, 1), DType.FLOAT32), TensorSpec("n", (5,), DType.UINT8)))
    stage = CastStage()
    src = np.arange(layer.nbytes * 2, dtype=np.uint8)
    narrow = np.full(stage.encoded_layer(layer).nbytes * 2, 0xA5, np.uint8)
    stage.encode_into(src.data, layer, narrow.data)
    out = np.full(len(src), 0xA5, np.uint8)
    stage.decode_into(narrow.data, layer, out.data)
    for n in range(2):
        start = n * layer.nbytes
        assert np.array_equal(out[start + 12 : start + 17], src[start + 12 : start + 17])
        assert not out[start + 17 : start + layer.nbytes].any()


def test_it_says_what_it_does_not_take() -> None:
    assert "float32" in CastStage().unsupported(kv_layer(16, 1, 64))
    assert not CastStage().unsupported(LAYER)
    with pytest.raises(CodecError, match="bfloat16 or float16"):
        CodecPipeline.parse("cast(to=int8)")
    stage = CastStage()
    with pytest.raises(CodecError, match="slices"):
        stage.encode_into(memoryview(bytes(LAYER.nbytes)), LAYER, memoryview(bytearray(7)))
