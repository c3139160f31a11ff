"""A port that speaks the wire protocol: one thread accepts, one thread a connection serves."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import urlsplit

from kvferry import transports
from kvferry.core.arrivals import Arrivals
from kvferry.core.clock import deadline_in, time_left
from kvferry.core.errors import (
    ConnectError,
    ConnectionClosedError,
    KVFerryError,
    OverloadedError,
    TransferTimeoutError,
)
from kvferry.core.log import LogLimiter
from kvferry.core.open_files import lack_of_files
from kvferry.transports.base import Connection, Listener
from kvferry.wire.channel import Channel
from kvferry.wire.options import ChannelOptions, Peer

__all__ = ["MOST_ARRIVING", "ChannelServer"]

log = logging.getLogger(__name__)

MOST_ARRIVING = 64
"""Connections of a server at once whose hello has not come."""
_TICK_S = 1.0
_JOIN_TIMEOUT_S = 5.0
_TELL_TIMEOUT_S = 1.0
_PUSH_OUT_S = 1.0


@dataclass(eq=False)
class _Served:
    """A connection with the thread that serves it; the channel is there after the handshake."""

    connection: Connection
    thread: threading.Thread | None = None
    channel: Channel | None = None
    dropped: bool = False


class ChannelServer:
    """Listens, shakes hands, and runs ``handler(channel)`` in a named thread a connection.

    A :class:`KVFerryError` that the handler raises is sent to the peer as ``Failure`` if the channel
    still stands, and logged in one line; then the connection is closed, as it is when the handler
    returns. Bytes that are no handshake close that connection, cost one log line a peer and reason in
    10 s, and touch nothing else.

    Connections whose hello has not come are no more than 64 at once, beside those that are served. Whoever
    comes then takes the place of one of them, of the host that has most, so that silent ones keep nobody out.

    Args:
        listen_url: Where to listen, or a listener, which the server then owns.
        options: What this end says in the handshake; also bounds handshake, message and payload.
        handler: Serves one connection; called in its own thread. It ends when its channel raises.
        name: Part of the names of the threads and of messages.
        max_connections: Connections served at once; one more is refused as overloaded, after its hello.
        idle_timeout_s: A connection on which the handler waited this long for a frame is closed.

    Raises:
        ConnectError: If the address cannot be bound.
        ConfigError: If it is malformed.
    """

    def __init__(
        self,
        listen_url: str | Listener,
        options: ChannelOptions,
        handler: Callable[[Channel], None],
        *,
        name: str,
        max_connections: int = 256,
        idle_timeout_s: float = 600.0,
    ) -> None:
        self._options = options
        self._handler = handler
        self._name = name
        self._max_connections = max_connections
        self._idle_timeout_s = idle_timeout_s
        self._lock = threading.Lock()
        self._served: set[_Served] = set()
        self._arriving: Arrivals[_Served] = Arrivals(MOST_ARRIVING)  # of those served, without a hello
        self._threads: list[threading.Thread] = []  # also those that have served and are just ending
        self._closing = threading.Event()
        self._count = 0
        self._limiter = LogLimiter(log)
        self._listener: Listener = (
            transports.listen(listen_url) if isinstance(listen_url, str) else listen_url
        )
        self._accepting = threading.Thread(
            target=self._accept_loop, name=f"kvferry-{name}-accept", daemon=True
        )
        self._accepting.start()

    @property
    def address(self) -> str:
        """The dialable URL."""
        return self._listener.address

    @property
    def connections(self) -> int:
        """How many connections are being served."""
        with self._lock:
            return len(self._served) - len(self._arriving)

    @property
    def arriving(self) -> int:
        """How many connections there are whose hello has not come yet."""
        with self._lock:
            return len(self._arriving)

    def transports(self) -> Counter[str]:
        """How many of the connections there are by transport, as the addresses of the peers have it."""
        with self._lock:
            served = [one.connection for one in self._served if one not in self._arriving]
        return Counter(one.peer_address.partition("://")[0] for one in served)

    def close(self) -> None:
        """Stop listening, abort all connections and join the threads (5 s at most); idempotent.

        A handler may call it: its own thread is not waited for.
        """
        self._closing.set()
        self._listener.close()
        limit = deadline_in(_JOIN_TIMEOUT_S)
        self._accepting.join(time_left(limit))
        with self._lock:
            served, threads = list(self._served), list(self._threads)
        for one in served:
            one.connection.abort()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(time_left(limit))
                if thread.is_alive():
                    log.warning("%s did not end within %g s of close()", thread.name, _JOIN_TIMEOUT_S)
        self._limiter.flush()

    # ---- accepting ---------------------------------------------------------------------------

    def _accept_loop(self) -> None:
        tick = min(_TICK_S, self._idle_timeout_s / 2)
        while not self._closing.is_set():
            try:
                self._admit(self._listener.accept(deadline_in(tick)))
            except TransferTimeoutError:
                pass
            except ConnectionClosedError:
                if not self._closing.is_set():
                    log.warning("%s: listener at %s was closed from outside", self._name, self.address)
                return
            except Exception as error:  # noqa: BLE001 - thread root; the port must outlive one bad accept
                self._limiter.log(
                    logging.ERROR, type(error).__name__, "%s: accept failed: %s", self._name, error
                )
                self._closing.wait(0.1)
            self._close_idle()

    def _admit(self, connection: Connection) -> None:
        served = _Served(connection)
        with self._lock:
            self._count += 1
            number = self._count
            self._served.add(served)
            dropped = self._arriving.add(served, _host(connection.peer_address))
        if dropped is not None and not self._push_out(dropped):
            self._forget(served)
            return
        thread = served.thread = threading.Thread(
            target=self._serve, args=(served,), name=f"kvferry-{self._name}-{number}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the process is out of threads
            self._forget(served)
            raise
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]

    def _push_out(self, dropped: _Served) -> bool:
        """End a connection whose hello has not come; whether it has ended."""
        self._log_refusal(dropped.connection, "silent", f"{MOST_ARRIVING} connections have said no hello yet")
        dropped.dropped = True
        dropped.connection.abort()
        if dropped.thread is None:
            return True
        dropped.thread.join(_PUSH_OUT_S)
        return not dropped.thread.is_alive()

    def _take_place(self, served: _Served, peer: Peer) -> None:
        """In the handshake, once the hello has come: see whether it may come in, and whether there is room.

        Raises:
            AuthError: If it may not.
            OverloadedError: If there is none.
        """
        if self._options.admit is not None:
            self._options.admit(peer)
        with self._lock:
            if len(self._served) - len(self._arriving) >= self._max_connections:
                raise OverloadedError(
                    f"{self._name} serves {self._max_connections} connections, the most it may "
                    "(max_connections); try again later"
                )
            self._arriving.remove(served)

    def _close_idle(self) -> None:
        with self._lock:
            channels = [served.channel for served in self._served if served.channel is not None]
        for channel in channels:
            if channel.idle_s > self._idle_timeout_s:
                log.info("%s: closing %s, idle for %g s", self._name, channel.address, self._idle_timeout_s)
                channel.abort()

    # ---- serving -----------------------------------------------------------------------------

    def _serve(self, served: _Served) -> None:
        try:
            self._serve_channel(served)
        except OSError as error:
            if (lack := lack_of_files(error)) is None:
                log.exception("%s: serving %s failed", self._name, served.connection.peer_address)
            else:
                self._log_refusal(served.connection, lack.code, str(lack))
        except Exception:
            log.exception("%s: serving %s failed", self._name, served.connection.peer_address)
        finally:
            self._forget(served)

    def _serve_channel(self, served: _Served) -> None:
        limit = deadline_in(self._options.hello_timeout_s)
        try:
            options = replace(self._options, admit=partial(self._take_place, served))
            channel = Channel.accept(served.connection, options, limit)
        except KVFerryError as error:
            if not (self._closing.is_set() or served.dropped):
                self._log_refusal(served.connection, error.code, str(error))
            return
        served.channel = channel
        try:
            self._handler(channel)
            channel.close()
        except ConnectionClosedError as error:
            if channel.closed:
                log.debug("%s: %s ended: %s", self._name, channel.address, error)
            else:
                self._fail(channel, error)
        except KVFerryError as error:
            self._fail(channel, error)
        except Exception as error:
            if (lack := lack_of_files(error)) is not None:
                self._fail(channel, lack)
                return
            log.exception("%s: handler of %s failed", self._name, channel.address)
            text = f"internal error in {self._name}: {type(error).__name__}; its log says more"
            self._tell(channel, KVFerryError(text))

    def _fail(self, channel: Channel, error: KVFerryError) -> None:
        key = (_host(channel.address), error.code)
        self._limiter.log(
            logging.WARNING,
            key,
            "%s: request %sof %s failed [%s]: %s",
            self._name,
            f"{error.request[:80]} " if error.request else "",
            key[0],
            error.code,
            error,
        )
        self._tell(channel, error)

    @staticmethod
    def _tell(channel: Channel, error: KVFerryError) -> None:
        limit = deadline_in(_TELL_TIMEOUT_S)
        try:
            if not channel.closed:
                channel.send_failure(error, deadline=limit)
                channel.linger(limit)
        except KVFerryError as failed:
            log.debug("%s could not be told of its failure: %s", channel.address, failed)
        finally:
            channel.close()

    def _log_refusal(self, connection: Connection, reason: str, text: str) -> None:
        host = _host(connection.peer_address)
        level = logging.INFO if reason == ConnectError.code else logging.WARNING
        self._limiter.log(
            level, (host, reason), "%s: connection from %s refused [%s]: %s", self._name, host, reason, text
        )

    def _forget(self, served: _Served) -> None:
        # Whatever the handler did, nothing of this connection outlives its thread.
        if served.channel is None or not served.channel.closed:
            served.connection.close()
        with self._lock:
            self._served.discard(served)
            self._arriving.remove(served)


def _host(address: str) -> str:
    """The part of a peer's URL that stays the same when it connects again."""
    try:
        return urlsplit(address).hostname or address.partition("&pid=")[0]
    except ValueError:
        return address
