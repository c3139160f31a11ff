"""Serving requests on a channel, and noticing while one is under way that nobody wants it any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from kvferry.core.clock import deadline_in, is_past
from kvferry.core.errors import (
    ConnectionClosedError,
    KVFerryError,
    ProtocolError,
    RequestCancelledError,
)
from kvferry.wire import Channel, Incoming
from kvferry.wire.messages import Cancel, Generate, Message, Ping, Pong, Prefill

__all__ = ["POLL_S", "CancelWatch", "Handlers", "serve_requests"]

POLL_S = 0.1
"""Seconds between two looks at a connection whose request is under way: cancelling takes no longer."""

_IDLE_POLL_S = 1.0
_SEND_TIMEOUT_S = 10.0

Handlers: TypeAlias = Mapping[type[Message], Callable[[Channel, Incoming], None]]


class CancelWatch:
    """Looks whether the request that is under way on a channel is still wanted."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def poll(self) -> None:
        """Return if the request is still wanted; takes microseconds.

        Raises:
            RequestCancelledError: If the peer asked to cancel it; the channel stays good.
            ConnectionClosedError: If the peer has gone.
            ProtocolError: If it sent anything else.
        """
        incoming = self._channel.receive_idle(time.monotonic())
        if incoming is None:
            return
        if isinstance(incoming.message, Cancel):
            raise RequestCancelledError(f"cancelled by {self._channel.address}")
        raise ProtocolError(
            f"{self._channel.address} sent {type(incoming.message).__name__} while its request was under way",
            remote=True,
        )


def serve_requests(channel: Channel, handlers: Handlers, stopping: Callable[[], bool], idle_s: float) -> None:
    """Serve one request after the other until the peer goes, is idle for too long, or we stop.

    A handler answers by itself. An error it raises is what :class:`kvferry.wire.ChannelServer` logs and
    sends to the peer before it closes the connection.
    """
    until = deadline_in(idle_s)
    while not stopping() and not is_past(until):
        try:
            incoming = channel.receive_idle(deadline_in(_IDLE_POLL_S))
        except ConnectionClosedError:
            return
        if incoming is None:
            continue
        message = incoming.message
        handler = handlers.get(type(message))
        if handler is not None:
            try:
                handler(channel, incoming)
            except KVFerryError as error:
                if isinstance(message, (Prefill, Generate)):
                    error.request = message.request
                raise
        elif isinstance(message, Ping):
            channel.reply(incoming, Pong(at=time.monotonic()), deadline=deadline_in(_SEND_TIMEOUT_S))
        elif not isinstance(message, Cancel):  # a late one crossed the answer on its way
            raise ProtocolError(f"{channel.address} sent {type(message).__name__}, no request", remote=True)
        until = deadline_in(idle_s)
