"""``split``: sign and mantissa apart from the exponents, which are entropy coded; lossless."""

from __future__ import annotations

from typing import ClassVar

from kvferry.codecs.kernels import kernels
from kvferry.codecs.tensors import TensorCodec, TensorView
from kvferry.core.buffers import ByteArray
from kvferry.core.spec import TensorSpec

__all__ = ["SplitCodec"]


class SplitCodec(TensorCodec):
    """The smallest lossless form (about 1.49 times), at half the speed of ``ebp``.

    The native kernels code the exponents by Huffman, numpy by zstd; both read what the other wrote.
    """

    codec_id: ClassVar[str] = "split"

    def encode_tensor(self, view: TensorView, tensor: TensorSpec, dst: ByteArray) -> int:
        """See :meth:`TensorCodec.encode_tensor`."""
        del tensor
        return kernels().split_encode(view, dst)

    def decode_tensor(self, view: TensorView, tensor: TensorSpec, src: ByteArray) -> int:
        """See :meth:`TensorCodec.decode_tensor`."""
        del tensor
        return kernels().split_decode(view, src)
