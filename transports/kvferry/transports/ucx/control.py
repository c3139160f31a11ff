"""The socket of a connection: it carries what is small, and tells when the peer is gone."""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import sys
import termios
import time
from collections.abc import Iterator

from kvferry.core.clock import is_past
from kvferry.core.errors import ConnectionClosedError
from kvferry.transports.guard import GuardedSocket
from kvferry.transports.sockets import SocketConnection, poll_timeout_ms

__all__ = ["ControlSocket"]

_PAUSE_S = 0.0002


class ControlSocket(SocketConnection):
    """A socket connection that can be watched for its end while UCX moves bytes beside it."""

    def __init__(self, sock: socket.socket, *, local_address: str, peer_address: str) -> None:
        super().__init__(sock, local_address=local_address, peer_address=peer_address)
        # of the receiving half: another thread may be in wait_readable, and a poll object serves one
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    @property
    def name(self) -> str:
        """The connection as messages call it."""
        return self._name

    @property
    def guard(self) -> GuardedSocket:
        """Who is inside of calls on the socket."""
        return self._guard

    @property
    def closed(self) -> bool:
        """Whether this end was closed or aborted."""
        return self._guard.closed

    @contextlib.contextmanager
    def descriptor(self) -> Iterator[int]:
        """The descriptor, which stays open meanwhile.

        Raises:
            ConnectionClosedError: If this end was closed, or belongs to the parent of this process.
        """
        self._guard.enter(self._name)
        try:
            yield self._guard.sock.fileno()
        finally:
            self._guard.leave()

    def readable(self, deadline: float) -> bool:
        """As :meth:`wait_readable`, for the thread that receives."""
        with self.descriptor():
            while not (ready := self._readable.poll(poll_timeout_ms(deadline))):
                if is_past(deadline):
                    break
            if self._guard.closed:
                raise ConnectionClosedError(f"{self._name} was closed here while it was waiting for bytes")
            return bool(ready)

    def ended(self, patience_s: float = 0.0) -> bool:
        """Whether the peer has ended the stream, or its process is gone; what it sent may still be there.

        Args:
            patience_s: A process that was killed loses its memory a moment before its sockets.
        """
        with self.descriptor() as fd:
            poll = select.poll()
            poll.register(fd, select.POLLRDHUP)
            return bool(poll.poll(patience_s * 1e3))

    def retract(self, words: bytes, patience_s: float) -> None:
        """Say ``words`` so that the peer's kernel has them when this returns, or break the connection.

        What the peer does later with memory of this process it can then know to be worthless, even if it
        sleeps now.
        """
        try:
            with self.descriptor() as fd:
                sent = self._guard.sock.send(words, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                until = time.monotonic() + patience_s
                while sent == len(words) and _unacknowledged(fd):
                    if time.monotonic() >= until:
                        break
                    time.sleep(_PAUSE_S)
                else:
                    if sent == len(words):
                        return
        except (OSError, ConnectionClosedError):
            pass  # the stream has ended, or its buffers are full: then it ends with a reset
        self.abort()


def _unacknowledged(fd: int) -> int:
    """Bytes that the peer's kernel has not acknowledged."""
    if sys.platform != "linux":
        return 0
    return int.from_bytes(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
