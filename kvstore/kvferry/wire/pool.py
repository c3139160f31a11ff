"""Idle channels to one address, kept for the next request."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from kvferry.core.buffers import Buf
from kvferry.core.errors import ConnectionClosedError
from kvferry.wire.channel import Channel
from kvferry.wire.messages import Message
from kvferry.wire.options import ChannelOptions

__all__ = ["ChannelPool"]

M = TypeVar("M", bound=Message)


class ChannelPool:
    """Channels to one address: an idle one is used again, else a new one is made.

    Thread safe; connecting happens outside the lock. An idle channel that its peer closed meanwhile (a
    restart, an idle timeout) is dropped and replaced unseen by the caller. Idle channels older than
    ``idle_timeout_s`` are closed whenever the pool is used. At any time there are as many channels as are in
    use, and ``max_idle`` at most besides.

    Args:
        address: URL of a :class:`kvferry.wire.ChannelServer`, or a function that knows where the peer is
            now: it is asked for each new channel, so a peer that moved is found as soon as it is missed. It
            is called outside the lock, by any thread, and its errors are those of :meth:`acquire`.
        options: For the channels made.
        max_idle: Channels kept at most; one more that is released is closed.
        idle_timeout_s: Seconds after which an unused channel is closed; keep it below the server's.
    """

    def __init__(
        self,
        address: str | Callable[[], str],
        options: ChannelOptions,
        *,
        max_idle: int = 8,
        idle_timeout_s: float = 60.0,
    ) -> None:
        self.address = address if isinstance(address, str) else ""
        """Where the last channel went, or the next goes; empty as long as that is not known."""
        self._locate = address if callable(address) else None
        self._options = options
        self._max_idle = max_idle
        self._idle_timeout_s = idle_timeout_s
        self._lock = threading.Lock()
        self._idle: list[tuple[float, Channel]] = []
        self._reconnects = 0
        self._lost = False  # a channel died that none has replaced
        self._request_ids = itertools.count(1)
        self._closed = False

    @property
    def idle(self) -> int:
        """How many channels are kept."""
        with self._lock:
            return len(self._idle)

    @property
    def reconnects(self) -> int:
        """How often channels had died, idle or in use, and a new one took their place, however much later."""
        with self._lock:
            return self._reconnects

    def acquire(self, deadline: float) -> Channel:
        """A channel for the caller alone, until it is given to :meth:`release` or :meth:`discard`.

        Raises:
            ConnectionClosedError: If the pool is closed.
            KVFerryError: As :meth:`Channel.connect`.
        """
        return self._acquire(deadline)[0]

    def _acquire(self, deadline: float) -> tuple[Channel, bool]:
        """A channel, and whether it was idle before."""
        self.close_idle()
        while (channel := self._take()) is not None:
            # Nobody sends to an idle channel: what is readable is the end of the stream, or garbage.
            if channel.reusable and not channel.readable():
                return channel, True
            self._lose(channel)
        return self._connect(deadline), False

    def _lose(self, channel: Channel) -> None:
        channel.abort()
        with self._lock:
            self._lost = True

    def _connect(self, deadline: float) -> Channel:
        if self._locate is not None:
            self.address = self._locate()
        channel = Channel.connect(self.address, self._options, deadline)
        with self._lock:
            self._reconnects += self._lost
            self._lost = False
        return channel

    def call(
        self, message: Message, reply_type: type[M], *, payload: Sequence[Buf] = (), deadline: float
    ) -> M:
        """:meth:`Channel.call` on a channel of the pool.

        An idle channel whose end shows only while the request is being sent is replaced once too: of a
        request that was not sent whole the peer does nothing.

        Raises:
            KVFerryError: As :meth:`acquire` and :meth:`Channel.call`.
        """
        channel, idle = self._acquire(deadline)
        request_id = next(self._request_ids)
        try:
            try:
                channel.send(message, payload, deadline=deadline, request_id=request_id)
            except ConnectionClosedError:
                if not idle:
                    raise
                self._lose(channel)
                channel = self._connect(deadline)
                channel.send(message, payload, deadline=deadline, request_id=request_id)
            reply = channel.expect(reply_type, deadline, request_id=request_id)
        except ConnectionClosedError:
            self._lose(channel)
            raise
        except BaseException:
            self.discard(channel)
            raise
        self.release(channel)
        return reply

    def release(self, channel: Channel) -> None:
        """Give back a channel between two requests; it is closed if it cannot be used again."""
        with self._lock:
            keep = channel.reusable and not self._closed and len(self._idle) < self._max_idle
            if keep:
                self._idle.append((time.monotonic(), channel))
        if not keep:
            channel.close()
        self.close_idle()

    def discard(self, channel: Channel) -> None:
        """Give back a channel that must not be used again, such as after an error."""
        channel.abort()

    @contextmanager
    def channel(self, deadline: float) -> Iterator[Channel]:
        """:meth:`acquire`, then :meth:`release`, or :meth:`discard` after an exception."""
        channel = self.acquire(deadline)
        try:
            yield channel
        except ConnectionClosedError:
            self._lose(channel)
            raise
        except BaseException:
            self.discard(channel)
            raise
        self.release(channel)

    def close_idle(self) -> None:
        """Close the channels that were unused for ``idle_timeout_s``."""
        oldest = time.monotonic() - self._idle_timeout_s
        with self._lock:
            expired = [channel for since, channel in self._idle if since <= oldest]
            self._idle = [(since, channel) for since, channel in self._idle if since > oldest]
        for channel in expired:
            channel.close()

    def close(self) -> None:
        """Close the idle channels; those in use are closed when they are released."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for _, channel in idle:
            channel.close()

    def _take(self) -> Channel | None:
        with self._lock:
            if self._closed:
                raise ConnectionClosedError(f"the pool of channels to {self.address} is closed")
            return self._idle.pop()[1] if self._idle else None
