"""Exponent packing in numpy; ``native/ebp.h`` describes the section."""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.codecs.fallback.bits import join_planes, pack3, pack4, unpack3, unpack4
from kvferry.codecs.fallback.view import (
    DAMAGED,
    RAW,
    SECTION_NBYTES,
    Elements,
    TensorView,
    header,
    load_raw,
    parse_header,
    store_raw,
)
from kvferry.core.buffers import ByteArray
from kvferry.core.errors import CorruptBlockError

__all__ = ["ebp_decode", "ebp_encode"]

_T = TypeVar("_T", bound=np.generic)
_SAMPLES: Final = 32
_GROUP: Final = 32


def ebp_encode(view: TensorView, bits: int, dst: ByteArray) -> int:
    """As ``ebp_encode`` of the native library."""
    total, raw = view.count * view.nbytes // 2, SECTION_NBYTES + view.count * view.nbytes
    if not total or SECTION_NBYTES + view.cols > raw:
        return store_raw(view, dst)
    elements = view.load()
    exponents = _exponents(elements, view.dtype)
    base, chosen = _base_and_bits(exponents.reshape(-1, view.cols))
    bits = bits or chosen
    fixed = SECTION_NBYTES + view.cols + _plane_nbytes(view, bits)
    if fixed > raw:
        return store_raw(view, dst)
    limit = (1 << bits) - 1
    offsets = np.minimum(base - exponents, np.uint8(limit))
    if _overflows(_groups(offsets == limit, view), raw - fixed):
        return store_raw(view, dst)
    escapes = exponents[offsets == limit]
    low = (elements << 1 | elements >> 15).astype(np.uint8)
    parts = [base, low.reshape(-1)]
    if view.dtype:
        small: ByteArray = (elements >> 7 & 7).astype(np.uint8)
        parts.append(pack3(_groups(small, view)))
    parts.append((pack3 if bits == 3 else pack4)(_groups(offsets, view)))
    parts.append(escapes)
    dst[:SECTION_NBYTES] = np.frombuffer(header(bits, number=len(escapes)), np.uint8)
    at = SECTION_NBYTES
    for part in parts:
        dst[at : at + part.size] = part.reshape(-1)
        at += part.size
    return at


def ebp_decode(view: TensorView, src: ByteArray) -> int:
    """As ``ebp_decode`` of the native library."""
    bits, _, _, count = parse_header(src)
    if bits == RAW:
        return load_raw(view, src)
    total = view.count * view.nbytes // 2
    end = SECTION_NBYTES + view.cols + (_plane_nbytes(view, bits) if bits in (3, 4) else 0)
    if bits not in (3, 4) or not total or len(src) < end + count:
        raise CorruptBlockError(DAMAGED)
    base = src[SECTION_NBYTES : SECTION_NBYTES + view.cols]
    at = SECTION_NBYTES + view.cols
    low = src[at : at + total].reshape(view.count, view.rows, view.cols)
    at += total
    groups = view.count * _group_count(view)
    small = src[at : at + 12 * groups] if view.dtype else src[:0]
    at += len(small)
    packed = src[at : at + 4 * bits * groups]
    offsets = _elements((unpack3 if bits == 3 else unpack4)(packed), view)
    exponents = (base - offsets).astype(np.uint8)
    escaped = offsets == (1 << bits) - 1
    if int(escaped.sum()) != count:
        raise CorruptBlockError("an encoded tensor cannot be decoded: its escapes do not fit its offsets")
    exponents[escaped] = src[end : end + count]
    if len(small):
        exponents = (exponents << 3 | _elements(unpack3(small), view)).astype(np.uint8)
    view.store(join_planes(exponents, low))
    return end + count


def _exponents(elements: Elements, dtype: int) -> ByteArray:
    return ((elements >> 10 & 31) if dtype else (elements >> 7 & 255)).astype(np.uint8)


def _base_and_bits(exponents: ByteArray) -> tuple[ByteArray, int]:
    """The base of each column from sampled rows, and which of 3 and 4 bits they say is smaller."""
    rows = len(exponents)
    samples = min(rows, _SAMPLES)
    sampled = exponents[(np.arange(samples) * rows + rows // 2) // samples]
    base = sampled.max(axis=0)
    offsets = base - sampled
    out3, out4 = int((offsets >= 7).sum()), int((offsets >= 15).sum())
    return base, 3 if 3 * sampled.size + 8 * out3 <= 4 * sampled.size + 8 * out4 else 4


def _group_count(view: TensorView) -> int:
    return -(-view.rows * view.cols // _GROUP)


def _plane_nbytes(view: TensorView, bits: int) -> int:
    small = 12 if view.dtype else 0
    return view.count * (view.rows * view.cols + _group_count(view) * (small + 4 * bits))


def _groups(values: npt.NDArray[_T], view: TensorView) -> npt.NDArray[_T]:
    """The values of each slice in groups of 32, the last one filled up with zeros: ``[groups, 32]``."""
    padded = np.zeros((view.count, _group_count(view) * _GROUP), values.dtype)
    padded[:, : view.rows * view.cols] = values.reshape(view.count, -1)
    return padded.reshape(-1, _GROUP)


def _overflows(escaped: npt.NDArray[np.bool_], room: int) -> bool:
    """Whether the escapes find no room: before those of a group are written, 32 bytes must be left."""
    counts = escaped.sum(axis=1)
    before = np.cumsum(counts) - counts
    return bool(((counts > 0) & (before + _GROUP > room)).any())


def _elements(groups: ByteArray, view: TensorView) -> ByteArray:
    """The groups of each slice without what fills up the last one."""
    whole = groups.reshape(view.count, -1)[:, : view.rows * view.cols]
    return whole.reshape(view.count, view.rows, view.cols)
