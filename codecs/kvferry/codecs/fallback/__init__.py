"""What the native kernels do, in numpy: the same sections bit for bit, on machines without a compiler."""

from __future__ import annotations

import numpy as np

from kvferry.codecs.error import compared, sums_of_squares
from kvferry.codecs.fallback.ebp import ebp_decode, ebp_encode
from kvferry.codecs.fallback.quant import quant_decode, quant_encode
from kvferry.codecs.fallback.split import split_decode, split_encode
from kvferry.codecs.fallback.view import DAMAGED, TensorView, load_raw, store_raw
from kvferry.codecs.kernels import EBP, QUANT, SPLIT, Frames, Piece, Plan, SumsOfSquares
from kvferry.core.buffers import ByteArray
from kvferry.core.errors import CorruptBlockError
from kvferry.core.spec import DType

__all__ = ["NumpyKernels"]


class NumpyKernels:
    """The kernels of :class:`kvferry.codecs.kernels.Kernels` in numpy.

    Only ``split`` differs from the native ones: it writes zstd in place of Huffman codes, and reads both.
    """

    frames: Frames | None = None

    def encode(self, plan: Plan, src: memoryview, count: int, dst: memoryview) -> int:
        """See :class:`kvferry.codecs.kernels.Kernels`."""
        data = np.frombuffer(src, np.uint8).reshape(count, plan.slice_nbytes)
        out, at = np.frombuffer(dst, np.uint8), 0
        for piece in plan.pieces:
            at += _encode(_view(data, piece), piece, out[at:])
        return at

    def decode(self, plan: Plan, src: memoryview, count: int, dst: memoryview) -> None:
        """See :class:`kvferry.codecs.kernels.Kernels`."""
        data = np.frombuffer(dst, np.uint8).reshape(count, plan.slice_nbytes)
        encoded, at = np.frombuffer(src, np.uint8), 0
        for piece in plan.pieces:
            at += _decode(_view(data, piece), piece, encoded[at:])
        if at != len(src):
            raise CorruptBlockError(DAMAGED)

    def errors(
        self, plan: Plan, before: memoryview, after: memoryview, count: int, tokens: int
    ) -> list[SumsOfSquares]:
        """See :class:`kvferry.codecs.kernels.Kernels`."""
        del count
        found = []
        for piece in plan.pieces:
            dtype = DType.FLOAT16 if piece.dtype else DType.BFLOAT16
            x, y = (compared(data, plan.slice_nbytes, piece, dtype, tokens) for data in (before, after))
            found.append(sums_of_squares(x, y))
        return found


def _view(data: ByteArray, piece: Piece) -> TensorView:
    return TensorView(data, piece.offset, piece.nbytes, piece.rows, piece.cols, piece.last, piece.dtype)


def _encode(view: TensorView, piece: Piece, dst: ByteArray) -> int:
    code, first, second, group = piece.operation
    if code == EBP:
        return ebp_encode(view, first, dst)
    if code == SPLIT:
        return split_encode(view, dst)
    if code == QUANT:
        return quant_encode(view, first, second, group, dst)
    return store_raw(view, dst)


def _decode(view: TensorView, piece: Piece, src: ByteArray) -> int:
    code, first, _, _ = piece.operation
    if code == EBP:
        return ebp_decode(view, src)
    if code == SPLIT:
        return split_decode(view, src)
    if code == QUANT:
        return quant_decode(view, first, src)
    return load_raw(view, src)
