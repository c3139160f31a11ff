"""Pipelines of stages: ``ebp``, ``shuffle|zstd(level=1)``, ``int8(k=channel)|lz4``.

A pipeline writes frames (:mod:`kvferry.codecs.frame`), which say by themselves how they are decoded, so a
reader needs no configuration: :mod:`kvferry.codecs.decoding`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from kvferry.codecs.base import (
    ArrayStage,
    ByteStage,
    Codec,
    Stage,
    UnfitValuesError,
    check_apart,
    check_bytes,
    check_writable,
    checked_bound,
    checked_nbytes,
    slice_count,
)
from kvferry.codecs.checks import CallChecks
from kvferry.codecs.error import slice_errors
from kvferry.codecs.foreign import is_foreign, no_exit
from kvferry.codecs.frame import (
    LOSSY,
    STORED_RAW,
    Frame,
    aligned,
    encode_header,
    header_bytes,
    header_nbytes,
    parse_frame,
    stage_bytes,
)
from kvferry.codecs.kernels import FrameForm, kernels
from kvferry.codecs.raw import RawCodec
from kvferry.codecs.scratch import Buffers, Scratch
from kvferry.codecs.stages import load_stage
from kvferry.codecs.tensors import TensorCodec
from kvferry.codecs.text import parse_stages, stage_text
from kvferry.core.buffers import copy_into
from kvferry.core.errors import CodecError, CorruptBlockError, KVFerryError
from kvferry.core.nearest import shown
from kvferry.core.spec import KVSpec, LayerSpec, TensorSpec

__all__ = ["CodecPipeline"]

_CACHED: Final = 64
_CHECKED_TOKENS: Final = 64
_MOST_NBYTES: Final = (1 << 63) - 1
_scratch: Final = Scratch()


class _Shape(NamedTuple):
    """Slices of one size: how many, what their frame needs, and its form where kernels make all of it."""

    slices: int
    needed: int
    form: FrameForm | None


class CodecPipeline:
    """Stages in a row, with the verbs of a codec; writes frames. Thread safe.

    A slice whose frame would be larger than the slices themselves, or whose lossy values are outside the
    stated bound, is stored as it is. What stages of others raise goes through, and their input is read-only;
    a size that one gives back and that cannot be is a ``CodecError``, and so are, as often as a bound is
    checked, other bytes behind one that says that it is lossless.

    Args:
        stages: In the order of encoding: array stages, at most one codec (``raw`` if none), byte stages.
        check: How often the bound of a lossy pipeline, or a stage of others, is checked: ``"sample"`` the
            first call and one of each 16, and each of the 1024 calls after one that was outside;
            ``"always"``, ``"never"``.

    Raises:
        CodecError: If the stages do not follow each other.
    """

    def __init__(self, stages: Sequence[Stage], *, check: str = "sample") -> None:
        if not isinstance(stages, Sequence) or not all(isinstance(stage, Stage) for stage in stages):
            raise CodecError(f"the stages are {shown(stages)}, must be a sequence of stages, or use parse")
        self.stages: Final = tuple(stages)
        texts = [stage_text(stage.codec_id, stage.config()) for stage in self.stages]
        self.text: Final = "|".join(texts) or RawCodec.codec_id
        """The text form, which :meth:`parse` reads back to an equal pipeline."""
        self.arrays: Final = tuple(s for s in stages if isinstance(s, ArrayStage))
        codecs = [s for s in stages if isinstance(s, Codec)]
        self.bytes: Final = tuple(s for s in stages if isinstance(s, ByteStage))
        if len(codecs) > 1 or [*self.arrays, *codecs, *self.bytes] != list(stages):
            raise CodecError(
                f"pipeline {self.text!r}: array stages come first, then at most one codec, then byte stages"
            )
        self.codec: Final = codecs[0] if codecs else RawCodec()
        self.lossless: Final = all(s.lossless for s in stages)
        self._alone = not self.arrays and not self.bytes
        self._plain = self._alone and isinstance(self.codec, RawCodec)
        self._who = f"codec {self.text!r}"
        self._foreign = any(map(is_foreign, self.stages))
        self.checks: Final = CallChecks(check, lossy=not self.lossless, foreign=self._foreign)
        self._named = stage_bytes(tuple((s.codec_id, s.config()) for s in stages))
        self._header = header_nbytes(self._named)
        # not bound to the instance's lifetime by a cache of the class
        self._shape = functools.lru_cache(_CACHED)(self._make_shape)

    @classmethod
    def parse(cls, text: str, *, check: str = "sample") -> CodecPipeline:
        """A pipeline from its text form.

        Raises:
            CodecError: For a malformed text, an unknown parameter or stages in a wrong order.
            UnknownPluginError: For a stage that does not exist; with the nearest name.
        """
        return cls([load_stage(stage) for stage in parse_stages(text)], check=check)

    def __repr__(self) -> str:
        return f"<CodecPipeline {self.text}>"

    def __reduce__(self) -> tuple[object, ...]:
        """For another process: the text form, which that one parses; counts begin anew there."""
        return _parsed, (self.text, self.checks.how)

    @property
    def counts(self) -> dict[str, int]:
        """Calls of :meth:`encode_into`, how many stored slices as they are, and how many for the bound."""
        return self.checks.counts()

    def unsupported(self, spec: KVSpec) -> str:
        """Why it does not apply to blocks of ``spec``, for people; empty if it does.

        A stage of others that raises here, or states sizes or bounds that cannot be, does not apply.
        """
        try:
            return self._unsupported(spec) or self._impossible(spec)
        except KVFerryError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - third-party code can raise anything
            return f"codec {self.text!r} failed: {type(error).__name__}: {str(error)[:200]}"

    def _unsupported(self, spec: KVSpec) -> str:
        typed = [*self.arrays, *([] if isinstance(self.codec, RawCodec) else [self.codec])]
        if spec.layout != "kvferry" and typed:
            return f"layout {spec.layout!r} is opaque, so {typed[0].codec_id!r} cannot know its tensors"
        for number, layer in enumerate(spec.layers):
            inner = layer
            for stage in self.arrays:
                if reason := stage.unsupported(inner):
                    return f"layer {number}: {reason}"
                inner = stage.encoded_layer(inner)
            if reason := self.codec.unsupported(inner):
                return f"layer {number}: {reason}"
        return ""

    def _impossible(self, spec: KVSpec) -> str:
        for layer in set(spec.layers):
            self.max_encoded_nbytes(layer)
            for tensor in layer.tensors:
                self.error_bound(tensor)
        return ""

    def error_bound(self, tensor: TensorSpec) -> float:
        """The stated bound of the relative error of ``tensor``, that of all stages together.

        Raises:
            CodecError: If a stage states none that can be.
        """
        stages: tuple[ArrayStage | Codec, ...] = (*self.arrays, self.codec)
        return sum(checked_bound(stage.error_bound(tensor), stage) for stage in stages)

    def max_encoded_nbytes(self, layer: LayerSpec, count: int = 1) -> int:
        """What :meth:`encode_into` needs: a header and the larger of the slices and what a stage makes."""
        return self._header + max(layer.nbytes * count, self._body_bounds(layer, count)[-1])

    def encode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> int:
        """Encode whole slices of ``layer`` to one frame at the start of ``dst``.

        Returns:
            Bytes written.

        Raises:
            CodecError: As :meth:`kvferry.codecs.Codec.encode_into`; ``dst`` must hold
                :meth:`max_encoded_nbytes`.
        """
        return self.encode_many((src,), layer, (dst,))[0]

    def encode_many(
        self, srcs: Sequence[memoryview], layer: LayerSpec, dsts: Sequence[memoryview]
    ) -> list[int]:
        """As :meth:`encode_into` for each of ``srcs`` and its ``dsts``, with less around each of them.

        Native kernels encode them in one call, with the GIL released. No part of ``dsts`` that
        :meth:`max_encoded_nbytes` bytes need overlaps another, or one of ``srcs``.
        """
        self._check_buffers(srcs, dsts)
        if len(srcs) != len(dsts):
            raise CodecError(f"codec {self.text!r}: {len(srcs)} inputs for {len(dsts)} outputs")
        of_nbytes = {nbytes: self._shape(layer, nbytes) for nbytes in set(map(len, srcs))}
        shapes = [of_nbytes[len(src)] for src in srcs]
        for shape, dst in zip(shapes, dsts, strict=True):
            if len(dst) < shape.needed or dst.readonly:
                self._check_room(dst, shape.needed)
        used = [dst[: shape.needed] for shape, dst in zip(shapes, dsts, strict=True)]
        check_apart(srcs, used, self._who)
        done = _run(shapes, srcs, dsts)
        for index in range(len(done), len(srcs)):
            done.append(self._encode_frame(srcs[index], layer, shapes[index], dsts[index]))
        number = self.checks.counted(len(done))
        return [
            self._settled(number + index, srcs[index], layer, dsts[index], nbytes, flags)
            for index, (nbytes, flags) in enumerate(done)
        ]

    def encode_row(
        self, srcs: Sequence[memoryview], layers: Sequence[LayerSpec], dst: memoryview
    ) -> list[int]:
        """As :meth:`encode_many`, to frames in a row from the start of ``dst`` on.

        Each begins at a multiple of 64 bytes from there, with zeros before it, and behind the last one.

        Args:
            srcs: The slices of each frame.
            layers: Of each of ``srcs``.
            dst: Has room for the largest frame of each, rounded up to 64 bytes.
        """
        self._check_buffers(srcs, (dst,))
        if len(srcs) != len(layers):
            raise CodecError(f"codec {self.text!r}: {len(srcs)} inputs for {len(layers)} layers")
        shapes = [self._shape(layer, len(src)) for src, layer in zip(srcs, layers, strict=True)]
        needed = sum(aligned(shape.needed) for shape in shapes)
        self._check_room(dst, needed)
        check_apart(srcs, (dst[:needed],), self._who)
        sizes: list[int] = []
        at = 0
        while len(sizes) < len(srcs):
            start = len(sizes)
            done = _run(shapes[start:], srcs[start:], (dst[at:],), in_row=True)
            if not done:
                done = [self._encode_frame(srcs[start], layers[start], shapes[start], dst[at:])]
            number = self.checks.counted(len(done))
            for index, (nbytes, flags) in enumerate(done):
                src, layer = srcs[start + index], layers[start + index]
                size = self._settled(number + index, src, layer, dst[at:], nbytes, flags)
                sizes.append(size)
                dst[at + size : at + aligned(size)] = bytes(aligned(size) - size)
                at += aligned(size)
                if size != nbytes:  # it took the place of the next ones, which are encoded again
                    self.checks.counted(index + 1 - len(done))
                    break
        return sizes

    def decode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        """Decode one frame of this very pipeline; otherwise as :func:`kvferry.codecs.decode_frame`."""
        self._check_buffers((src,), (dst,))
        check_apart((src,), (dst,), self._who)
        frame = parse_frame(src)
        if frame.stages != self._named:
            raise CorruptBlockError(f"the slice was encoded by other stages than {self.text!r}")
        self.decode_body(frame, layer, dst)

    def decode_body(self, frame: Frame, layer: LayerSpec, dst: memoryview) -> None:
        """Decode a parsed frame of this pipeline.

        Raises:
            CorruptBlockError: If it does not hold exactly what ``dst`` takes.
            CodecError: If ``dst`` is no whole number of slices.
        """
        count = slice_count(len(dst), layer, self.text)
        check_writable(dst, self.text)
        if frame.decoded_nbytes != len(dst):
            raise CorruptBlockError(
                f"an encoded slice declares {frame.decoded_nbytes} bytes, {len(dst)} are expected"
            )
        if frame.stored_raw:
            if len(frame.body) != len(dst):
                raise CorruptBlockError(f"{len(frame.body)} bytes were stored as they are, not {len(dst)}")
            copy_into(dst, frame.body)
        else:
            self._decode(frame.body, layer, count, dst)

    # -- frames ----------------------------------------------------------------------------------------

    def form(self, layer: LayerSpec, nbytes: int) -> FrameForm | None:
        """For kernels that make whole frames of ``nbytes`` of slices; ``None`` where the stages must.

        Raises:
            CodecError: If ``nbytes`` is no whole number of slices.
        """
        return self._shape(layer, nbytes).form

    def _make_shape(self, layer: LayerSpec, nbytes: int) -> _Shape:
        count = slice_count(nbytes, layer, self.text)
        needed = self.max_encoded_nbytes(layer, count)
        form = None
        if self._alone and isinstance(self.codec, TensorCodec) and count:
            plan = self.codec.plan(layer)
            if plan.useful:
                header = header_bytes(self._named, nbytes, 0, lossy=not self.lossless)
                form = FrameForm(plan, count, header, needed - self._header)
        return _Shape(count, needed, form)

    def _check_buffers(self, srcs: Sequence[memoryview], dsts: Sequence[memoryview]) -> None:
        check_bytes(srcs, "input", self._who)
        check_bytes(dsts, "output", self._who)

    def _check_room(self, dst: memoryview, needed: int) -> None:
        if len(dst) < needed:
            raise CodecError(f"codec {self.text!r}: {needed} bytes are needed, the output has {len(dst)}")
        check_writable(dst, self.text)

    def _encode_frame(
        self, src: memoryview, layer: LayerSpec, shape: _Shape, dst: memoryview
    ) -> tuple[int, int]:
        """Size and flags of one frame, made stage by stage."""
        body = dst[self._header : shape.needed]
        try:
            nbytes = len(src) if self._plain else self._encode(src, layer, shape.slices, body)
        except UnfitValuesError:
            nbytes = len(src)
        if nbytes >= len(src):
            return self._store_raw(src, dst), STORED_RAW
        encode_header(dst, self._named, len(src), nbytes, lossy=not self.lossless, stored_raw=False)
        return self._header + nbytes, 0 if self.lossless else LOSSY

    def _store_raw(self, src: memoryview, dst: memoryview) -> int:
        nbytes = self._header + len(src)
        copy_into(dst[self._header : nbytes], src)
        encode_header(dst, self._named, len(src), len(src), lossy=False, stored_raw=True)
        return nbytes

    def _settled(
        self, number: int, src: memoryview, layer: LayerSpec, dst: memoryview, nbytes: int, flags: int
    ) -> int:
        """Size of the frame ``number``, which is stored as it is if it is outside its bound."""
        if flags & STORED_RAW:
            self.checks.kept(number, outside=False)
            return nbytes
        if not self.checks.due(number):
            return nbytes
        try:
            spoilt = self._spoilt(src, layer, dst[self._header : nbytes])
        except Exception:  # of a stage of others: it goes through, and the next calls are compared too
            self.checks.suspect(number)
            raise
        if not spoilt:
            return nbytes
        self.checks.kept(number, outside=True)
        return self._store_raw(src, dst)

    # -- stages ----------------------------------------------------------------------------------------

    def _layers(self, layer: LayerSpec) -> list[LayerSpec]:
        found = [layer]
        for stage in self.arrays:
            found.append(stage.encoded_layer(found[-1]))
        return found

    def _body_bounds(self, layer: LayerSpec, count: int) -> list[int]:
        """Largest size after the codec and after each byte stage."""
        last = self._layers(layer)[-1] if self.arrays else layer
        found = [checked_nbytes(self.codec.max_encoded_nbytes(last, count), _MOST_NBYTES, self.codec)]
        for stage in self.bytes:
            found.append(checked_nbytes(stage.max_encoded_nbytes(found[-1]), _MOST_NBYTES, stage))
        return found

    def _encode(self, src: memoryview, layer: LayerSpec, count: int, dst: memoryview) -> int:
        if not self._foreign:
            return self._encode_stages(src, layer, count, dst)
        with no_exit(self._who):  # and the KV of others is not theirs to write
            return self._encode_stages(src.toreadonly(), layer, count, dst)

    def _encode_stages(self, src: memoryview, layer: LayerSpec, count: int, dst: memoryview) -> int:
        if self._alone:
            return checked_nbytes(self.codec.encode_into(src, layer, dst), len(dst), self.codec)
        with _scratch.taken() as buffer:
            return self._encode_through(src, layer, count, dst, buffer)

    def _encode_through(
        self, src: memoryview, layer: LayerSpec, count: int, dst: memoryview, buffer: Buffers
    ) -> int:
        layers = self._layers(layer)
        data = src
        for index, stage in enumerate(self.arrays):
            out = buffer(f"array{index % 2}", layers[index + 1].nbytes * count)
            stage.encode_into(data, layers[index], out)
            data = out
        bounds = self._body_bounds(layer, count)
        if not self.bytes:
            return checked_nbytes(self.codec.encode_into(data, layers[-1], dst), len(dst), self.codec)
        if not isinstance(self.codec, RawCodec):
            out = buffer("bytes0", bounds[0])
            used = self.codec.encode_into(data, layers[-1], out)
            data = out[: checked_nbytes(used, len(out), self.codec)]
        for index, step in enumerate(self.bytes):
            last = index == len(self.bytes) - 1
            target = dst if last else buffer(f"bytes{1 - index % 2}", bounds[index + 1])
            data = target[: checked_nbytes(step.encode_into(data, target), len(target), step)]
        return len(data)

    def _decode(self, body: memoryview, layer: LayerSpec, count: int, dst: memoryview) -> None:
        if not self._foreign:
            self._decode_stages(body, layer, count, dst)
            return
        with no_exit(self._who):
            self._decode_stages(body.toreadonly(), layer, count, dst)

    def _decode_stages(self, body: memoryview, layer: LayerSpec, count: int, dst: memoryview) -> None:
        if self._alone:
            self.codec.decode_into(body, layer, dst)
            return
        with _scratch.taken() as buffer:
            self._decode_through(body, layer, count, dst, buffer)

    def _decode_through(
        self, body: memoryview, layer: LayerSpec, count: int, dst: memoryview, buffer: Buffers
    ) -> None:
        layers = self._layers(layer)
        bounds = self._body_bounds(layer, count)
        raw = isinstance(self.codec, RawCodec)
        data = body
        for index in range(len(self.bytes) - 1, -1, -1):
            direct = raw and index == 0 and not self.arrays
            out = dst if direct else buffer(f"bytes{index % 2}", bounds[index])
            used = self.bytes[index].decode_into(data, out)
            data = out[: checked_nbytes(used, len(out), self.bytes[index])]
            if direct:
                if len(data) != len(dst):
                    raise CorruptBlockError(f"{len(data)} bytes were decoded, not {len(dst)}")
                return
        for index in range(len(self.arrays), -1, -1):
            out = dst if index == 0 else buffer(f"array{index % 2}", layers[index].nbytes * count)
            if index == len(self.arrays):
                self.codec.decode_into(data, layers[index], out)
            else:
                self.arrays[index].decode_into(data, layers[index], out)
            data = out

    # -- the bound -------------------------------------------------------------------------------------

    def _spoilt(self, src: memoryview, layer: LayerSpec, body: memoryview) -> bool:
        """Whether a tensor is outside its bound after decoding again."""
        with _scratch.taken() as buffer:
            again = buffer("check", len(src))
            self._decode(body, layer, len(src) // layer.nbytes, again)
            return self.outside(src, again, layer)

    def outside(self, src: memoryview, again: memoryview, layer: LayerSpec) -> bool:
        """Whether the error of a tensor of ``again``, which is what became of ``src``, is above its bound.

        Raises:
            CodecError: If the pipeline says that it is lossless, and the bytes differ.
        """
        if self.lossless:
            if not np.array_equal(np.frombuffer(src, np.uint8), np.frombuffer(again, np.uint8)):
                raise CodecError(f"{self._who} says that it is lossless, and is not; tell its authors")
            return False
        tokens = None if self.checks.how == "always" else _CHECKED_TOKENS
        for error in slice_errors(src, again, layer, tokens):
            bound = self.error_bound(error.tensor)
            any_error = bound >= 1 and math.isfinite(error.bounded)  # where energy of channels is capped
            if not error.bounded <= bound and not any_error:  # also for NaN
                return True
        return False


def _parsed(text: str, check: str) -> CodecPipeline:
    return CodecPipeline.parse(text, check=check)


def _run(
    shapes: Sequence[_Shape], srcs: Sequence[memoryview], dsts: Sequence[memoryview], *, in_row: bool = False
) -> list[tuple[int, int]]:
    """Size and flags of the frames that the kernels make by themselves, from the first on."""
    frames = kernels().frames
    if frames is None:
        return []
    some: list[FrameForm] = []
    for shape in shapes:
        if shape.form is None:
            break
        some.append(shape.form)
    if not some:
        return []
    return frames.encode(some, srcs[: len(some)], dsts if in_row else dsts[: len(some)], in_row=in_row)
