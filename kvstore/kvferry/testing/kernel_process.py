"""Native kernels in a process of their own: builds for other processors or with sanitizers."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvferry.codecs.kernels import Plan
from kvferry.core.buffers import ByteArray

__all__ = ["ARM", "X86", "Answer", "Request", "build", "serve"]

_COMMON = ("-g", "-std=gnu11", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi")
_AVX2 = ("-DKVC_AVX2", "-mavx2", "-mbmi", "-mbmi2")
_AVX512 = ("-DKVC_AVX512", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vbmi", "-mavx512vbmi2")
X86 = {"portable": (), "avx2": _AVX2, "avx512": (*_AVX2, *_AVX512)}
"""Instruction sets of x86-64, with what compiles each."""
ARM = {"portable": (), "neon": ("-DKVC_NEON",)}
"""The same for aarch64."""


def build(
    folder: Path,
    sources: Path,
    program: Path,
    kinds: Mapping[str, Sequence[str]],
    compiler: Sequence[str] = ("gcc", "-O1"),
) -> Path:
    """Compile a C program with the kernels of all ``kinds``.

    Args:
        folder: Where to put what is built.
        sources: The folder of the kernels.
        program: Its C file.
        kinds: :data:`X86` or :data:`ARM`.
        compiler: Its name and options.

    Raises:
        subprocess.CalledProcessError: If it does not compile.
    """
    command = [*compiler, *_COMMON, f"-I{sources}"]
    running, objects = [], []
    for kind, flags in kinds.items():
        target = folder / f"{kind}.o"
        running.append(subprocess.Popen([*command, *flags, "-c", str(sources / "isa.c"), "-o", str(target)]))
        objects.append(str(target))
    for process in running:
        if process.wait(300):
            raise subprocess.CalledProcessError(process.returncode, process.args)
    binary = folder / program.stem
    subprocess.run(
        [*command, str(sources / "dispatch.c"), str(program), *objects, "-o", str(binary)], check=True
    )
    return binary


class Request(NamedTuple):
    """One call; ``data`` are the slices to encode, or the sections to decode to ``slices`` slices."""

    plan: Plan
    slices: int
    data: ByteArray
    decode: bool = False


class Answer(NamedTuple):
    """What it gave: the size or an error, and the bytes."""

    result: int
    data: ByteArray


def serve(command: Sequence[str], requests: Sequence[Request], timeout_s: float = 300) -> list[Answer]:
    """Run all ``requests`` in one process of ``serve.c``.

    Raises:
        AssertionError: If the process does not end well; with what it said.
    """
    done = subprocess.run(
        command, input=b"".join(map(_packed, requests)), capture_output=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-4000:]
    answers, at, raw = [], 0, np.frombuffer(done.stdout, np.uint8)
    for request in requests:
        (result,) = struct.unpack_from("<q", done.stdout, at)
        nbytes = request.slices * request.plan.slice_nbytes if request.decode else max(result, 0)
        answers.append(Answer(result, raw[at + 8 : at + 8 + nbytes]))
        at += 8 + nbytes
    assert at == len(raw)
    return answers


def _packed(request: Request) -> bytes:
    plan = request.plan
    room = request.slices * plan.slice_nbytes + 8 * len(plan.pieces)
    head = struct.pack(
        "<IIQQQQ",
        request.decode,
        len(plan.pieces),
        request.slices,
        plan.slice_nbytes,
        room,
        len(request.data),
    )
    pieces = b"".join(
        struct.pack(
            "<6Q4i", p.offset, p.nbytes, p.rows, p.cols, p.last, p.operation.group, p.dtype, *p.operation[:3]
        )
        for p in plan.pieces
    )
    return head + pieces + request.data.tobytes()
