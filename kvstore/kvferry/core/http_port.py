"""An HTTP port of a process: bound early, served by one thread, bounded wherever a client could stretch it.

Import this module only where HTTP is served: it brings uvicorn.
"""

from __future__ import annotations

import asyncio
import logging
import math
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvferry.core.address import Address, parse_url
from kvferry.core.arrivals import Arrivals
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError
from kvferry.core.log import LogLimiter
from kvferry.core.names import resolve
from kvferry.core.open_files import lack_of_files
from kvferry.core.process import require_loopback

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Scope

__all__ = ["HttpServer", "PortLimits", "client_is_gone"]

log = logging.getLogger(__name__)

_BACKLOG = 256
_LOOKUP_S = 10.0  # for the name of a host to listen on
_GONE = "kvferry.gone"


@dataclass(frozen=True, slots=True)
class PortLimits:
    """Bounds of one HTTP port, beside those of the application.

    Attributes:
        max_connections: With a whole request under way at once; one more is cut.
        max_waiting: Without one: new, sending it, or between two. One more cuts off one of them, of the host
            that has most, so that those who say nothing keep nobody out.
        max_head_nbytes: Of a request's line and headers.
        head_timeout_s: From the connection's start, or the end of the last answer, until a request's head is
            there.
        answer_timeout_s: From there until its body was read and its answer was taken; ``None`` leaves that to
            the application.
        streams: Paths whose answers may take as long as they like, while the client takes what is sent.
        stall_timeout_s: After which a client of such a path that takes nothing is cut.
    """

    max_connections: int = 1024
    max_waiting: int = 256
    max_head_nbytes: int = 16 << 10
    head_timeout_s: float = 10.0
    answer_timeout_s: float | None = None
    streams: frozenset[str] = frozenset()
    stall_timeout_s: float = 10.0


class _BoundedHttp(h11.Connection):
    """h11, which bounds the head of a request only while it is incomplete, with a bound on whole ones too."""

    def __init__(self, max_head_nbytes: int) -> None:
        super().__init__(h11.SERVER, max_head_nbytes)
        self._max_head_nbytes = max_head_nbytes

    def next_event(self) -> Any:  # noqa: ANN401 - h11's own
        """The next event; raises :class:`h11.RemoteProtocolError` for a head that is too large."""
        event: Any = super().next_event()
        if type(event) is h11.Request:
            headers = event.headers.raw_items()
            nbytes = len(event.target) + sum(len(name) + len(value) + 4 for name, value in headers)
            if nbytes > self._max_head_nbytes:
                raise h11.RemoteProtocolError("head too large", error_status_hint=431)
        return event


class _BoundedProtocol(H11Protocol):
    """Uvicorn's protocol with a deadline for each phase, bounds on connections, and no noise.

    A connection waits, one of ``waiting``, while it has no whole request under way; else it is ``busy``.
    """

    limits: ClassVar[PortLimits]
    limiter: ClassVar[LogLimiter]
    waiting: ClassVar[Arrivals[_BoundedProtocol]]
    busy: ClassVar[set[_BoundedProtocol]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(*args, **kwargs)
        self.conn = _BoundedHttp(self.limits.max_head_nbytes)
        self.logger = _protocol_log
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self._wait()
        self._arm(self.limits.head_timeout_s, "no request")

    def connection_lost(self, exc: Exception | None) -> None:
        """A client is gone."""
        self._disarm()
        self.waiting.remove(self)
        self.busy.discard(self)
        super().connection_lost(exc)

    def _wait(self) -> None:
        """It has no request under way (any more)."""
        self.busy.discard(self)
        if self.transport.is_closing() or self in self.waiting:
            return
        dropped = self.waiting.add(self, self.client[0] if self.client else "?")
        if dropped is not None:
            dropped._refuse(f"{self.limits.max_waiting} connections have sent no request yet")
            dropped.transport.abort()

    def _work(self) -> None:
        """A whole request has come."""
        if self not in self.waiting:
            return
        if len(self.busy) >= self.limits.max_connections:
            self._refuse(f"over {self.limits.max_connections} connections")
            self.transport.abort()
        self.waiting.remove(self)
        self.busy.add(self)

    def handle_events(self) -> None:
        """What has been received may hold the head of a request, or the rest of its body."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body:
            self._work()
        if self.cycle is before or self.cycle.response_complete:
            return
        self.scope.setdefault("state", {})[_GONE] = self.is_gone
        timeout_s = self.limits.answer_timeout_s
        if timeout_s is None or self._streams:
            self._disarm()
        else:
            self._arm(timeout_s, "a request or its answer took too long")

    def pause_writing(self) -> None:
        """The client does not take what was sent."""
        super().pause_writing()
        if self._streams:
            self._arm(self.limits.stall_timeout_s, "takes nothing")

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        if self._streams:
            self._disarm()

    def is_gone(self) -> bool:
        """Whether the client has closed its end, also if the event loop has not seen it yet."""
        return self.transport.is_closing() or self._has(select.POLLRDHUP)

    def speaks(self) -> bool:
        """Whether it has sent something that the event loop has not seen yet."""
        return not self.transport.is_closing() and self._has(select.POLLIN)

    def _has(self, event: int) -> bool:
        sock = self.transport.get_extra_info("socket")
        if sock is None or (fd := sock.fileno()) < 0:
            return True
        poll = select.poll()
        poll.register(fd, event)
        return bool(poll.poll(0))

    @property
    def _streams(self) -> bool:
        return self.scope is not None and self.scope["path"] in self.limits.streams

    def on_response_complete(self) -> None:
        """An answer was written."""
        self._arm(self.limits.head_timeout_s, "")
        self._wait()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """The request cannot be understood; an answer may be under way already."""
        self._refuse("no HTTP, or a head that is too large")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what it still sends is dropped
            self.cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.abort()

    def _arm(self, seconds: float, reason: str) -> None:
        self._disarm()
        if not self.transport.is_closing():
            self._timer = self.loop.call_later(seconds, self._late, reason)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self, reason: str) -> None:
        if reason:
            self._refuse(reason)
        self.transport.abort()

    def _refuse(self, reason: str) -> None:
        peer = self.client[0] if self.client else "?"
        self.limiter.log(logging.INFO, (peer, reason), "http: %s is cut off: %s", peer, reason)


def client_is_gone(scope: Scope) -> bool:
    """Whether the client of a request has closed its end of the connection, however late that is found out.

    Ask right before something is done that cannot be undone: who has given up, and thinks that it failed,
    must not find it done later. Thread safe.
    """
    return bool(scope["state"][_GONE]())


_protocol_log = logging.getLogger(f"{__name__}.protocol")
_protocol_log.setLevel(logging.ERROR)  # bad requests are summed up in one line a peer and reason


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handling, which would end the process by the signal."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve; whoever cannot be taken for want of a descriptor costs a line, not a traceback."""
        limiter = LogLimiter(log)

        def failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            lack = lack_of_files(context.get("exception") or Exception())
            if lack is None:
                loop.default_exception_handler(context)
            else:
                limiter.log(logging.WARNING, lack.code, "http: nobody is taken for a second: %s", lack)

        asyncio.get_running_loop().set_exception_handler(failed)
        await super().serve(sockets)
        limiter.flush()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's business."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not used: see :meth:`capture_signals`."""


class HttpServer:
    """An HTTP port: bound when made, so that the real port is known; served from :meth:`start` on.

    Args:
        url: ``http://host:port``; port 0 takes a free one.
        option: What the address is called in the configuration and on the command line, for errors.
        name: Of its thread, after ``kvferry-``.
        default_port: Where the URL names none.
        trusted_network: Whether addresses beyond loopback may be used.
        limits: See :class:`PortLimits`.

    Attributes:
        url: Where it is reached.

    Raises:
        ConfigError: If the address cannot be used.
    """

    def __init__(
        self,
        url: str,
        option: str,
        *,
        name: str,
        default_port: int,
        trusted_network: bool = False,
        limits: PortLimits = PortLimits(),
    ) -> None:
        address = parse_url(url, default_scheme="http", default_port=default_port)
        require_loopback(address.url, option, trusted_network=trusted_network)
        self._bound = _bind(address, option)
        self.address = Address("http", address.host, self._bound.getsockname()[1])
        self.url = self.address.url
        self._name = f"kvferry-{name}"
        self._limits = limits
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._limiter = LogLimiter(log)

    def start(self, app: ASGIApp, *, drain_s: float) -> None:
        """Serve ``app``; at the end requests under way get ``drain_s``."""
        bounds = {
            "limits": self._limits,
            "limiter": self._limiter,
            "waiting": Arrivals(self._limits.max_waiting, _BoundedProtocol.speaks),
            "busy": set(),
        }
        self._server = _Server(
            uvicorn.Config(
                app,
                http=type("_Protocol", (_BoundedProtocol,), bounds),
                ws="none",
                proxy_headers=False,
                loop="asyncio",
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                h11_max_incomplete_event_size=self._limits.max_head_nbytes,
                timeout_keep_alive=math.ceil(self._limits.head_timeout_s),
                timeout_graceful_shutdown=math.ceil(drain_s),
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([self._bound],), name=self._name, daemon=True
        )
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether it serves."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Take no more connections, end when what is under way has ended; see :meth:`join`."""
        if self._server is not None:
            self._server.should_exit = True

    def join(self, timeout_s: float) -> None:
        """Wait for the end after :meth:`stop`."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def close(self) -> None:
        """Give the port back, after :meth:`join`."""
        self._bound.close()
        self._limiter.flush()


def _bind(address: Address, option: str) -> socket.socket:
    """A listening socket, made here so that the real port is known and a taken one has a clear error."""
    if address.scheme != "http" or address.port is None:
        raise ConfigError(f"{address.url} ({option}) must be http://host:port")
    try:
        family, where = resolve(address.host, address.port, deadline_in(_LOOKUP_S), passive=True)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {address.url}: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {address.url}: {error.strerror or error}; choose another address with {option}"
        ) from error
    return bound
