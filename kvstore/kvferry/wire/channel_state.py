"""What a channel is while it lives: its connection, its peer, and its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.core.errors import ProtocolError
from kvferry.transports.base import Connection, SharedMemoryConnection
from kvferry.wire.incoming import Incoming
from kvferry.wire.options import ChannelOptions, Peer
from kvferry.wire.protocol import Side, WireProtocol
from kvferry.wire.reader import FrameReader
from kvferry.wire.short import MessageWay, ShortWay

__all__ = ["ChannelState"]


class ChannelState:
    """The half of :class:`kvferry.wire.channel.Channel` that moves no messages."""

    def __init__(self, connection: Connection, protocol: WireProtocol, options: ChannelOptions) -> None:
        self._connection = connection
        self._protocol = protocol
        self._reader = FrameReader(connection, protocol)
        self._short: ShortWay | MessageWay | None = None  # once the connection is open
        self._short_place = self._reader.place
        self._took_long_way = False  # whether the reader may hold bytes of the next frame
        # Descriptors that were read over would be lost; only servers send them.
        self._reads_ahead = protocol.side is Side.SERVER or not self.shares_memory
        self._options = options
        self._send_lock = threading.Lock()
        self._receive_lock = threading.Lock()
        self._pending: Incoming | None = None
        self._peer: Peer | None = None
        self._next_request = 0
        self._closed = False
        self._failure_received = False
        self._waiting = False
        self._last_activity = time.monotonic()

    def __repr__(self) -> str:
        return f"<Channel to {self.address} {self._protocol.state.value}>"

    @property
    def address(self) -> str:
        """URL of the other end."""
        return self._connection.peer_address

    @property
    def peer(self) -> Peer:
        """The other end, as it described itself."""
        assert self._peer is not None, "made by connect() and accept() only"
        return self._peer

    @property
    def checksum(self) -> bool:
        """Whether frames carry a checksum on this connection."""
        return self._protocol.checksum

    @property
    def shares_memory(self) -> bool:
        """Whether descriptors of memory can be passed along with frames."""
        return isinstance(self._connection, SharedMemoryConnection)

    @property
    def peer_pid(self) -> int | None:
        """Process id of the peer as the kernel knows it, if it does."""
        return self._memory().peer_credentials[0] if self.shares_memory else None

    @property
    def closed(self) -> bool:
        """Whether this end was closed, or aborted after an error."""
        return self._closed

    @property
    def reusable(self) -> bool:
        """Whether another request may be made: no frame is open, and the peer reported no failure."""
        return not (
            self._closed or self._failure_received or self._pending is not None or self._protocol.in_frame
        )

    @property
    def idle_s(self) -> float:
        """For how many seconds a thread has been waiting for a frame with nothing moving; else 0."""
        return time.monotonic() - self._last_activity if self._waiting else 0.0

    def _memory(self) -> SharedMemoryConnection:
        if not isinstance(self._connection, SharedMemoryConnection):
            raise ProtocolError(
                f"{self.address}: descriptors of memory pass only between processes of one machine, "
                "use a unix:// address"
            )
        return self._connection

    def _unread(self) -> ProtocolError:
        assert self._pending is not None
        return ProtocolError(
            f"{self.address}: {self._pending.payload_nbytes} payload bytes of the last "
            f"{type(self._pending.message).__name__} must be read or discarded first"
        )

    # ---- ending ------------------------------------------------------------------------------

    @contextmanager
    def _frame(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._frame_failed()
            raise
        self._last_activity = time.monotonic()

    def _frame_failed(self) -> None:
        """Abort the connection after any exception: half a frame is on the way or taken."""
        if self._peer is not None:  # before that the handshake ends it, with a word to the peer
            self.abort()

    def close(self) -> None:
        """End the connection after what was sent has been handed over; a second call does nothing."""
        self._closed = True
        self._connection.close()

    def abort(self) -> None:
        """End the connection at once; wakes threads that use it. Safe from any thread."""
        self._closed = True
        self._connection.abort()
