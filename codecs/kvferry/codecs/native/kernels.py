"""The native library as :class:`kvferry.codecs.kernels.Kernels`."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np

from kvferry.codecs.kernels import Plan, SumsOfSquares
from kvferry.core.errors import CodecError, CorruptBlockError

__all__ = ["NativeKernels"]

_CORRUPT, _OTHER = -1, -3
_DERIVED: Final = "native"


class _Piece(ctypes.Structure):
    """``kvc_piece`` of kvc.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("offset", "nbytes", "rows", "cols", "last", "group")),
        *((name, ctypes.c_int32) for name in ("dtype", "operation", "first", "second")),
    )


class NativeKernels:
    """One call into C for all tensors of the slices, with the GIL released."""

    def __init__(self, library: ctypes.CDLL) -> None:
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
        pieces, number = _pieces(plan)
        found = self._encode(pieces, number, _address(src), count, plan.slice_nbytes, _address(dst), len(dst))
        if found < 0:
            raise CodecError(f"the output of {len(dst)} bytes is too small for {count} slices")
        return int(found)

    def decode(self, plan: Plan, src: memoryview, count: int, dst: memoryview) -> None:
        """See :class:`kvferry.codecs.kernels.Kernels`."""
        pieces, number = _pieces(plan)
        found = self._decode(pieces, number, _address(dst), count, plan.slice_nbytes, _address(src), len(src))
        if found == _OTHER:
            from kvferry.codecs.fallback import NumpyKernels

            NumpyKernels().decode(plan, src, count, dst)
        elif found < 0:
            raise CorruptBlockError("encoded slices cannot be decoded: a section is damaged")

    def errors(
        self, plan: Plan, before: memoryview, after: memoryview, count: int, tokens: int
    ) -> list[SumsOfSquares]:
        """See :class:`kvferry.codecs.kernels.Kernels`."""
        pieces, number = _pieces(plan)
        work = np.empty(2 * max(piece.cols for piece in plan.pieces), np.float32)
        found = np.empty((number, len(SumsOfSquares._fields)), np.float64)
        self._errors(
            *(pieces, number, _address(before), _address(after), count, plan.slice_nbytes, tokens),
            *(work.ctypes.data, found.ctypes.data),
        )
        return [SumsOfSquares(*row) for row in found.tolist()]


def _pieces(plan: Plan) -> tuple[int, int]:
    """Address and number of the pieces as C has them, made once a plan."""
    held: Any = plan.derived.get(_DERIVED)
    if held is None:
        array = (_Piece * len(plan.pieces))(
            *(
                _Piece(
                    piece.offset,
                    piece.nbytes,
                    piece.rows,
                    piece.cols,
                    piece.last,
                    piece.operation.group,
                    piece.dtype,
                    piece.operation.code,
                    piece.operation.first,
                    piece.operation.second,
                )
                for piece in plan.pieces
            )
        )
        # what a thread that was faster made stays: this call's array would die with this call
        held = plan.derived.setdefault(_DERIVED, (ctypes.addressof(array), len(array), array))
    address, number, _ = held
    return address, number


def _address(view: memoryview) -> int:
    if not len(view):
        return 0
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(
        ctypes.c_char.from_buffer(view)
    )  # three times as fast, but not for read-only views
