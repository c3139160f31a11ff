"""The ``inproc`` transport: ``inproc://name``, within one process.

A connection is a pair of pipes. Up to :data:`_LEND_NBYTES` a message is copied into the pipe, which holds
at most :data:`_PIPE_NBYTES`; a larger one is lent to the receiver, which copies straight out of the sender's
buffers while ``send`` waits. So there is one copy of what is large, and no memory that grows.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import ClassVar, Final

from kvferry.core.address import Address, parse_url
from kvferry.core.buffers import Buf, as_bytes_view, as_places, copy_into, total_nbytes
from kvferry.core.clock import is_past, time_left
from kvferry.core.errors import ConfigError, ConnectError, ConnectionClosedError, TransferTimeoutError
from kvferry.transports.base import Connection, Listener, Transport
from kvferry.transports.streams import sending

__all__ = ["InprocTransport"]

_PIPE_NBYTES: Final = 1 << 20
_LEND_NBYTES: Final = 1 << 18
_STEP_NBYTES: Final = 1 << 20  # copied with the pipe's lock held
_BACKLOG: Final = 128

_numbers = itertools.count(1)
_names_lock = threading.Lock()
_names: dict[str, InprocListener] = {}


class _Pipe:
    """Bytes in one direction: one writer, one reader, any thread may end or break it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._own: deque[memoryview] = deque()  # copied, in order before what is lent
        self._own_nbytes = 0
        self._lent: deque[memoryview] = deque()
        self._ended = False  # by the writer: the reader drains it first
        self._broken = ""  # by either: why nothing moves any more

    def write(self, views: list[memoryview], deadline: float) -> None:
        nbytes = total_nbytes(views)
        with self._changed:
            self._check_writable()
            self._check_deadline(deadline, sending(0, nbytes))
            if nbytes > _LEND_NBYTES:
                self._lend(views, nbytes, deadline)
                return
            while self._own_nbytes + nbytes > _PIPE_NBYTES:
                self._wait(deadline, sending(0, nbytes))
                self._check_writable()
            if nbytes:
                self._own.append(memoryview(b"".join(views)))
                self._own_nbytes += nbytes
                self._changed.notify_all()

    def _lend(self, views: list[memoryview], nbytes: int, deadline: float) -> None:
        self._lent.extend(views)
        self._changed.notify_all()
        try:
            while self._lent:
                self._wait(deadline, sending(nbytes - total_nbytes(self._lent), nbytes))
                self._check_writable()
        finally:
            # whatever happened, nobody reads the caller's buffers after this returns
            self._lent.clear()

    def read_into(self, views: list[memoryview], deadline: float) -> None:
        wanted, got = total_nbytes(views), 0
        with self._changed:
            self._check_broken(got, wanted)
            self._check_deadline(deadline, f"receiving, 0 of {wanted} bytes had come")
        for view in views:
            while view:
                with self._changed:
                    while not (self._own or self._lent):
                        self._check_readable(got, wanted)
                        self._wait(deadline, f"receiving, {got} of {wanted} bytes had come")
                    self._check_broken(got, wanted)
                    n = self._take(view)
                got += n
                view = view[n:]

    def _take(self, view: memoryview) -> int:
        """Copy the start of what is there to the start of ``view``."""
        chunks = self._own or self._lent
        chunk = chunks[0]
        n = min(len(chunk), len(view), _STEP_NBYTES)
        copy_into(view[:n], chunk[:n])
        if n == len(chunk):
            chunks.popleft()
        else:
            chunks[0] = chunk[n:]
        if chunks is self._own:
            self._own_nbytes -= n
        self._changed.notify_all()
        return n

    def wait_readable(self, deadline: float) -> bool:
        with self._changed:
            while not (self._own or self._lent or self._ended):
                self._check_broken(0, 0)
                if is_past(deadline):
                    return False
                self._changed.wait(time_left(deadline))
            self._check_broken(0, 0)
            return True

    def end(self) -> None:
        """The writer is done."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def break_off(self, reason: str) -> None:
        """Drop what is there; reads and writes fail with ``reason`` from now on."""
        with self._changed:
            self._broken = self._broken or reason
            self._own.clear()
            self._own_nbytes = 0
            self._changed.notify_all()

    def _wait(self, deadline: float, doing: str) -> None:
        self._check_deadline(deadline, doing)
        self._changed.wait(time_left(deadline))

    def _check_deadline(self, deadline: float, doing: str) -> None:
        if is_past(deadline):
            raise TransferTimeoutError(f"{self._name}: the deadline passed while {doing}")

    def _check_broken(self, got: int, wanted: int) -> None:
        if self._broken:
            raise ConnectionClosedError(f"{self._name} {self._broken} after {got} of {wanted} bytes")

    def _check_readable(self, got: int, wanted: int) -> None:
        self._check_broken(got, wanted)
        if self._ended:
            raise ConnectionClosedError(f"{self._name} was ended by the peer after {got} of {wanted} bytes")

    def _check_writable(self) -> None:
        if self._broken or self._ended:
            raise ConnectionClosedError(f"{self._name} {self._broken or 'was closed'} while sending")


class _InprocConnection(Connection):
    """One end: a pipe out and a pipe in."""

    def __init__(self, local: str, peer: str, outgoing: _Pipe, incoming: _Pipe) -> None:
        self._local_address = local
        self._peer_address = peer
        self._outgoing = outgoing
        self._incoming = incoming
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()

    @property
    def local_address(self) -> str:
        return self._local_address

    @property
    def peer_address(self) -> str:
        return self._peer_address

    def __repr__(self) -> str:
        return f"<inproc connection {self._local_address} to {self._peer_address}>"

    def send(self, parts: Sequence[Buf], deadline: float) -> None:
        self._check_open()
        views = [view for part in parts if len(view := as_bytes_view(part))]
        if views:
            self._outgoing.write(views, deadline)

    def recv_into(self, views: Sequence[memoryview], deadline: float) -> None:
        self._check_open()
        left = [view for view in as_places(views) if len(view)]
        if left:
            self._incoming.read_into(left, deadline)

    def wait_readable(self, deadline: float) -> bool:
        self._check_open()
        return self._incoming.wait_readable(deadline)

    def close(self) -> None:
        if self._pid != os.getpid():
            return  # its locks may be held for ever here
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._outgoing.end()
        self._incoming.break_off("was closed")

    def abort(self) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._outgoing.break_off("was aborted")
        self._incoming.break_off("was aborted")

    def _check_open(self) -> None:
        name = f"the connection {self._local_address} to {self._peer_address}"
        _check_not_forked(name, self._pid)
        if self._closed:
            raise ConnectionClosedError(f"{name} is closed")


class InprocListener(Listener):
    """A name that connections of this process can be made to."""

    def __init__(self, address: Address) -> None:
        self._url = address.url
        self._name = address.host
        self._changed = threading.Condition()
        self._pending: deque[_InprocConnection] = deque()
        self._closed = False
        self._pid = os.getpid()

    @property
    def address(self) -> str:
        """The URL as it was asked for."""
        return self._url

    def __repr__(self) -> str:
        return f"<inproc listener {self._url}>"

    def accept(self, deadline: float) -> Connection:
        """The next connection; see :meth:`Listener.accept`."""
        _check_not_forked(f"the listener on {self._url}", self._pid)
        with self._changed:
            while True:
                if self._closed:
                    raise ConnectionClosedError(f"the listener on {self._url} was closed")
                if self._pending:
                    self._changed.notify_all()
                    return self._pending.popleft()
                if is_past(deadline):
                    raise TransferTimeoutError(f"nobody connected to {self._url} by the deadline")
                self._changed.wait(time_left(deadline))

    def offer(self, connection: _InprocConnection, deadline: float) -> None:
        """Queue ``connection`` for :meth:`accept`; the dialling side calls this.

        Raises:
            ConnectError: If the listener closes, or accepts none by the deadline and its queue is full.
        """
        with self._changed:
            while True:
                if self._closed:
                    raise _nobody(self._url)
                if len(self._pending) < _BACKLOG:
                    self._pending.append(connection)
                    self._changed.notify_all()
                    return
                if is_past(deadline):
                    raise ConnectError(
                        f"cannot connect to {self._url}: its queue of {_BACKLOG} was full until "
                        "the deadline; check that its owner accepts"
                    )
                self._changed.wait(time_left(deadline))

    def close(self) -> None:
        """Free the name; connections that were not accepted yet are aborted."""
        if self._pid != os.getpid():
            return
        with _names_lock:
            if _names.get(self._name) is self:
                del _names[self._name]
        with self._changed:
            self._closed = True
            pending = list(self._pending)
            self._pending.clear()
            self._changed.notify_all()
        for connection in pending:
            connection.abort()


class InprocTransport(Transport):
    """Makes connections within the process; has no state of its own, any thread may use it."""

    scheme: ClassVar[str] = "inproc"

    def connect(self, address: str, deadline: float) -> Connection:
        """Connect to the listener of that name."""
        url = _parse(address).url
        with _names_lock:
            listener = _names.get(_parse(address).host)
        if listener is None:
            raise _nobody(url)
        if is_past(deadline):
            raise ConnectError(f"cannot connect to {url}: the deadline passed")
        client = f"{url}.client-{next(_numbers)}"
        there, back = (_Pipe(f"the connection {client} to {url}") for _ in range(2))
        listener.offer(_InprocConnection(url, client, back, there), deadline)
        return _InprocConnection(client, url, there, back)

    def listen(self, address: str) -> InprocListener:
        """Take the name."""
        parsed = _parse(address)
        with _names_lock:
            if parsed.host in _names:
                raise ConnectError(f"cannot listen on {parsed.url}: the name is taken, choose another one")
            listener = _names[parsed.host] = InprocListener(parsed)
        return listener


def _parse(address: str) -> Address:
    parsed = parse_url(address, options=())
    if parsed.scheme != "inproc":
        raise ConfigError(f"address {address!r}: is not an inproc address")
    return parsed


def _check_not_forked(name: str, pid: int) -> None:
    """Refuse what a forked child has a copy of: nobody is at the other end, a lock may be held for ever."""
    if pid != os.getpid():
        raise ConnectionClosedError(
            f"{name} was made by process {pid}, which forked this one; make a new one here"
        )


def _nobody(url: str) -> ConnectError:
    return ConnectError(
        f"cannot connect to {url}: nobody in this process listens there. inproc does not leave the process: "
        "use tcp to reach another one"
    )
