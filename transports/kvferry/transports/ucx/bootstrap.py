"""How two ends find out about each other before a byte is moved.

The one that dials sends its preamble first, the one that listens answers with its own, or with a refusal.
A preamble is a magic of 8 bytes, a length (u16, little-endian), and a MessagePack map. Addresses of workers
are not part of it: they are exchanged when the first large message of a direction is sent.
"""

from __future__ import annotations

import functools
import secrets
import socket
import struct
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvferry.core.open_files import OUT_OF_FILES
from kvferry.transports.ucx.context import Context
from kvferry.transports.ucx.rdma import kind_of, kinds
from kvferry.transports.ucx.settings import Options

__all__ = [
    "PREFIX_NBYTES",
    "Preamble",
    "keeps_messages",
    "key_of",
    "own_preamble",
    "pack_preamble",
    "parse_body",
    "parse_prefix",
    "problem_with",
    "uses_shared_memory",
]

_MAGIC: Final = b"kvf-ucx\x02"
_PREFIX: Final = struct.Struct("<8sH")
PREFIX_NBYTES: Final = _PREFIX.size
_MAX_BODY_NBYTES: Final = 4096
_MAX_NAMES: Final = 64
_NONCE_NBYTES: Final = 16
_MAILBOXES: Final = frozenset({"posix", "sysv", "xpmem"})


class Preamble(msgspec.Struct, frozen=True, kw_only=True):
    """What one end says of itself.

    Attributes:
        host: The same for two processes that may share memory.
        ucx: Version of UCX.
        transports: Names of the transports that its UCX uses.
        nonce: Random, of this connection alone; see :func:`key_of`.
        refused: Why there will be no connection; empty if there will.
        unauthorised: Whether that is for who the other end is.
    """

    host: str
    ucx: str
    transports: list[str]
    nonce: Annotated[bytes, msgspec.Meta(min_length=_NONCE_NBYTES, max_length=_NONCE_NBYTES)]
    refused: str = ""
    unauthorised: bool = False


@functools.cache
def _host() -> str:
    """Differs between machines, and between containers that do not share /dev/shm.

    Raises:
        OSError: If there is no descriptor left to see: nothing else is remembered for that.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        shm = Path("/dev/shm").stat().st_dev  # noqa: S108 - only looked at
    except OSError as error:
        if error.errno in OUT_OF_FILES:
            raise
        return socket.gethostname()
    return f"{boot}/{shm}"


def own_preamble(context: Context, refused: str = "", *, unauthorised: bool = False) -> Preamble:
    """The preamble of this process for one connection."""
    names = context.names[:_MAX_NAMES]
    return Preamble(
        host=_host(),
        ucx=context.ucx.version,
        transports=names,
        nonce=secrets.token_bytes(_NONCE_NBYTES),
        refused=refused[:1024],
        unauthorised=unauthorised,
    )


def key_of(dialled: Preamble, listened: Preamble) -> bytes:
    """The key of the digests that addresses of workers have on this connection."""
    return dialled.nonce + listened.nonce


def pack_preamble(preamble: Preamble) -> bytes:
    """The bytes of a preamble."""
    body = msgspec.msgpack.encode(preamble)
    return _PREFIX.pack(_MAGIC, len(body)) + body


def parse_prefix(data: bytes | bytearray | memoryview) -> int:
    """How many bytes follow.

    Raises:
        ValueError: If the other end speaks another protocol; with what it said.
    """
    magic, nbytes = _PREFIX.unpack(data)
    if magic != _MAGIC or nbytes > _MAX_BODY_NBYTES:
        raise ValueError(f"it is no ucx end of this version, its first bytes are {bytes(data).hex()}")
    return int(nbytes)


def parse_body(data: bytes | bytearray | memoryview) -> Preamble:
    """Read what follows the prefix.

    Raises:
        ValueError: If it is none.
    """
    try:
        return msgspec.msgpack.decode(data, type=Preamble)
    except msgspec.MsgspecError as error:
        raise ValueError(f"its preamble cannot be read: {error}") from error


def _common(own: Preamble, peer: Preamble) -> list[str]:
    """Transports of both ends that lead from one to the other."""
    same_host = own.host == peer.host
    both = set(own.transports) & set(peer.transports)
    # self is for messages of one worker to itself
    return sorted(name for name in both if name != "self" and (same_host or kind_of(name) != "shm"))


def uses_shared_memory(own: Preamble, peer: Preamble) -> bool:
    """Whether UCX will find shared memory between the two, if it does not watch the peer itself."""
    return "shm" in kinds(_common(own, peer))


def keeps_messages(own: Preamble, peer: Preamble) -> bool:
    """Whether small messages end up in memory of the receiver's, which it need not be looking at."""
    return bool(_MAILBOXES & set(_common(own, peer)))


def problem_with(own: Preamble, peer: Preamble, options: Options) -> str:
    """Why the two cannot be connected; empty if they can."""
    common = _common(own, peer)
    place = "the same host" if own.host == peer.host else "another host"
    lists = f"{', '.join(own.transports)} here, {', '.join(peer.transports)} there (on {place})"
    if not common:
        return (
            f"UCX has no transport in common: {lists}. Compare UCX_TLS and UCX_NET_DEVICES of both, "
            "and the tls of the address"
        )
    if options.require and options.require not in kinds(common):
        return f"asked for {options.require}, but in common are only {', '.join(common)}: {lists}"
    return ""
