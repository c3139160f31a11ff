"""KV that has lost something, in a stream: the sender says which it is, the receiver whether it takes any."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from kvferry.core.errors import CodecError, ProtocolError
from kvferry.streaming.slots import BlockSlots
from kvferry.wire.messages import BeginStream, FinishStream, StreamReady

__all__ = ["mark_told", "ready_message", "require_exact", "require_told"]


def require_told(begin: BeginStream, who: str, *, takes_lossy: bool) -> None:
    """Refuse a sender that does not say what has lost something, where that matters.

    Raises:
        CodecError: If so.
    """
    if begin.tells_lossy is not True and not takes_lossy:
        raise CodecError(
            f"{who} refused: the sender is too old to say what has lost something, and this end is "
            "configured lossless; bring the sender up to date, or set stream.allow_lossy=true here"
        )


def ready_message(slots: BlockSlots, *, ring: int, takes_lossy: bool) -> StreamReady:
    """What the sender is asked for."""
    missing = tuple(sorted(slots.missing))
    return StreamReady(missing=missing, ring=ring, takes_lossy=takes_lossy or msgspec.UNSET)


def mark_told(slots: BlockSlots, message: FinishStream, who: str, *, takes_lossy: bool) -> None:
    """Mark the full blocks that had lost something at the sender, so that they are stored as such.

    Raises:
        ProtocolError: If there are any and no loss is taken, or there is no such block.
    """
    lossy = message.lossy
    if lossy is msgspec.UNSET or not lossy:
        return
    if not takes_lossy or max(lossy) >= len(slots):
        refused = "there is none" if takes_lossy else "no loss is taken here"
        raise ProtocolError(
            f"{who}: {len(lossy)} of {len(slots)} blocks are said to have lost something, the last of them "
            f"number {max(lossy)}; {refused}",
            remote=True,
        )
    slots.mark_lossy(lossy)


def require_exact(lossy: Collection[int], who: str, *, takes_lossy: bool) -> None:
    """Refuse to hand over what has lost something to a receiver that takes no loss.

    Raises:
        ProtocolError: If so.
    """
    if lossy and not takes_lossy:
        raise ProtocolError(
            f"{who}: {len(lossy)} blocks have lost something, and the receiver takes no loss; compute behind "
            "what a namespace without takes_lossy gives"
        )
