"""Packing of groups of 32 small values."""

from __future__ import annotations

import numpy as np

from kvferry.codecs.fallback.floats import U16
from kvferry.core.buffers import ByteArray

__all__ = ["join_planes", "pack3", "pack4", "unpack3", "unpack4"]


def pack3(groups: ByteArray) -> ByteArray:
    """12 bytes a group: of each eight values, value i in the bits 3 i to 3 i + 2 of three bytes."""
    eights = groups.reshape(-1, 8).astype(np.uint32)
    joined = np.bitwise_or.reduce(eights << (3 * np.arange(8, dtype=np.uint32)), axis=1)
    raw: ByteArray = joined.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3]
    return raw.reshape(-1)


def unpack3(packed: ByteArray) -> ByteArray:
    """The reverse of :func:`pack3`, flat."""
    raw = np.zeros((len(packed) // 3, 4), np.uint8)
    raw[:, :3] = packed.reshape(-1, 3)
    joined = raw.view("<u4").reshape(-1, 1)
    values: ByteArray = (joined >> (3 * np.arange(8, dtype=np.uint32)) & 7).astype(np.uint8)
    return values.reshape(-1)


def pack4(groups: ByteArray) -> ByteArray:
    """16 bytes a group: the first half in the lower, the second in the upper four bits."""
    packed: ByteArray = np.bitwise_or(groups[:, :16], np.left_shift(groups[:, 16:], 4), dtype=np.uint8)
    return packed.reshape(-1)


def unpack4(packed: ByteArray) -> ByteArray:
    """The reverse of :func:`pack4`, flat."""
    halves = packed.reshape(-1, 16)
    values: ByteArray = np.concatenate([halves & 15, halves >> 4], axis=1).astype(np.uint8)
    return values.reshape(-1)


def join_planes(high: ByteArray, low: ByteArray) -> U16:
    """Elements from their high bytes (exponents) and low bytes (the rest, with the sign last)."""
    wide = low.astype(np.uint32)
    joined: U16 = ((wide & 1) << 15 | high.astype(np.uint32) << 7 | wide >> 1).astype(np.uint16)
    return joined
