"""The first exchange of a stream, at the sender: what it is, and what the receiver wants and offers."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvferry.core.errors import ProtocolError, StoreError, error_from_code
from kvferry.wire import Channel, SharedArena
from kvferry.wire.messages import (
    ArenaSegments,
    BeginStream,
    Failure,
    StreamReady,
    StreamSlots,
    StreamWindows,
)

__all__ = ["Opened", "open_stream"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Opened:
    """What a receiver grants.

    Attributes:
        slots: Slots of its arena into which they may be written.
        windows: Windows of a region transport, likewise.
    """

    slots: StreamSlots | None = None
    windows: StreamWindows | None = None


def open_stream(
    channel: Channel,
    opening: BeginStream,
    opened: Opened,
    *,
    arena: SharedArena | None,
    regions: bool,
    deadline: float,
    who: str,
) -> StreamReady:
    """Send the opening message; what comes before its answer is about the receiver's memory.

    Args:
        channel: To the receiver.
        opening: The message.
        opened: Takes what the receiver grants, also where an error follows.
        arena: Takes the receiver's segments, if it has some to share.
        regions: Whether windows may be granted.
        deadline: By when.
        who: The stream, for messages.

    Raises:
        KVFerryError: The receiver's refusal, or an error of the channel.
    """
    if arena is None and not regions:
        return channel.call(opening, StreamReady, deadline=deadline)
    channel.send(opening, deadline=deadline)
    while True:
        incoming = channel.receive(deadline)
        message = incoming.message
        if isinstance(message, ArenaSegments) and arena is not None:
            try:
                arena.take(channel, incoming, deadline)
            except StoreError as error:
                _log.warning("%s: KV goes by frames: %s", who, error)
        elif isinstance(message, StreamSlots):
            opened.slots = message
        elif isinstance(message, StreamWindows):
            opened.windows = message
        elif isinstance(message, StreamReady):
            return message
        elif isinstance(message, Failure):
            raise error_from_code(message.code, f"{channel.address}: {message.message}")
        else:
            raise ProtocolError(f"{who}: the receiver answered with {message!r}", remote=True)
