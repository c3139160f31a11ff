"""Messages as MessagePack, and the first bytes by which their frames are known."""

from __future__ import annotations

import functools
import struct
from typing import Final

import msgspec

from kvferry.wire.daemon_messages import DaemonMessage
from kvferry.wire.messages import AnyMessage, Message
from kvferry.wire.tables import HANDSHAKE_ONLY, TYPES

__all__ = ["MAGIC", "decode_message", "encode_message", "kind_numbers", "kinds"]

MAGIC: Final = b"KVFY"

# Over the union, not per class: only so is the tag required and compared.
decode_message = msgspec.msgpack.Decoder(AnyMessage | DaemonMessage).decode
encode_message = msgspec.msgpack.Encoder().encode


@functools.lru_cache(maxsize=8)
def kinds(version: int) -> dict[int, type[Message]]:
    """What may come on an open connection, by the first 8 bytes of its header."""
    return {
        int.from_bytes(MAGIC + struct.pack("<HH", version, number), "little"): cls
        for number, cls in TYPES.items()
        if cls not in HANDSHAKE_ONLY
    }


@functools.lru_cache(maxsize=8)
def kind_numbers(version: int) -> dict[type[Message], int]:
    """These numbers, by class."""
    return {cls: kind for kind, cls in kinds(version).items()}
