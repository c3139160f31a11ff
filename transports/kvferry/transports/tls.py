"""The ``tls`` transport: TLS 1.3 over TCP, ``tls://host:port?cert=…&key=…&ca=…&client_ca=…&server_name=…``.

A listener has a certificate and its key (``cert``, ``key``); with ``client_ca`` who dials must have one of
that CA too. Who dials verifies the listener's certificate against ``ca`` (the system's CAs where none is
given) and the host of the URL, or ``server_name``. All are paths of PEM files on the machine that uses the
URL. A listener's address keeps all options, so where the files lie at the same place on every machine it can
be dialled as it is.

Handshakes of a listener run in a thread of its own, many at a time, and each has five seconds.
"""

from __future__ import annotations

import logging
import select
import socket
import ssl
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Final

from kvferry.core.cause import kind_of
from kvferry.core.clock import time_left
from kvferry.core.errors import (
    AuthError,
    ConnectError,
    ConnectionClosedError,
    TransferTimeoutError,
    TransportError,
)
from kvferry.core.log import LogLimiter
from kvferry.transports.base import Connection, Listener, Transport
from kvferry.transports.ip import SockAddr, bind, dial, dialable_address, reason_of, tune, url_of
from kvferry.transports.sockets import GuardedSocket
from kvferry.transports.tls_connection import TlsConnection
from kvferry.transports.tls_context import TlsAddress, TlsSession

__all__ = ["TlsListener", "TlsTransport"]

_log = logging.getLogger(__name__)

_HANDSHAKE_S: Final = 5.0
_GOODBYE_S: Final = 1.0
_MAX_HANDSHAKES: Final = 256
_MAX_READY: Final = 256
_PAUSE_S: Final = 0.2
_JOIN_S: Final = 5.0
_CHUNK_NBYTES: Final = 16 << 10
# Fatal, protocol version: what OpenSSL does not say to one who does not speak TLS at all.
_ALERT: Final = b"\x15\x03\x03\x00\x02\x02\x46"


class TlsTransport(Transport):
    """Makes TLS connections; has no state, any thread may use it."""

    scheme: ClassVar[str] = "tls"

    def connect(self, address: str, deadline: float) -> Connection:
        """Connect to ``address`` and shake hands; see :meth:`Transport.connect`.

        Raises:
            AuthError: If the peer refused our certificate and said so during the handshake. With TLS 1.3 a
                listener says so after it, so the first call that receives may raise it too.
        """
        parsed = TlsAddress.parse(address)
        session = TlsSession(parsed.client_context(), server_side=False, name=parsed.expected_name)
        sock = dial(parsed.address, deadline)
        url = parsed.address.url
        try:
            _shake_hands(sock, session, f"cannot connect to {url}", deadline)
            local = url_of("tls", sock.getsockname())
            return TlsConnection(
                sock,
                session,
                local_address=local,
                peer_address=url,
                rate=parsed.rate,
                spin_s=parsed.spin_s,
            )
        except OSError as error:
            sock.close()
            raise ConnectError(
                f"cannot connect to {url}: the connection ended during the TLS handshake: "
                f"{reason_of(error)}; does it speak TLS?"
            ) from error
        except BaseException:
            sock.close()
            raise

    def listen(self, address: str) -> TlsListener:
        """Listen on the first address of the host that can be bound."""
        parsed = TlsAddress.parse(address)
        context = parsed.server_context()
        return TlsListener(bind(parsed.address), parsed, context)


def _shake_hands(sock: socket.socket, session: TlsSession, doing: str, deadline: float) -> None:
    """The handshake of who dials, on a socket with timeouts."""
    done = False
    while not done:
        try:
            done = session.step(doing)
        finally:  # an alert says to the peer why
            if out := session.outgoing.read():
                sock.settimeout(max(1e-3, time_left(deadline)))
                sock.sendall(out)
        if done:
            return
        try:
            sock.settimeout(max(1e-3, time_left(deadline)))
            data = sock.recv(_CHUNK_NBYTES)
        except TimeoutError as error:
            raise ConnectError(f"{doing}: no TLS handshake by the deadline; does it speak TLS?") from error
        if data:
            session.incoming.write(data)
        else:
            session.incoming.write_eof()


@dataclass(eq=False)
class _Handshake:
    """A connection whose handshake is under way; or one that failed, until the peer has heard why."""

    sock: socket.socket
    sockaddr: SockAddr
    session: TlsSession
    until: float
    out: bytes = b""
    done: bool = False
    failed: bool = False
    heard: bool = False


class TlsListener(Listener):
    """A listening socket with a thread that shakes hands. Any thread may accept or close."""

    def __init__(self, sock: socket.socket, asked: TlsAddress, context: ssl.SSLContext) -> None:
        sock.setblocking(False)
        self._guard = GuardedSocket(sock)
        self._rate = asked.rate
        self._spin_s = asked.spin_s
        self._context = context
        self._address: Final = dialable_address(sock, asked.address)
        self._name = f"the listener on {self._address}"
        self._log_name = url_of("tls", sock.getsockname())
        self._condition = threading.Condition()
        self._ready: deque[Connection] = deque()
        self._failure: TransportError | None = None
        self._handshakes: dict[int, _Handshake] = {}
        self._limiter = LogLimiter(_log)
        self._paused_until = 0.0
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        port = sock.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name=f"kvferry-tls-{port}", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The URL to dial, with the port that the kernel bound and the options that were asked for."""
        return self._address

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._address}>"

    def accept(self, deadline: float) -> Connection:
        """The next connection, its handshake done; see :meth:`Listener.accept`."""
        self._guard.enter(self._name)
        try:
            with self._condition:
                while not (self._ready or self._guard.closed or self._failure):
                    if not self._condition.wait(time_left(deadline)):
                        raise TransferTimeoutError(f"nobody connected to {self._address} by the deadline")
                if self._guard.closed:
                    raise ConnectionClosedError(f"{self._name} was closed while accepting")
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
                self._wake()  # there is room again
                return self._ready.popleft()
        finally:
            self._guard.leave()

    def close(self) -> None:
        """Stop listening, wake waiting threads and join the own one; handshakes under way are cut."""
        if not self._guard.begin_close():
            return
        try:
            self._wake()
            with self._condition:
                self._condition.notify_all()
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                _log.warning("%s did not end within %g s", self._thread.name, _JOIN_S)
                return
            self._waker.close()
            self._woken.close()
        finally:
            self._guard.leave()
        for connection in self._ready:
            connection.abort()
        self._ready.clear()
        self._limiter.flush()

    def _wake(self) -> None:
        with suppress(OSError):  # it has enough to wake for, or has ended
            self._waker.send(b"x", socket.MSG_DONTWAIT)

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._guard.closed:
                self._turn()
        except Exception:  # noqa: BLE001 - thread root; who accepts is told
            _log.exception("%s: the thread that shakes hands ended", self._name)
            with self._condition:
                self._failure = TransportError(f"{self._name} failed; the log says more")
                self._condition.notify_all()
        finally:
            for handshake in list(self._handshakes.values()):
                self._drop(handshake)

    def _turn(self) -> None:
        now = time.monotonic()
        for handshake in [h for h in self._handshakes.values() if h.until <= now]:
            if not handshake.failed:
                self._refused(handshake, "late", f"no complete TLS handshake within {_HANDSHAKE_S:g} s")
            self._drop(handshake)
        for fd in self._wait(now):
            if fd == self._woken.fileno():
                self._woken.recv(4096)
            elif fd == self._guard.sock.fileno():
                self._begin()
            elif (under_way := self._handshakes.get(fd)) is not None:
                self._advance(under_way)

    def _wait(self, now: float) -> list[int]:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        until = [h.until for h in self._handshakes.values()]
        if len(self._ready) < _MAX_READY:
            if self._paused_until <= now:
                poll.register(self._guard.sock, select.POLLIN)
            else:
                until.append(self._paused_until)
        for fd, handshake in self._handshakes.items():
            poll.register(fd, select.POLLIN | (select.POLLOUT if handshake.out else 0))
        timeout = max(0.0, min(until) - now) * 1000 if until else None
        return [fd for fd, _ in poll.poll(timeout)]

    def _begin(self) -> None:
        try:
            sock, sockaddr = self._guard.sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._paused_until = time.monotonic() + _PAUSE_S
            with self._condition:
                self._failure = TransportError(f"cannot accept on {self._address}: {reason_of(error)}")
                self._condition.notify_all()
            return
        sock.setblocking(False)
        session = TlsSession(self._context, server_side=True)
        new = _Handshake(sock, sockaddr, session, time.monotonic() + _HANDSHAKE_S)
        if len(self._handshakes) >= _MAX_HANDSHAKES:
            one = self._dispensable()
            if not one.failed:
                self._refused(one, "overloaded", f"{_MAX_HANDSHAKES} handshakes are under way")
            self._drop(one)
        self._handshakes[sock.fileno()] = new
        self._advance(new)

    def _dispensable(self) -> _Handshake:
        """The oldest that is over or has said nothing; else the oldest, which has had the most time."""
        under_way = self._handshakes.values()
        return next((one for one in under_way if one.failed or not one.heard), next(iter(under_way)))

    def _advance(self, handshake: _Handshake) -> None:
        """Go on with what can be done now."""
        try:
            tune(handshake.sock)
            if not self._exchange(handshake):
                return
        except (ConnectError, AuthError) as error:
            # OpenSSL's own words: none of the peer's bytes, which would make each line new
            self._refused(handshake, kind_of(str(error))[:200], str(error))
            handshake.out = handshake.out or _ALERT
            self._say_goodbye(handshake)
            return
        except OSError as error:
            if not handshake.failed:
                self._refused(handshake, "ended", f"it ended during the handshake: {reason_of(error)}")
            self._drop(handshake)
            return
        del self._handshakes[handshake.sock.fileno()]
        connection = TlsConnection(
            handshake.sock,
            handshake.session,
            local_address=url_of("tls", handshake.sock.getsockname()),
            peer_address=url_of("tls", handshake.sockaddr),
            rate=self._rate,
            spin_s=self._spin_s,
        )
        with self._condition:
            self._ready.append(connection)
            self._condition.notify()

    def _exchange(self, handshake: _Handshake) -> bool:
        """Take what came, answer; whether the handshake is complete and everything sent."""
        session = handshake.session
        try:
            data = handshake.sock.recv(_CHUNK_NBYTES)
        except BlockingIOError:
            data = None
        if handshake.failed:
            if data == b"":
                self._drop(handshake)
            return False
        if data == b"":
            session.incoming.write_eof()
        elif data:
            handshake.heard = True
            session.incoming.write(data)
        if not handshake.done:
            try:
                handshake.done = session.step("handshake")
            finally:
                handshake.out += session.outgoing.read()
        if handshake.out:
            with suppress(BlockingIOError):
                handshake.out = handshake.out[handshake.sock.send(handshake.out) :]
        return handshake.done and not handshake.out

    def _say_goodbye(self, handshake: _Handshake) -> None:
        """Send the alert that says why, and end; closed when the peer has, so that nothing overtakes it."""
        handshake.failed = True
        handshake.until = time.monotonic() + _GOODBYE_S
        try:
            handshake.sock.send(handshake.out)
            handshake.out = b""
            handshake.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._drop(handshake)

    def _drop(self, handshake: _Handshake) -> None:
        if self._handshakes.get(handshake.sock.fileno()) is handshake:
            del self._handshakes[handshake.sock.fileno()]
        handshake.sock.close()

    def _refused(self, handshake: _Handshake, reason: str, text: str) -> None:
        host = str(handshake.sockaddr[0])
        self._limiter.log(
            logging.WARNING, (host, reason), "%s: connection from %s refused: %s", self._log_name, host, text
        )
