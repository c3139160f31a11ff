from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar

import numpy as np
import pytest

from kvferry.codecs import ArrayStage, CodecPipeline, decode_frame
from kvferry.codecs.base import Codec
from kvferry.codecs.decoding import decode_many, decode_row
from kvferry.codecs.error import slice_errors
from kvferry.codecs.frame import aligned
from kvferry.codecs.native import native
from kvferry.codecs.quantised import Int4Codec, Int8Codec
from kvferry.codecs.raw import RawCodec
from kvferry.codecs.scratch import Scratch
from kvferry.codecs.stages import registry
from kvferry.codecs.tensors import TensorCodec
from kvferry.core.buffers import ByteArray, page_aligned
from kvferry.core.errors import CodecError, CorruptBlockError
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.testing.codecs import kv_layer

LAYER = kv_layer(16, 2, 64)
PIPELINES = (
    "raw",
    "ebp",
    "split",
    "int8",
    "int4",
    "fp8",
    "lz4",
    "shuffle",
    "shuffle|zstd",
    "int8|lz4",
    "shuffle|lz4|zstd",
    "int4|zstd|lz4|zstd",
)


def normal(layer: LayerSpec, seed: int, count: int = 1, scale: float = 1.0) -> ByteArray:
    """Values as bfloat16, whatever the layer's type is; the padding is not zero."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(count * layer.nbytes // 2) * scale).astype(np.float32)
    found: ByteArray = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return found


def encode(pipeline: CodecPipeline, data: ByteArray, layer: LayerSpec = LAYER) -> memoryview:
    dst = page_aligned(pipeline.max_encoded_nbytes(layer, data.size // layer.nbytes))
    return dst[: pipeline.encode_into(data.data, layer, dst)]


@pytest.mark.parametrize("text", PIPELINES)
def test_round_trip_through_frames(text: str) -> None:
    pipeline = CodecPipeline.parse(text)
    for count in (0, 1, 3):
        data = normal(LAYER, count, count)
        frame = encode(pipeline, data)
        for decode in (pipeline.decode_into, decode_frame):
            out = np.full(data.size, 0xA5, np.uint8)
            decode(frame, LAYER, out.data)
            if pipeline.lossless:
                assert np.array_equal(out, data)


@pytest.mark.parametrize("text", PIPELINES)
def test_output_one_byte_too_small(text: str) -> None:
    pipeline = CodecPipeline.parse(text)
    whole = np.full(pipeline.max_encoded_nbytes(LAYER) + 64, 0xA5, np.uint8)
    with pytest.raises(CodecError, match="bytes are needed"):
        pipeline.encode_into(normal(LAYER, 0).data, LAYER, whole.data[:-65])
    assert (whole[-65:] == 0xA5).all()


@pytest.mark.parametrize("text", PIPELINES)
def test_a_read_only_output_is_refused_and_stays(text: str) -> None:
    pipeline = CodecPipeline.parse(text)
    data = normal(LAYER, 0)
    fixed = bytes(pipeline.max_encoded_nbytes(LAYER))
    with pytest.raises(CodecError, match="read-only"):
        pipeline.encode_into(data.data, LAYER, memoryview(fixed))
    frame, out = encode(pipeline, data), bytes(LAYER.nbytes)
    row = page_aligned(aligned(len(frame)))
    row[: len(frame)] = frame
    for decode in (
        partial(pipeline.decode_into, frame, LAYER),
        partial(decode_frame, frame, LAYER),
        lambda dst: decode_many([frame], LAYER, [dst]),
        lambda dst: decode_row(row, [LAYER], [dst]),
    ):
        decode(page_aligned(LAYER.nbytes))  # the next one goes the way of frames that look like the last
        with pytest.raises(CodecError, match="read-only"):
            decode(memoryview(out))
    if isinstance(pipeline.codec, TensorCodec) and not pipeline.bytes:
        with pytest.raises(CodecError, match="read-only"):
            pipeline.codec.decode_into(frame[64:], LAYER, memoryview(out))
        with pytest.raises(CodecError, match="read-only"):
            pipeline.codec.encode_into(data.data, LAYER, memoryview(fixed))
    assert not any(out)
    assert not any(fixed)


@pytest.mark.parametrize("text", ["ebp", "int8", "int8|lz4", "cast"])
def test_a_frame_cannot_deny_its_loss(text: str) -> None:
    layer = kv_layer(16, 2, 64, DType.FLOAT32) if text == "cast" else LAYER
    frame, out = encode(CodecPipeline.parse(text), normal(layer, 0), layer), page_aligned(layer.nbytes)
    decode_frame(frame, layer, out)  # the next one may go the way of frames that look like the last
    frame[4] ^= 1
    row = page_aligned(aligned(len(frame)))
    row[: len(frame)] = frame
    with pytest.raises(CorruptBlockError, match="is said to be"):
        decode_frame(frame, layer, out)
    with pytest.raises(CorruptBlockError, match="is said to be"):
        decode_row(row, [layer], [out])


@pytest.mark.parametrize("text", PIPELINES)
def test_parts_of_slices_are_refused(text: str) -> None:
    pipeline = CodecPipeline.parse(text)
    dst = page_aligned(2 * pipeline.max_encoded_nbytes(LAYER))
    with pytest.raises(CodecError):
        pipeline.encode_into(memoryview(bytes(LAYER.nbytes - 1)), LAYER, dst)
    frame = encode(pipeline, normal(LAYER, 0))
    for nbytes in (LAYER.nbytes - 1, 2 * LAYER.nbytes, 0):
        with pytest.raises(CodecError):
            decode_frame(frame, LAYER, page_aligned(nbytes))


def test_random_bits_are_stored_as_they_are_and_counted() -> None:
    data = np.random.default_rng(1).integers(0, 256, LAYER.nbytes, np.uint8)
    for text in ("zstd", "shuffle|lz4", "int8"):  # bits at random are too wide for every scale, or NaN
        pipeline = CodecPipeline.parse(text)
        frame = encode(pipeline, data)
        assert len(frame) <= LAYER.nbytes + 64
        found = decode_frame(frame, LAYER, page_aligned(LAYER.nbytes))
        assert found.stored_raw
        assert not found.lossy
        assert pipeline.counts["stored_raw"] == 1


def test_another_pipeline_is_not_decoded_by_this_one() -> None:
    frame = encode(CodecPipeline.parse("ebp(bits=4)"), normal(LAYER, 0))
    with pytest.raises(CorruptBlockError, match="other stages"):
        CodecPipeline.parse("ebp").decode_into(frame, LAYER, page_aligned(LAYER.nbytes))


def test_layouts_and_layers_that_it_does_not_apply_to() -> None:
    def spec(layer: LayerSpec, layout: str = "kvferry") -> KVSpec:
        return KVSpec(model="m", revision="r", layers=(LAYER, layer), block_tokens=16, layout=layout)

    plain = kv_layer(16, 1, 64, DType.FLOAT32)
    assert CodecPipeline.parse("ebp").unsupported(spec(LAYER)) == ""
    assert CodecPipeline.parse("ebp").unsupported(spec(plain)).startswith("layer 1: codec 'ebp' needs")
    assert "opaque" in CodecPipeline.parse("shuffle|zstd").unsupported(spec(LAYER, "theirs"))
    assert "bfloat16" in CodecPipeline.parse("shuffle|ebp").unsupported(spec(LAYER))
    for text in ("raw", "lz4", "zstd|lz4"):
        assert CodecPipeline.parse(text).unsupported(spec(plain, "theirs")) == ""


# -- C096, C101, C102 ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [
        LayerSpec(()),
        LayerSpec((TensorSpec("k", (0, 8, 128), DType.BFLOAT16),)),
        LayerSpec((TensorSpec("state", (), DType.FLOAT32),)),
        LayerSpec((TensorSpec("state", (), DType.BFLOAT16),)),
    ],
)
@pytest.mark.parametrize("text", PIPELINES)
def test_nothing_and_scalars_come_back_or_are_refused(text: str, layer: LayerSpec) -> None:
    pipeline = CodecPipeline.parse(text)
    data = np.arange(layer.nbytes).astype(np.uint8)
    spec = KVSpec(model="m", revision="r", layers=(layer,), block_tokens=16)
    if pipeline.unsupported(spec):
        with pytest.raises(CodecError, match="needs bfloat16"):
            encode(pipeline, np.zeros(64, np.uint8), layer)
        return
    dst = page_aligned(pipeline.max_encoded_nbytes(layer, 1))
    frame = dst[: pipeline.encode_into(data.data, layer, dst)]
    out = np.full(data.size, 0xA5, np.uint8)
    decode_frame(frame, layer, out.data)
    assert np.array_equal(out, data)


def test_a_stage_that_loses_nothing_says_so_and_the_others_too() -> None:
    lossy = {name for name in registry.names() if not registry.load(name).from_config({}).lossless}
    assert lossy == {"cast", "int8", "int4", "fp8"}
    assert CodecPipeline([]).lossless
    assert isinstance(CodecPipeline([]).codec, RawCodec)


@pytest.mark.parametrize("text", ["int8", "int4", "fp8", "int8|zstd"])
def test_lossy_frames_say_so_and_are_refused_by_readers_that_take_no_loss(text: str) -> None:
    frame = encode(CodecPipeline.parse(text), normal(LAYER, 0))
    assert decode_frame(frame, LAYER, page_aligned(LAYER.nbytes)).lossy
    with pytest.raises(CodecError, match="takes no loss"):
        decode_frame(frame, LAYER, page_aligned(LAYER.nbytes), lossless_only=True)
    frame[4] &= ~1  # a frame that hides it
    with pytest.raises(CodecError, match="takes no loss"):
        decode_frame(frame, LAYER, page_aligned(LAYER.nbytes), lossless_only=True)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("text", PIPELINES)
def test_every_type_keeps_its_bits(text: str, dtype: DType) -> None:
    shape = (16, 2, 24)
    layer = LayerSpec((TensorSpec("k", shape, dtype), TensorSpec("v", shape, DType.BFLOAT16)))
    pipeline = CodecPipeline.parse(text, check="never")
    nbytes = layer.slots()[0].spec.nbytes
    data = normal(layer, 3, 2).reshape(2, -1)
    data[:, :nbytes] = np.random.default_rng(5).integers(0, 256, (2, nbytes))  # NaN payloads among them
    out = np.full(data.size, 0xA5, np.uint8)
    decode_frame(encode(pipeline, data.reshape(-1), layer), layer, out.data)
    if pipeline.lossless or dtype not in (DType.BFLOAT16, DType.FLOAT16):
        assert np.array_equal(out.reshape(2, -1)[:, :nbytes], data[:, :nbytes])


# -- the bound -----------------------------------------------------------------------------------------


def test_a_slice_outside_the_bound_is_stored_as_it_is_and_counted(both_kernels: None) -> None:
    data = normal(LAYER, 0)
    pipeline = CodecPipeline([Int4Codec(bound=0.01)], check="always")
    for number in range(3):
        frame = encode(pipeline, data)
        out = np.zeros_like(data)
        found = decode_frame(frame, LAYER, out.data, lossless_only=False)
        assert found.stored_raw
        assert not found.lossy
        assert np.array_equal(out, data)
        counted = number + 1
        assert pipeline.counts == {"calls": counted, "stored_raw": counted, "out_of_bound": counted}


def with_outliers(layer: LayerSpec, *tensors: int) -> ByteArray:
    """Normal values, but one channel of some tensors is thirty times as large."""
    data = normal(layer, 0)
    values = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(2, 16, -1)
    for tensor in tensors:
        values[tensor, :, 5] *= 30
    found: ByteArray = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
    return found


@pytest.mark.parametrize("outliers", [(0,), (1,), (0, 1)])
def test_channels_that_stick_out_do_not_hide_an_error(both_kernels: None, outliers: tuple[int, ...]) -> None:
    """One tensor outside is enough, and its large channel does not make the error look small."""
    data = with_outliers(LAYER, *outliers)
    out = np.zeros_like(data)
    pipeline = CodecPipeline.parse("int8", check="never")
    pipeline.decode_into(encode(pipeline, data), LAYER, out.data)
    assert all(error.relative_l2 < 0.025 for error in slice_errors(data.data, out.data, LAYER))
    for text, outside in (
        ("int8", True),
        ("int8(k=channel)", 1 in outliers),
        ("int8(k=range)", 1 in outliers),
        ("int8(bound=0.5)", False),
    ):
        pipeline = CodecPipeline.parse(text, check="always")
        assert decode_frame(encode(pipeline, data), LAYER, out.data).stored_raw == outside
        assert pipeline.counts["out_of_bound"] == outside


@pytest.mark.parametrize("check", ["always", "sample", "never"])
def test_how_often_the_bound_is_checked(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By sampling, until a slice is outside: then each of the next 1024 calls."""
    codec = Int8Codec()
    pipeline = CodecPipeline([codec], check=check)
    checked: list[int] = []
    decode_into = codec.decode_into

    def counted(src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        checked.append(pipeline.counts["calls"] - 1)
        decode_into(src, layer, dst)

    monkeypatch.setattr(codec, "decode_into", counted)
    data = normal(LAYER, 0)
    first = 38  # of the third 16 calls the one that is due
    monkeypatch.setattr("kvferry.codecs.checks._AFTER_FAILURE", 64)
    for call in range(120):
        monkeypatch.setattr(codec, "bound", 1e-6 if call == first else None)
        encode(pipeline, data)
    sampled = [0, 28, *range(first, first + 65), *(n for n in checked if n > first + 64)]
    assert checked == {"always": list(range(120)), "sample": sampled, "never": []}[check]
    if check == "sample":  # one of each 16 again
        assert [n // 16 for n in checked if n > 112] == [7]
    assert pipeline.counts["out_of_bound"] == (check != "never")
    with pytest.raises(CodecError, match="sample, always or never"):
        CodecPipeline([], check="often")


@pytest.mark.parametrize("layers", [12, 16, 32, 80])
def test_no_layer_is_left_out_of_the_checks(layers: int) -> None:
    """Layers come in turn, so the 16th call would be the same few of them for ever."""
    fine, outside = normal(LAYER, 0), with_outliers(LAYER, 0)
    for bad in (1, layers - 1):
        pipeline = CodecPipeline.parse("int8")
        memory = memoryview(bytearray(layers * aligned(pipeline.max_encoded_nbytes(LAYER))))
        slices = [(outside if layer == bad else fine).data for layer in range(layers)]
        for _ in range(200):
            pipeline.encode_row(slices, (LAYER,) * layers, memory)
            if pipeline.counts["out_of_bound"]:
                break
        for _ in range(3):  # once it was seen it is seen in each block that follows
            pipeline.encode_row(slices, (LAYER,) * layers, memory)
        assert pipeline.counts["out_of_bound"] == 4


class Spoiling(Codec):
    """Loses a value entirely where nothing is finite any more."""

    codec_id: ClassVar[str] = "spoiling"
    lossless = False

    def error_bound(self, tensor: TensorSpec) -> float:
        return 1.0

    def max_encoded_nbytes(self, layer: LayerSpec, count: int = 1) -> int:
        return layer.nbytes * count

    def encode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> int:
        dst[: len(src) - 64] = src[64:]
        return len(src) - 64

    def decode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        dst[:64] = b"\xff" * 64
        dst[64:] = src


def test_a_bound_of_1_takes_any_error() -> None:
    layer = LayerSpec((TensorSpec("k", (16, 64), DType.FLOAT16),))
    values = np.random.default_rng(1).standard_normal((16, 64)).astype(np.float16)
    values[:, :4] *= 8000  # their step spoils all others, and their energy is capped
    for text, outside in (("int8", 1), ("int8(bound=0.99)", 1), ("int8(bound=1)", 0)):
        pipeline = CodecPipeline.parse(text, check="always")
        dst = memoryview(bytearray(pipeline.max_encoded_nbytes(layer)))
        pipeline.encode_into(values.view(np.uint8).reshape(-1).data, layer, dst)
        assert pipeline.counts["out_of_bound"] == outside


def test_values_that_are_no_numbers_any_more_are_outside_every_bound() -> None:
    pipeline = CodecPipeline([Spoiling()], check="always")
    encode(pipeline, normal(LAYER, 0))
    assert pipeline.counts["out_of_bound"] == 1


# -- threads and nested use ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["ebp", "shuffle|zstd", "int8|lz4", "shuffle|lz4|zstd"])
def test_eight_threads_on_one_pipeline(text: str) -> None:
    pipeline = CodecPipeline.parse(text, check="always")
    layers = [kv_layer(8 + n, 1 + n % 3, 32) for n in range(8)]
    inputs = [normal(layer, n, 2) for n, layer in enumerate(layers)]
    expected = [
        bytes(encode(CodecPipeline.parse(text, check="never"), d, e))
        for d, e in zip(inputs, layers, strict=True)
    ]
    barrier = threading.Barrier(8)

    def work(n: int) -> int:
        barrier.wait(30)
        wrong = 0
        for _ in range(40):
            frame = encode(pipeline, inputs[n], layers[n])
            wrong += bytes(frame) != expected[n]
            out = np.zeros_like(inputs[n])
            decode_frame(frame, layers[n], out.data)
            if pipeline.lossless:
                wrong += not np.array_equal(out, inputs[n])
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 0
    assert pipeline.counts == {"calls": 320, "stored_raw": 0, "out_of_bound": 0}


def test_threads_share_the_derived_pieces_of_a_plan() -> None:
    """The first calls of all threads at once: what is made for C must live as long as it is used."""
    if native().library is None:
        pytest.skip("only the native kernels have any")
    data = normal(LAYER, 0)
    for _ in range(30):
        pipeline = CodecPipeline.parse("ebp")
        barrier = threading.Barrier(8)

        def work(_: int, pipeline: CodecPipeline = pipeline, barrier: threading.Barrier = barrier) -> bytes:
            barrier.wait(30)
            return bytes(encode(pipeline, data))

        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(work, range(8)))) == 1


class Nested(ArrayStage):
    """A stage that uses a pipeline of its own for what it is given."""

    codec_id: ClassVar[str] = "nested"
    inner = CodecPipeline.parse("shuffle|zstd")

    def encoded_layer(self, layer: LayerSpec) -> LayerSpec:
        return layer

    def encode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        frame = encode(self.inner, np.zeros(len(src), np.uint8), layer)
        decode_frame(frame, layer, page_aligned(len(src)))
        dst[:] = src

    decode_into = encode_into


def test_a_stage_may_use_a_pipeline_itself() -> None:
    pipeline = CodecPipeline(
        [*CodecPipeline.parse("shuffle").stages, Nested(), *CodecPipeline.parse("zstd").stages]
    )
    data = normal(LAYER, 0)
    frame = encode(pipeline, data)
    out = np.zeros_like(data)
    pipeline.decode_into(frame, LAYER, out.data)
    assert np.array_equal(out, data)


def test_scratch_memory_is_used_again_and_what_is_large_is_given_back() -> None:
    scratch = Scratch()
    with scratch.taken() as buffer, scratch.taken() as inner:
        first = buffer("a", 1000)
        assert inner("a", 1000).obj is not first.obj
        assert buffer("a", 10).obj is first.obj
    with scratch.taken() as buffer:
        kept = {buffer("a", 1000).obj}
        large = buffer("large", (64 << 20) + 1).obj
    with scratch.taken() as buffer:
        assert buffer("a", 1000).obj in kept
        assert buffer("large", 1).obj is not large


@pytest.mark.parametrize("text", ["raw", "int4(group=64)|lz4", "dedup(inner=split)"])
def test_a_pipeline_goes_to_another_process_by_its_text(text: str) -> None:
    pipeline = CodecPipeline.parse(text, check="always")
    found = pickle.loads(pickle.dumps(pipeline))
    assert (found.text, found.checks.how) == (pipeline.text, "always")
