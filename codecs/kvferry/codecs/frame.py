"""The frame around encoded slices: what made them, how long they are, whether something was lost.

A frame is a header (multiple of 64 bytes, so that the body is aligned where the frame is) and a body::

    magic "KVc" | version u8 | flags u8 | 0 u8 | header size u16 | stages size u16 | 6 zeros
    decoded size u64 | body size u64
    stages: MessagePack of [[codec id, {parameter: value}], ...]; zeros up to the header size

All integers are little-endian. Nothing in it is trusted: sizes are compared with what the reader has.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from kvferry.codecs.base import CodecConfig
from kvferry.core.errors import CodecError, CorruptBlockError

__all__ = [
    "FLAGS_AT",
    "LOSSY",
    "MAX_HEADER_NBYTES",
    "STORED_RAW",
    "VERSION",
    "Frame",
    "StageId",
    "aligned",
    "encode_header",
    "frame_nbytes",
    "header_bytes",
    "header_nbytes",
    "parse_frame",
    "stage_bytes",
]

StageId: TypeAlias = "tuple[str, CodecConfig]"
VERSION: Final = 1
MAX_HEADER_NBYTES: Final = 1024
_MAGIC: Final = b"KVc"
_FIXED: Final = struct.Struct("<3sBBxHH6xQQ")
_RESERVED_AT: Final = 5
_RESERVED: Final = slice(10, 16)
_ALIGNMENT: Final = 64
_MAX_STAGES: Final = 8
LOSSY, STORED_RAW = 1, 2
FLAGS_AT: Final = 4
"""Flags, and where they stand."""
_stages = msgspec.msgpack.Decoder(list[tuple[str, dict[str, str | int | float | bool]]])


@dataclass(frozen=True, slots=True)
class Frame:
    """One parsed frame.

    Attributes:
        stages: What encoded it, in the order of encoding, as MessagePack.
        lossy: Whether decoding gives other values than were encoded.
        stored_raw: Whether the pipeline would have been outside its bound or larger, so that the body is the
            slices as they were.
        decoded_nbytes: Bytes of the slices.
        body: The encoded bytes, a view into what was parsed.
    """

    stages: bytes
    lossy: bool
    stored_raw: bool
    decoded_nbytes: int
    body: memoryview

    def stage_ids(self) -> tuple[StageId, ...]:
        """The stages and their parameters.

        Raises:
            CorruptBlockError: If they are malformed or too many.
        """
        try:
            found = _stages.decode(self.stages)
        except msgspec.MsgspecError as error:
            raise CorruptBlockError(f"the stages of an encoded slice cannot be read: {error}") from error
        if len(found) > _MAX_STAGES:
            raise CorruptBlockError(
                f"an encoded slice names {len(found)} stages, at most {_MAX_STAGES} exist"
            )
        return tuple(found)


def stage_bytes(stages: tuple[StageId, ...]) -> bytes:
    """``stages`` as they stand in a header.

    Raises:
        CodecError: If they are too many or too long.
    """
    found = msgspec.msgpack.encode([[name, dict(sorted(config.items()))] for name, config in stages])
    if len(stages) > _MAX_STAGES or len(found) > MAX_HEADER_NBYTES - _FIXED.size:
        raise CodecError(
            f"a pipeline of {len(stages)} stages and {len(found)} bytes of parameters; use fewer"
        )
    return found


def header_nbytes(stages: bytes) -> int:
    """Size of a header with these stages."""
    return aligned(_FIXED.size + len(stages))


def aligned(nbytes: int) -> int:
    """``nbytes`` and the zeros behind them, up to where the next frame of a row begins."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def encode_header(
    dst: memoryview, stages: bytes, decoded: int, body: int, *, lossy: bool, stored_raw: bool
) -> None:
    """Write a header to the start of ``dst``; the body of ``body`` bytes begins at :func:`header_nbytes`."""
    header = header_bytes(stages, decoded, body, lossy=lossy, stored_raw=stored_raw)
    dst[: len(header)] = header


def header_bytes(stages: bytes, decoded: int, body: int, *, lossy: bool, stored_raw: bool = False) -> bytes:
    """A header, whose size is :func:`header_nbytes`."""
    size = header_nbytes(stages)
    flags = (LOSSY if lossy else 0) | (STORED_RAW if stored_raw else 0)
    fixed = _FIXED.pack(_MAGIC, VERSION, flags, size, len(stages), decoded, body)
    return (fixed + stages).ljust(size, b"\0")


def frame_nbytes(src: memoryview) -> int:
    """Size of the frame at the start of ``src``, which may be one of several; :func:`parse_frame` checks it.

    Raises:
        CorruptBlockError: If none begins there, or it is longer than ``src``.
    """
    if len(src) < _FIXED.size:
        raise CorruptBlockError(f"{len(src)} bytes are too few for an encoded slice")
    magic, _, _, size, _, _, body = _FIXED.unpack_from(src)
    if magic != _MAGIC or size + body > len(src):
        raise CorruptBlockError(f"no encoded slice of at most {len(src)} bytes where one should begin")
    return int(size + body)


def parse_frame(src: memoryview, nbytes: int | None = None) -> Frame:
    """Take one frame apart; ``src`` is exactly one.

    Args:
        src: The frame, or its start with the whole header, if the body is elsewhere.
        nbytes: Size of the whole frame in that case.

    Raises:
        CorruptBlockError: If it is none, cut, longer than it says, or of a newer version.
    """
    if len(src) < _FIXED.size:
        raise CorruptBlockError(f"{len(src)} bytes are too few for an encoded slice")
    magic, version, flags, size, stages, decoded, body = _FIXED.unpack_from(src)
    if magic != _MAGIC:
        raise CorruptBlockError("the bytes are no encoded slice: the magic number is missing")
    if version != VERSION:
        raise CorruptBlockError(f"an encoded slice of format {version}; this kvferry reads {VERSION}")
    fits = _FIXED.size + stages <= size <= MAX_HEADER_NBYTES
    total = len(src) if nbytes is None else nbytes
    if size % _ALIGNMENT or not fits or size + body != total:
        raise CorruptBlockError(
            f"an encoded slice of {total} bytes declares a header of {size} and a body of {body}"
        )
    if flags & ~(LOSSY | STORED_RAW):
        raise CorruptBlockError(f"an encoded slice has unknown flags {flags:#x}")
    named, padding = bytes(src[_FIXED.size : _FIXED.size + stages]), src[_FIXED.size + stages : size]
    if src[_RESERVED_AT] or any(src[_RESERVED]) or any(padding):
        raise CorruptBlockError("an encoded slice has something in bytes that are zeros in this format")
    return Frame(named, bool(flags & LOSSY), bool(flags & STORED_RAW), decoded, src[size:])
