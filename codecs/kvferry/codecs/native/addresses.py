"""What the native library is given of a plan: the address of its pieces."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from kvferry.codecs.kernels import Plan

__all__ = ["pieces_of"]

_DERIVED: Final = "native"


class _Piece(ctypes.Structure):
    """``kvc_piece`` of kvc.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("offset", "nbytes", "rows", "cols", "last", "group")),
        *((name, ctypes.c_int32) for name in ("dtype", "operation", "first", "second")),
    )


def pieces_of(plan: Plan) -> tuple[int, int]:
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
