"""The HTTP edge: ``/v1/completions``, ``/v1/models``, ``/live``, ``/ready``, ``/metrics``.

The only place with an event loop. Each request runs in the router's threads, which report through a
queue; beside it the client's connection is watched, so that a client that has gone is noticed in any
phase, also while nothing is being sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvferry.core.errors import KVFerryError, OverloadedError, RequestCancelledError, TransferTimeoutError
from kvferry.core.log import LogLimiter
from kvferry.core.metrics import CONTENT_TYPE
from kvferry.engine.gateway.answer import Answer
from kvferry.engine.gateway.errors import (
    InvalidFieldError,
    NoWorkerError,
    error_body,
    error_headers,
    http_status,
    request_headers,
)
from kvferry.engine.gateway.events import Done, Event, Failed, RequestRouter, Tokens
from kvferry.engine.gateway.metrics import GatewayMetrics
from kvferry.engine.gateway.request import CompletionRequest, ServedModel, new_request_id, parse_completion

__all__ = ["HttpLimits", "create_app"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of the HTTP side.

    Attributes:
        max_body_nbytes: Largest request body.
        max_bodies_nbytes: All bodies together that are being received or read; beyond it requests are
            refused as overloaded, so that many large ones cannot take all memory before they count as
            requests under way.
        body_timeout_s: Time for a client to send its body.
        send_timeout_s: Time for a client to take what is sent before the request is cancelled.
    """

    max_body_nbytes: int = 32 << 20
    max_bodies_nbytes: int = 256 << 20
    body_timeout_s: float = 30.0
    send_timeout_s: float = 30.0


class _ClientGoneError(Exception):
    """The client closed its connection."""


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def _error(error: KVFerryError, request_id: str | None = None) -> Response:
    headers = {**error_headers(error), **({} if request_id is None else request_headers(request_id))}
    return _json(error_body(error, request_id), http_status(error), headers)


class _Call:
    """One request between the event loop and the router's threads."""

    def __init__(
        self, router: RequestRouter, request: CompletionRequest, arrived: float, receive: Receive
    ) -> None:
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def on_event(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody listens any more
                loop.call_soon_threadsafe(events.put_nowait, event)

        self._events = events
        self._run = router.submit(request, arrived, on_event)
        self._gone = loop.create_task(_until_disconnected(receive))

    async def next(self) -> Event:
        """The next event.

        Raises:
            _ClientGoneError: If the client went away first.
        """
        if not self._events.empty():
            return self._events.get_nowait()
        getting = asyncio.ensure_future(self._events.get())
        done, _ = await asyncio.wait({getting, self._gone}, return_when=asyncio.FIRST_COMPLETED)
        if getting in done:
            return getting.result()
        getting.cancel()
        raise _ClientGoneError

    def stop(self) -> None:
        self._run.stop()

    def close(self) -> None:
        self._run.cancel()
        self._gone.cancel()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Completions:
    """The ASGI application of ``POST /v1/completions``."""

    def __init__(self, router: RequestRouter, limits: HttpLimits, metrics: GatewayMetrics) -> None:
        self._router = router
        self._limits = limits
        self._metrics = metrics
        self._bodies = _Bodies(limits)
        self._limiter = LogLimiter(log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived, status = time.monotonic(), 500
        name = new_request_id()
        try:
            status = await self._serve(scope, receive, send, arrived, name)
        except (_ClientGoneError, ClientDisconnect):
            status = 499  # nobody to answer to; the number is what proxies log
        except KVFerryError as error:
            status = http_status(error)
            await _error(error, name)(scope, receive, send)
        except Exception:
            log.exception("request %s failed", name)
            body = error_body(KVFerryError("internal error; the gateway's log says more"), name)
            await _json(body, 500, request_headers(name))(scope, receive, send)
        finally:
            self._metrics.requests.labels(code=str(status)).inc()

    async def _serve(self, scope: Scope, receive: Receive, send: Send, arrived: float, name: str) -> int:
        try:
            served, request = await self._parse(Request(scope, receive), name)
            call = _Call(self._router, request, arrived, receive)
        except KVFerryError as error:  # what fails later, the router logs
            text = "request %s is refused [%s]: %s"
            if not self._limiter.log(logging.INFO, error.code, text, name, error.code, error):
                log.debug(text, name, error.code, error)  # summed up above, but each can be looked for
            raise
        try:
            with self._metrics.in_flight.track_inprogress():
                if request.stream:
                    return await self._stream(call, Answer(request, served), send)
                return await self._whole(call, Answer(request, served), scope, receive, send)
        finally:
            call.close()

    async def _parse(self, http: Request, name: str) -> tuple[ServedModel, CompletionRequest]:
        served = self._router.served()
        with self._bodies.one() as body:
            data = await body.read(http)
            # Encoding a long text takes a while: not in the event loop.
            loop = asyncio.get_running_loop()
            return served, await loop.run_in_executor(None, parse_completion, data, served, name)

    async def _whole(self, call: _Call, answer: Answer, scope: Scope, receive: Receive, send: Send) -> int:
        while True:
            event = await call.next()
            if isinstance(event, Tokens):
                if answer.token_sent_at is None:
                    answer.token_sent_at = time.monotonic()
                self._take(call, answer, event)
            else:
                break
        done = _checked(event, answer)
        answer.finish()
        self._metrics.observe(done, answer.timing(done), len(answer.token_ids))
        await _Sender(send, self._limits.send_timeout_s).response(
            _json(answer.body(done), headers=request_headers(answer.id)), scope, receive
        )
        return 200

    async def _stream(self, call: _Call, answer: Answer, send: Send) -> int:
        event = await call.next()
        if not isinstance(event, Tokens):  # before the first token a failure still has its status
            _checked(event, answer)
            raise KVFerryError("the decode worker ended the request without a token")
        out = _Sender(send, self._limits.send_timeout_s)
        await out.start(request_headers(answer.id))
        try:
            while isinstance(event, Tokens):
                if not answer.stopped:
                    await out.event(answer.chunk(self._take(call, answer, event), event.token_ids))
                    if answer.token_sent_at is None:
                        answer.token_sent_at = time.monotonic()
                event = await call.next()
            done = _checked(event, answer)
            self._metrics.observe(done, answer.timing(done), len(answer.token_ids))
            await out.event(answer.last_chunk(answer.finish(), done))
        except KVFerryError as error:
            log.debug("stream of %s failed after %d tokens: %s", answer.id, len(answer.token_ids), error)
            await out.event(error_body(error, answer.id))
        await out.end()
        return 200

    @staticmethod
    def _take(call: _Call, answer: Answer, event: Tokens) -> str:
        """Add tokens to the answer, unless a stop string already ended it."""
        if answer.stopped:
            return ""
        text = answer.add(event.token_ids)
        if answer.stopped:
            call.stop()
        return text


def _checked(event: Event, answer: Answer) -> Done:
    """The end of a request that ended well; everything else raises."""
    if isinstance(event, Failed):
        raise event.error
    if not isinstance(event, Done) or (event.reason == "cancelled" and not answer.stopped):
        raise RequestCancelledError("the request was cancelled behind the gateway")
    return event


class _Sender:
    """An answer to one client, each piece within a time limit."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s

    async def _put(self, message: MutableMapping[str, Any]) -> None:
        try:
            await asyncio.wait_for(self._send(message), self._timeout_s)
        except asyncio.TimeoutError as error:
            log.warning("a client took nothing for %.0f s, its request is cancelled", self._timeout_s)
            raise _ClientGoneError from error
        except OSError as error:
            raise _ClientGoneError from error

    async def response(self, response: Response, scope: Scope, receive: Receive) -> None:
        """A whole answer."""
        await response(scope, receive, self._put)

    async def start(self, more: Mapping[str, str]) -> None:
        """The head of a stream of events."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        headers += [(name.encode(), value.encode()) for name, value in more.items()]
        await self._put({"type": "http.response.start", "status": 200, "headers": headers})

    async def event(self, body: object) -> None:
        """One event."""
        data = b"data: " + msgspec.json.encode(body) + b"\n\n"
        await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """The event that ends every stream."""
        await self._put({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


class _Bodies:
    """The bodies that are being received or read, bounded each and together. For the event loop only."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.nbytes = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[_Body]:
        """A body, which counts until the end of the block."""
        body = _Body(self)
        try:
            yield body
        finally:
            self.nbytes -= body.nbytes


class _Body:
    """One body on its way."""

    def __init__(self, bodies: _Bodies) -> None:
        self._bodies = bodies
        self.nbytes = 0

    async def read(self, request: Request) -> bytes:
        """All of it.

        Raises:
            InvalidFieldError: If it is too long, or says that it will be.
            OverloadedError: If all bodies together are.
            TransferTimeoutError: If it does not arrive in time.
        """
        limits = self._bodies.limits
        announced = request.headers.get("content-length", "")
        if announced.isdecimal():
            self._check(int(announced[:20]))  # nobody waits for what is not wanted
        try:
            return await asyncio.wait_for(self._parts(request), limits.body_timeout_s)
        except asyncio.TimeoutError as error:
            raise TransferTimeoutError(
                f"the body did not arrive within {limits.body_timeout_s:g} s"
            ) from error

    async def _parts(self, request: Request) -> bytes:
        parts: list[bytes] = []
        async for part in request.stream():
            self._check(self.nbytes + len(part))
            self.nbytes += len(part)
            self._bodies.nbytes += len(part)
            parts.append(part)
        return b"".join(parts)

    def _check(self, nbytes: int) -> None:
        limits, others = self._bodies.limits, self._bodies.nbytes - self.nbytes
        if nbytes > limits.max_body_nbytes:
            raise InvalidFieldError(f"the body is over the limit of {limits.max_body_nbytes} bytes")
        if nbytes + others > max(limits.max_bodies_nbytes, limits.max_body_nbytes):
            raise OverloadedError(
                f"bodies of {others} bytes are being received, no more than "
                f"{limits.max_bodies_nbytes} may be; try again later"
            )


def create_app(router: RequestRouter, limits: HttpLimits, metrics: GatewayMetrics) -> Starlette:
    """The gateway's HTTP application over ``router``."""
    started = int(time.time())

    async def live(_request: Request) -> Response:
        return _json({"live": True})

    async def ready(_request: Request) -> Response:
        try:
            served = router.served()
        except NoWorkerError as error:
            return _json({"ready": False, "reason": str(error)}, 503, error_headers(error))
        return _json({"ready": True, "model": served.name, "max_model_len": served.max_model_len})

    async def models(_request: Request) -> Response:
        try:
            served: ServedModel = router.served()
        except NoWorkerError as error:
            return _error(error)
        entry = {"id": served.name, "object": "model", "created": started, "owned_by": "kvferry"}
        return _json({"object": "list", "data": [{**entry, "max_model_len": served.max_model_len}]})

    async def exposition(_request: Request) -> Response:
        return Response(metrics.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def http_error(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        what = f"{request.method} {request.url.path}"[:200]
        message = {404: f"{what}: there is no such path", 405: f"{what}: another method is needed"}
        body = {"message": message.get(status, what), "type": "invalid_request_error", "param": None}
        return _json({"error": {**body, "code": None}}, status)

    return Starlette(
        routes=[
            Route("/live", live),
            Route("/ready", ready),
            Route("/metrics", exposition),
            Route("/v1/models", models),
            Route("/v1/completions", _Completions(router, limits, metrics), methods=["POST"]),
        ],
        exception_handlers={HTTPException: http_error},
    )
