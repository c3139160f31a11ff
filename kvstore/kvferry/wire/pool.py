"""Idle channels to one address, kept for the next request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.core.errors import ConnectionClosedError
from kvferry.wire.channel import Channel
from kvferry.wire.options import ChannelOptions

__all__ = ["ChannelPool"]


class ChannelPool:
    """Channels to one address: an idle one is used again, else a new one is made.

    Thread safe; connecting happens outside the lock. An idle channel that its peer closed meanwhile (a
    restart, an idle timeout) is dropped and replaced unseen by the caller. Idle channels older than
    ``idle_timeout_s`` are closed whenever the pool is used.

    Args:
        address: URL of a :class:`kvferry.wire.ChannelServer`.
        options: For the channels made.
        max_idle: Channels kept at most; one more that is released is closed.
        idle_timeout_s: Seconds after which an unused channel is closed; keep it below the server's.
    """

    def __init__(
        self, address: str, options: ChannelOptions, *, max_idle: int = 8, idle_timeout_s: float = 60.0
    ) -> None:
        self.address = address
        self._options = options
        self._max_idle = max_idle
        self._idle_timeout_s = idle_timeout_s
        self._lock = threading.Lock()
        self._idle: list[tuple[float, Channel]] = []
        self._closed = False

    @property
    def idle(self) -> int:
        """How many channels are kept."""
        with self._lock:
            return len(self._idle)

    def acquire(self, deadline: float) -> Channel:
        """A channel for the caller alone, until it is given to :meth:`release` or :meth:`discard`.

        Raises:
            ConnectionClosedError: If the pool is closed.
            KVFerryError: As :meth:`Channel.connect`.
        """
        self.close_idle()
        while (channel := self._take()) is not None:
            # Nobody sends to an idle channel: what is readable is the end of the stream, or garbage.
            if channel.reusable and not channel.readable():
                return channel
            channel.abort()
        return Channel.connect(self.address, self._options, deadline)

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
