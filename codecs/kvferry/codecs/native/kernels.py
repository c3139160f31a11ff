"""The kernels as Python functions over :class:`~kvferry.codecs.tensors.TensorView`."""

from __future__ import annotations

import ctypes
from typing import Final

from kvferry.codecs.fallback.split import ZSTD_MODE, split_decode
from kvferry.codecs.tensors import TensorView
from kvferry.core.buffers import ByteArray
from kvferry.core.errors import CodecError, CorruptBlockError

__all__ = ["NativeKernels"]

_TENSOR: Final = (ctypes.c_void_p, *(ctypes.c_size_t,) * 4, ctypes.c_int)
_BYTES: Final = (ctypes.c_void_p, ctypes.c_size_t)
_CORRUPT: Final = -1


class NativeKernels:
    """The functions of one library, with their types.

    Every method takes a view and a buffer, writes or reads one section and gives its size. Raises
    :class:`CodecError` if the buffer is too small, :class:`CorruptBlockError` if a section cannot be decoded.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {}
        for name, extra in (
            ("ebp_encode", (ctypes.c_int,)),
            ("ebp_decode", ()),
            ("split_encode", ()),
            ("split_decode", ()),
            ("quant_encode", (ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t)),
            ("quant_decode", (ctypes.c_int, ctypes.c_size_t)),
        ):
            function = library[f"kvc_{name}"]
            function.argtypes = (*_TENSOR, *extra, *_BYTES)
            function.restype = ctypes.c_int64
            self._functions[name] = function

    def ebp_encode(self, view: TensorView, bits: int, dst: ByteArray) -> int:
        """Exponent packing with 3 or 4 bits, 0 to choose."""
        return self._call("ebp_encode", view, (bits,), dst)

    def ebp_decode(self, view: TensorView, src: ByteArray) -> int:
        """The reverse."""
        return self._call("ebp_decode", view, (), src)

    def split_encode(self, view: TensorView, dst: ByteArray) -> int:
        """Split planes with Huffman codes."""
        return self._call("split_encode", view, (), dst)

    def split_decode(self, view: TensorView, src: ByteArray) -> int:
        """The reverse; what numpy wrote has zstd in it and is read by numpy."""
        if len(src) and src[0] == ZSTD_MODE:
            return split_decode(view, src)
        return self._call("split_decode", view, (), src)

    def quant_encode(self, view: TensorView, kind: int, axis: int, group: int, dst: ByteArray) -> int:
        """int8, int4 and fp8; see :mod:`kvferry.codecs.quantised`."""
        return self._call("quant_encode", view, (kind, axis, view.last, group), dst)

    def quant_decode(self, view: TensorView, kind: int, src: ByteArray) -> int:
        """The reverse."""
        return self._call("quant_decode", view, (kind, view.last), src)

    def _call(self, name: str, view: TensorView, extra: tuple[int, ...], buffer: ByteArray) -> int:
        found = int(
            self._functions[name](
                view.data.ctypes.data,
                view.count,
                view.stride,
                view.rows,
                view.cols,
                view.dtype,
                *extra,
                buffer.ctypes.data,
                len(buffer),
            )
        )
        if found >= 0:
            return found
        if found == _CORRUPT:
            raise CorruptBlockError("an encoded tensor cannot be decoded: its section is damaged")
        raise CodecError(f"the output of {len(buffer)} bytes is too small for the tensor")
