"""Connections over stream sockets: what ``tcp`` and ``unix`` are made of.

The sockets are blocking: a call waits in the kernel, which counts down the deadline (``SO_RCVTIMEO``,
``SO_SNDTIMEO``) and fills or empties the whole list of buffers before it comes back to Python. So a call is
one system call in the good case.
"""

from __future__ import annotations

import errno
import fcntl
import math
import select
import socket
import struct
import sys
import termios
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

from typing_extensions import Buffer

from kvferry.core.buffers import Buf, as_bytes_view, as_places, total_nbytes
from kvferry.core.clock import is_past, remaining, time_left
from kvferry.core.errors import (
    ConnectionClosedError,
    KVFerryError,
    TransferTimeoutError,
    TransportError,
)
from kvferry.transports.guard import GuardedSocket
from kvferry.transports.streams import StreamConnection, advance, sending

__all__ = ["Ancillary", "GuardedSocket", "SocketConnection", "flush_all", "poll_timeout_ms"]

_MAX_PARTS: Final = 1024  # IOV_MAX
_MAX_WAIT_S: Final = 3600.0
_EXACT_S: Final = 0.02
_FLUSH_S: Final = 0.25
# As plain numbers: to join flags of the enumeration takes longer than a short call.
_NO_SIGNAL: Final = int(socket.MSG_NOSIGNAL)
_MORE: Final = int(socket.MSG_MORE)
_NOW: Final = int(socket.MSG_DONTWAIT)
_ALL: Final = int(socket.MSG_WAITALL)
_DRAIN_NBYTES: Final = 1 << 16
_DRAIN_CALLS: Final = 64
_SIOCOUTQNSD: Final = 0x894B  # bytes of the send queue that were not sent yet
Ancillary: TypeAlias = "Sequence[tuple[int, int, Buffer]]"
"""Control messages of ``sendmsg``: level, kind, bytes."""
_GONE: Final = frozenset(
    {errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN, errno.ETIMEDOUT, errno.ESHUTDOWN, errno.ECONNABORTED}
)


def poll_timeout_ms(deadline: float) -> float:
    """Milliseconds until ``deadline`` for ``poll``: not negative, and finite."""
    return min(time_left(deadline), _MAX_WAIT_S) * 1000


class SocketConnection(StreamConnection):
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
        super().__init__(local_address=local_address, peer_address=peer_address, rate=rate)
        sock.settimeout(None)
        self._guard = GuardedSocket(sock)
        self._crossing = False
        self._direct = True  # whether to receive is to call the socket, and nothing else
        self._send_limit = self._recv_limit = math.inf  # what the kernel was told
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def _enter(self) -> None:
        self._guard.enter(self._name)

    def _leave(self) -> None:
        self._guard.leave()

    def _sleep(self, seconds: float) -> bool:
        return self._guard.closing.wait(seconds)

    # -- sending ---------------------------------------------------------------------------------------

    def send(self, parts: Sequence[Buf], deadline: float) -> None:
        """See :meth:`Connection.send`; paced if the connection has a rate."""
        nbytes = 0
        plain: Any = parts  # the socket takes what the loop lets through
        for part in parts:
            if type(part) is bytes:
                nbytes += len(part)
            elif type(part) is memoryview and part.c_contiguous:
                nbytes += part.nbytes
            else:
                nbytes = 0
                break
        if not nbytes > 0 or len(parts) > _MAX_PARTS or self._pacer is not None:
            super().send(parts, deadline)
            return
        # the short way: one system call, which takes what it gets as it is
        guard = self._guard
        guard.enter(self._name)
        try:
            limit, left = self._send_limit, remaining(deadline)
            if not (limit <= left and (limit >= 1.0 or left <= limit + limit)):
                self._limit_wait(socket.SO_SNDTIMEO, deadline, sending(0, nbytes))
            try:
                if len(parts) == 1:
                    sent = guard.sock.send(plain[0], _NO_SIGNAL)
                else:
                    sent = guard.sock.sendmsg(plain, (), _NO_SIGNAL)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise self._failed(error, "sending") from error
            if sent < nbytes:
                views = [view for part in parts if len(view := as_bytes_view(part))]
                del views[: advance(views, 0, sent)]
                self._send_all(views, deadline, sent, nbytes, waits=True)
        finally:
            guard.leave()

    def send_views(self, views: list[memoryview], deadline: float, before: int, total: int) -> bool:
        """Send ``views``, none of them empty (the list is used up), regardless of the rate.

        They are ``total`` bytes with what a message of errors has to count, of which ``before`` have gone.

        Returns:
            Whether it had to wait for the peer. Raises as :meth:`send`.
        """
        self._guard.enter(self._name)
        try:
            return self._send_all(views, deadline, before, total)
        finally:
            self._guard.leave()

    def _send_all(
        self, views: list[memoryview], deadline: float, before: int, total: int, *, waits: bool = False
    ) -> bool:
        """See :meth:`StreamConnection._send_all`; ``waits``: a first try without waiting was made."""
        first = 0
        while first < len(views):
            batch = views[first : first + _MAX_PARTS]
            # the kernel may join the batches of one call into full segments
            more = _MORE if first + _MAX_PARTS < len(views) else 0
            sent = self._send_some(batch, more, deadline, sending(before, total), waits=waits)
            waits = waits or sent < total_nbytes(batch)
            before += sent
            first = advance(views, first, sent)
        return waits

    def _send_some(
        self,
        batch: list[memoryview],
        more: int,
        deadline: float,
        doing: str,
        *,
        waits: bool,
        ancillary: Ancillary = (),
    ) -> int:
        """Bytes sent; 0 if the buffer of the socket is full."""
        flags = _NO_SIGNAL | more
        if waits:
            self._limit_wait(socket.SO_SNDTIMEO, deadline, doing)
        else:
            flags |= _NOW
            if is_past(deadline):
                raise self._timed_out(doing)
        try:
            return self._guard.sock.sendmsg(batch, ancillary, flags)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._failed(error, doing) from error

    # -- receiving -------------------------------------------------------------------------------------

    def recv_into(self, views: Sequence[memoryview], deadline: float) -> None:
        """See :meth:`Connection.recv_into`."""
        views = as_places(views)
        guard = self._guard
        guard.enter(self._name)
        try:
            n = 0
            if len(views) == 1:
                left, wanted = list(views), len(views[0])
                if wanted:
                    n = self._recv_directly(views[0], _ALL, deadline, 0, wanted)
                if n == wanted:
                    return
            else:
                left = [view for view in views if len(view)]
                wanted = sum(map(len, left))
            if wanted and not n and len(left) <= _MAX_PARTS:
                n = self._recv_some(left, deadline, "receiving", waits=True)
                if n == wanted and not guard.closed:
                    return
                if n == 0 or guard.closed:
                    raise self._ended(0, wanted)
                n = max(n, 0)
            del left[: advance(left, 0, n)]
            got = n + self._receive(left, wanted - n, deadline, before=n, total=wanted)
            if got < wanted:
                raise self._timed_out(f"receiving, {got} of {wanted} bytes had come")
        finally:
            guard.leave()

    def recv_at_least(self, view: memoryview, minimum: int, deadline: float) -> int:
        """See :meth:`Connection.recv_at_least`."""
        guard, got = self._guard, 0
        guard.enter(self._name)
        try:
            got = self._recv_directly(view, 0, deadline, 0, minimum)
            while got < minimum:
                piece = view[got:] if got else view
                n = self._recv_some([piece], deadline, "receiving", waits=True, all_of_it=False)
                if n == 0 or guard.closed:
                    raise self._ended(got, minimum)
                got += max(n, 0)
            return got
        finally:
            guard.leave()

    def _recv_directly(self, view: memoryview, flags: int, until: float, before: int, total: int) -> int:
        """The short way: bytes received if nothing is out of the ordinary; 0 for the long way to go on."""
        limit, left = self._recv_limit, remaining(until)
        if not (self._direct and limit <= left and (limit >= 1.0 or left <= limit + limit)):
            return 0
        try:
            n = self._recv_one(view, flags)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._failed(error, "receiving") from error
        if n == 0 or self._guard.closed:
            raise self._ended(before, total)
        return n

    def _receive(
        self, left: list[memoryview], wanted: int, until: float, *, before: int = 0, total: int = 0
    ) -> int:
        """As :meth:`receive_by`, by a caller who is inside; uses up ``left``."""
        first, got = 0, 0
        doing = f"receiving {wanted} bytes"
        while got < wanted:
            batch = left[first : first + _MAX_PARTS] if first or len(left) > _MAX_PARTS else left
            try:
                n = self._recv_some(batch, until, doing, waits=True)
            except TransferTimeoutError:
                break
            # once closed here, what comes may lie behind bytes that close() took and dropped
            if n == 0 or self._guard.closed:
                raise self._ended(before + got, total or wanted)
            if n > 0:
                got += n
                if got < wanted:
                    first = advance(left, first, n)
        return got

    def _ended(self, got: int, wanted: int) -> ConnectionClosedError:
        who = "was closed here" if self._guard.closed else "was ended by the peer"
        return ConnectionClosedError(f"{self._name} {who} after {got} of {wanted} bytes")

    def _recv_some(
        self,
        batch: list[memoryview],
        deadline: float,
        doing: str,
        *,
        waits: bool,
        all_of_it: bool = True,
    ) -> int:
        """Bytes received; 0 at the end of the stream, -1 if none are there yet."""
        flags = _NOW
        if waits:
            limit, left = self._recv_limit, remaining(deadline)
            if not (limit <= left and (limit >= 1.0 or left <= limit + limit)) or self._guard.closed:
                self._limit_wait(socket.SO_RCVTIMEO, deadline, doing)
            flags = _ALL if all_of_it else 0
        elif is_past(deadline):
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

    def _recv_one(self, view: memoryview, flags: int) -> int:
        """As :meth:`_recv_call` for one view, where descriptors are not due."""
        return self._guard.sock.recv_into(view, 0, flags)

    def receive_by(self, views: list[memoryview], wanted: int, until: float, before: int, total: int) -> int:
        """Fill ``views``, which have ``wanted`` bytes; how many of them came by ``until``.

        Raises:
            ConnectionClosedError: If the stream ends; the message says after how many of ``total`` bytes,
                ``before`` of which came before.
        """
        self._guard.enter(self._name)
        try:
            n = self._recv_directly(views[0], _ALL, until, before, total) if len(views) == 1 else 0
            if n == wanted:
                return n
            left = list(views)
            del left[: advance(left, 0, n)]
            return n + self._receive(left, wanted - n, until, before=before + n, total=total)
        finally:
            self._guard.leave()

    def receive_some_by(self, view: memoryview, until: float, before: int, total: int) -> int:
        """Receive what is there into ``view``, after waiting for the first byte; 0 at ``until``.

        Raises as :meth:`receive_by`.
        """
        guard = self._guard
        guard.enter(self._name)
        try:
            if n := self._recv_directly(view, 0, until, before, total):
                return n
            n = self._recv_some([view], until, "receiving", waits=True, all_of_it=False)
            if n == 0 or guard.closed:
                raise self._ended(before, total)
            return max(n, 0)
        except TransferTimeoutError:
            return 0
        finally:
            guard.leave()

    def wait_readable(self, deadline: float) -> bool:
        """See :meth:`Connection.wait_readable`."""
        self._guard.enter(self._name)
        try:
            while not (ready := self._poll.poll(poll_timeout_ms(deadline))) and not is_past(deadline):
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
        if self.begin_end():
            self.finish_end()

    def begin_end(self) -> bool:
        """The first half of :meth:`close`, which does not wait; ``False`` if it was closed before."""
        if not self._guard.begin_close():
            return False
        try:
            self._last_words()
            self._shutdown(socket.SHUT_WR)
        except BaseException:
            self._guard.leave()
            raise
        return True

    def _last_words(self) -> None:
        """What is sent before the end of the stream: here nothing."""

    def finish_end(self, *, flush: bool = True) -> None:
        """The second half, which waits for what is unsent."""
        try:
            if flush:
                self._flush()
            if self._guard.others:
                self._shutdown(socket.SHUT_RD)
        finally:
            self._guard.leave()

    def fileno(self) -> int:
        """The descriptor, for ``poll``; negative once it is closed."""
        return self._guard.sock.fileno()

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
        """Wait until nothing is unsent, taking what the peer still sends."""
        flush_all([self])

    def flushed(self, scratch: bytearray) -> bool:
        """Whether nothing is unsent; takes what the peer sent meanwhile, some MiB at most.

        Closing a socket with unread bytes, or bytes that arrive later, makes the kernel answer with a
        reset, which drops everything that is not yet sent: a last message that says why would be lost.
        """
        for _ in range(_DRAIN_CALLS):
            try:
                if self._guard.sock.recv_into(scratch, 0, socket.MSG_DONTWAIT) == 0:
                    return True  # the peer has ended too, nothing can cross
            except BlockingIOError:
                break
            except OSError:
                return True
            self._crossing = True
        else:
            return False
        # with bytes of the peer on their way to us, only what it acknowledged is safe
        return self._queued(termios.TIOCOUTQ if self._crossing else _SIOCOUTQNSD) <= 1  # the end counts

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
        left = remaining(deadline)
        if left <= 0:
            raise self._timed_out(doing)
        if self._guard.closed:
            raise ConnectionClosedError(f"{self._name} was closed here while {doing}")
        sends = option == socket.SO_SNDTIMEO
        if min(1.0, left / 2) <= (self._send_limit if sends else self._recv_limit) <= left:
            return
        limit = left if left < _EXACT_S else min(left, _MAX_WAIT_S) * 0.9
        fraction, whole = math.modf(limit)
        # zero would mean without a limit
        value = struct.pack("@ll", int(whole), max(1, int(fraction * 1e6)))
        self._guard.sock.setsockopt(socket.SOL_SOCKET, option, value)
        if sends:
            self._send_limit = limit
        else:
            self._recv_limit = limit

    def _failed(self, error: OSError, doing: str) -> KVFerryError:
        if self._guard.closed:
            return ConnectionClosedError(f"{self._name} was closed here while {doing}")
        reason = error.strerror or str(error)
        if error.errno in _GONE:
            return ConnectionClosedError(f"{self._name} was ended by the peer while {doing}: {reason}")
        return TransportError(f"{self._name} failed while {doing}: {reason}")


def flush_all(connections: Iterable[SocketConnection]) -> None:
    """Wait until ``connections``, which are being closed, have sent all; a quarter of a second at most."""
    scratch = bytearray(_DRAIN_NBYTES)
    until = time.monotonic() + _FLUSH_S
    pause, left = 0.0005, list(connections)
    while left := [one for one in left if not one.flushed(scratch)]:
        if time.monotonic() >= until:
            return
        time.sleep(pause)
        pause = min(pause * 2, 0.01)
