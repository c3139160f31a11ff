"""Split planes in numpy: written with zstd on the exponents, read with Huffman codes too."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

from kvferry.codecs.fallback.bits import join_planes
from kvferry.codecs.fallback.view import (
    DAMAGED,
    RAW,
    SECTION_NBYTES,
    TensorView,
    header,
    load_raw,
    parse_header,
    store_raw,
)
from kvferry.core.buffers import ByteArray
from kvferry.core.errors import CorruptBlockError

__all__ = ["split_decode", "split_encode"]

_HUFFMAN: Final = 1
_ZSTD: Final = 2
_BITS: Final = 10
_LENGTHS_NBYTES: Final = 128
_STREAM: Final = 1 << 14
_PAD_NBYTES: Final = 8
_LEVEL: Final = 1


def split_encode(view: TensorView, dst: ByteArray) -> int:
    """Write a section: the low bytes, then the exponents compressed by zstd."""
    total = view.count * view.nbytes // 2
    elements = view.load().reshape(-1)
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress((elements >> 7).astype(np.uint8).tobytes())
    end = SECTION_NBYTES + total + len(packed)
    if end >= SECTION_NBYTES + 2 * total:
        return store_raw(view, dst)
    dst[:SECTION_NBYTES] = np.frombuffer(header(_ZSTD, number=len(packed)), np.uint8)
    dst[SECTION_NBYTES : SECTION_NBYTES + total] = (elements << 1 | elements >> 15).astype(np.uint8)
    dst[SECTION_NBYTES + total : end] = np.frombuffer(packed, np.uint8)
    return end


def split_decode(view: TensorView, src: ByteArray) -> int:
    """Read a section of either kind; its size.

    Raises:
        CorruptBlockError: If it cannot be decoded.
    """
    mode, _, streams, payload = parse_header(src)
    if mode == RAW:
        return load_raw(view, src)
    total = view.count * view.nbytes // 2
    if mode == _ZSTD:
        start = SECTION_NBYTES
        high = _unzstd(src[start + total : start + total + payload], total, payload)
        end = start + total + payload
    elif mode == _HUFFMAN:
        start = SECTION_NBYTES + _LENGTHS_NBYTES
        high, end = _unhuffman(src, total, streams, payload)
    else:
        raise CorruptBlockError(DAMAGED)
    joined = join_planes(high, src[start : start + total])
    view.store(joined.reshape(view.count, view.rows, view.cols))
    return end


def _unzstd(packed: ByteArray, total: int, payload: int) -> ByteArray:
    try:
        if len(packed) != payload or zstandard.frame_content_size(packed[:18].tobytes()) != total:
            raise CorruptBlockError(DAMAGED)
        found = zstandard.ZstdDecompressor().decompress(packed.tobytes(), max_output_size=total)
    except zstandard.ZstdError as error:
        raise CorruptBlockError(f"{DAMAGED}: {error}") from error
    if len(found) != total:
        raise CorruptBlockError(DAMAGED)
    return np.frombuffer(found, np.uint8)


def _unhuffman(src: ByteArray, total: int, streams: int, payload: int) -> tuple[ByteArray, int]:
    """The exponents, and the size of the section; all streams take a step at a time."""
    start = SECTION_NBYTES + _LENGTHS_NBYTES + total
    first = start + 4 * streams
    expected = max(4, (total + 4 * _STREAM - 1) // (4 * _STREAM) * 4)
    if not total or streams != expected or len(src) < first + payload + _PAD_NBYTES:
        raise CorruptBlockError(DAMAGED)
    sizes = np.ascontiguousarray(src[start:first]).view("<u4").astype(np.int64)
    if int(sizes.sum()) != payload:
        raise CorruptBlockError(DAMAGED)
    symbols, lengths = _table(src[SECTION_NBYTES : SECTION_NBYTES + _LENGTHS_NBYTES])
    words = np.concatenate([src[first : first + payload], np.zeros(_PAD_NBYTES, np.uint8)]).astype(np.int64)
    begins = np.cumsum(sizes) - sizes
    each = -(-total // streams)
    counts = np.clip(total - each * np.arange(streams), 0, each)
    out = np.zeros((streams, each), np.uint8)
    at = 8 * begins
    limit = 8 * (begins + sizes)
    for step in range(each):
        live = counts > step
        byte = np.minimum(at >> 3, payload + _PAD_NBYTES - 3)
        window = (words[byte] | words[byte + 1] << 8 | words[byte + 2] << 16) >> (at & 7)
        index = window & ((1 << _BITS) - 1)
        out[live, step] = symbols[index][live]
        at = np.where(live, at + lengths[index], at)
    if ((at + 7) // 8 * 8 != limit).any():
        raise CorruptBlockError(DAMAGED)
    return np.concatenate([out[i, :n] for i, n in enumerate(counts)]), first + payload + _PAD_NBYTES


def _table(packed: ByteArray) -> tuple[ByteArray, npt.NDArray[np.int64]]:
    """Symbol and code length for each value of the next 10 bits.

    Raises:
        CorruptBlockError: If the lengths are no complete prefix code.
    """
    lengths = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1).astype(np.int64)
    used = lengths > 0
    if lengths.max() > _BITS or int((1 << (_BITS - lengths[used])).sum()) != 1 << _BITS:
        raise CorruptBlockError(DAMAGED)
    symbols, spans = np.zeros(1 << _BITS, np.uint8), np.zeros(1 << _BITS, np.int64)
    code = 0
    for length in range(1, _BITS + 1):
        for symbol in np.flatnonzero(lengths == length):
            turned = int(f"{code:0{length}b}"[::-1], 2)
            symbols[turned :: 1 << length] = symbol
            spans[turned :: 1 << length] = length
            code += 1
        code <<= 1
    return symbols, spans
