"""The tensors of whole layer slices as codecs see them, and codecs that write one section a tensor.

A section begins with eight bytes: mode u8 (0: the elements follow as they are), parameter u8, u16, u32.
Tensors that are no 16-bit floats with a token axis, and the padding of slices, are kept as they are.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.codecs.base import Codec, slice_count
from kvferry.core.buffers import ByteArray
from kvferry.core.errors import CodecError, CorruptBlockError
from kvferry.core.spec import DType, LayerSpec, TensorSpec

__all__ = ["RAW", "SECTION_NBYTES", "Elements", "TensorCodec", "TensorView", "header", "parse_header"]

Elements: TypeAlias = "npt.NDArray[np.uint16]"
"""Elements of all slices, ``[count, rows, cols]``, contiguous."""
SECTION_NBYTES: Final = 8
RAW: Final = 0
_HEADER: Final = struct.Struct("<BBHI")
_FLOATS: Final = {DType.BFLOAT16: 0, DType.FLOAT16: 1}


def header(mode: int, parameter: int = 0, small: int = 0, number: int = 0) -> bytes:
    """The eight bytes at the start of a section."""
    return _HEADER.pack(mode, parameter, small, number)


def parse_header(src: ByteArray) -> tuple[int, int, int, int]:
    """Mode, parameter, small and large number of a section.

    Raises:
        CorruptBlockError: If ``src`` is shorter than a header.
    """
    if len(src) < SECTION_NBYTES:
        raise CorruptBlockError(
            f"{len(src)} bytes are left for a section, at least {SECTION_NBYTES} are needed"
        )
    mode, parameter, small, number = _HEADER.unpack_from(src.data)
    return mode, parameter, small, number


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor of several slices in a buffer, as the kernels take it.

    Attributes:
        data: The buffer from the first byte of the tensor in the first slice to the end.
        count: Slices.
        stride: Bytes from one slice to the next.
        rows: Tokens of a slice.
        cols: Elements of a row.
        last: Elements of the last axis, a divisor of ``cols``.
        dtype: 0 for bfloat16, 1 for float16.
    """

    data: ByteArray
    count: int
    stride: int
    rows: int
    cols: int
    last: int
    dtype: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in one slice."""
        return 2 * self.rows * self.cols

    def _strided(self) -> ByteArray:
        shape, strides = (self.count, self.nbytes), (self.stride, 1)
        return np.lib.stride_tricks.as_strided(self.data, shape, strides)

    def load(self) -> Elements:
        """The elements of all slices together, copied."""
        whole = np.ascontiguousarray(self._strided())
        return whole.view("<u2").reshape(self.count, self.rows, self.cols)

    def store(self, elements: Elements) -> None:
        """Put ``elements`` in place; other bytes of the slices are not touched."""
        raw = np.ascontiguousarray(elements, "<u2").view(np.uint8)
        self._strided()[:] = raw.reshape(self.count, self.nbytes)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One tensor, or the padding, inside a slice."""

    offset: int
    nbytes: int
    tensor: TensorSpec | None
    rows: int = 0
    cols: int = 0
    last: int = 0


@lru_cache(256)
def _pieces(layer: LayerSpec) -> tuple[_Piece, ...]:
    found = []
    for tensor, offset in layer.slots():
        if not tensor.nbytes:
            continue
        if tensor.dtype in _FLOATS and len(tensor.shape) > 1:
            rows, last = tensor.shape[0], tensor.shape[-1]
            found.append(_Piece(offset, tensor.nbytes, tensor, rows, tensor.nbytes // 2 // rows, last))
        else:
            found.append(_Piece(offset, tensor.nbytes, None))
    if layer.nbytes > layer.data_nbytes:
        found.append(_Piece(layer.data_nbytes, layer.nbytes - layer.data_nbytes, None))
    return tuple(found)


class TensorCodec(Codec):
    """A codec that writes one section for each tensor; subclasses know how one is encoded."""

    def unsupported(self, layer: LayerSpec) -> str:
        """It needs a tensor of 16-bit floats with a token axis."""
        if layer.nbytes and not any(piece.tensor for piece in _pieces(layer)):
            return f"codec {self.codec_id!r} needs bfloat16 or float16 tensors with a token axis"
        return ""

    @abstractmethod
    def encode_tensor(self, view: TensorView, tensor: TensorSpec, dst: ByteArray) -> int:
        """Write one section to the start of ``dst``, which has room for the elements and a header."""

    @abstractmethod
    def decode_tensor(self, view: TensorView, tensor: TensorSpec, src: ByteArray) -> int:
        """Read the section at the start of ``src`` into ``view``; how many bytes it has.

        Raises:
            CorruptBlockError: If it cannot be decoded.
        """

    def max_encoded_nbytes(self, layer: LayerSpec, count: int = 1) -> int:
        """A header a tensor, and the bytes as they are."""
        return layer.nbytes * count + SECTION_NBYTES * len(_pieces(layer))

    def encode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> int:
        """See :meth:`Codec.encode_into`."""
        count = slice_count(len(src), layer, self.codec_id)
        if reason := self.unsupported(layer):
            raise CodecError(reason)
        if len(dst) < (needed := self.max_encoded_nbytes(layer, count)):
            raise CodecError(f"codec {self.codec_id!r}: {needed} bytes are needed, the output has {len(dst)}")
        if not count:
            return 0
        data, out, at = np.frombuffer(src, np.uint8), np.frombuffer(dst, np.uint8), 0
        for piece in _pieces(layer):
            if piece.tensor is None:
                at += _keep(data, piece, layer.nbytes, count, out[at:])
            else:
                view = _view(data, piece, piece.tensor, layer.nbytes, count)
                at += self.encode_tensor(view, piece.tensor, out[at:])
        return at

    def decode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        """See :meth:`Codec.decode_into`."""
        count = slice_count(len(dst), layer, self.codec_id)
        data, out, at = np.frombuffer(src, np.uint8), np.frombuffer(dst, np.uint8), 0
        for piece in _pieces(layer) if count else ():
            if piece.tensor is None:
                at += _restore(out, piece, layer.nbytes, count, data[at:])
            else:
                view = _view(out, piece, piece.tensor, layer.nbytes, count)
                at += self.decode_tensor(view, piece.tensor, data[at:])
        if at != len(src):
            raise CorruptBlockError(f"codec {self.codec_id!r}: {len(src)} encoded bytes, {at} were expected")


def _view(data: ByteArray, piece: _Piece, tensor: TensorSpec, stride: int, count: int) -> TensorView:
    return TensorView(
        data[piece.offset :], count, stride, piece.rows, piece.cols, piece.last, _FLOATS[tensor.dtype]
    )


def _keep(data: ByteArray, piece: _Piece, stride: int, count: int, out: ByteArray) -> int:
    end = SECTION_NBYTES + count * piece.nbytes
    out[:SECTION_NBYTES] = np.frombuffer(header(RAW), np.uint8)
    rows = data.reshape(count, stride)[:, piece.offset : piece.offset + piece.nbytes]
    out[SECTION_NBYTES:end].reshape(count, piece.nbytes)[:] = rows
    return end


def _restore(out: ByteArray, piece: _Piece, stride: int, count: int, data: ByteArray) -> int:
    end = SECTION_NBYTES + count * piece.nbytes
    if parse_header(data)[0] != RAW or len(data) < end:
        raise CorruptBlockError("bytes that were kept as they are do not fit the slices")
    rows = out.reshape(count, stride)[:, piece.offset : piece.offset + piece.nbytes]
    rows[:] = data[SECTION_NBYTES:end].reshape(count, piece.nbytes)
    return end
