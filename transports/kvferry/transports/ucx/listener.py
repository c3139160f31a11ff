"""Listening: a thread takes the sockets and exchanges preambles, ``accept`` hands out what is ready."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from typing import Final

from kvferry.core.address import Address
from kvferry.core.log import LogLimiter
from kvferry.transports import ip
from kvferry.transports.accepting import next_ready
from kvferry.transports.base import Connection, Listener
from kvferry.transports.ucx.bootstrap import (
    PREFIX_NBYTES,
    keeps_messages,
    key_of,
    own_preamble,
    pack_preamble,
    parse_body,
    parse_prefix,
    problem_with,
    uses_shared_memory,
)
from kvferry.transports.ucx.connection import UcxConnection
from kvferry.transports.ucx.context import Context
from kvferry.transports.ucx.control import ControlSocket
from kvferry.transports.ucx.settings import Options, advertised

__all__ = ["PREAMBLE_S", "UcxListener"]

PREAMBLE_S: Final = 5.0
"""How long a peer may take over its preamble."""
_MAX_WAITING: Final = 256
_PAUSE_S: Final = 0.05

_log = logging.getLogger(__name__)


class _Guest:
    """A socket that was accepted, on its way to a connection."""

    def __init__(self, sock: socket.socket, sockaddr: ip.SockAddr) -> None:
        self.sock = sock
        self.url = ip.url_of("ucx", sockaddr)
        self.until = time.monotonic() + PREAMBLE_S
        self.received = bytearray()
        self.wanted = PREFIX_NBYTES


class UcxListener(Listener):
    """Any thread may accept or close.

    Args:
        sock: Bound and listening; owned from here on.
        asked: The address that was asked for.
        options: Its options.
        context: Of UCX.
    """

    def __init__(self, sock: socket.socket, asked: Address, options: Options, context: Context) -> None:
        self._sock = sock
        self._options = options
        self._context = context
        public = Address(asked.scheme, asked.host, asked.port, options=advertised(asked))
        self._address: Final = ip.dialable_address(sock, public)
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._ready: deque[UcxConnection] = deque()
        self._closed = False
        self._guests: dict[socket.socket, _Guest] = {}
        self._limiter = LogLimiter(_log)
        self._wake, self._woken = socket.socketpair()
        sock.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._run, name=f"kvferry-ucx-listen-{sock.getsockname()[1]}", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """The URL to dial: the port that was bound, and the options but those of this host's devices."""
        return self._address

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._address}>"

    def accept(self, deadline: float) -> Connection:
        """The next connection; see :meth:`Listener.accept`."""
        return next_ready(
            self._address, self._pid, self._changed, self._ready, lambda: self._closed, deadline
        )

    def close(self) -> None:
        """Stop listening and wake waiting threads; who was not accepted yet is turned away."""
        if os.getpid() != self._pid:
            for sock in (self._sock, self._wake, self._woken):  # copies; the lock may be held for ever here
                sock.close()
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            waiting = list(self._ready)
            self._ready.clear()
            self._changed.notify_all()
        self._wake.send(b"x")
        self._thread.join()
        for connection in waiting:
            connection.abort()

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception:  # noqa: BLE001 - the root of a thread
            _log.exception("the listener on %s failed and is closed", self._address)
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._selector.close()
            for guest in list(self._guests.values()):
                guest.sock.close()
            for sock in (self._sock, self._wake, self._woken):
                sock.close()

    def _turn(self) -> bool:
        """Wait for one round of events; ``False`` once the listener is closed."""
        next_end = min((guest.until for guest in self._guests.values()), default=None)
        timeout = None if next_end is None else max(0.0, next_end - time.monotonic())
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._sock:
                self._take_guest()
            elif (guest := self._guests.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                self._hear(guest)
        now = time.monotonic()
        for guest in [guest for guest in self._guests.values() if guest.until <= now]:
            self._dismiss(guest, "silent", f"said nothing complete within {PREAMBLE_S:g} s")
        return not self._closed

    def _take_guest(self) -> None:
        try:
            sock, sockaddr = self._sock.accept()
        except OSError as error:  # gone again, or no descriptor is left
            if not isinstance(error, (BlockingIOError, ConnectionAbortedError)):
                self._limiter.log(
                    logging.WARNING, "accept", "cannot accept on %s: %s", self._address, ip.reason_of(error)
                )
                time.sleep(_PAUSE_S)
            return
        sock.setblocking(False)
        guest = _Guest(sock, sockaddr)
        with self._changed:
            full = len(self._ready) + len(self._guests) >= _MAX_WAITING
        self._guests[sock] = guest
        self._selector.register(sock, selectors.EVENT_READ)
        if full:  # it goes that has said nothing for longest
            oldest = min(self._guests.values(), key=lambda guest: guest.until)
            self._refuse(oldest, "full", f"{_MAX_WAITING} connections wait to be accepted already")

    def _hear(self, guest: _Guest) -> None:
        try:
            data = guest.sock.recv(guest.wanted - len(guest.received))
            if not data:
                self._dismiss(guest, "gone", "went away")
                return
            guest.received += data
            if len(guest.received) < guest.wanted:
                return
            if guest.wanted == PREFIX_NBYTES:
                guest.wanted += parse_prefix(guest.received)
                return
            self._welcome(guest)
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            self._dismiss(guest, type(error).__name__, str(error))

    def _welcome(self, guest: _Guest) -> None:
        peer = parse_body(memoryview(guest.received)[PREFIX_NBYTES:])
        own = own_preamble(self._context)
        if problem := self._options.allowed.problem_with_peer(guest.sock):
            self._refuse(guest, "user", problem, unauthorised=True)
            return
        if problem := problem_with(own, peer, self._options):
            self._refuse(guest, "transports", problem)
            return
        self._forget(guest)
        with contextlib.ExitStack() as stack:
            stack.callback(guest.sock.close)
            ip.tune(guest.sock)
            guest.sock.send(pack_preamble(own))  # fits the empty buffer of a new socket
            control = ControlSocket(guest.sock, local_address=self._address, peer_address=guest.url)
            stack.pop_all()
        connection = UcxConnection(
            control,
            self._context,
            self._options,
            key=key_of(peer, own),
            error_handling=not uses_shared_memory(own, peer),
            eager=keeps_messages(own, peer),
        )
        with self._changed:
            if not self._closed:
                self._ready.append(connection)
                self._changed.notify_all()
                return
        connection.abort()

    def _refuse(self, guest: _Guest, kind: str, reason: str, *, unauthorised: bool = False) -> None:
        preamble = own_preamble(self._context, reason, unauthorised=unauthorised)
        with contextlib.suppress(OSError):
            guest.sock.send(pack_preamble(preamble))
        self._dismiss(guest, kind, reason)

    def _dismiss(self, guest: _Guest, kind: str, reason: str) -> None:
        """Turn away; ``kind`` of the reason has none of the guest's bytes, which would make each line new."""
        self._forget(guest)
        guest.sock.close()
        key = (guest.url.rpartition(":")[0], kind)
        self._limiter.log(logging.WARNING, key, "%s refused %s: %s", self._address, guest.url, reason)

    def _forget(self, guest: _Guest) -> None:
        if self._guests.pop(guest.sock, None) is not None:
            self._selector.unregister(guest.sock)
