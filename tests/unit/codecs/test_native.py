"""Every build of the native kernels gives the bits that numpy gives, and touches nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvferry.codecs.fallback import NumpyKernels
from kvferry.codecs.kernels import (
    CHANNEL,
    EBP,
    FP8,
    FP8_PLAIN,
    INT4,
    INT8,
    INT8_RANGE,
    QUANT,
    SPLIT,
    TOKEN,
    Operation,
    Piece,
    Plan,
)
from kvferry.core.buffers import ByteArray
from kvferry.core.errors import CorruptBlockError
from kvferry.testing.kernel_process import ARM, X86, Answer, Request, build, serve

pytestmark = pytest.mark.timeout(600)  # they compile, some for a minute and a half beside other work

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "codecs" / "kvferry" / "codecs" / "native"
SERVE = ROOT / "tests" / "native" / "serve.c"

OPERATIONS = (
    Operation(EBP),
    Operation(EBP, 3),
    Operation(EBP, 4),
    Operation(SPLIT),
    Operation(QUANT, INT8, TOKEN, 64),
    Operation(QUANT, INT8, CHANNEL, 64),
    Operation(QUANT, INT8_RANGE, CHANNEL, 64),
    Operation(QUANT, INT8_RANGE, CHANNEL, 5),
    Operation(QUANT, INT4, TOKEN, 32),
    Operation(QUANT, INT4, TOKEN, 7),
    Operation(QUANT, INT4, CHANNEL, 32),
    Operation(QUANT, INT4, CHANNEL, 5),
    Operation(QUANT, FP8, TOKEN, 64),
    Operation(QUANT, FP8_PLAIN, TOKEN, 64),
)
SHAPES = (  # slices, tokens, heads, size of a head
    (1, 16, 3, 64),
    (3, 16, 2, 80),
    (2, 7, 1, 96),
    (1, 33, 1, 112),
    (1, 16, 1, 576),
    (5, 1, 1, 7),
    (2, 3, 1, 1),
)


def values(kind: str, shape: tuple[int, ...], dtype: int, seed: int) -> ByteArray:
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape))
    normal = rng.standard_normal(count).astype(np.float32) * np.float32(3)
    raw = (
        normal.astype(np.float16).view(np.uint16)
        if dtype
        else (normal.view(np.uint32) >> 16).astype(np.uint16)
    )
    if kind == "bits":
        raw = rng.integers(0, 1 << 16, count).astype(np.uint16)
    elif kind == "some not finite":
        raw[rng.integers(0, count, max(1, count // 50))] = 0x7C00 if dtype else 0x7F80
    elif kind == "constant":
        raw[:] = 0x3C01 if dtype else 0x3F9A
    elif kind == "skewed":  # most codes short, and runs of long ones
        raw[:] = 100 << 7
        rare = rng.integers(0, count, count // 8)
        raw[rare] = rng.integers(80, 140, len(rare)) << 7
        raw[count // 2 : count // 2 + 100] = (
            rng.integers(80, 140, len(raw[count // 2 : count // 2 + 100])) << 7
        )
        raw[rng.integers(0, count)] = 0x8000
    found: ByteArray = raw.view(np.uint8)
    return found


def requests() -> list[Request]:
    found = []
    for number, shape in enumerate(SHAPES):
        count, rows, heads, last = shape
        nbytes = 2 * rows * heads * last
        for operation in OPERATIONS:
            for dtype in (0, 1):
                skewed = ("skewed",) if operation.code == SPLIT else ()
                for kind in ("normal", "bits", "some not finite", "constant", *skewed):
                    piece = Piece(0, nbytes, operation, rows, heads * last, last, dtype)
                    plan = Plan((piece, Piece(nbytes, 24)), nbytes + 24)
                    slices = np.arange(count * plan.slice_nbytes).astype(np.uint8).reshape(count, -1)
                    slices[:, :nbytes] = values(kind, shape, dtype, number).reshape(count, nbytes)
                    found.append(Request(plan, count, slices.reshape(-1)))
    # decoded past the caches: 2 MiB and more; of 8 slices one begins with a cache line, none ends with one
    large, cols = 8, 16387
    piece = Piece(0, 16 * cols, Operation(EBP), 8, cols, cols)
    for dtype in (0, 1):
        plan = Plan((replace(piece, dtype=dtype), Piece(16 * cols, 24)), 16 * cols + 24)
        slices = np.full((large, plan.slice_nbytes), 0x5A, np.uint8)
        slices[:, : 16 * cols] = values("normal", (large, 8, cols), dtype, 1).reshape(large, -1)
        found.append(Request(plan, large, slices.reshape(-1)))
    return found


def numpy_encodes(request: Request) -> ByteArray:
    out = np.zeros(request.slices * request.plan.slice_nbytes + 8 * len(request.plan.pieces), np.uint8)
    used = NumpyKernels().encode(request.plan, request.data.data, request.slices, out.data)
    return out[:used]


def numpy_decodes(request: Request) -> ByteArray | None:
    out = np.full(request.slices * request.plan.slice_nbytes, 0xA5, np.uint8)
    try:
        NumpyKernels().decode(request.plan, request.data.data, request.slices, out.data)
    except CorruptBlockError:
        return None
    return out


def check(command: list[str]) -> None:
    """Both directions of all requests against numpy."""
    asked = requests()
    encoded = serve(command, asked)
    for request, answer in zip(asked, encoded, strict=True):
        assert answer.result > 0, request
        if request.plan.pieces[0].operation.code != SPLIT:  # numpy writes zstd there
            assert np.array_equal(answer.data, numpy_encodes(request)), request
    back = serve(command, [_decoding(r, a) for r, a in zip(asked, encoded, strict=True)])
    for request, answer, decoded in zip(asked, encoded, back, strict=True):
        assert decoded.result == len(answer.data), request
        if request.plan.pieces[0].operation.code == QUANT:
            assert np.array_equal(decoded.data, numpy_decodes(_decoding(request, answer))), request  # type: ignore[arg-type]
        else:
            assert np.array_equal(decoded.data, request.data), request


def _decoding(request: Request, answer: Answer) -> Request:
    return Request(request.plan, request.slices, answer.data, decode=True)


def mutated(command: list[str], each: int) -> None:
    """Damaged sections: an error or some values, never a crash; what numpy decodes is decoded alike."""
    asked = requests()[::3]
    encoded = serve(command, asked)
    rng = np.random.default_rng(9)
    damaged = []
    for request, answer in zip(asked, encoded, strict=True):
        for _ in range(each):
            data = answer.data.copy()
            kind, at = rng.integers(0, 4), rng.integers(0, len(data))
            if kind == 0:
                data[at] ^= 1 << rng.integers(0, 8)
            elif kind == 1:
                data[at : at + 8] = 0xFF
            elif kind == 2:
                data = data[:at]
            else:
                data[rng.integers(0, min(16, len(data)))] = rng.integers(0, 256)
            damaged.append(Request(request.plan, request.slices, data, decode=True))
    for request, answer in zip(damaged, serve(command, damaged), strict=True):
        expected = numpy_decodes(request)
        assert (answer.result > 0) == (expected is not None), (request, answer.result)
        # a damaged scale may be no number, of which processors keep other bits
        if expected is not None and request.plan.pieces[0].operation.code != QUANT:
            assert np.array_equal(answer.data, expected), request


@pytest.fixture(scope="module")
def on_x86(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("x86"), SOURCES, SERVE, X86, _compiler("gcc", "-O1")))


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> str:
    options = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    return str(build(tmp_path_factory.mktemp("asan"), SOURCES, SERVE, X86, _compiler("gcc", *options)))


def _compiler(name: str, *options: str) -> tuple[str, ...]:
    if shutil.which(name) is None or os.uname().machine != "x86_64":
        pytest.skip(f"needs {name} on x86-64")
    return (name, *options)


@pytest.mark.parametrize("instructions", ["portable", "avx2", "avx512"])
def test_every_instruction_set_of_this_processor(
    on_x86: str, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_NATIVE_ISA", instructions)  # what the processor lacks is not taken
    check([on_x86])


def test_neon(tmp_path: Path) -> None:
    compiler = "aarch64-linux-gnu-gcc"
    if shutil.which(compiler) is None or shutil.which("qemu-aarch64") is None:
        pytest.skip("needs Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user")
    binary = build(tmp_path, SOURCES, SERVE, ARM, (compiler, "-O1", "-static"))
    check(["qemu-aarch64", str(binary)])
    mutated(["qemu-aarch64", str(binary)], each=1)


@pytest.mark.parametrize("instructions", ["portable", "avx2", "avx512"])
def test_sanitizers_find_nothing(sanitized: str, instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_NATIVE_ISA", instructions)
    check([sanitized])
    mutated([sanitized], each=2)


# as in fuzz.c, which chooses by the first bytes of its input
FUZZED = {
    Operation(EBP): 0,
    Operation(EBP, 3): 1,
    Operation(SPLIT): 2,
    Operation(QUANT, INT8, TOKEN, 64): 3,
    Operation(QUANT, INT8, CHANNEL, 64): 4,
    Operation(QUANT, INT4, TOKEN, 32): 5,
    Operation(QUANT, INT4, CHANNEL, 32): 6,
    Operation(QUANT, FP8, TOKEN, 64): 7,
    Operation(QUANT, FP8_PLAIN, TOKEN, 64): 9,
    Operation(QUANT, INT8_RANGE, CHANNEL, 64): 10,
}


def seeds(command: list[str]) -> list[bytes]:
    """Sections that can be decoded, behind the bytes that say of what they are."""
    asked = [
        request
        for request in requests()
        if request.plan.pieces[0].operation in FUZZED
        if request.plan.pieces[0].last <= 80 and request.slices <= 4
    ]
    found = []
    for request, answer in zip(asked, serve(command, asked), strict=True):
        piece = request.plan.pieces[0]
        group = max(2, piece.operation.group)
        shape = (piece.rows, piece.cols // piece.last - 1, piece.last - 1, request.slices - 1)
        chosen = (FUZZED[piece.operation], *shape, group + 126 if piece.dtype else group - 1)
        found.append(bytes(chosen) + answer.data[: -8 - 24 * request.slices].tobytes())
    return found


@pytest.mark.soak
@pytest.mark.timeout(1800)  # 300 s of fuzzing behind a build that takes minutes beside other work
@pytest.mark.parametrize("instructions", ["portable", "avx512"])
def test_fuzzing_finds_nothing(
    tmp_path: Path, on_x86: str, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_NATIVE_ISA", instructions)
    options = ("-O1", "-fsanitize=address,undefined,fuzzer-no-link", "-fno-sanitize-recover=all")
    compiler = (*_compiler("clang", *options), "-fsanitize=fuzzer")
    trial = tmp_path / "trial.c"
    trial.write_text(
        "int LLVMFuzzerTestOneInput(const unsigned char *p, unsigned long n) { return !p && n; }\n"
    )
    if subprocess.run(
        (*compiler, trial, "-o", tmp_path / "trial"), capture_output=True, check=False
    ).returncode:
        pytest.skip("needs clang's runtime of libFuzzer and of the sanitizers (Debian: libclang-rt-dev)")
    binary = build(tmp_path, SOURCES, SERVE.with_name("fuzz.c"), X86, compiler)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(seeds([on_x86])):
        (corpus / str(number)).write_bytes(seed)
    # libFuzzer's own limit counts the peak of the process that started it, which other tests bring to 8 GiB
    monkeypatch.setenv("ASAN_OPTIONS", "hard_rss_limit_mb=2048")
    limits = ("-max_total_time=300", "-max_len=65536", "-rss_limit_mb=0", "-malloc_limit_mb=64")
    command = [str(binary), *limits, f"-artifact_prefix={tmp_path}/", str(corpus)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
