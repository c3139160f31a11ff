"""An unambiguous byte encoding of plain values, for identities.

Every value is tagged with its type and prefixed with its length, so moving a character across the
border of two fields changes the encoding, and ``None`` differs from empty. The encoding is part of
the on-disk and on-wire format: golden vectors pin it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

__all__ = ["Canonical", "encode"]

Canonical: TypeAlias = "str | int | bytes | bool | Sequence[Canonical] | None"


def encode(value: Canonical) -> bytes:
    """Encode ``value``; equal encodings mean equal values of equal types.

    Raises:
        TypeError: For any other type (no fallback to ``repr``: it is not stable).
        OverflowError: For an integer outside 64 signed bits.
    """
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"T" if value else b"F"
    if isinstance(value, int):
        return b"I" + value.to_bytes(8, "little", signed=True)
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return b"S" + struct.pack("<Q", len(data)) + data
    if isinstance(value, bytes):
        return b"B" + struct.pack("<Q", len(value)) + value
    if isinstance(value, Sequence):
        return b"L" + struct.pack("<Q", len(value)) + b"".join(map(encode, value))
    raise TypeError(f"{type(value).__name__} has no canonical encoding")
