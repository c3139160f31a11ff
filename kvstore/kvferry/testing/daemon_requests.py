"""What a client asks of the cache daemon in one connection, such that all of it is granted: to be mutated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.core.keys import BlockKey
from kvferry.core.spec import KeyScope, KVSpec, namespace_id
from kvferry.testing.blocks import block_bytes
from kvferry.wire import daemon_messages as d
from kvferry.wire.messages import AttachArena, Message, Ping

__all__ = ["daemon_requests", "opening"]


def opening(spec: KVSpec, scope: KeyScope) -> Message:
    """The first request of a connection: it is given namespace 0."""
    return d.OpenNamespace(spec=spec, scope=scope, namespace_id=namespace_id(spec, scope))


def daemon_requests(spec: KVSpec, keys: Sequence[BlockKey], *, local: bool) -> list[tuple[Message, bytes]]:
    """Requests and their payloads, granted in this order behind :func:`opening`, whatever was stored before.

    Args:
        spec: Of the namespace.
        keys: Of a chain, from its first block.
        local: Whether the daemon's memory may be asked for: over ``unix``, by a client that knows of it.
    """
    chain, first = b"".join(keys), bytes(keys[0])
    blocks = b"".join(block_bytes(key, spec.block_nbytes) for key in keys)
    on: dict[str, Any] = {"namespace": 0, "timeout_s": 1.5}
    chained: dict[str, Any] = {
        "parents": (None, *keys[:-1]),
        "positions": tuple(range(len(keys))),
        "lossy": bytes(len(keys)),
    }
    return [
        (Ping(), b""),
        (d.BlockVerb(namespace=0, verb="clear"), b""),
        (d.SaveBlocks(**on, keys=chain), blocks),
        (d.LookupBlocks(namespace=0, keys=chain), b""),
        (d.LoadBlocks(**on, keys=chain, lease=1, inline=True), b""),
        (d.LoadBlocks(**on, keys=chain, lease=2, inline=not local), b""),
        (d.RenewLease(lease=1), b""),
        (d.FindLease(lease=1, inline=True), b""),
        (d.EndLeases(ended=(1, 2), abandoned=(3,)), b""),
        (d.BlockVerb(namespace=0, verb="pin", keys=chain, ttl_s=60.0), b""),
        (d.BlockVerb(namespace=0, verb="unpin", keys=chain), b""),
        (d.BlockVerb(namespace=0, verb="prefetch", keys=chain), b""),
        (d.BlockVerb(namespace=0, verb="remove", keys=chain), b""),
        (d.ReserveBlocks(**on, keys=chain, lease=4, inline=True), b""),
        (d.CommitBlocks(lease=4, timeout_s=1.5, publish=5), blocks),
        (d.BlockVerb(namespace=0, verb="remove", keys=chain, ended=(5,)), b""),
        (d.ReserveBlocks(**on, keys=first, lease=6, inline=not local), b""),
        (d.QuarantineLease(lease=6), b""),
        (d.AskPeer(**on, verb="remove", keys=chain), b""),
        (d.WritePeer(**on, **chained, keys=chain), blocks),
        (d.AskPeer(**on, verb="has", keys=chain), b""),
        (d.AskPeer(**on, verb="read", keys=chain), b""),
        (d.FlushStore(timeout_s=1.5, ended=(6,)), b""),
        (d.GetStats(), b""),
        (d.PollStore(), b""),
        *[(AttachArena(), b"")] * local,
    ]  # fmt: skip
