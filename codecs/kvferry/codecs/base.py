"""The codec contract: a layer slice into fewer bytes and back.

A codec works on whole layer slices of one :class:`~kvferry.core.spec.LayerSpec` and may be given
several at once (one a block): small slices cost more a byte. The caller owns both buffers. Codecs hold
no state between calls and are thread safe. Checksums are not theirs: they cover the encoded bytes and
belong to the tier or the link.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, TypeAlias

from kvferry.core.errors import CodecError
from kvferry.core.spec import LayerSpec

__all__ = ["Codec", "CodecConfig", "slice_count"]

CodecConfig: TypeAlias = "Mapping[str, str | int | float | bool]"


class Codec(ABC):
    """Encodes and decodes layer slices.

    Attributes:
        codec_id: Stable name; stored with every entry that the codec wrote.
        lossless: Whether ``decode(encode(x)) == x`` bit for bit, NaN payloads and padding included.
    """

    codec_id: ClassVar[str]
    lossless: ClassVar[bool]

    @abstractmethod
    def max_encoded_nbytes(self, layer: LayerSpec, count: int = 1) -> int:
        """Exact upper bound of the encoded size of ``count`` slices of ``layer``."""

    @abstractmethod
    def encode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> int:
        """Encode ``src``, any number of whole slices of ``layer``, to the start of ``dst``.

        Returns:
            Bytes written to ``dst``.

        Raises:
            CodecError: If ``src`` is no whole number of slices, or ``dst`` is too small; what ``dst``
                holds is then undefined, but nothing outside it was touched.
        """

    @abstractmethod
    def decode_into(self, src: memoryview, layer: LayerSpec, dst: memoryview) -> None:
        """Decode ``src`` into ``dst``, which is exactly as long as what was encoded.

        No length found in ``src`` is trusted before it is checked against ``dst``.

        Raises:
            CorruptBlockError: If ``src`` was not made by this codec from as many bytes as ``dst``.
            CodecError: If ``dst`` is no whole number of slices.
        """

    def config(self) -> CodecConfig:
        """The parameters from which :meth:`from_config` builds an equal codec; empty by default."""
        return {}

    @classmethod
    def from_config(cls, config: CodecConfig) -> Codec:
        """Build a codec from its parameters.

        Raises:
            CodecError: For a parameter that the codec does not have.
        """
        if config:
            raise CodecError(f"codec {cls.codec_id!r} has no parameters, got {sorted(config)}")
        return cls()


def slice_count(nbytes: int, layer: LayerSpec, codec_id: str) -> int:
    """How many slices of ``layer`` are ``nbytes``.

    Raises:
        CodecError: If that is no whole number.
    """
    if layer.nbytes == 0:
        if nbytes:
            raise CodecError(f"codec {codec_id!r}: {nbytes} bytes for a layer of none")
        return 0
    count, rest = divmod(nbytes, layer.nbytes)
    if rest:
        raise CodecError(
            f"codec {codec_id!r}: {nbytes} bytes are no whole number of layer slices of {layer.nbytes} bytes"
        )
    return count
