"""What the headers of all format versions have in common: the length, and four fields of fixed width."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Final

from kvferry.core.keys import KEY_NBYTES, BlockKey

__all__ = [
    "ALIGNMENT",
    "ENCODED",
    "LENGTH_NBYTES",
    "PLAIN",
    "SHORTEST",
    "TAIL_AT",
    "U64",
    "checksum_at",
    "dumps",
    "has_parent",
    "read_fields",
    "round_up",
    "tensor_entry",
    "write_fields",
]

ALIGNMENT: Final = 4096
"""Data starts at a multiple of this, whatever the page size of the machine that wrote the file."""
PLAIN: Final = 1
"""Format version of a block as it is."""
ENCODED: Final = 2
"""Format version of an encoded block."""
U64: Final = struct.Struct("<Q")
LENGTH_NBYTES: Final = 8
_POSITION_DIGITS: Final = 12
_HEX_KEY: Final = 2 * KEY_NBYTES
_HEX_CHECKSUM: Final = 16


def round_up(nbytes: int) -> int:
    """To whole pages."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def dumps(value: object) -> str:
    """As JSON without a space."""
    return json.dumps(value, separators=(",", ":"))


def tensor_entry(dtype: str, shape: Sequence[int], start: int, stop: int) -> dict[str, object]:
    """A tensor as safetensors describes it."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


_ANY_KEY: Final = BlockKey(bytes(KEY_NBYTES))
_BEFORE_KEY: Final = b'{"__metadata__":{"format":"kvferry.block","version":"%d","key":"'
_BEFORE_PARENT: Final = b'","parent":"'
_BEFORE_POSITION: Final = b'","position":"'
_BEFORE_CHECKSUM: Final = b'","xxh3_64":"'
_AFTER_CHECKSUM: Final = b'",'
_PARENT_AT: Final = LENGTH_NBYTES + len(_BEFORE_KEY % PLAIN) + _HEX_KEY + len(_BEFORE_PARENT)


_FIELDS: Final = {
    version: b"".join(
        (
            (_BEFORE_KEY % version).replace(b"%", b"%%"), b"%b", _BEFORE_PARENT, b"%b", _BEFORE_POSITION,
            b"%%0%dd" % _POSITION_DIGITS, _BEFORE_CHECKSUM, b"%%0%dx" % _HEX_CHECKSUM, _AFTER_CHECKSUM,
        )
    )
    for version in (PLAIN, ENCODED)
}  # fmt: skip


def write_fields(
    parent: BlockKey | None, position: int, checksum: int, key: BlockKey = _ANY_KEY, version: int = PLAIN
) -> bytes:
    """The start of a header, behind its length; a position that has no place in it is not known."""
    if not 0 <= position < 10**_POSITION_DIGITS:  # of another daemon, or a store of others
        position = -1
    parent_hex = b"" if parent is None else parent.hex().encode()
    return _FIELDS[version] % (key.hex().encode(), parent_hex, position, checksum)


SHORTEST: Final = LENGTH_NBYTES + len(write_fields(None, -1, 0))
TAIL_AT: Final = (SHORTEST, SHORTEST + _HEX_KEY)
"""Where what follows the fields begins, without and with a parent."""


def checksum_at(parent: BlockKey | None) -> int:
    """Where the 16 hexadecimal digits of the checksum are in a header with that parent."""
    return TAIL_AT[parent is not None] - len(_AFTER_CHECKSUM) - _HEX_CHECKSUM


def has_parent(header: bytes) -> bool:
    """Whether a header that is long enough names a parent."""
    return header[_PARENT_AT : _PARENT_AT + 1] != b'"'


def read_fields(header: bytes) -> tuple[BlockKey | None, int, int] | None:
    """Parent, position and checksum, if they can be read: unchecked until they are written and compared."""
    at, named = _PARENT_AT, has_parent(header)
    try:
        parent = BlockKey(bytes.fromhex(header[at : at + _HEX_KEY].decode())) if named else None
        at += (_HEX_KEY if named else 0) + len(_BEFORE_POSITION)
        position = int(header[at : at + _POSITION_DIGITS])
        at += _POSITION_DIGITS + len(_BEFORE_CHECKSUM)
        checksum = int(header[at : at + _HEX_CHECKSUM], 16)
    except ValueError:
        return None
    return parent, position, checksum
