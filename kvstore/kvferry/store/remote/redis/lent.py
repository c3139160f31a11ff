"""Memory lent to a server, of whose connection nothing more is expected: until when it may be read."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from typing import Final

from kvferry.transports.sockets import SocketConnection

__all__ = ["StillRead"]

_LOOK_S: Final = 0.01
_ENDED: Final = frozenset({6, 7})  # TIME_WAIT and CLOSE: both sides are done, all that was sent is gone


class StillRead(threading.Event):
    """Set once a server has let go of a connection; what still lies in its socket it may read until then.

    The kernel of the server holds what it was lent by reference. Nothing tells how much of that the server
    has read, but for its answers; when it has closed its socket, or the kernels have given up, nobody holds
    anything. So the connection is not reset but ended in order, and seen to its end, by whoever asks.

    Args:
        connection: Which is aborted right after this.
    """

    def __init__(self, connection: SocketConnection) -> None:
        super().__init__()
        self._sock: socket.socket | None = None
        with suppress(OSError):  # it was closed here: then it is never known
            self._sock = socket.socket(fileno=os.dup(connection.fileno()))
            self._sock.shutdown(socket.SHUT_WR)

    def is_set(self) -> bool:
        """See :class:`threading.Event`; looks at the connection."""
        sock = self._sock
        if sock is not None and not super().is_set():
            with suppress(OSError):
                if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] not in _ENDED:
                    return False
            self.set()
            sock.close()
        return super().is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """See :class:`threading.Event`."""
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        while not self.is_set():
            left = until - time.monotonic()
            if left <= 0:
                return False
            super().wait(min(left, _LOOK_S))
        return True
