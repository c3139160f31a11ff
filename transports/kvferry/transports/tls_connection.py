"""A connection over TLS: a socket connection whose bytes pass through a TLS session in memory.

A session is not made for two threads at once, and TLS over a blocking socket would hold its lock while it
waits. Here the socket's calls block without any lock, and the lock is held only while bytes that are there
are encrypted or decrypted, some tens of microseconds. It also saves system calls: records are sent and
received many at a time.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, cast

from typing_extensions import Buffer

from kvferry.core.buffers import Buf, total_nbytes
from kvferry.core.errors import ConnectionClosedError, KVFerryError
from kvferry.transports.sockets import SocketConnection
from kvferry.transports.streams import StreamConnection
from kvferry.transports.tls_context import TlsSession, stream_error

__all__ = ["TlsConnection"]

_RECORD_NBYTES: Final = 16 << 10  # what one record holds at most
_BATCH_NBYTES: Final = 64 << 10
_SCRATCH_NBYTES: Final = 256 << 10
_LAST_WORDS_S: Final = 0.25
_NOW: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class TlsConnection(SocketConnection):
    """A connection over TLS.

    Args:
        sock: Connected; owned from here on.
        session: With its handshake done.
        local_address: URL of this end.
        peer_address: URL of the other end.
        rate: Bytes a second at which it sends, before encryption; ``None`` for as fast as it goes.
    """

    def __init__(
        self,
        sock: socket.socket,
        session: TlsSession,
        *,
        local_address: str,
        peer_address: str,
        rate: float | None = None,
    ) -> None:
        super().__init__(sock, local_address=local_address, peer_address=peer_address, rate=rate)
        self._session = session
        self._lock = threading.Lock()  # around every call of the session
        self._sending = threading.Lock()  # records leave in the order in which they were made
        self._receiving = threading.Lock()  # and are taken in the order in which they came
        self._read = cast("Callable[[int, memoryview], int]", session.tls.read)
        self._scratch = memoryview(bytearray(_SCRATCH_NBYTES))
        self._held = memoryview(b"")  # decrypted by wait_readable
        self._over = ""  # why nothing more can come

    # -- sending ---------------------------------------------------------------------------------------

    def send(self, parts: Sequence[Buf], deadline: float) -> None:
        """See :meth:`Connection.send`."""
        StreamConnection.send(self, parts, deadline)

    def _send_all(self, views: list[memoryview], deadline: float, *, waits: bool = False) -> bool:
        if time.monotonic() >= deadline:
            raise self._timed_out("sending")
        with self._sending:
            for batch in _batches(views):
                data = self._encrypt(batch)
                try:
                    waits = self._send_records(data, deadline) or waits
                except ConnectionClosedError:
                    self._raise_refusal()
                    raise
        return waits

    def _send_records(self, data: bytes, deadline: float) -> bool:
        if self._pacer is not None:  # which has to know whether this waits
            return super()._send_all([memoryview(data)], deadline)
        self._limit_wait(socket.SO_SNDTIMEO, deadline, "sending")
        try:
            sent = self._guard.sock.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise self._failed(error, "sending") from error
        return sent < len(data) and super()._send_all([memoryview(data)[sent:]], deadline, waits=True)

    def _encrypt(self, records: list[Buffer]) -> bytes:
        write = self._session.tls.write
        with self._lock:
            try:
                for record in records:
                    write(record)  # whole, since it fits into a record and nothing waits
            except ssl.SSLError as error:
                raise self._end_of_session(error, "sending") from error
            return self._session.outgoing.read()

    def _raise_refusal(self) -> None:
        """Raise what the peer said before it closed, such as that it wants another certificate."""
        if self._guard.closed or not self._receiving.acquire(blocking=False):
            return  # the receiving thread will hear it
        try:
            with suppress(OSError):
                n = self._guard.sock.recv_into(self._scratch, 0, socket.MSG_DONTWAIT)
                with self._lock:
                    self._session.incoming.write(self._scratch[:n])
            self._look_ahead()
        finally:
            self._receiving.release()

    # -- receiving -------------------------------------------------------------------------------------

    def recv_into(self, views: Sequence[memoryview], deadline: float) -> None:
        """See :meth:`Connection.recv_into`."""
        wanted, got = total_nbytes(views), 0
        self._guard.enter(self._name)
        try:
            if time.monotonic() >= deadline:
                raise self._timed_out("receiving")
            with self._receiving:
                for view in views:
                    self._fill(view, len(view), deadline, got, wanted)
                    got += len(view)
        finally:
            self._guard.leave()

    def recv_at_least(self, view: memoryview, minimum: int, deadline: float) -> int:
        """See :meth:`Connection.recv_at_least`."""
        self._guard.enter(self._name)
        try:
            if time.monotonic() >= deadline:
                raise self._timed_out("receiving")
            with self._receiving:
                return self._fill(view, minimum, deadline, 0, minimum)
        finally:
            self._guard.leave()

    def _fill(self, view: memoryview, minimum: int, deadline: float, before: int, total: int) -> int:
        """Take ``minimum`` bytes or more into ``view``; how many."""
        got = 0
        while got < minimum:
            if n := self._take(view[got:] if got else view, minimum - got):
                got += n
            elif self._over or self._guard.closed:
                why = "was closed here" if self._guard.closed else self._over
                raise ConnectionClosedError(f"{self._name} {why} after {before + got} of {total} bytes")
            else:
                self._pull(deadline, f"receiving, {before + got} of {total} bytes had come")
        return got

    def _take(self, view: memoryview, minimum: int) -> int:
        """Decrypted bytes that are there; 0 if there are none, which may be the end."""
        if not self._held:
            return self._decrypt(view, minimum)
        n = min(len(view), len(self._held))
        view[:n] = self._held[:n]
        self._held = self._held[n:]
        return n

    def _decrypt(self, view: memoryview, minimum: int = 1) -> int:
        """As :meth:`_take`, from the session alone, and until there are ``minimum`` if they are there."""
        session, got = self._session, 0
        if self._over or not (session.incoming.pending or session.tls.pending() or session.incoming.eof):
            return 0
        try:
            with self._lock:
                while got < minimum:
                    n = self._read(len(view), view)
                    got += n
                    if n == 0:
                        self._over = "was ended by the peer"
                        break
                    view = view[n:]
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self._over = "was ended by the peer"
        except ssl.SSLEOFError:
            self._over = "was cut by the peer or on its way, without the end that TLS has,"
        except ssl.SSLError as error:
            raise self._end_of_session(error, "receiving") from error
        return got

    def _pull(self, deadline: float, doing: str) -> None:
        """Take what the peer sent into the session."""
        n = self._recv_some([self._scratch], deadline, doing, waits=True, all_of_it=False)
        with self._lock:
            if n == 0:
                self._session.incoming.write_eof()
            elif n > 0:
                self._session.incoming.write(self._scratch[:n])

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
                    self._pull(max(deadline, time.monotonic() + 1.0), "waiting for bytes")
        finally:
            self._guard.leave()

    def _look_ahead(self) -> None:
        if not (self._held or self._over):
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
        return stream_error(error, self._name)


def _batches(views: list[memoryview]) -> Iterator[list[Buffer]]:
    """``views`` as lists of records: large ones cut, small ones that follow each other joined."""
    if total_nbytes(views) <= _RECORD_NBYTES:
        if views:
            yield [views[0] if len(views) == 1 else b"".join(views)]
        return
    batch: list[Buffer] = []
    small = bytearray()
    room = _BATCH_NBYTES
    for view in views:
        start = 0
        while start < len(view):
            part = view[start : start + _RECORD_NBYTES - len(small)]
            start += len(part)
            room -= len(part)
            if small or len(part) < _RECORD_NBYTES:
                small += part
                if len(small) == _RECORD_NBYTES:
                    batch.append(small)
                    small = bytearray()
            else:
                batch.append(part)
            if room <= 0 and not small:
                yield batch
                batch, room = [], _BATCH_NBYTES
    if small:
        batch.append(small)
    if batch:
        yield batch
