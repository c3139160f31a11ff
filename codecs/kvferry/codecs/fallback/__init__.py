"""What the native kernels do, in numpy: the same sections bit for bit, on machines without a compiler."""

from __future__ import annotations

from kvferry.codecs.fallback.ebp import ebp_decode, ebp_encode
from kvferry.codecs.fallback.quant import quant_decode, quant_encode
from kvferry.codecs.fallback.split import split_decode, split_encode

__all__ = ["NumpyKernels"]


class NumpyKernels:
    """The kernels of :class:`kvferry.codecs.kernels.Kernels` in numpy.

    Only ``split`` differs from the native ones: it writes zstd in place of Huffman codes, and reads both.
    """

    ebp_encode = staticmethod(ebp_encode)
    ebp_decode = staticmethod(ebp_decode)
    split_encode = staticmethod(split_encode)
    split_decode = staticmethod(split_decode)
    quant_encode = staticmethod(quant_encode)
    quant_decode = staticmethod(quant_decode)
