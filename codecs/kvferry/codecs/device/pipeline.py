"""A pipeline on torch tensors."""

from __future__ import annotations

from typing import Final

import torch

from kvferry.codecs.base import slice_count
from kvferry.codecs.device.ebp import ebp_decode, ebp_encode
from kvferry.codecs.device.quant import quant_decode, quant_encode
from kvferry.codecs.device.view import DAMAGED, DeviceView, load_raw, store_raw
from kvferry.codecs.frame import (
    MAX_HEADER_NBYTES,
    encode_header,
    header_nbytes,
    parse_frame,
    stage_bytes,
)
from kvferry.codecs.kernels import EBP, QUANT, Piece
from kvferry.codecs.pipeline import CodecPipeline
from kvferry.codecs.split import SplitCodec
from kvferry.codecs.tensors import TensorCodec
from kvferry.core.errors import CodecError, CorruptBlockError
from kvferry.core.nearest import shown
from kvferry.core.spec import LayerSpec

__all__ = ["DevicePipeline"]

_KNOWN: Final = (EBP, QUANT)


class DevicePipeline:
    """Encodes and decodes on the device of the tensors; the frames are those of ``pipeline`` on the host.

    ``ebp``, ``int8``, ``int4`` and ``fp8`` alone; other pipelines run on the host. Thread safe. The size of a
    frame depends on the values, so each call waits for the device. The bound of a lossy codec is checked as
    often as ``pipeline`` says, with its counts; the slices that are compared are copied to the host.

    Args:
        pipeline: What to do.

    Raises:
        CodecError: If it has other stages.
    """

    def __init__(self, pipeline: CodecPipeline) -> None:
        if not isinstance(pipeline, CodecPipeline):
            raise CodecError(
                f"a device pipeline of {shown(pipeline)}; write DevicePipeline(CodecPipeline.parse('ebp'))"
            )
        codec = pipeline.codec
        if len(pipeline.stages) != 1 or not isinstance(codec, TensorCodec) or isinstance(codec, SplitCodec):
            raise CodecError(f"codec {pipeline.text!r} runs on the host only; write ebp, int8, int4 or fp8")
        self.pipeline: Final = pipeline
        self._codec: Final = codec
        self._named = stage_bytes(((codec.codec_id, codec.config()),))

    def encode(self, src: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
        """One frame of whole slices of ``layer``.

        Args:
            src: Their bytes, uint8, contiguous.
            layer: What they are.

        Returns:
            The frame, uint8, on the device of ``src``.

        Raises:
            CodecError: If ``src`` is no whole number of slices, or the codec does not apply to ``layer``.
        """
        data = self._slices(src, layer)
        plan = self._codec.plan(layer)
        if not plan.useful or any(p.operation and p.operation.code not in _KNOWN for p in plan.pieces):
            raise CodecError(
                self._codec.unsupported(layer) or f"codec {self.pipeline.text!r} runs on the host only"
            )
        sections = [_encode(DeviceView.of(data, piece), piece) for piece in plan.pieces] if len(data) else []
        body = torch.cat(sections) if sections else src[:0]
        number = self.pipeline.checks.counted()
        raw = body.numel() >= src.numel()
        if raw:
            self.pipeline.checks.kept(number, outside=False)
        elif self.pipeline.checks.due(number) and self._outside(data, body, layer):
            raw = True
            self.pipeline.checks.kept(number, outside=True)
        if raw:
            body = src
        head = bytearray(header_nbytes(self._named))
        lossy = not (self._codec.lossless or raw)
        encode_header(memoryview(head), self._named, src.numel(), body.numel(), lossy=lossy, stored_raw=raw)
        return torch.cat([torch.frombuffer(head, dtype=torch.uint8).to(src.device), body])

    def decode(self, frame: torch.Tensor, layer: LayerSpec, dst: torch.Tensor) -> None:
        """Decode one frame of this pipeline into ``dst``, uint8, contiguous, on the device of ``frame``.

        Raises:
            CorruptBlockError: If it does not hold exactly what ``dst`` takes, or other stages wrote it.
            CodecError: If ``dst`` is no whole number of slices, or one of both is no such tensor.
        """
        data = self._slices(dst, layer)
        _check_flat(frame, "the frame is")
        if frame.device != dst.device:
            raise CodecError(f"a frame on {frame.device} is decoded into {dst.device}; they must be the same")
        _check_apart(frame, dst, self.pipeline.text)
        head = memoryview(bytes(frame[:MAX_HEADER_NBYTES].cpu().numpy()))
        parsed = parse_frame(head, frame.numel())
        if parsed.stages != self._named or parsed.decoded_nbytes != dst.numel():
            raise CorruptBlockError(f"the frame does not hold {dst.numel()} bytes of {self.pipeline.text!r}")
        body = frame[header_nbytes(self._named) :]
        if parsed.stored_raw:
            if body.numel() != dst.numel():
                raise CorruptBlockError(f"{body.numel()} bytes were stored as they are, not {dst.numel()}")
            dst.copy_(body)
            return
        self._decode_body(body, layer, data)

    def _decode_body(self, body: torch.Tensor, layer: LayerSpec, data: torch.Tensor) -> None:
        at = 0
        for piece in self._codec.plan(layer).pieces if len(data) else ():
            at += _decode(DeviceView.of(data, piece), piece, body[at:])
        if at != body.numel():
            raise CorruptBlockError(DAMAGED)

    def _outside(self, data: torch.Tensor, body: torch.Tensor, layer: LayerSpec) -> bool:
        """Whether a tensor is outside its bound after decoding again."""
        again = torch.empty_like(data)
        self._decode_body(body, layer, again)
        before, after = (each.reshape(-1).cpu().numpy().data for each in (data, again))
        return self.pipeline.outside(before, after, layer)

    def _slices(self, flat: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
        _check_flat(flat, "slices are")
        return flat.view(slice_count(flat.numel(), layer, self.pipeline.text), layer.nbytes)


def _check_flat(given: torch.Tensor, what: str) -> None:
    if not isinstance(given, torch.Tensor):
        raise CodecError(f"{what} {type(given).__name__}, must be a flat, contiguous uint8 tensor")
    if given.dtype != torch.uint8 or given.dim() != 1 or not given.is_contiguous():
        raise CodecError(
            f"{what} {given.dtype} of shape {tuple(given.shape)} with strides {given.stride()}, must be a "
            f"flat, contiguous uint8 tensor; take tensor{'' if given.is_contiguous() else '.contiguous()'}"
            ".view(-1).view(torch.uint8)"
        )


def _check_apart(frame: torch.Tensor, dst: torch.Tensor, text: str) -> None:
    common = min(each.data_ptr() + each.numel() for each in (frame, dst)) - max(
        each.data_ptr() for each in (frame, dst)
    )
    if common > 0:
        raise CodecError(
            f"codec {text!r}: frame and output overlap by {common} bytes; give them memory of their own"
        )


def _encode(view: DeviceView, piece: Piece) -> torch.Tensor:
    code, first, second, group = piece.operation
    if code == EBP:
        return ebp_encode(view, first)
    return quant_encode(view, first, second, group) if code == QUANT else store_raw(view)


def _decode(view: DeviceView, piece: Piece, src: torch.Tensor) -> int:
    code, first, _, _ = piece.operation
    if code == EBP:
        return ebp_decode(view, src)
    return quant_decode(view, first, src) if code == QUANT else load_raw(view, src)
