"""Conversions of 16- and 8-bit floats, to nearest even; bit for bit as ``native/floats.h``."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.core.buffers import ByteArray

__all__ = [
    "U16",
    "Floats",
    "bf16_above",
    "bf16_of",
    "fp8_of",
    "fp8_value",
    "of_value",
    "sortable",
    "value_of",
]

Floats: TypeAlias = "npt.NDArray[np.float32]"
U16: TypeAlias = "npt.NDArray[np.uint16]"


def value_of(raw: U16, dtype: int) -> Floats:
    """Values of bfloat16 (``dtype`` 0) or float16 (1) elements."""
    if dtype:
        return raw.view(np.float16).astype(np.float32)
    return (raw.astype(np.uint32) << 16).view(np.float32)


def bf16_of(values: Floats) -> U16:
    """The nearest bfloat16."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)


def bf16_above(values: Floats) -> U16:
    """The next bfloat16 that is not below ``values``, which are positive."""
    return ((values.view(np.uint32) + 0xFFFF) >> 16).astype(np.uint16)


def of_value(values: Floats, dtype: int) -> U16:
    """The nearest element; float16 saturates at its largest value."""
    if dtype:
        return np.clip(values, -65504, 65504).astype(np.float16).view(np.uint16)
    return bf16_of(values)


def fp8_of(values: Floats) -> ByteArray:
    """The nearest float8 e4m3fn, at most 448."""
    bits = values.view(np.uint32)
    magnitude = bits & 0x7FFFFFFF
    with np.errstate(over="ignore", invalid="ignore"):
        below = (magnitude.view(np.float32) + np.float32(2.0**14)).view(np.uint32) - np.uint32(0x46800000)
    normal = ((magnitude + (0x7FFFF + (magnitude >> 20 & 1))) >> 20) - np.uint32(120 << 3)
    found = np.where(magnitude < 0x3C800000, below, np.minimum(normal, 0x7E))
    raw: ByteArray = (found | bits >> 24 & 0x80).astype(np.uint8)
    return raw


def fp8_value(raw: ByteArray) -> Floats:
    """Values of float8 e4m3fn."""
    wide = raw.astype(np.uint32)
    values: Floats = ((wide & 0x80) << 24 | (wide & 0x7F) << 20).view(np.float32) * np.float32(2.0**120)
    return values


def sortable(raw: U16) -> npt.NDArray[np.int16]:
    """Numbers in the order of the values."""
    signed = raw.view(np.int16)
    return signed ^ (signed >> 15 & 0x7FFF)
