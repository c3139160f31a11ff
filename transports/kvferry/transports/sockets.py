"""Connections over stream sockets: what ``tcp`` and ``unix`` are made of.

The sockets are blocking. A call first tries without waiting (one system call in the good case); what is
left then blocks in the kernel, which counts down the deadline (``SO_RCVTIMEO``, ``SO_SNDTIMEO``) and fills
or empties the whole list of buffers before it comes back to Python.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import select
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Sequence
from typing import Final, TypeAlias

from typing_extensions import Buffer

from kvferry.core.buffers import Buf, as_bytes_view, total_nbytes
from kvferry.core.errors import (
    ConnectionClosedError,
    KVFerryError,
    TransferTimeoutError,
    TransportError,
)
from kvferry.transports.base import Connection
from kvferry.transports.pacing import Pacer

__all__ = ["Ancillary", "GuardedSocket", "SocketConnection", "poll_timeout_ms"]

_MAX_PARTS: Final = 1024  # IOV_MAX
_MAX_WAIT_S: Final = 3600.0
_EXACT_S: Final = 0.02
_FLUSH_S: Final = 0.25
_DRAIN_NBYTES: Final = 1 << 16
_SIOCOUTQNSD: Final = 0x894B  # bytes of the send queue that were not sent yet
Ancillary: TypeAlias = "Sequence[tuple[int, int, Buffer]]"
"""Control messages of ``sendmsg``: level, kind, bytes."""
_GONE: Final = frozenset(
    {errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN, errno.ETIMEDOUT, errno.ESHUTDOWN, errno.ECONNABORTED}
)


def poll_timeout_ms(deadline: float) -> float:
    """Milliseconds until ``deadline`` for ``poll``: not negative, and finite."""
    return min(max(0.0, deadline - time.monotonic()), _MAX_WAIT_S) * 1000


class GuardedSocket:
    """A socket whose descriptor is closed only when no thread is inside a call on it.

    Otherwise a thread that blocks in a system call could find itself on a descriptor that the kernel has
    given to another file meanwhile.

    A forked child has a copy of the descriptor, and with it the parent's stream: there every call fails,
    and the end closes the copy and leaves the stream alone.
    """

    __slots__ = ("_lock", "_pid", "_users", "closing", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock: Final = sock
        self.closing: Final = threading.Event()
        self._lock = threading.Lock()
        self._users = 0
        self._pid = os.getpid()

    @property
    def closed(self) -> bool:
        """Whether the end has begun; calls still inside come back soon."""
        return self.closing.is_set()

    def enter(self, name: str) -> None:
        """A call on the socket starts; each needs its :meth:`leave`.

        Raises:
            ConnectionClosedError: If it was closed here, or belongs to the parent of this process;
                ``name`` says what.
        """
        if self._inherited():
            raise ConnectionClosedError(
                f"{name} was made by process {self._pid}, which forked this one; make a new one here"
            )
        with self._lock:
            if self.closing.is_set():
                raise ConnectionClosedError(f"{name} is closed")
            self._users += 1

    def leave(self) -> None:
        """A call ends; the last one out closes the descriptor once that was asked for."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self.closing.is_set():
                self.sock.close()

    def _inherited(self) -> bool:
        """Whether this is a forked child's copy; it is closed then. The lock may be held for ever there."""
        if os.getpid() == self._pid:
            return False
        self.sock.close()
        return True

    def begin_close(self) -> bool:
        """Mark as closed and enter; ``False`` (not entered) if it was closed before, or is inherited."""
        if self._inherited():
            return False
        with self._lock:
            if self.closing.is_set():
                return False
            self.closing.set()
            self._users += 1
            return True

    def reenter(self) -> bool:
        """Enter even if it is being closed; ``False`` if the descriptor is gone, or inherited."""
        if self._inherited():
            return False
        with self._lock:
            if self.sock.fileno() < 0:
                return False
            self.closing.set()
            self._users += 1
            return True

    @property
    def others(self) -> bool:
        """Whether another thread is inside; for a caller that is inside itself."""
        with self._lock:
            return self._users > 1


class SocketConnection(Connection):
    """A connection over one connected stream socket.

    After a fork it is the parent's; the child makes its own.

    Args:
        sock: Connected; owned from here on.
        local_address: URL of this end.
        peer_address: URL of the other end.
        rate: Bytes a second at which it sends; ``None`` for as fast as it goes.
    """

    def __init__(
        self, sock: socket.socket, *, local_address: str, peer_address: str, rate: float | None = None
    ) -> None:
        sock.settimeout(None)
        self._guard = GuardedSocket(sock)
        self._local_address = local_address
        self._peer_address = peer_address
        self._name = f"the connection {local_address} to {peer_address}"
        self._pacer = Pacer(rate, time.monotonic()) if rate is not None else None
        self._limits = {socket.SO_SNDTIMEO: math.inf, socket.SO_RCVTIMEO: math.inf}
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    @property
    def local_address(self) -> str:
        """URL of this end."""
        return self._local_address

    @property
    def peer_address(self) -> str:
        """URL of the other end."""
        return self._peer_address

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._local_address} to {self._peer_address}>"

    # -- sending ---------------------------------------------------------------------------------------

    def send(self, parts: Sequence[Buf], deadline: float) -> None:
        """See :meth:`Connection.send`; paced if the connection has a rate."""
        views = [view for part in parts if len(view := as_bytes_view(part))]
        self._guard.enter(self._name)
        try:
            if self._pacer is None:
                self._send_all(views, deadline)
            else:
                self._send_paced(self._pacer, views, deadline)
        finally:
            self._guard.leave()

    def _send_all(self, views: list[memoryview], deadline: float) -> bool:
        """Send ``views`` (the list is used up); whether it had to wait for the peer."""
        first, waits = 0, False
        while first < len(views):
            batch = views[first : first + _MAX_PARTS]
            # the kernel may join the batches of one call into full segments
            more = socket.MSG_MORE if first + _MAX_PARTS < len(views) else 0
            sent = self._send_some(batch, more, deadline, waits=waits)
            waits = waits or sent < total_nbytes(batch)
            first = _advance(views, first, sent)
        return waits

    def _send_some(
        self, batch: list[memoryview], more: int, deadline: float, *, waits: bool, ancillary: Ancillary = ()
    ) -> int:
        """Bytes sent; 0 if the buffer of the socket is full."""
        flags = socket.MSG_NOSIGNAL | more
        if waits:
            self._limit_wait(socket.SO_SNDTIMEO, deadline, "sending")
        else:
            flags |= socket.MSG_DONTWAIT
            if time.monotonic() >= deadline:
                raise self._timed_out("sending")
        try:
            return self._guard.sock.sendmsg(batch, ancillary, flags)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._failed(error, "sending") from error

    def _send_paced(self, pacer: Pacer, views: list[memoryview], deadline: float) -> None:
        now = time.monotonic()
        pacer.begin(now)
        first = 0
        while first < len(views):
            piece, nbytes = _take(views, first, pacer.limit(now))
            due = pacer.reserve(nbytes, now)
            if due > now:
                self._sleep_until(min(due, deadline))
            if due >= deadline:
                raise self._timed_out("sending at its rate")
            stalled = self._send_all(piece, deadline)
            now = time.monotonic()
            pacer.sent(now, stalled=stalled)
            first = _advance(views, first, nbytes)

    def _sleep_until(self, then: float) -> None:
        if self._guard.closing.wait(max(0.0, then - time.monotonic())):
            raise ConnectionClosedError(f"{self._name} was closed while it was sending")

    # -- receiving -------------------------------------------------------------------------------------

    def recv_into(self, views: Sequence[memoryview], deadline: float) -> None:
        """See :meth:`Connection.recv_into`."""
        left = [view for view in views if len(view)]
        wanted = total_nbytes(left)
        got = 0
        self._guard.enter(self._name)
        try:
            first, waits = 0, False
            while first < len(left):
                batch = left[first : first + _MAX_PARTS]
                n = self._recv_some(
                    batch, deadline, f"receiving, {got} of {wanted} bytes had come", waits=waits
                )
                # once closed here, what comes may lie behind bytes that close() took and dropped
                if n == 0 or self._guard.closed:
                    who = "was closed here" if self._guard.closed else "was ended by the peer"
                    raise ConnectionClosedError(f"{self._name} {who} after {got} of {wanted} bytes")
                waits = n < 0 or n < total_nbytes(batch)
                got += max(n, 0)
                first = _advance(left, first, max(n, 0))
        finally:
            self._guard.leave()

    def _recv_some(self, batch: list[memoryview], deadline: float, doing: str, *, waits: bool) -> int:
        """Bytes received; 0 at the end of the stream, -1 if none are there yet."""
        flags = socket.MSG_DONTWAIT
        if waits:
            self._limit_wait(socket.SO_RCVTIMEO, deadline, doing)
            flags = socket.MSG_WAITALL
        elif time.monotonic() >= deadline:
            raise self._timed_out(doing)
        try:
            return self._recv_call(batch, flags)
        except BlockingIOError:
            return -1
        except OSError as error:
            raise self._failed(error, doing) from error

    def _recv_call(self, batch: list[memoryview], flags: int) -> int:
        """One system call that receives."""
        if len(batch) == 1:
            return self._guard.sock.recv_into(batch[0], 0, flags)
        return self._guard.sock.recvmsg_into(batch, 0, flags)[0]

    def wait_readable(self, deadline: float) -> bool:
        """See :meth:`Connection.wait_readable`."""
        self._guard.enter(self._name)
        try:
            while not (ready := self._poll.poll(poll_timeout_ms(deadline))) and time.monotonic() < deadline:
                pass
            if self._guard.closed:
                raise ConnectionClosedError(f"{self._name} was closed here while it was waiting for bytes")
            return bool(ready)
        finally:
            self._guard.leave()

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the stream; what was sent still arrives.

        Waits for at most a quarter of a second, and only while the kernel still holds bytes that it could
        not send; after that it goes on sending them by itself.
        """
        if not self._guard.begin_close():
            return
        try:
            self._shutdown(socket.SHUT_WR)
            self._flush()
            if self._guard.others:
                self._shutdown(socket.SHUT_RD)
        finally:
            self._guard.leave()

    def abort(self) -> None:
        """End the stream at once: the peer gets a reset, what it has not received is dropped."""
        if not self._guard.reenter():
            return
        try:
            self._guard.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if self._guard.others:
                self._shutdown(socket.SHUT_RDWR)
        finally:
            self._guard.leave()

    def _flush(self) -> None:
        """Wait until nothing is unsent, taking what the peer still sends.

        Closing a socket with unread bytes, or bytes that arrive later, makes the kernel answer with a
        reset, which drops everything that is not yet sent: a last message that says why would be lost.
        """
        scratch = bytearray(_DRAIN_NBYTES)
        until = time.monotonic() + _FLUSH_S
        pause, crossing = 0.0005, False
        while time.monotonic() < until:
            try:
                if self._guard.sock.recv_into(scratch, 0, socket.MSG_DONTWAIT) == 0:
                    return  # the peer has ended too, nothing can cross
            except BlockingIOError:
                pass
            except OSError:
                return
            else:
                crossing = True
                continue
            # with bytes of the peer on their way to us, only what it acknowledged is safe
            if self._queued(termios.TIOCOUTQ if crossing else _SIOCOUTQNSD) <= 1:  # the end itself counts
                return
            time.sleep(pause)
            pause = min(pause * 2, 0.01)

    def _queued(self, request: int) -> int:
        if sys.platform != "linux":
            return 0
        try:
            answer = fcntl.ioctl(self._guard.sock.fileno(), request, bytes(4))
        except OSError:
            return 0
        return int.from_bytes(answer, sys.byteorder)

    def _shutdown(self, how: int) -> None:
        try:
            self._guard.sock.shutdown(how)
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # the peer was first
                raise self._failed(error, "closing") from error

    # -- errors ----------------------------------------------------------------------------------------

    def _limit_wait(self, option: int, deadline: float, doing: str) -> None:
        """Let the kernel give up before ``deadline``, with a system call only if the last limit is unfit.

        The limit is a little shorter than asked for, so that it also fits the next call, whose deadline
        is as far away but for some microseconds. A wait that it ends too early just goes on.
        """
        left = deadline - time.monotonic()
        if left <= 0:
            raise self._timed_out(doing)
        if self._guard.closed:
            raise ConnectionClosedError(f"{self._name} was closed here while {doing}")
        if min(1.0, left / 2) <= self._limits[option] <= left:
            return
        limit = left if left < _EXACT_S else min(left, _MAX_WAIT_S) * 0.9
        fraction, whole = math.modf(limit)
        # zero would mean without a limit
        value = struct.pack("@ll", int(whole), max(1, int(fraction * 1e6)))
        self._guard.sock.setsockopt(socket.SOL_SOCKET, option, value)
        self._limits[option] = limit

    def _timed_out(self, doing: str) -> TransferTimeoutError:
        return TransferTimeoutError(f"{self._name}: the deadline passed while {doing}")

    def _failed(self, error: OSError, doing: str) -> KVFerryError:
        if self._guard.closed:
            return ConnectionClosedError(f"{self._name} was closed here while {doing}")
        reason = error.strerror or str(error)
        if error.errno in _GONE:
            return ConnectionClosedError(f"{self._name} was ended by the peer while {doing}: {reason}")
        return TransportError(f"{self._name} failed while {doing}: {reason}")


def _advance(views: list[memoryview], first: int, nbytes: int) -> int:
    """Skip ``nbytes`` of ``views[first:]``; the first that is left, a view begun shortened in place."""
    while nbytes:
        view = views[first]
        if nbytes < len(view):
            views[first] = view[nbytes:]
            break
        nbytes -= len(view)
        first += 1
    return first


def _take(views: list[memoryview], first: int, limit: int) -> tuple[list[memoryview], int]:
    """Views of at most ``limit`` bytes from ``views[first:]``, and how many bytes they have."""
    taken: list[memoryview] = []
    nbytes = 0
    while first < len(views) and nbytes < limit:
        view = views[first][: limit - nbytes]
        taken.append(view)
        nbytes += len(view)
        first += 1
    return taken, nbytes
