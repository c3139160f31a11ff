"""``shuffle``: bytes of the same significance together, for a byte stage behind it; lossless."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import numpy as np

from kvferry.codecs.base import ArrayStage, slice_count
from kvferry.core.buffers import copy_into
from kvferry.core.errors import CodecError
from kvferry.core.spec import DType, LayerSpec, TensorSpec

__all__ = ["ShuffleStage"]


@lru_cache(256)
def _shuffled(layer: LayerSpec) -> LayerSpec:
    return LayerSpec((TensorSpec("shuffled", (layer.nbytes,), DType.UINT8),)) if layer.nbytes else layer


class ShuffleStage(ArrayStage):
    """In each tensor of each slice: first the first bytes of all elements, then the second, and so on."""

    codec_id: ClassVar[str] = "shuffle"

    def encoded_layer(self, layer: LayerSpec) -> LayerSpec:
        """As many bytes, without a type."""
        return _shuffled(layer)

    def encode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        """See :meth:`ArrayStage.encode_into`."""
        self._turn(src, layer, dst, forward=True)

    def decode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        """See :meth:`ArrayStage.decode_into`."""
        self._turn(src, layer, dst, forward=False)

    def _turn(self, src: memoryview, layer: LayerSpec, dst: memoryview, *, forward: bool) -> None:
        count = slice_count(len(src), layer, self.codec_id)
        if len(dst) != len(src):
            raise CodecError(f"codec 'shuffle': {len(src)} bytes into {len(dst)}")
        copy_into(dst, src)
        if not count:
            return
        before = np.frombuffer(src, np.uint8).reshape(count, layer.nbytes)
        after = np.frombuffer(dst, np.uint8).reshape(count, layer.nbytes)
        for tensor, offset in layer.slots():
            size = tensor.dtype.itemsize
            if size == 1 or not tensor.nbytes:
                continue
            end = offset + tensor.nbytes
            shape = (count, -1, size) if forward else (count, size, tensor.nbytes // size)
            after[:, offset:end] = before[:, offset:end].reshape(shape).swapaxes(1, 2).reshape(count, -1)
