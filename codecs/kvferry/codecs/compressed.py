"""``lz4`` and ``zstd``: general compression, for padded, sparse or already quantised bytes; lossless."""

from __future__ import annotations

import struct
from abc import abstractmethod
from typing import ClassVar, Final

import lz4.block
import zstandard

from kvferry.codecs.base import ByteStage, CodecConfig
from kvferry.codecs.parameters import Parameters
from kvferry.core.buffers import copy_into
from kvferry.core.errors import CodecError, CorruptBlockError

__all__ = ["Lz4Stage", "ZstdStage"]

_PIECE_NBYTES: Final = 1 << 30
"""Neither library is given more at once: lz4 takes less than 2 GiB, and either fails there in its own way."""
_LENGTHS: Final = struct.Struct("<II")  # encoded and decoded bytes of a piece


class _Pieces(ByteStage):
    """Compresses piece by piece, each with both of its lengths in front.

    Attributes:
        piece_nbytes: Bytes of a piece; less in tests.
    """

    piece_nbytes = _PIECE_NBYTES

    @abstractmethod
    def bound(self, nbytes: int) -> int:
        """The largest compressed size of one piece."""

    @abstractmethod
    def compress(self, piece: memoryview) -> bytes:
        """One piece."""

    @abstractmethod
    def decompress(self, piece: memoryview, nbytes: int) -> bytes:
        """One piece, known to be ``nbytes`` long afterwards.

        Raises:
            CorruptBlockError: If it is not.
        """

    def max_encoded_nbytes(self, nbytes: int) -> int:
        """See :meth:`ByteStage.max_encoded_nbytes`."""
        whole, rest = divmod(nbytes, self.piece_nbytes)
        found = whole * (_LENGTHS.size + self.bound(self.piece_nbytes)) if whole else 0
        return found + (_LENGTHS.size + self.bound(rest) if rest else 0)

    def encode_into(self, src: memoryview, dst: memoryview) -> int:
        """See :meth:`ByteStage.encode_into`."""
        at = 0
        for start in range(0, len(src), self.piece_nbytes):
            piece = src[start : start + self.piece_nbytes]
            packed = self.compress(piece)
            end = at + _LENGTHS.size + len(packed)
            if end > len(dst):
                raise CodecError(
                    f"codec {self.codec_id!r}: {end} bytes are needed, the output has {len(dst)}"
                )
            _LENGTHS.pack_into(dst, at, len(packed), len(piece))
            copy_into(dst[at + _LENGTHS.size : end], packed)
            at = end
        return at

    def decode_into(self, src: memoryview, dst: memoryview) -> int:
        """See :meth:`ByteStage.decode_into`."""
        at = done = 0
        while at < len(src):
            if len(src) - at < _LENGTHS.size:
                raise CorruptBlockError(f"codec {self.codec_id!r}: the last piece is cut")
            packed, plain = _LENGTHS.unpack_from(src, at)
            at += _LENGTHS.size
            if packed > len(src) - at or plain > min(self.piece_nbytes, len(dst) - done) or not plain:
                raise CorruptBlockError(
                    f"codec {self.codec_id!r}: a piece declares {packed} bytes for {plain}; "
                    f"{len(src) - at} are there, and room for {len(dst) - done}"
                )
            copy_into(dst[done : done + plain], self.decompress(src[at : at + packed], plain))
            at += packed
            done += plain
        return done


class Lz4Stage(_Pieces):
    """lz4 blocks: fast, for runs of equal bytes.

    Args:
        acceleration: From 1; larger is faster and compresses less.

    Raises:
        CodecError: For a value outside its range.
    """

    codec_id: ClassVar[str] = "lz4"

    def __init__(self, acceleration: int = 1) -> None:
        given = Parameters(self.codec_id, {"acceleration": acceleration})
        self.acceleration = given.integer("acceleration", 1, 1, 65537)

    def bound(self, nbytes: int) -> int:
        """LZ4_COMPRESSBOUND of lz4.h."""
        return nbytes + nbytes // 255 + 16

    def compress(self, piece: memoryview) -> bytes:
        """See the base."""
        return bytes(lz4.block.compress(piece, mode="fast", acceleration=self.acceleration, store_size=False))

    def decompress(self, piece: memoryview, nbytes: int) -> bytes:
        """See the base."""
        try:
            found = lz4.block.decompress(piece, uncompressed_size=nbytes)
        except (lz4.block.LZ4BlockError, ValueError) as error:
            raise CorruptBlockError(f"codec 'lz4': {error}") from error
        if len(found) != nbytes:
            raise CorruptBlockError(f"codec 'lz4': {len(found)} bytes were decoded, not {nbytes}")
        return bytes(found)

    def config(self) -> CodecConfig:
        """``acceleration``, if it was given."""
        return {"acceleration": self.acceleration} if self.acceleration != 1 else {}

    @classmethod
    def from_config(cls, config: CodecConfig) -> Lz4Stage:
        """Build it from :meth:`config`."""
        return cls(**Parameters(cls.codec_id, config).plain("acceleration"))


class ZstdStage(_Pieces):
    """Zstandard frames.

    Args:
        level: From -7 (fastest) to 19.

    Raises:
        CodecError: For a value outside its range.
    """

    codec_id: ClassVar[str] = "zstd"

    def __init__(self, level: int = 1) -> None:
        self.level = Parameters(self.codec_id, {"level": level}).integer("level", 1, -7, 19)

    def bound(self, nbytes: int) -> int:
        """ZSTD_COMPRESSBOUND of zstd.h."""
        return nbytes + (nbytes >> 8) + (((128 << 10) - nbytes) >> 11 if nbytes < 128 << 10 else 0) + 64

    def compress(self, piece: memoryview) -> bytes:
        """See the base."""
        return zstandard.ZstdCompressor(level=self.level).compress(piece)

    def decompress(self, piece: memoryview, nbytes: int) -> bytes:
        """See the base."""
        try:
            if zstandard.frame_content_size(bytes(piece[:18])) != nbytes:
                raise CorruptBlockError(f"codec 'zstd': a frame does not declare {nbytes} bytes")
            return zstandard.ZstdDecompressor().decompress(
                piece, max_output_size=nbytes, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise CorruptBlockError(f"codec 'zstd': {error}") from error

    def config(self) -> CodecConfig:
        """``level``, if it was given."""
        return {"level": self.level} if self.level != 1 else {}

    @classmethod
    def from_config(cls, config: CodecConfig) -> ZstdStage:
        """Build it from :meth:`config`."""
        return cls(**Parameters(cls.codec_id, config).plain("level"))
