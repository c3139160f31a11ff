"""``split``: sign and mantissa apart from the exponents, which are entropy coded; lossless."""

from __future__ import annotations

from typing import ClassVar

from kvferry.codecs.kernels import SPLIT, Operation
from kvferry.codecs.tensors import TensorCodec
from kvferry.core.spec import TensorSpec

__all__ = ["SplitCodec"]


class SplitCodec(TensorCodec):
    """The smallest lossless form (about 1.49 times), at half the speed of ``ebp``.

    The native kernels code the exponents by Huffman, numpy by zstd; both read what the other wrote.
    """

    codec_id: ClassVar[str] = "split"

    def operation(self, tensor: TensorSpec) -> Operation:
        """See :meth:`TensorCodec.operation`."""
        del tensor
        return Operation(SPLIT)
