"""A connection over one socket that moves bytes and their hash in one call of the native library."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from typing import Final

from kvferry.core.buffers import total_nbytes
from kvferry.core.clock import remaining
from kvferry.core.errors import ConnectionClosedError, KVFerryError
from kvferry.transports.guard import GuardedSocket
from kvferry.transports.hashed import AGAIN, ENDED, STRAY, HashedStream, hashed_stream
from kvferry.transports.replies import Ahead, Form, ReplyStream, Taken, reply_stream
from kvferry.transports.sockets import SocketConnection
from kvferry.transports.streams import sending
from kvferry.transports.values import Value, ValueStream, value_stream

__all__ = ["HashedSocketConnection"]

_NO_SIGNAL: Final = int(socket.MSG_NOSIGNAL)
_ALL: Final = int(socket.MSG_WAITALL)


class HashedSocketConnection(SocketConnection):
    """As :class:`SocketConnection`; without the library, and at a rate, it does what any connection does.

    Attributes:
        spin_s: How long the short ways of a channel look for the next message before they sleep, while
            messages come that fast (:mod:`kvferry.transports.spin`); 0: never.
    """

    receive_flags = _ALL
    """Of the system call that receives."""
    _receives_hashed = True
    """Whether to receive is to call the socket, and nothing else."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        local_address: str,
        peer_address: str,
        rate: float | None = None,
        spin_s: float = 0.0,
    ) -> None:
        super().__init__(sock, local_address=local_address, peer_address=peer_address, rate=rate)
        self.spin_s = spin_s
        self._outgoing: HashedStream | None = None  # made when first used: most lanes never do
        self._incoming: HashedStream | None = None
        self._values: ValueStream | None = None
        self._replies: ReplyStream | None = None

    @property
    def bare(self) -> GuardedSocket | None:
        """The socket, if to send and to receive is to call it, and nothing else, from now on."""
        return self._guard if self._pacer is None and self._receives_hashed else None

    def send_hashed(self, head: bytes, views: Sequence[memoryview], deadline: float) -> None:
        """See :meth:`Connection.send_hashed`."""
        stream = self._outgoing
        if stream is None:
            stream = self._outgoing = None if self._pacer is not None else hashed_stream()
            if stream is None:
                super().send_hashed(head, views, deadline)
                return
        guard = self._guard
        guard.enter(self._name)
        try:
            limit, left = self._send_limit, remaining(deadline)
            if not (limit <= left and (limit >= 1.0 or left <= limit + limit)):
                self._limit_wait(socket.SO_SNDTIMEO, deadline, sending(0, len(head) + total_nbytes(views)))
                limit = self._send_limit
            code = stream.send(guard.sock.fileno(), _NO_SIGNAL, head, views, deadline - limit)
            while code:
                if code not in AGAIN:
                    raise self._failed(OSError(code, os.strerror(code)), sending(*stream.progress))
                self._limit_wait(socket.SO_SNDTIMEO, deadline, sending(*stream.progress))
                code = stream.go_on(deadline - self._send_limit, sending=True)
        finally:
            guard.leave()

    @property
    def sends_values(self) -> bool:
        """Whether :meth:`send_values` can be called: where the library is, on a connection without a rate."""
        if self._values is None and self._pacer is None:
            self._values = value_stream()
        return self._values is not None

    def send_values(self, values: Sequence[Value], end: bytes, deadline: float, *, lends: bool) -> int:
        """Send values, each with the checksum of its data and ``end`` behind it.

        Args:
            values: Heads and data.
            end: What ends each of them, a few bytes.
            deadline: Of the whole call.
            lends: The data stays as it is until the peer has answered, or has let go of the connection: so
                the kernel need not copy it.

        Returns:
            Bytes that were lent. Raises as :meth:`send`; then it counts as lent whatever might be.
        """
        stream = self._values
        assert stream is not None
        guard = self._guard
        guard.enter(self._name)
        try:
            self._limit_wait(socket.SO_SNDTIMEO, deadline, "sending values")
            until = deadline - self._send_limit
            code = stream.send(guard.sock.fileno(), _NO_SIGNAL, values, end, until, lends=lends)
            while code:
                if code not in AGAIN:
                    raise self._failed(OSError(code, os.strerror(code)), sending(*stream.progress))
                self._limit_wait(socket.SO_SNDTIMEO, deadline, sending(*stream.progress))
                code = stream.go_on(deadline - self._send_limit)
            return stream.lent
        finally:
            stream.end()
            guard.leave()

    @property
    def receives_values(self) -> bool:
        """Whether :meth:`recv_values` can be called: as of :attr:`sends_values`."""
        if self._replies is None and self.bare is not None:
            self._replies = reply_stream()
        return self._replies is not None

    def recv_values(
        self, form: Form, views: Sequence[memoryview], ahead: Ahead, deadline: float
    ) -> list[Taken]:
        """Receive values of one form, the data of each into one of ``views``.

        Args:
            form: Of all of them.
            views: As large as their data.
            ahead: What was received before; its buffer has room for start and prefix at least. What follows
                on the last value that was taken, as far as that has come, lies there afterwards.
            deadline: Of the whole call.

        Returns:
            What came, in order: fewer than ``views`` if the next one is of another form. Raises as
            :meth:`recv_into`.
        """
        stream = self._replies
        assert stream is not None
        guard = self._guard
        guard.enter(self._name)
        try:
            self._limit_wait(socket.SO_RCVTIMEO, deadline, "receiving values")
            fd, until = guard.sock.fileno(), deadline - self._recv_limit
            code = stream.receive(fd, self.receive_flags, form, views, ahead, until)
            while code and code != stream.OTHER:
                if code not in AGAIN:
                    raise self._broken(stream, code)
                self._wait_more(stream, deadline)
                code = stream.go_on(ahead, deadline - self._recv_limit)
            if guard.closed:
                raise self._ended(*stream.progress)
            return stream.taken
        finally:
            stream.end()
            guard.leave()

    def recv_hashed(self, start: bytes, views: Sequence[memoryview], deadline: float) -> tuple[int, int]:
        """See :meth:`Connection.recv_hashed`."""
        stream = self._incoming
        if stream is None or not self._receives_hashed:
            stream = self._incoming = hashed_stream() if self._receives_hashed else None
            if stream is None:
                return super().recv_hashed(start, views, deadline)
        guard = self._guard
        guard.enter(self._name)
        try:
            limit, left = self._recv_limit, remaining(deadline)
            if not (limit <= left and (limit >= 1.0 or left <= limit + limit)):
                self._limit_wait(socket.SO_RCVTIMEO, deadline, "receiving")
                limit = self._recv_limit
            code = stream.receive(guard.sock.fileno(), self.receive_flags, start, views, deadline - limit)
            while code:
                if code not in AGAIN:
                    raise self._broken(stream, code)
                self._wait_more(stream, deadline)
                code = stream.go_on(deadline - self._recv_limit, sending=False)
            if guard.closed:
                raise self._ended(*stream.progress)
            return stream.hashes
        finally:
            guard.leave()

    def _wait_more(self, stream: HashedStream | ReplyStream, deadline: float) -> None:
        got, wanted = stream.progress
        if self._guard.closed:
            raise self._ended(got, wanted)
        self._limit_wait(socket.SO_RCVTIMEO, deadline, f"receiving, {got} of {wanted} bytes had come")

    def _broken(self, stream: HashedStream | ReplyStream, code: int) -> KVFerryError:
        if self._guard.closed or code == ENDED:
            return self._ended(*stream.progress)
        if code == STRAY:
            return self._truncated()
        return self._failed(OSError(code, os.strerror(code)), "receiving")

    def ended(self, doing: str, moved: int, wanted: int) -> KVFerryError:
        """What is raised when the stream ended, here or there; ``wanted`` is 0 if nothing was begun."""
        if doing == "sending":
            return self.failed(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)), doing)
        return self._ended(moved, wanted or 1)

    def late(self, doing: str, moved: int, wanted: int) -> KVFerryError:
        """What is raised when the deadline passed in the midst of ``wanted`` bytes."""
        if doing == "sending":
            return self._timed_out(sending(moved, wanted))
        return self._timed_out(f"receiving, {moved} of {wanted} bytes had come")

    def failed(self, error: OSError, doing: str) -> KVFerryError:
        """What is raised when the system says ``error``."""
        return self._failed(error, doing)

    def truncated(self) -> KVFerryError:
        """What is raised when control messages came where none are due."""
        return self._truncated()

    def _truncated(self) -> KVFerryError:
        """Control messages were cut off, which none but unix sockets have."""
        return ConnectionClosedError(f"{self._name}: control messages came where none are due")
