"""Whole frames by the native library, many in one call."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvferry.codecs.kernels import FrameForm
from kvferry.codecs.native.addresses import pieces_of
from kvferry.core.buffers import addresses_of

__all__ = ["NativeFrames"]

_DERIVED: Final = "native"
_FIELDS: Final = 6  # of kvc_frame, all of 64 bits
_FORM, _SLICES, _FRAME, _ROOM, _NBYTES, _FLAGS = range(_FIELDS)


class _Form(ctypes.Structure):
    """``kvc_form`` of frames.h."""

    _fields_ = (
        ("pieces", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("number", "count", "stride")),
        ("header", ctypes.c_char_p),
        *((name, ctypes.c_uint64) for name in ("header_nbytes", "room")),
    )


class NativeFrames:
    """See :class:`kvferry.codecs.kernels.Frames`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._encode = library.kvc_encode_frames
        self._decode = library.kvc_decode_frames
        for function in (self._encode, self._decode):
            function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            function.restype = ctypes.c_size_t

    def encode(
        self,
        forms: Sequence[FrameForm],
        srcs: Sequence[memoryview],
        dsts: Sequence[memoryview],
        *,
        in_row: bool = False,
    ) -> list[tuple[int, int]]:
        """See :meth:`kvferry.codecs.kernels.Frames.encode`."""
        return _run(self._encode, forms, srcs, dsts, in_row)

    def decode(
        self,
        forms: Sequence[FrameForm],
        srcs: Sequence[memoryview],
        dsts: Sequence[memoryview],
        *,
        in_row: bool = False,
    ) -> list[tuple[int, int]]:
        """See :meth:`kvferry.codecs.kernels.Frames.decode`."""
        return _run(self._decode, forms, dsts, srcs, in_row)


def _run(
    function: Callable[[int, int, bool], Any],
    forms: Sequence[FrameForm],
    slices: Sequence[memoryview],
    frames: Sequence[memoryview],
    in_row: bool,
) -> list[tuple[int, int]]:
    # a column at a time: what is done here is done with the GIL held, while other threads wait for it
    jobs = array("Q", bytes(8 * _FIELDS * len(slices)))
    jobs[_FORM::_FIELDS] = array("Q", [_address(form) for form in forms])
    jobs[_SLICES::_FIELDS] = array("Q", addresses_of(slices))
    given = len(frames) * _FIELDS
    jobs[_FRAME:given:_FIELDS] = array("Q", addresses_of(frames))
    jobs[_ROOM:given:_FIELDS] = array("Q", map(len, frames))
    done = int(function(jobs.buffer_info()[0], len(slices), in_row))
    end = done * _FIELDS
    return list(zip(jobs[_NBYTES:end:_FIELDS], jobs[_FLAGS:end:_FIELDS], strict=True))


def _address(form: FrameForm) -> int:
    """Of the form as C has it, made once."""
    held: Any = form.derived.get(_DERIVED) or _made(form)
    return int(held[0])


def _made(form: FrameForm) -> tuple[int, _Form]:
    pieces, number = pieces_of(form.plan)
    made = _Form(pieces, number, form.count, form.plan.slice_nbytes, form.header, len(form.header), form.room)
    # what a thread that was faster made stays: this call's would die with this call
    held: Any = form.derived.setdefault(_DERIVED, (ctypes.addressof(made), made))
    return int(held[0]), held[1]
