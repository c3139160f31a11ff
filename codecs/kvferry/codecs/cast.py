"""``cast``: float32 KV as bfloat16 or float16, for the codecs behind it, which need 16-bit floats; lossy."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from kvferry.codecs.base import ArrayStage, CodecConfig, UnfitValuesError, slice_count
from kvferry.codecs.fallback.floats import bf16_of
from kvferry.codecs.parameters import Parameters
from kvferry.core.errors import CodecError
from kvferry.core.spec import DType, LayerSpec, TensorSpec

__all__ = ["CastStage"]

_TO: Final = ("bfloat16", "float16")
_BOUNDS: Final = {"bfloat16": 0.004, "float16": 0.001}
"""Half a unit of the last place is 2**-9 and 2**-12 of a value; subnormals need some more."""


@lru_cache(256)
def _cast(layer: LayerSpec, to: str) -> LayerSpec:
    return LayerSpec(
        tuple(
            TensorSpec(t.name, t.shape, DType(to) if t.dtype is DType.FLOAT32 else t.dtype)
            for t in layer.tensors
        )
    )


class CastStage(ArrayStage):
    """float32 tensors to 16 bits and back; others stay. The padding of slices comes back as zeros.

    Engines that keep KV in 16 bits have no use for it. float16 holds values up to 65504; slices with larger
    ones, or with some that are not finite, are stored as they are. bfloat16 holds all; the
    few that would round up to infinity become its largest.

    Args:
        to: ``bfloat16`` or ``float16``.
    """

    codec_id: ClassVar[str] = "cast"
    lossless = False

    def __init__(self, to: str = "bfloat16") -> None:
        if to not in _TO:
            raise CodecError(f"codec 'cast': to is {to!r}; write bfloat16 or float16")
        self.to = to

    def unsupported(self, layer: LayerSpec) -> str:
        """It needs float32 tensors."""
        if layer.nbytes and not any(t.dtype is DType.FLOAT32 for t in layer.tensors):
            return "codec 'cast' needs float32 tensors"
        return ""

    def error_bound(self, tensor: TensorSpec) -> float:
        """See :meth:`ArrayStage.error_bound`."""
        return _BOUNDS[self.to] if tensor.dtype is DType.FLOAT32 else 0.0

    def encoded_layer(self, layer: LayerSpec) -> LayerSpec:
        """The same tensors of 16 bits."""
        return _cast(layer, self.to)

    def encode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        """See :meth:`ArrayStage.encode_into`."""
        self._convert(src, layer, dst, self.encoded_layer(layer), forward=True)

    def decode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        """See :meth:`ArrayStage.decode_into`."""
        self._convert(src, self.encoded_layer(layer), dst, layer, forward=False)

    def _convert(
        self, src: memoryview, before: LayerSpec, dst: memoryview, after: LayerSpec, *, forward: bool
    ) -> None:
        count = slice_count(len(src), before, self.codec_id)
        if len(dst) != count * after.nbytes:
            raise CodecError(f"codec 'cast': {count} slices of {before.nbytes} bytes into {len(dst)}")
        if not count:
            return
        old = np.frombuffer(src, np.uint8).reshape(count, before.nbytes)
        new = np.frombuffer(dst, np.uint8).reshape(count, after.nbytes)
        new[:, after.data_nbytes :] = 0
        for (tensor, at), (target, to) in zip(before.slots(), after.slots(), strict=True):
            piece = np.ascontiguousarray(old[:, at : at + tensor.nbytes])
            if tensor.dtype is not target.dtype:
                piece = self._narrowed(piece) if forward else self._widened(piece)
            new[:, to : to + target.nbytes] = piece.reshape(count, target.nbytes)

    def _narrowed(self, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        values = raw.view("<f4")
        if self.to == "bfloat16":
            nan = np.isnan(values)
            found = np.where(nan, np.uint16(0x7FC0), bf16_of(values)).astype("<u2")
            infinite = (found & 0x7FFF) == 0x7F80
            if infinite.any():  # what rounds up to infinity becomes the largest, as in float16 codecs
                found -= (infinite & np.isfinite(values)).astype("<u2")
            return found.view(np.uint8)
        if not bool((np.abs(values) <= 65504).all()):
            raise UnfitValuesError("codec 'cast': float16 holds no value above 65504; use cast(to=bfloat16)")
        return values.astype("<f2").view(np.uint8)

    def _widened(self, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        if self.to == "bfloat16":
            return (raw.view("<u2").astype("<u4") << 16).view(np.uint8)
        return raw.view("<f2").astype("<f4").view(np.uint8)

    def config(self) -> CodecConfig:
        """``to``, if it was given."""
        return {"to": self.to} if self.to != "bfloat16" else {}

    @classmethod
    def from_config(cls, config: CodecConfig) -> CastStage:
        """Build it from :meth:`config`."""
        given = Parameters(cls.codec_id, config)
        stage = cls(given.choice("to", "bfloat16", _TO))
        given.check()
        return stage
