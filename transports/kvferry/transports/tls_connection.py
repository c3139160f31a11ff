"""A connection over TLS: a socket connection whose bytes pass through a TLS session in memory.

A session is not made for two threads at once, and TLS over a blocking socket would hold its lock while it
waits. Here the socket's calls block without any lock, and the lock is held only while bytes that are there
are encrypted or decrypted, some tens of microseconds. It also saves system calls: records are sent and
received many at a time.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, cast

from kvferry.core.buffers import Buf, as_bytes_view, as_places, total_nbytes
from kvferry.core.clock import is_past, remaining
from kvferry.core.errors import ConnectionClosedError, KVFerryError, TransferTimeoutError
from kvferry.transports.sockets import SocketConnection
from kvferry.transports.spin import Look
from kvferry.transports.streams import StreamConnection, sending
from kvferry.transports.tls_context import TlsSession, stream_error

__all__ = ["TlsConnection"]

_RECORD_NBYTES: Final = 16 << 10  # what one record holds at most
_BATCH_NBYTES: Final = 4 * _RECORD_NBYTES
_ALONE_NBYTES: Final = 8 << 10  # from here on a part has records of its own: copying it costs more
_SCRATCH_NBYTES: Final = 256 << 10
_LAST_WORDS_S: Final = 0.25
_NO_SIGNAL: Final = int(socket.MSG_NOSIGNAL)
_NOW: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class TlsConnection(SocketConnection):
    """A connection over TLS.

    Args:
        sock: Connected; owned from here on.
        session: With its handshake done.
        local_address: URL of this end.
        peer_address: URL of the other end.
        rate: Bytes a second at which it sends, before encryption; ``None`` for as fast as it goes.
        spin_s: How long to look for bytes before sleeping, while they come that fast; 0: never.
    """

    def __init__(
        self,
        sock: socket.socket,
        session: TlsSession,
        *,
        local_address: str,
        peer_address: str,
        rate: float | None = None,
        spin_s: float = 0.0,
    ) -> None:
        super().__init__(sock, local_address=local_address, peer_address=peer_address, rate=rate)
        self._session = session
        looks = select.poll()  # one of its own: another thread may be in wait_readable
        looks.register(sock, select.POLLIN)
        self._is_there = partial(looks.poll, 0)
        self._look = Look(spin_s)  # for the first bytes of a message,
        self._look_on = Look(spin_s)  # and for more of them
        self._lock = threading.Lock()  # around every call of the session
        self._sending = threading.Lock()  # records leave in the order in which they were made
        self._receiving = threading.Lock()  # and are taken in the order in which they came
        self._read = cast("Callable[[int, memoryview], int]", session.tls.read)
        self._scratch = memoryview(bytearray(_SCRATCH_NBYTES))
        self._scratches = [self._scratch]
        self._held = memoryview(b"")  # decrypted by wait_readable
        self._unread = True  # whether the session may hold bytes that were not taken
        self._over = ""  # why nothing more can come

    # -- sending ---------------------------------------------------------------------------------------

    def send(self, parts: Sequence[Buf], deadline: float) -> None:
        """See :meth:`Connection.send`."""
        if self._pacer is not None:
            StreamConnection.send(self, parts, deadline)
            return
        views = [view for part in parts if len(view := as_bytes_view(part))]
        self._guard.enter(self._name)
        try:
            self._send_all(views, deadline, 0, total_nbytes(views))
        finally:
            self._guard.leave()

    def _send_all(
        self, views: list[memoryview], deadline: float, before: int, total: int, *, waits: bool = False
    ) -> bool:
        if is_past(deadline):
            raise self._timed_out(sending(before, total))
        with self._sending:
            try:
                for batch in _batches(views):
                    waits = self._send_records(self._encrypt(batch), deadline) or waits
                    before += total_nbytes(batch)
            except TransferTimeoutError:  # it counts encrypted bytes
                raise self._timed_out(sending(before, total)) from None
            except ConnectionClosedError:
                self._raise_refusal()
                raise
        return waits

    def _send_records(self, data: bytes, deadline: float) -> bool:
        if self._pacer is not None:  # which has to know whether this waits
            return super()._send_all([memoryview(data)], deadline, 0, len(data))
        limit, left = self._send_limit, remaining(deadline)
        if not (limit <= left and (limit >= 1.0 or left <= limit + limit)):
            self._limit_wait(socket.SO_SNDTIMEO, deadline, "sending")
        try:
            sent = self._guard.sock.send(data, _NO_SIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise self._failed(error, "sending") from error
        if sent == len(data):
            return False
        return super()._send_all([memoryview(data)[sent:]], deadline, sent, len(data), waits=True)

    def _encrypt(self, pieces: list[memoryview]) -> bytes:
        session = self._session
        write = session.tls.write
        with self._lock:
            try:
                for piece in pieces:
                    done = write(piece)  # all of it, since nothing waits; or a record, with another library
                    while done < len(piece):
                        done += write(piece[done:])
            except ssl.SSLError as error:
                raise self._end_of_session(error, "sending") from error
            return session.outgoing.read()

    def _raise_refusal(self) -> None:
        """Raise what the peer said before it closed, such as that it wants another certificate."""
        if self._guard.closed or not self._receiving.acquire(blocking=False):
            return  # the receiving thread will hear it
        try:
            with suppress(OSError):
                n = self._guard.sock.recv_into(self._scratch, 0, socket.MSG_DONTWAIT)
                with self._lock:
                    self._session.incoming.write(self._scratch[:n])
                self._unread = True
            self._look_ahead()
        finally:
            self._receiving.release()

    # -- receiving -------------------------------------------------------------------------------------

    def recv_into(self, views: Sequence[memoryview], deadline: float) -> None:
        """See :meth:`Connection.recv_into`."""
        views = as_places(views)
        wanted, got = total_nbytes(views), 0
        self._guard.enter(self._name)
        try:
            if is_past(deadline):
                raise self._timed_out("receiving")
            with self._receiving:
                for view in views:
                    self._fill(view, len(view), deadline, got, wanted, self._look_on)
                    got += len(view)
        finally:
            self._guard.leave()

    def recv_at_least(self, view: memoryview, minimum: int, deadline: float) -> int:
        """See :meth:`Connection.recv_at_least`."""
        self._guard.enter(self._name)
        try:
            if is_past(deadline):
                raise self._timed_out("receiving")
            with self._receiving:
                return self._fill(view, minimum, deadline, 0, minimum, self._look)
        finally:
            self._guard.leave()

    def _fill(
        self, view: memoryview, minimum: int, deadline: float, before: int, total: int, look: Look
    ) -> int:
        """Take ``minimum`` bytes or more into ``view``; how many."""
        got = self._take_held(view) if self._held else 0
        while got < minimum:
            if self._unread:
                got += self._decrypt(view[got:] if got else view, minimum - got)
                if got >= minimum:
                    break
            if self._over or self._guard.closed:
                why = "was closed here" if self._guard.closed else self._over
                raise ConnectionClosedError(f"{self._name} {why} after {before + got} of {total} bytes")
            self._pull(deadline, before + got, total, look)
        return got

    def _take_held(self, view: memoryview) -> int:
        n = min(len(view), len(self._held))
        view[:n] = self._held[:n]
        self._held = self._held[n:]
        return n

    def _decrypt(self, view: memoryview, minimum: int = 1) -> int:
        """Bytes out of the session until there are ``minimum``, or no more; 0 may be the end."""
        tls, incoming, got = self._session.tls, self._session.incoming, 0
        if self._over:
            return 0
        try:
            with self._lock:
                while got < minimum:
                    n = self._read(len(view), view)
                    got += n
                    if n == 0:
                        self._over = "was ended by the peer"
                        break
                    if not (incoming.pending or tls.pending() or incoming.eof):  # spares an exception
                        self._unread = False
                        break
                    view = view[n:]
        except ssl.SSLWantReadError:
            self._unread = False
        except ssl.SSLZeroReturnError:
            self._over = "was ended by the peer"
        except ssl.SSLEOFError:
            self._over = "was cut by the peer or on its way, without the end that TLS has,"
        except ssl.SSLError as error:
            raise self._end_of_session(error, "receiving") from error
        return got

    def _pull(self, deadline: float, got: int, total: int, look: Look | None) -> None:
        """Take what the peer sent into the session, after waiting for it."""
        doing = f"receiving, {got} of {total} bytes had come"
        if look is None or not look.most_s:
            n = self._recv_some(self._scratches, deadline, doing, waits=True, all_of_it=False)
        else:
            start = time.monotonic()
            looked = look.look(self._is_there, start, deadline)
            n = self._recv_some(self._scratches, deadline, doing, waits=True, all_of_it=False)
            look.waited(time.monotonic() - start, looked=looked)
        with self._lock:
            if n == 0:
                self._session.incoming.write_eof()
            elif n > 0:
                self._session.incoming.write(self._scratch[:n])
        self._unread = True

    def wait_readable(self, deadline: float) -> bool:
        """See :meth:`Connection.wait_readable`; a part of a record does not count."""
        self._guard.enter(self._name)
        try:
            while True:
                with self._receiving:
                    self._look_ahead()
                if self._held or self._over:
                    return True
                if not super().wait_readable(deadline):
                    return False
                with self._receiving:
                    self._pull(max(deadline, time.monotonic() + 1.0), 0, 1, None)
        finally:
            self._guard.leave()

    def _look_ahead(self) -> None:
        if self._unread and not (self._held or self._over):
            room = memoryview(bytearray(_RECORD_NBYTES))
            self._held = room[: self._decrypt(room)]

    # -- the end ---------------------------------------------------------------------------------------

    def _last_words(self) -> None:
        """Tell the peer that the stream is complete, unless a thread is in the middle of sending."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            with self._lock, suppress(ssl.SSLError, ValueError):
                self._session.tls.unwrap()
            self._send_last(memoryview(self._session.outgoing.read()))
        finally:
            self._sending.release()

    def _send_last(self, data: memoryview) -> None:
        until = time.monotonic() + _LAST_WORDS_S
        with suppress(OSError):
            while data:
                try:
                    data = data[self._guard.sock.send(data, _NOW) :]
                except BlockingIOError:
                    if time.monotonic() >= until:
                        return
                    time.sleep(0.005)

    def _end_of_session(self, error: ssl.SSLError, doing: str) -> KVFerryError:
        if self._guard.closed:
            return ConnectionClosedError(f"{self._name} was closed here while {doing}")
        if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):  # the end was seen before
            return ConnectionClosedError(
                f"{self._name} {self._over or 'was ended by the peer'} while {doing}"
            )
        return stream_error(error, self._name)


def _batches(views: list[memoryview]) -> Iterator[list[memoryview]]:
    """``views`` as lists of what the session is given at once: small ones that follow each other joined.

    The first list fills one record and each next one twice as many, up to a limit: so the peer wakes, and
    decrypts what it has, while the rest is being encrypted.
    """
    if total_nbytes(views) <= _RECORD_NBYTES:
        if views:
            yield [views[0] if len(views) == 1 else memoryview(b"".join(views))]
        return
    batch: list[memoryview] = []
    room = most = _RECORD_NBYTES
    for piece, nbytes in _pieces(views):
        start = 0
        while start < nbytes:
            n = min(room, nbytes - start)
            batch.append(piece[start : start + n] if n < nbytes else piece)
            start += n
            room -= -(-n // _RECORD_NBYTES) * _RECORD_NBYTES  # each begins a record
            if room <= 0:
                yield batch
                batch, most = [], min(2 * most, _BATCH_NBYTES)
                room = most
    if batch:
        yield batch


def _pieces(views: list[memoryview]) -> Iterator[tuple[memoryview, int]]:
    """``views``, small ones that follow each other joined to a record, and how many bytes each has."""
    small = bytearray()
    for view in views:
        nbytes = len(view)
        if small and (nbytes >= _ALONE_NBYTES or len(small) + nbytes > _RECORD_NBYTES):
            yield memoryview(small), len(small)
            small = bytearray()
        if nbytes >= _ALONE_NBYTES:
            yield view, nbytes
        else:
            small += view
    if small:
        yield memoryview(small), len(small)
