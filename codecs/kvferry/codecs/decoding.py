"""Frames back into slices, whichever pipeline wrote them: one, many, or those of a block in a row."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvferry.codecs.base import check_apart, check_bytes
from kvferry.codecs.frame import LOSSY, STORED_RAW, Frame, aligned, frame_nbytes, parse_frame
from kvferry.codecs.kernels import FrameForm, kernels
from kvferry.codecs.pipeline import CodecPipeline
from kvferry.codecs.stages import load_stage
from kvferry.core.errors import CodecError, ConfigError, CorruptBlockError
from kvferry.core.spec import LayerSpec

__all__ = ["DecodedRow", "decode_frame", "decode_many", "decode_row"]

_CACHED: Final = 64
_WHO: Final = "decoding an encoded slice"


class DecodedRow(NamedTuple):
    """What :func:`decode_row` found.

    Attributes:
        nbytes: Of all frames with the zeros behind them.
        lossy: Whether one of them has lost something.
        stages: What encoded them, as it stands in their headers.
    """

    nbytes: int
    lossy: bool
    stages: frozenset[bytes]


class _Expected(NamedTuple):
    """How the last frame looked, which the next one is likely to look like."""

    layer: LayerSpec
    nbytes: int
    form: FrameForm
    stages: bytes
    lossless: bool


_last: list[_Expected] = []  # one at most; a thread that takes another's loses time alone


def decode_frame(src: memoryview, layer: LayerSpec, dst: memoryview, *, lossless_only: bool = False) -> Frame:
    """Decode one frame, whichever pipeline wrote it.

    Args:
        src: Exactly one frame.
        layer: What the slices are.
        dst: As long as what was encoded.
        lossless_only: Refuse a frame whose values are not those that were encoded.

    Raises:
        CorruptBlockError: If it cannot be decoded to exactly ``dst``.
        CodecError: If it is lossy and ``lossless_only``, or names a stage that is not installed.
    """
    _check((src,), (dst,))
    return _decode_frame(src, layer, dst, lossless_only)


def _check(srcs: Sequence[memoryview], dsts: Sequence[memoryview]) -> None:
    check_bytes(srcs, "frame", _WHO)
    check_bytes(dsts, "output", _WHO)
    check_apart(srcs, dsts, _WHO)


def _decode_frame(src: memoryview, layer: LayerSpec, dst: memoryview, lossless_only: bool) -> Frame:
    for expected in _last[:1]:
        for _, flags in _as_expected(expected, (src,), layer, (dst,), lossless_only):
            body = src[len(expected.form.header) :]
            return Frame(expected.stages, bool(flags & LOSSY), bool(flags & STORED_RAW), len(dst), body)
    frame = parse_frame(src)
    pipeline = _pipeline_of(frame.stages)
    if lossless_only and (frame.lossy or not (pipeline.lossless or frame.stored_raw)):
        raise CodecError(f"the slice was encoded by the lossy {pipeline.text!r}, this reader takes no loss")
    if frame.lossy == (pipeline.lossless or frame.stored_raw):
        raise CorruptBlockError(
            f"an encoded slice of {pipeline.text!r} is said to be {'lossy' if frame.lossy else 'lossless'}"
        )
    pipeline.decode_body(frame, layer, dst)
    form = pipeline.form(layer, len(dst))
    if form is not None:
        _last[:] = [_Expected(layer, len(dst), form, frame.stages, pipeline.lossless)]
    return frame


def decode_many(
    srcs: Sequence[memoryview],
    layer: LayerSpec,
    dsts: Sequence[memoryview],
    *,
    lossless_only: bool = False,
) -> None:
    """As :func:`decode_frame` for each of ``srcs`` and its ``dsts``, with less around each of them.

    Native kernels decode them in one call, with the GIL released, as far as one pipeline wrote them.
    """
    if len(srcs) != len(dsts):
        raise CodecError(f"{len(srcs)} frames for {len(dsts)} outputs")
    _check(srcs, dsts)
    at = 0
    while at < len(srcs):
        for expected in _last[:1]:
            at += len(_as_expected(expected, srcs[at:], layer, dsts[at:], lossless_only))
        if at < len(srcs):
            _decode_frame(srcs[at], layer, dsts[at], lossless_only)
            at += 1


def decode_row(
    src: memoryview, layers: Sequence[LayerSpec], dsts: Sequence[memoryview], *, lossless_only: bool = False
) -> DecodedRow:
    """Decode the frames with which ``src`` begins, as :meth:`CodecPipeline.encode_row` writes them.

    A frame that has lost something ends it where ``lossless_only``; what follows is not decoded.

    Raises:
        CorruptBlockError: If one cannot be decoded to exactly its ``dsts``.
        CodecError: If one names a stage that is not installed.
    """
    _check((src,), dsts)
    if len(layers) != len(dsts):
        raise CodecError(f"{len(layers)} layers for {len(dsts)} outputs")
    at, lossy, stages = 0, False, set[bytes]()
    index = 0
    while index < len(layers):
        rest = src[at:]
        one = rest[: frame_nbytes(rest)]
        frame = parse_frame(one)
        stages.add(frame.stages)
        if lossless_only and frame.lossy:
            return DecodedRow(at, True, frozenset(stages))
        done = _in_row(_pipeline_of(frame.stages), rest, layers[index:], dsts[index:], lossless_only)
        if not done:
            _decode_frame(one, layers[index], dsts[index], lossless_only)
            done = [(len(one), LOSSY * frame.lossy)]
        for nbytes, flags in done:
            at += aligned(nbytes)
            lossy |= bool(flags & LOSSY)
        index += len(done)
    return DecodedRow(at, lossy, frozenset(stages))


def _as_expected(
    expected: _Expected,
    srcs: Sequence[memoryview],
    layer: LayerSpec,
    dsts: Sequence[memoryview],
    lossless_only: bool,
) -> list[tuple[int, int]]:
    """Size and flags of the frames that are as expected, from the first on: they are decoded."""
    frames = kernels().frames
    if frames is None or expected.layer is not layer or (lossless_only and not expected.lossless):
        return []
    if any(len(dst) != expected.nbytes or dst.readonly for dst in dsts):
        return []
    return frames.decode((expected.form,) * len(srcs), srcs, dsts)


def _in_row(
    pipeline: CodecPipeline,
    src: memoryview,
    layers: Sequence[LayerSpec],
    dsts: Sequence[memoryview],
    lossless_only: bool,
) -> list[tuple[int, int]]:
    frames = kernels().frames
    if frames is None or (lossless_only and not pipeline.lossless):
        return []
    forms: list[FrameForm] = []
    for layer, dst in zip(layers, dsts, strict=True):
        form = pipeline.form(layer, len(dst))
        if form is None or dst.readonly:
            break
        forms.append(form)
    return frames.decode(forms, (src,), dsts[: len(forms)], in_row=True) if forms else []


@functools.lru_cache(_CACHED)
def _pipeline_of(stages: bytes) -> CodecPipeline:
    named = Frame(stages, lossy=False, stored_raw=False, decoded_nbytes=0, body=memoryview(b"")).stage_ids()
    try:
        return CodecPipeline([load_stage(stage) for stage in named])
    except ConfigError as error:
        raise CodecError(f"an encoded slice needs a codec that is not to be had: {error}") from error
