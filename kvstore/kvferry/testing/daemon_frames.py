"""An example of each message between a client and the cache daemon: for golden frames, and to be mutated."""

from __future__ import annotations

from typing import Any

from kvferry.core.blockstore import Completion, Stats
from kvferry.core.spec import KeyScope, KVSpec
from kvferry.wire import daemon_messages as d
from kvferry.wire import messages as m
from kvferry.wire.messages import Message

__all__ = ["daemon_frames", "frame_of_place", "frames_of_loss"]


def daemon_frames(spec: KVSpec, scope: KeyScope) -> list[tuple[Message, bytes]]:
    """Each message with all of its fields, and the payload of those that can have one."""
    keys, slot = bytes(range(64)), bytes(range(24))
    more: dict[str, Any] = {"ended": (7, 2**63), "abandoned": (9,)}
    stats = Stats(entries=2, used_nbytes=8192, per_tier={"dram": {"entries": 2.0}})
    done = Completion("prefetch-1", "prefetch", False, 4096, 0.5, (1,))
    at: dict[str, Any] = {"expires_at": 30.5, "epoch": "e1"}
    of_one: dict[str, Any] = {"parents": (bytes(32),), "positions": (3,), "lossy": b"\x00"}
    opened = d.NamespaceOpened(namespace=1, lease_s=30.0, shared=True, writable=True)
    return [
        (d.OpenNamespace(spec=spec, scope=scope, namespace_id=bytes(32), **more), b""),
        (opened, b""),
        (d.LookupBlocks(namespace=1, keys=keys), b""),
        (d.LookedUp(tiers=("dram", "disk"), found=b"\x01\x02"), b""),
        (d.LoadBlocks(namespace=1, keys=keys, lease=8, timeout_s=1.5, inline=True), b""),
        (d.Loaded(blocks=1, slots=slot, **at), bytes(range(128))),
        (d.ReserveBlocks(namespace=1, keys=keys, lease=8, timeout_s=1.5, parent=bytes(32), inline=True), b""),
        (d.Reserved(blocks=1, keys=keys[:32], slots=slot, **at), b""),
        (d.CommitBlocks(lease=8, timeout_s=1.5, publish=9), bytes(range(128))),
        (d.SaveBlocks(namespace=1, keys=keys, timeout_s=1.5, parent=bytes(32)), bytes(range(128))),
        (d.Stored(blocks=2, expires_at=30.5), b""),
        (d.EndLeases(**more), b""),
        (d.QuarantineLease(lease=8), b""),
        (d.RenewLease(lease=8), b""),
        (d.LeaseRenewed(expires_at=60.5), b""),
        (d.FindLease(lease=8, inline=True), b""),
        (d.FoundLease(kind="read", spec=spec, keys=keys[:32], slots=slot, **at), bytes(range(128))),
        (d.BlockVerb(namespace=1, verb="pin", keys=keys, ttl_s=60.0), b""),
        (d.FlushStore(timeout_s=1.5), b""),
        (d.Done(count=3), b""),
        (d.GetStats(), b""),
        (d.StoreStats(stats=stats), b""),
        (d.PollStore(), b""),
        (d.Completions(completions=(done,)), b""),
        (d.AskPeer(namespace=1, verb="read", keys=keys, timeout_s=1.5), b""),
        (d.PeerBlocks(asked=2, keys=keys[:32], **of_one, expires_at=30.5), bytes(range(128))),
        (d.WritePeer(namespace=1, keys=keys[:32], **of_one, timeout_s=1.5), bytes(range(128))),
        (d.PeerMarks(marks=b"\x01\x00"), b""),
        (d.OfferStaging(nbytes=1 << 26), b""),
    ]  # fmt: skip


def frames_of_loss(spec: KVSpec, handoff: m.Handoff) -> list[Message]:
    """Messages with the fields about loss, which are left out where they say nothing."""
    return [
        m.BeginStream(stream="st", spec=spec, keys=b"", tail_tokens=3, tells_lossy=True),
        m.StreamReady(missing=(0,), takes_lossy=True),
        m.FinishStream(handoff=handoff, lossy=(1, 300)),
        d.OpenNamespace(spec=spec, namespace_id=bytes(32), lossless=True),
        d.NamespaceOpened(namespace=1, lease_s=30.0, lossless=True),
        d.Loaded(blocks=3, expires_at=1.5, lossy=(0, 2)),
        d.FoundLease(kind="read", keys=bytes(32), lossy=(0,)),
    ]


def frame_of_place(spec: KVSpec) -> Message:
    """A namespace that takes the place of another, which few connections need."""
    return d.OpenNamespace(spec=spec, namespace_id=bytes(32), instead_of=300)
