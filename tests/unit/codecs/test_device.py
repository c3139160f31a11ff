"""Codecs on torch tensors write what the numpy kernels write, and read it."""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from kvferry.codecs import CodecPipeline
from kvferry.codecs.device import DevicePipeline
from kvferry.codecs.fallback.floats import bf16_of
from kvferry.codecs.kernels import use_kernels
from kvferry.core.buffers import ByteArray, page_aligned
from kvferry.core.errors import CodecError, CorruptBlockError
from kvferry.core.spec import DType, LayerSpec, TensorSpec
from kvferry.testing.codecs import kv_layer, mutations

PIPELINES = (
    "ebp", "ebp(bits=3)", "ebp(bits=4)", "int8", "int8(k=channel, group=11)", "int8(k=range)", "int8(k=keep)",
    "int8(k=range, group=5)", "int4",
    "int4(k=token, group=7)", "int4(group=5)", "fp8", "fp8(group=48)", "fp8(scaled=false)",
)  # fmt: skip
SHAPES = (
    (1, 16, 3, 64),
    (3, 16, 2, 80),
    (2, 7, 1, 96),
    (1, 33, 1, 112),
    (1, 16, 1, 576),
    (5, 1, 1, 7),
    (0, 4, 1, 8),
)


@pytest.fixture(params=["cpu", "cuda"])
def where(request: pytest.FixtureRequest) -> torch.device:
    """Where the tensors are."""
    name: str = request.param
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a torch that looks for a driver
        if name == "cuda" and not torch.cuda.is_available():
            pytest.skip("no CUDA device")
    return torch.device(name)


def slices(layer: LayerSpec, count: int, dtype: DType, kind: str) -> ByteArray:
    rng = np.random.default_rng(count)
    total = count * layer.nbytes // 2
    values = rng.standard_normal(total).astype(np.float32) * np.float32(3)
    raw = values.astype(np.float16).view(np.uint16) if dtype is DType.FLOAT16 else bf16_of(values)
    if kind == "bits":
        raw = rng.integers(0, 1 << 16, total).astype(np.uint16)
    elif kind == "some not finite" and total:
        raw[rng.integers(0, total, 1 + total // 50)] = 0x7C00 if dtype is DType.FLOAT16 else 0x7F80
    elif kind == "constant":
        raw[:] = 0x3C01
    elif kind == "small":
        raw = (raw & 0x807F).astype(np.uint16)
    found: ByteArray = raw.view(np.uint8)
    return found


def on_host(text: str, layer: LayerSpec, data: ByteArray) -> ByteArray:
    pipeline = CodecPipeline.parse(text, check="never")
    count = data.size // layer.nbytes if layer.nbytes else 0
    dst = np.frombuffer(page_aligned(pipeline.max_encoded_nbytes(layer, count)), np.uint8)
    with use_kernels("numpy"):
        found: ByteArray = dst[: pipeline.encode_into(data.data, layer, dst.data)]
    return found


@pytest.mark.parametrize("kind", ["normal", "bits", "some not finite", "constant", "small"])
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize("text", PIPELINES)
def test_the_same_bits_as_on_the_host(text: str, dtype: DType, kind: str, where: torch.device) -> None:
    device = DevicePipeline(CodecPipeline.parse(text, check="never"))
    for count, *shape in SHAPES:
        layer = kv_layer(shape[0], shape[1], shape[2], dtype)
        data = slices(layer, count, dtype, kind)
        expected = on_host(text, layer, data)
        frame = device.encode(torch.from_numpy(data.copy()).to(where), layer)
        assert frame.device.type == where.type
        assert np.array_equal(frame.cpu().numpy(), expected), (count, shape)
        out = torch.full((data.size,), 0xA5, dtype=torch.uint8, device=where)
        device.decode(frame, layer, out)
        back = np.full(data.size, 0xA5, np.uint8)
        with use_kernels("numpy"):
            device.pipeline.decode_into(expected.data, layer, back.data)
        assert np.array_equal(out.cpu().numpy(), back), (count, shape)


@pytest.mark.parametrize("text", ["ebp", "int8", "int4", "fp8"])
def test_damaged_frames_are_refused_or_decoded_as_on_the_host(text: str, where: torch.device) -> None:
    layer = kv_layer(16, 1, 48)
    frame = on_host(text, layer, slices(layer, 1, DType.BFLOAT16, "some not finite"))
    device = DevicePipeline(CodecPipeline.parse(text))
    for mutated in mutations(frame.tobytes(), 200):
        out, back = (
            torch.zeros(layer.nbytes, dtype=torch.uint8, device=where),
            np.zeros(layer.nbytes, np.uint8),
        )
        error: CodecError | None = None
        try:
            with use_kernels("numpy"):
                device.pipeline.decode_into(memoryview(mutated), layer, back.data)
        except CodecError as found:
            error = found
        given = torch.frombuffer(mutated, dtype=torch.uint8) if mutated else torch.zeros(0, dtype=torch.uint8)
        given = given.to(where)
        if error is not None:
            with pytest.raises(CorruptBlockError):
                device.decode(given, layer, out)
        else:
            device.decode(given, layer, out)
            if text == "ebp":  # a damaged scale may be no number
                assert np.array_equal(out.cpu().numpy(), back)


@pytest.mark.parametrize("check", ["sample", "always", "never"])
def test_the_bound_is_checked_as_often_as_on_the_host(check: str, where: torch.device) -> None:
    layer = kv_layer(16, 2, 64)
    fine = slices(layer, 2, DType.BFLOAT16, "normal")
    wide = fine.view(np.uint16).reshape(2, 2, 16, -1).copy()  # one channel of K is far larger than the others
    wide[:, 0, :, 5] = 0x4400
    pipeline, device = (CodecPipeline.parse("int8", check=check) for _ in range(2))
    encoder = DevicePipeline(device)
    room = memoryview(bytearray(pipeline.max_encoded_nbytes(layer, 2)))
    for call in range(24):  # of these "sample" compares call 0 only, the next one is 28
        data = fine if call < 10 else wide.reshape(-1).view(np.uint8)
        found = encoder.encode(torch.from_numpy(data.copy()).to(where), layer)
        with use_kernels("numpy"):
            assert bytes(found.cpu().numpy()) == bytes(room[: pipeline.encode_into(data.data, layer, room)])
    for _ in range(30):
        encoder.encode(torch.from_numpy(wide.reshape(-1).view(np.uint8).copy()).to(where), layer)
    outside = device.counts["out_of_bound"]
    assert outside == {"sample": 26, "always": 44, "never": 0}[check]
    assert device.counts == {"calls": 54, "stored_raw": outside, "out_of_bound": outside}


def test_bfloat16_tensors_as_engines_have_them(where: torch.device) -> None:
    layer = LayerSpec((TensorSpec("k", (16, 2, 64), DType.BFLOAT16),))
    kv = torch.randn(4, 16, 2, 64, generator=torch.Generator().manual_seed(1)).to(where, torch.bfloat16)
    device = DevicePipeline(CodecPipeline.parse("ebp"))
    frame = device.encode(kv.view(-1).view(torch.uint8), layer)
    assert frame.numel() < 0.8 * kv.numel() * 2
    back = torch.zeros_like(kv)
    device.decode(frame, layer, back.view(-1).view(torch.uint8))
    assert torch.equal(back, kv)


def test_what_runs_on_the_host_only() -> None:
    for text in ("raw", "split", "ebp|lz4", "shuffle|zstd", "dedup"):
        with pytest.raises(CodecError, match="host only"):
            DevicePipeline(CodecPipeline.parse(text))
    layer = kv_layer(16, 1, 64)
    device = DevicePipeline(CodecPipeline.parse("ebp"))
    out = torch.zeros(layer.nbytes, dtype=torch.uint8)
    frame = device.encode(out, layer)
    for wrong in (frame[None], frame.view(torch.int8), torch.stack((frame, frame), 1)[:, 0], bytes(9)):
        with pytest.raises(CodecError, match=r"the frame is .*flat, contiguous uint8"):
            device.decode(wrong, layer, out)  # type: ignore[arg-type]
    with pytest.raises(CodecError, match=r"take tensor\.contiguous\(\)\.view\(-1\)"):
        device.encode(torch.stack((out, out), 1)[:, 0], layer)
    with pytest.raises(CodecError, match="flat, contiguous uint8"):
        device.encode(torch.zeros(64), layer)
    with pytest.raises(CodecError, match="whole number"):
        device.encode(torch.zeros(63, dtype=torch.uint8), layer)
    plain = kv_layer(16, 1, 64, DType.FLOAT32)
    with pytest.raises(CodecError, match="needs bfloat16"):
        device.encode(torch.zeros(plain.nbytes, dtype=torch.uint8), plain)


def test_a_frame_is_not_decoded_over_itself(where: torch.device) -> None:
    layer = kv_layer(16, 1, 64)
    device = DevicePipeline(CodecPipeline.parse("ebp"))
    memory = torch.zeros(3 * layer.nbytes, dtype=torch.uint8, device=where)
    frame = device.encode(memory[: layer.nbytes], layer)
    for start in (0, 64, layer.nbytes - 64):
        memory[start : start + frame.numel()] = frame
        with pytest.raises(CodecError, match=r"frame and output overlap by [0-9]+ bytes"):
            device.decode(memory[start : start + frame.numel()], layer, memory[: layer.nbytes])
    memory[layer.nbytes : layer.nbytes + frame.numel()] = frame
    device.decode(memory[layer.nbytes : layer.nbytes + frame.numel()], layer, memory[: layer.nbytes])


def test_a_text_is_no_pipeline() -> None:
    with pytest.raises(CodecError, match=r"of 'ebp'; write DevicePipeline\(CodecPipeline\.parse"):
        DevicePipeline("ebp")  # type: ignore[arg-type]


def test_torch_is_imported_only_when_asked_for() -> None:
    code = (
        "import sys; from kvferry.codecs import registry; [registry.load(name) for name in registry.names()]"
    )
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
