"""The question and the answer at the start of a connection.

Who dials sends :class:`Ask`, the listener answers with :class:`Offers`, who dials says with :class:`Taken`
that the stream goes on over this very socket, or ends it and dials what it chose. Each is a magic of 8 bytes,
a version (u16) and a length (u32, both little-endian), and a MessagePack map of at most 8 KiB. Fields that
are not known are skipped; the first version that cannot be read so gets another number.

A connection beside the port, over ``unix`` or ``ucx``, begins with the ticket of the answer, so both ends
know that it leads to the process that was asked, whatever names and numbers suggest.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final, TypeVar

import msgspec

__all__ = [
    "ACCEPTED",
    "MAGIC",
    "PREFIX_NBYTES",
    "TICKET_NBYTES",
    "VERSION",
    "Ask",
    "Offer",
    "Offers",
    "Taken",
    "pack",
    "parse_body",
    "parse_prefix",
    "shown",
]

MAGIC: Final = b"\x89KVAUTO\n"
VERSION: Final = 1
TICKET_NBYTES: Final = 16
ACCEPTED: Final = b"\x89KVTAKE\n"
"""The listener's answer to a ticket."""

_PREFIX: Final = struct.Struct("<8sHI")
PREFIX_NBYTES: Final = _PREFIX.size
_MAX_BODY_NBYTES: Final = 8 << 10
_MAX_SHOWN: Final = 500

Text = Annotated[str, msgspec.Meta(max_length=1024)]
Names = Annotated[list[Annotated[str, msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=16)]
_M = TypeVar("_M", "Ask", "Offers", "Taken")


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Who dials, and what it would take.

    Attributes:
        host: See ``host_identity``.
        require: As in its address.
        regions: Region transports that it has.
    """

    host: Text
    require: Text = ""
    regions: Names = []


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """One way to connect.

    Attributes:
        scheme: The transport.
        path: Of the socket, for ``unix``.
        inode: Device and inode of that path, which tell it from one of the same name elsewhere.
        uid: Who listens there.
        port: For ``ucx``, on the host that was dialled.
        rdma: Whether it leads over RDMA.
    """

    scheme: Text
    path: Text = ""
    inode: tuple[int, int] = (0, 0)
    uid: int = -1
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    rdma: bool = False


class Offers(msgspec.Struct, frozen=True, kw_only=True):
    """What the listener has.

    Attributes:
        host: See ``host_identity``.
        offers: The best first.
        ticket: To be shown on a connection beside the port; good for one connection and half a minute.
        lacking: What it has not, with the reason, by transport.
        regions: Region transports that it has.
        refused: Why nothing is offered; empty otherwise.
    """

    host: Text
    offers: Annotated[list[Offer], msgspec.Meta(max_length=16)]
    ticket: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    lacking: Annotated[dict[Text, Text], msgspec.Meta(max_length=16)] = {}
    regions: Names = []
    refused: Text = ""


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """The stream goes on over this socket."""

    scheme: Text


def pack(message: Ask | Offers | Taken, version: int = VERSION) -> bytes:
    """The bytes of a message."""
    body = msgspec.msgpack.encode(message)
    return _PREFIX.pack(MAGIC, version, len(body)) + body


def parse_prefix(data: bytes | bytearray | memoryview) -> int:
    """How many bytes follow.

    Raises:
        ValueError: If it is something else, too long, or of a version that is not known here.
    """
    magic, version, nbytes = _PREFIX.unpack(data)
    if magic != MAGIC:
        raise ValueError(f"its first bytes are {bytes(magic).hex()}, those of an auto end are {MAGIC.hex()}")
    if version != VERSION:
        raise ValueError(
            f"it speaks version {version} of auto, this end {VERSION}; name the transport instead"
        )
    if nbytes > _MAX_BODY_NBYTES:
        raise ValueError(f"its message of {nbytes} bytes is over the limit of {_MAX_BODY_NBYTES}")
    return int(nbytes)


def shown(text: str) -> str:
    """What a peer wrote, fit for a line of a log: short, and without what would move the cursor."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:_MAX_SHOWN])


def parse_body(data: bytes | bytearray | memoryview, kind: type[_M]) -> _M:
    """The message.

    Raises:
        ValueError: If it is none.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"its message cannot be read: {error}") from error
