"""Codecs that write one section for each tensor of the slices, by kernels in C or in numpy.

A section begins with eight bytes: mode u8 (0: the elements follow as they are), parameter u8, u16, u32.
Tensors that are no 16-bit floats with a token axis, and the padding of slices, are kept as they are.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
from typing import Final

from kvferry.codecs.base import Codec, check_writable, slice_count
from kvferry.codecs.kernels import Operation, Piece, Plan, kernels
from kvferry.core.errors import CodecError, CorruptBlockError
from kvferry.core.spec import DType, LayerSpec, TensorSpec

__all__ = ["TensorCodec"]

_SECTION_NBYTES: Final = 8
_FLOATS: Final = {DType.BFLOAT16: 0, DType.FLOAT16: 1}
_PLANS: Final = 64


class TensorCodec(Codec):
    """A codec that writes one section for each tensor; subclasses say what is done with each."""

    def __init__(self) -> None:
        # not bound to the instance's lifetime by a cache of the class
        self._plan = lru_cache(_PLANS)(self._make_plan)

    @abstractmethod
    def operation(self, tensor: TensorSpec) -> Operation:
        """What is done with ``tensor``, which has 16-bit floats and a token axis."""

    def plan(self, layer: LayerSpec) -> Plan:
        """What is done with each part of a slice of ``layer``."""
        return self._plan(layer)

    def unsupported(self, layer: LayerSpec) -> str:
        """It needs a tensor of 16-bit floats with a token axis."""
        if layer.nbytes and not any(piece.operation for piece in self._plan(layer).pieces):
            return f"codec {self.codec_id!r} needs bfloat16 or float16 tensors with a token axis"
        return ""

    def max_encoded_nbytes(self, layer: LayerSpec, count: int = 1) -> int:
        """A header a tensor, and the bytes as they are."""
        return layer.nbytes * count + _SECTION_NBYTES * len(self._plan(layer).pieces)

    def encode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> int:
        """See :meth:`Codec.encode_into`."""
        count = slice_count(len(src), layer, self.codec_id)
        plan = self._plan(layer)
        if not plan.useful:
            raise CodecError(self.unsupported(layer))
        needed = layer.nbytes * count + _SECTION_NBYTES * len(plan.pieces)
        if len(dst) < needed:
            raise CodecError(f"codec {self.codec_id!r}: {needed} bytes are needed, the output has {len(dst)}")
        check_writable(dst, self.codec_id)
        return kernels().encode(plan, src, count, dst) if count else 0

    def decode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        """See :meth:`Codec.decode_into`."""
        count = slice_count(len(dst), layer, self.codec_id)
        check_writable(dst, self.codec_id)
        if count:
            kernels().decode(self._plan(layer), src, count, dst)
        elif len(src):
            raise CorruptBlockError(f"codec {self.codec_id!r}: {len(src)} encoded bytes for no slice")

    def _make_plan(self, layer: LayerSpec) -> Plan:
        found = []
        for tensor, offset in layer.slots():
            if tensor.nbytes and tensor.dtype in _FLOATS and len(tensor.shape) > 1:
                rows, last = tensor.shape[0], tensor.shape[-1]
                cols, dtype = tensor.nbytes // 2 // rows, _FLOATS[tensor.dtype]
                operation = self.operation(tensor)
                found.append(Piece(offset, tensor.nbytes, operation, rows, cols, last, dtype))
            elif tensor.nbytes:
                found.append(Piece(offset, tensor.nbytes))
        if layer.nbytes > layer.data_nbytes:
            found.append(Piece(layer.data_nbytes, layer.nbytes - layer.data_nbytes))
        return Plan(tuple(found), layer.nbytes)
