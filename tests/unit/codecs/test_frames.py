"""Many frames in one call: the same bytes as one by one, whichever kernels make them."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.codecs import CodecPipeline, decode_frame, decode_many, decode_row
from kvferry.codecs.frame import FLAGS_AT, STORED_RAW, aligned
from kvferry.core.errors import CodecError, CorruptBlockError
from kvferry.testing.codecs import kv_layer

pytestmark = pytest.mark.usefixtures("both_kernels")

LAYER, OTHER = kv_layer(16, 1, 48), kv_layer(7, 3, 16)
TEXTS = ("raw", "ebp", "split", "int8", "int4", "fp8", "shuffle|zstd", "dedup", "int8|lz4")


def values(nbytes: int, seed: int, *, noise: bool = False) -> memoryview:
    """KV that compresses, or noise that does not."""
    random = np.random.default_rng(seed)
    if noise:
        return memoryview(bytearray(random.bytes(nbytes)))
    floats = random.standard_normal(nbytes // 2).astype(np.float32).view(np.uint32) >> 16
    return memoryview(bytearray(floats.astype(np.uint16).tobytes()))


def slices(number: int) -> list[memoryview]:
    """The third one does not compress."""
    return [values(LAYER.nbytes, seed, noise=seed == 2) for seed in range(number)]


def one_by_one(text: str, srcs: list[memoryview]) -> list[bytes]:
    """Each by a call of its own, of one pipeline."""
    pipeline, found = CodecPipeline.parse(text), []
    for src in srcs:
        dst = memoryview(bytearray(pipeline.max_encoded_nbytes(LAYER)))
        found.append(bytes(dst[: pipeline.encode_into(src, LAYER, dst)]))
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_many_frames_are_those_of_single_calls(text: str) -> None:
    srcs = slices(5)
    expected = one_by_one(text, srcs)
    pipeline = CodecPipeline.parse(text)
    dsts = [memoryview(bytearray(pipeline.max_encoded_nbytes(LAYER))) for _ in srcs]
    sizes = pipeline.encode_many(srcs, LAYER, dsts)
    frames = [dst[:size] for dst, size in zip(dsts, sizes, strict=True)]
    assert [bytes(frame) for frame in frames] == expected
    assert pipeline.counts["calls"] == 5
    outs, single = ([memoryview(bytearray(LAYER.nbytes)) for _ in srcs] for _ in range(2))
    decode_many(frames, LAYER, outs)
    for frame, out in zip(frames, single, strict=True):
        decode_frame(frame, LAYER, out)
    assert outs == single
    if pipeline.lossless:
        assert outs == srcs


def test_what_is_decoded_past_the_caches_is_the_same_at_any_address() -> None:
    """2 MiB and more in one call; small outputs, of which some begin with a cache line."""
    layer, count = kv_layer(32, 5, 72), 48
    pipeline, src = CodecPipeline.parse("ebp"), values(layer.nbytes, 1)
    frame = memoryview(bytearray(pipeline.max_encoded_nbytes(layer)))
    frame = frame[: pipeline.encode_into(src, layer, frame)]
    apart = layer.nbytes + 8
    assert count * layer.nbytes >= 2 << 20
    place = memoryview(bytearray(count * apart))
    decode_many([frame] * count, layer, [place[at : at + layer.nbytes] for at in range(0, len(place), apart)])
    assert place == (bytes(src) + bytes(8)) * count


@pytest.mark.parametrize("text", TEXTS)
def test_frames_in_a_row(text: str) -> None:
    pipeline = CodecPipeline.parse(text, check="never")
    layers = [LAYER, OTHER, LAYER, LAYER]
    srcs = [values(layer.nbytes, seed, noise=seed == 2) for seed, layer in enumerate(layers)]
    room = sum(aligned(pipeline.max_encoded_nbytes(layer)) for layer in layers)
    whole = memoryview(bytearray(b"\xee" * (room + 8)))
    sizes = pipeline.encode_row(srcs, layers, whole[:room])
    at = 0
    for src, layer, size in zip(srcs, layers, sizes, strict=True):
        alone = memoryview(bytearray(pipeline.max_encoded_nbytes(layer)))
        assert (
            whole[at : at + size]
            == alone[: CodecPipeline.parse(text, check="never").encode_into(src, layer, alone)]
        )
        assert not any(whole[at + size : at + aligned(size)])
        at += aligned(size)
    assert whole[room:] == b"\xee" * 8
    outs = [memoryview(bytearray(layer.nbytes)) for layer in layers]
    row = decode_row(whole[:at], layers, outs)
    assert (row.nbytes, row.lossy, len(row.stages)) == (at, not pipeline.lossless, 1)
    if pipeline.lossless:
        assert outs == srcs
    else:
        assert decode_row(whole[:at], layers, outs, lossless_only=True).lossy
    with pytest.raises(CorruptBlockError):
        decode_row(whole[: at - 64], layers, outs)
    with pytest.raises(CodecError, match="bytes are needed"):
        pipeline.encode_row(srcs, layers, whole[: room - 64])


def test_what_is_outside_its_bound_makes_room_for_itself() -> None:
    """A frame in the middle grows; those behind it are encoded again."""
    pipeline = CodecPipeline.parse("int8", check="always")
    srcs = [values(LAYER.nbytes, seed) for seed in range(4)]
    outlier = np.frombuffer(srcs[1], np.uint16).reshape(-1, 48)
    outlier[:, 3] = 0x4700  # 32768 in one channel
    whole = memoryview(bytearray(4 * aligned(pipeline.max_encoded_nbytes(LAYER))))
    sizes = pipeline.encode_row(srcs, [LAYER] * 4, whole)
    starts = [sum(map(aligned, sizes[:index])) for index in range(4)]
    assert [bool(whole[at + FLAGS_AT] & STORED_RAW) for at in starts] == [False, True, False, False]
    assert pipeline.counts == {"calls": 4, "stored_raw": 1, "out_of_bound": 1}
    outs = [memoryview(bytearray(LAYER.nbytes)) for _ in srcs]
    assert decode_row(whole[: sum(map(aligned, sizes))], [LAYER] * 4, outs).lossy
    assert outs[1] == srcs[1]
    dsts = [memoryview(bytearray(pipeline.max_encoded_nbytes(LAYER))) for _ in srcs]
    assert pipeline.encode_many(srcs, LAYER, dsts) == sizes


def test_frames_of_several_pipelines_and_damage() -> None:
    srcs = slices(4)
    frames = [bytearray(one_by_one(text, srcs[:1])[0]) for text in ("ebp", "int8", "ebp", "raw")]
    outs = [memoryview(bytearray(LAYER.nbytes)) for _ in frames]
    decode_many([memoryview(frame) for frame in frames], LAYER, outs)
    assert outs[0] == outs[2] == outs[3] == srcs[0]
    with pytest.raises(CodecError, match="takes no loss"):
        decode_many([memoryview(frame) for frame in frames], LAYER, outs, lossless_only=True)
    frames[2][9] ^= 1
    with pytest.raises(CorruptBlockError):
        decode_many([memoryview(frame) for frame in frames], LAYER, outs)
    dst = memoryview(bytearray(LAYER.nbytes))
    with pytest.raises(CodecError, match="bytes are needed"):
        CodecPipeline.parse("ebp").encode_many(srcs[:2], LAYER, [dst, dst])
