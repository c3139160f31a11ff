"""The native library as :class:`kvferry.codecs.kernels.Kernels`."""

from __future__ import annotations

import ctypes

import numpy as np

from kvferry.codecs.kernels import Frames, Plan, SumsOfSquares
from kvferry.codecs.native.addresses import pieces_of
from kvferry.codecs.native.frames import NativeFrames
from kvferry.core.buffers import address_of
from kvferry.core.errors import CodecError, CorruptBlockError
from kvferry.core.forks import loading

__all__ = ["NativeKernels"]

_OTHER = -3


class NativeKernels:
    """One call into C for all tensors of the slices, with the GIL released."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.frames: Frames | None = NativeFrames(library)
        self._encode = library.kvc_encode
        self._decode = library.kvc_decode
        self._errors = library.kvc_errors
        self._errors.argtypes = (
            *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p),
            *(ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p),
        )
        self._errors.restype = None
        for function in (self._encode, self._decode):
            # addresses and sizes as plain numbers: converting them costs less than objects of their own
            function.argtypes = (
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_size_t,
                ctypes.c_void_p,
                ctypes.c_size_t,
            )
            function.restype = ctypes.c_int64

    def encode(self, plan: Plan, src: memoryview, count: int, dst: memoryview) -> int:
        """See :class:`kvferry.codecs.kernels.Kernels`."""
        pieces, number = pieces_of(plan)
        found = self._encode(
            pieces, number, address_of(src), count, plan.slice_nbytes, address_of(dst), len(dst)
        )
        if found < 0:
            raise CodecError(f"the output of {len(dst)} bytes is too small for {count} slices")
        return int(found)

    def decode(self, plan: Plan, src: memoryview, count: int, dst: memoryview) -> None:
        """See :class:`kvferry.codecs.kernels.Kernels`."""
        pieces, number = pieces_of(plan)
        found = self._decode(
            pieces, number, address_of(dst), count, plan.slice_nbytes, address_of(src), len(src)
        )
        if found == _OTHER:
            with loading():
                from kvferry.codecs.fallback import NumpyKernels

            NumpyKernels().decode(plan, src, count, dst)
        elif found < 0:
            raise CorruptBlockError("encoded slices cannot be decoded: a section is damaged")

    def errors(
        self, plan: Plan, before: memoryview, after: memoryview, count: int, tokens: int
    ) -> list[SumsOfSquares]:
        """See :class:`kvferry.codecs.kernels.Kernels`."""
        pieces, number = pieces_of(plan)
        work = np.empty(2 * max(piece.cols for piece in plan.pieces), np.float32)
        found = np.empty((number, len(SumsOfSquares._fields)), np.float64)
        self._errors(
            *(pieces, number, address_of(before), address_of(after), count, plan.slice_nbytes, tokens),
            *(work.ctypes.data, found.ctypes.data),
        )
        return [SumsOfSquares(*row) for row in found.tolist()]
