"""The daemon's HTTP port: status, metrics, the live page. The only place of the daemon with an event loop.

Import it only where the port is opened: it brings starlette, uvicorn and prometheus_client.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata, resources
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry.core.errors import (
    AuthError,
    KVFerryError,
    OverloadedError,
    RequestCancelledError,
    RequestError,
    TransferTimeoutError,
)
from kvferry.core.http_port import HttpServer, PortLimits, client_is_gone
from kvferry.core.log import LogLimiter
from kvferry.core.metrics import CONTENT_TYPE
from kvferry.core.open_files import lack_of_files
from kvferry.daemon.access import OPERATOR, Caller, caller_of, seen_by, store_of
from kvferry.daemon.admin import VERBS, AdminDone, decode, perform
from kvferry.daemon.event_stream import EventStreams, Snapshot
from kvferry.daemon.faults import Faults
from kvferry.daemon.metrics import DaemonMetrics, daemon_metrics
from kvferry.daemon.status import DaemonStatus, collect
from kvferry.daemon.token import AdminToken

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from kvferry.daemon.node import Daemon

__all__ = ["DaemonHttp"]

log = logging.getLogger(__name__)
T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]

_OPTION: Final = "daemon.http (--http)"
_ANSWER_S: Final = 20.0
_WORK_S: Final = 10.0
_ADMIN_S: Final = 15.0
_WRONG_TOKEN_S: Final = 0.2
_MOST_BODY: Final = 1 << 20
_FRESH_S: Final = 0.2
_CLOSE_S: Final = 3.0
_WAITING: Final = 64
LIMITS: Final = PortLimits(
    max_connections=128,
    max_waiting=64,
    head_timeout_s=10.0,
    answer_timeout_s=_ANSWER_S,
    streams=frozenset({"/events"}),
)
_PAGE_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_ERROR_STATUS: Final[tuple[tuple[type[KVFerryError], int], ...]] = (
    (OverloadedError, 503),
    (TransferTimeoutError, 504),
    (AuthError, 403),
)


def _json(body: object, status: int = 200) -> Response:
    headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def _refusal(status: int, code: str, message: str) -> Response:
    return _json({"error": {"code": code, "message": message}}, status)


class DaemonHttp:
    """The port of one daemon: bound when made, served from :meth:`start` until :meth:`close`.

    Attributes:
        url: Where it is reached.

    Raises:
        ConfigError: If the address cannot be used.
    """

    def __init__(self, daemon: Daemon, url: str) -> None:
        self._daemon = daemon
        self._token = AdminToken(daemon.config.daemon.token_file)
        self._server = HttpServer(
            url,
            _OPTION,
            name="daemon-http",
            default_port=8451,
            trusted_network=daemon.config.wire.trusted_network,
            limits=LIMITS,
        )
        self.url = self._server.url
        self._faults = Faults()
        self._pool = ThreadPoolExecutor(3, thread_name_prefix="kvferry-daemon-http-work")
        self._waiting = 0  # of the event loop
        self._lock = threading.Lock()
        self._cached: tuple[float, DaemonStatus] | None = None
        self._version = metadata.version("kvferry")
        self._metrics = daemon_metrics(DaemonMetrics(self.status, daemon.operations))
        self._requests = self._metrics.counter(
            "kvferry_daemon_http_requests_total",
            "Answers of the HTTP port, by path and status.",
            ["path", "code"],
        )
        self._limiter = LogLimiter(log)
        self._streams = EventStreams()
        page = resources.files("kvferry.daemon").joinpath("page.html").read_bytes()
        guarded = b"<html data-guarded" if daemon.tenants.guarded else b"<html"
        self._page = page.replace(b"<html", guarded, 1)  # it asks for a token before it asks for figures

    def start(self) -> None:
        """Serve."""
        self._server.start(self._app(), drain_s=_CLOSE_S)

    def reload_token(self) -> None:
        """Read the admin token's file again; raises as :meth:`AdminToken.reload`."""
        self._token.reload()

    def is_alive(self) -> bool:
        """Whether it serves."""
        return self._server.is_alive()

    def close(self) -> None:
        """End it; requests under way get a moment."""
        self._streams.close()
        self._server.stop()
        self._server.join(_CLOSE_S + 2)
        self._server.close()
        self._limiter.flush()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._faults.close()

    def status(self) -> DaemonStatus:
        """The status, at most 0.2 s old, so that many who ask do not cost more than one. Thread safe."""
        with self._lock:
            now = time.monotonic()
            if self._cached is None or now - self._cached[0] > _FRESH_S:
                found = collect(self._daemon, self._faults, version=self._version, http=self.url)
                self._cached = (now, found)
            return self._cached[1]

    # ---- the application ---------------------------------------------------------------------------

    def routes(self) -> list[Route]:
        """Every path that it answers."""
        shown: dict[str, Endpoint] = {
            "/": self._index,
            "/live": self._live,
            "/ready": self._ready,
            "/status": self._show_status,
            "/metrics": self._show_metrics,
            "/events": self._events,
        }
        verbs = {f"/admin/{verb}": self._admin(verb) for verb in VERBS}
        return [
            *(Route(path, self._contained(path, endpoint)) for path, endpoint in shown.items()),
            *(Route(path, self._contained(path, verb), methods=["POST"]) for path, verb in verbs.items()),
        ]

    def _app(self) -> ASGIApp:
        app = Starlette(routes=self.routes(), exception_handlers={HTTPException: self._http_error})
        app.router.redirect_slashes = False  # a path is one of those, or there is none
        return self._for_known_hosts(app)

    def _for_known_hosts(self, app: ASGIApp) -> ASGIApp:
        """Answers only those who name this host by an address of it or as localhost, with one length.

        A web page elsewhere that has its own name resolved to a loopback address gets nothing.
        """
        own = self._server.address.host

        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            headers = dict(scope["headers"])
            named = headers.get(b"host", b"").decode("latin-1").lower()
            if headers.keys() >= {b"content-length", b"transfer-encoding"}:  # a proxy may see another end
                text = "the request has two lengths, Content-Length and Transfer-Encoding"
                response = _refusal(400, "bad_request", text)
                response.headers["connection"] = "close"
            elif _is_address(named) or _host(named) in ("localhost", own):
                await app(scope, receive, send)
                return
            else:
                text = "this port answers to its address or to localhost, not to other host names"
                response = _refusal(421, "wrong_host", text)
            self._requests.labels(path="other", code=str(response.status_code)).inc()
            await response(scope, receive, send)

        return checked

    def _contained(self, path: str, endpoint: Endpoint) -> Endpoint:
        """Whatever happens is an answer, and counted."""

        async def answer(request: Request) -> Response:
            try:
                response = await endpoint(request)
            except ClientDisconnect:
                response = Response(status_code=499)  # nobody to answer to
            except KVFerryError as error:
                response = _refusal(_status_of(error), error.code, str(error))
            except HTTPException as error:
                response = _refusal(error.status_code, "refused", error.detail)
            except Exception as error:
                if (lack := lack_of_files(error)) is not None:
                    response = _refusal(503, lack.code, str(lack))
                else:
                    log.exception("%s %s failed", request.method, path)
                    response = _refusal(500, "internal", "internal error; the daemon's log says more")
            self._requests.labels(path=path, code=str(response.status_code)).inc()
            return response

        return answer

    async def _http_error(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        self._requests.labels(path="other", code=str(status)).inc()
        text = {404: "there is no such path", 405: "another method is needed"}.get(status, "refused")
        return _refusal(status, "refused", f"{request.method} {request.url.path}"[:200] + f": {text}")

    async def _in_thread(self, call: Callable[[], T], timeout_s: float = _WORK_S) -> T:
        """What takes locks of the store runs beside the event loop, a bounded number at once."""
        if self._waiting >= _WAITING:
            raise OverloadedError(f"{self._waiting} requests wait already; try again later")
        self._waiting += 1
        loop = asyncio.get_running_loop()
        running = asyncio.ensure_future(loop.run_in_executor(self._pool, call))
        running.add_done_callback(self._one_less)
        try:
            return await asyncio.wait_for(asyncio.shield(running), timeout_s)
        except asyncio.TimeoutError as error:
            raise TransferTimeoutError(f"no answer of the store within {timeout_s:g} s") from error

    def _one_less(self, done: asyncio.Future[T]) -> None:
        self._waiting -= 1
        if not done.cancelled():
            done.exception()  # looked at, also where nobody waits any more

    # ---- endpoints ---------------------------------------------------------------------------------

    async def _index(self, _request: Request) -> Response:
        return Response(self._page, headers=_PAGE_HEADERS, media_type="text/html; charset=utf-8")

    async def _live(self, _request: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, _request: Request) -> Response:
        if self._daemon.draining:
            return _json({"ready": False, "reason": "it is draining: no new work is taken"}, 503)
        return _json({"ready": True})

    async def _show_status(self, request: Request) -> Response:
        caller = await self._looking(request)
        return _json(seen_by(caller, await self._in_thread(self.status)))

    async def _show_metrics(self, request: Request) -> Response:
        if (await self._looking(request)) != OPERATOR:
            raise AuthError("/metrics is of all tenants: it takes the token of daemon.token_file")
        text = await self._in_thread(self._metrics.render)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def _events(self, request: Request) -> Response:
        caller = await self._require_token(request)
        tenant, store = store_of(self._daemon.stores, request.query_params.get("tenant"), caller)
        tiers = frozenset(request.query_params.getlist("tier"))
        if unknown := tiers.difference(names := ["dram", *(level.name for level in store.levels)]):
            raise RequestError(f"there is no tier {min(unknown)[:120]!r}; there are: {', '.join(names)}")
        feed = self._streams.open()
        try:
            present = await self._in_thread(lambda: store.listen(feed, tiers))
        except BaseException:
            self._streams.end(feed)
            raise
        header = request.headers.get("authorization", "")

        def may_go_on() -> bool:
            """Whether the token is still valid, and the tenant still there."""
            shown = caller_of(header, self._token, self._daemon.tenants)
            return shown == caller and self._daemon.stores.get(tenant) is store

        return self._streams.response(feed, Snapshot(store.arena.epoch, tenant, present), may_go_on)

    def _admin(self, verb: str) -> Endpoint:
        async def answer(request: Request) -> Response:
            caller = await self._require_token(request)
            wanted = decode(verb, await _body(request))

            def act() -> AdminDone:
                if client_is_gone(request.scope):  # it was told that this failed
                    raise RequestCancelledError(f"{verb} is not done: who asked for it has gone")
                log.info(
                    "admin: %s is asked for by %s of %s",
                    verb,
                    _peer(request),
                    caller.tenant or "the operator",
                )
                return perform(self._daemon, wanted, caller, self._token.reload)

            return _json(await self._in_thread(act, _ADMIN_S))

        return answer

    async def _looking(self, request: Request) -> Caller:
        """Who looks; anybody may where there are no credentials."""
        return await self._require_token(request) if self._daemon.tenants.guarded else OPERATOR

    async def _require_token(self, request: Request) -> Caller:
        caller = caller_of(request.headers.get("authorization", ""), self._token, self._daemon.tenants)
        if caller is not None:
            return caller
        if (
            "authorization" in request.headers or request.method == "POST"
        ):  # not who only looks, and asks anew
            peer = _peer(request)
            self._limiter.log(logging.WARNING, peer, "admin: %s shows no valid token", peer)
            await asyncio.sleep(_WRONG_TOKEN_S)  # slows down who tries them one by one
        remedy = "the one in daemon.token_file" if self._token.given else "daemon.token_file is none"
        raise HTTPException(401, f"this needs a token, as Bearer in the header Authorization; {remedy}")


def _peer(request: Request) -> str:
    return request.client.host if request.client else "?"


async def _body(request: Request) -> bytes:
    """The body, bounded; the port bounds its time."""
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > _MOST_BODY:
            raise HTTPException(413, f"the body is over the limit of {_MOST_BODY} bytes")
    return data


def _status_of(error: KVFerryError) -> int:
    return next((status for kind, status in _ERROR_STATUS if isinstance(error, kind)), 400)


def _host(named: str) -> str:
    """The host of a ``Host`` header, without its port and brackets."""
    if named.startswith("["):
        return named[1:].partition("]")[0]
    return named.rpartition(":")[0] if named.count(":") == 1 else named


def _is_address(named: str) -> bool:
    try:
        ipaddress.ip_address(_host(named))
    except ValueError:
        return False
    return True
