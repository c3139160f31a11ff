from __future__ import annotations

import struct

import numpy as np
import pytest

from kvferry.codecs import CodecPipeline
from kvferry.codecs.dedup import DedupCodec
from kvferry.codecs.ebp import EbpCodec
from kvferry.core.buffers import ByteArray, page_aligned
from kvferry.core.errors import CodecError, CorruptBlockError, UnknownPluginError
from kvferry.core.spec import DType, LayerSpec, TensorSpec
from kvferry.testing.codecs import kv_layer

LAYER = kv_layer(64, 2, 32)


def slices(layer: LayerSpec, kinds: int, count: int = 2, tensor: int = 1) -> ByteArray:
    """Values at random, but in one tensor only ``kinds`` different rows; padding that is not zero."""
    rng = np.random.default_rng(kinds)
    data = (rng.standard_normal(count * layer.nbytes // 2).astype(np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    found: ByteArray = data.view(np.uint8).reshape(count, layer.nbytes)
    spec, at = layer.slots()[tensor]
    row = spec.nbytes // spec.shape[0]
    table = found[0, at : at + kinds * row].reshape(kinds, row).copy()
    chosen = table[rng.integers(0, kinds, count * spec.shape[0])]
    found[:, at : at + spec.nbytes] = chosen.reshape(count, -1)
    return found.reshape(-1)


def encoded(codec: DedupCodec | EbpCodec, layer: LayerSpec, data: ByteArray) -> memoryview:
    dst = page_aligned(codec.max_encoded_nbytes(layer, data.size // layer.nbytes))
    return dst[: codec.encode_into(data.data, layer, dst)]


@pytest.mark.parametrize("inner", ["ebp", "split", "raw"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_rows_that_repeat_are_encoded_once(inner: str, count: int) -> None:
    codec, data = DedupCodec(inner), slices(LAYER, 8, count)
    frame = encoded(codec, LAYER, data)
    out = np.full(data.size, 0xA5, np.uint8)
    codec.decode_into(frame, LAYER, out.data)
    assert np.array_equal(out, data)
    v = sum(LAYER.slots()[1].spec.nbytes for _ in range(count))
    assert len(frame) < data.size - v + v * 0.2 + 100


def test_rows_that_differ_cost_a_header() -> None:
    data = slices(LAYER, 1, 1)
    data[LAYER.nbytes // 2 :] = data[: LAYER.nbytes // 2]  # V as K, which is all different
    assert bytes(encoded(DedupCodec(), LAYER, data)[8:]) == bytes(encoded(EbpCodec(), LAYER, data))


def test_rows_that_only_begin_alike_are_no_repetition() -> None:
    data = slices(LAYER, 4, 1)
    _, at = LAYER.slots()[1]
    data[at + 100 :: 128] = np.random.default_rng(1).integers(0, 256, len(data[at + 100 :: 128]))
    codec = DedupCodec()
    frame = encoded(codec, LAYER, data)
    assert frame[0] == 0
    out = np.zeros_like(data)
    codec.decode_into(frame, LAYER, out.data)
    assert np.array_equal(out, data)


def test_padding_and_other_tensors_are_kept() -> None:
    layer = LayerSpec(
        (
            TensorSpec("k", (16, 1, 9), DType.BFLOAT16),
            TensorSpec("state", (), DType.FLOAT32),
            TensorSpec("v", (16, 1, 9), DType.FLOAT16),
            TensorSpec("none", (0, 4), DType.BFLOAT16),
        )
    )
    assert layer.nbytes > layer.data_nbytes
    data = slices(layer, 2, 3, tensor=2)
    codec = DedupCodec()
    frame = encoded(codec, layer, data)
    assert frame[0] == 1
    out = np.zeros_like(data)
    codec.decode_into(frame, layer, out.data)
    assert np.array_equal(out, data)


def test_more_kinds_than_sixteen_bits_count() -> None:
    layer = LayerSpec((TensorSpec("v", (140_000, 16), DType.BFLOAT16),))
    rows = np.zeros((140_000, 4), np.uint64)
    rows[::2] = np.arange(70_000)[:, None]
    data = rows.view(np.uint8).reshape(-1)
    codec = DedupCodec("raw")
    frame = encoded(codec, layer, data)
    assert frame[0] == 1
    assert len(frame) < 0.7 * data.size
    out = np.zeros_like(data)
    codec.decode_into(frame, layer, out.data)
    assert np.array_equal(out, data)


@pytest.mark.parametrize(
    ("at", "value"), [(0, 2), (1, 3), (8, 1), (12, 200), (12, 0xFFFFFFFF), (12, 7), (16, 0xFFFF)]
)
def test_damaged_sections(at: int, value: int) -> None:
    codec = DedupCodec("raw")
    frame = bytearray(encoded(codec, LAYER, slices(LAYER, 8, 1)))
    assert frame[0] == 1
    struct.pack_into("<B" if at < 8 else "<H" if at == 16 else "<I", frame, at, value)
    with pytest.raises(CorruptBlockError):
        codec.decode_into(memoryview(frame), LAYER, page_aligned(LAYER.nbytes))


def test_parameters() -> None:
    assert DedupCodec().config() == {}
    assert DedupCodec().lossless
    lossy = DedupCodec.from_config({"inner": "int8( k=channel )"})
    assert lossy.config() == {"inner": "int8(k=channel)"}
    assert not lossy.lossless
    assert lossy.error_bound(LAYER.tensors[0]) == 0.025
    for wrong in ("ebp|lz4", "lz4", "shuffle", "dedup"):
        with pytest.raises(CodecError, match="one other codec"):
            DedupCodec(wrong)
    with pytest.raises(UnknownPluginError, match="did you mean split"):
        DedupCodec("splot")
    with pytest.raises(CodecError, match="did you mean inner"):
        DedupCodec.from_config({"iner": "ebp"})


def test_nested_as_deep_as_a_peer_likes_it_is_refused_in_few_words() -> None:
    with pytest.raises(CodecError, match="write one other codec") as raised:
        CodecPipeline.parse("dedup(inner=" * 5000 + "ebp" + ")" * 5000)
    assert len(str(raised.value)) < 200
