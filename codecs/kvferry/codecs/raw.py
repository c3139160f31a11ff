"""``raw``: the bytes as they are."""

from __future__ import annotations

from typing import ClassVar

from kvferry.codecs.base import Codec, slice_count
from kvferry.core.buffers import copy_into
from kvferry.core.errors import CodecError, CorruptBlockError
from kvferry.core.spec import LayerSpec

__all__ = ["RawCodec"]


class RawCodec(Codec):
    """Copies; the default of every tier and link."""

    codec_id: ClassVar[str] = "raw"

    def max_encoded_nbytes(self, layer: LayerSpec, count: int = 1) -> int:
        """Exactly the size of the slices."""
        return layer.nbytes * count

    def encode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> int:
        """Copy ``src`` to the start of ``dst``."""
        slice_count(len(src), layer, self.codec_id)
        if len(dst) < len(src):
            raise CodecError(f"codec 'raw': {len(src)} bytes do not fit an output buffer of {len(dst)}")
        copy_into(dst[: len(src)], src)
        return len(src)

    def decode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        """Copy ``src`` to ``dst``; their sizes must be equal."""
        slice_count(len(dst), layer, self.codec_id)
        if len(src) != len(dst):
            raise CorruptBlockError(f"codec 'raw': {len(src)} encoded bytes for a slice of {len(dst)}")
        copy_into(dst, src)
