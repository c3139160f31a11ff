"""What goes wrong at the HTTP edge, and the status that says so."""

from __future__ import annotations

from typing import Any

from kvferry.core.errors import (
    AuthError,
    CapacityError,
    ConfigError,
    ConnectError,
    KVFerryError,
    OverloadedError,
    RequestError,
    TransferTimeoutError,
    TransportError,
)

__all__ = [
    "InvalidFieldError",
    "NoWorkerError",
    "UnknownModelError",
    "error_body",
    "http_status",
    "request_headers",
]

RETRY_AFTER_S = 1


class InvalidFieldError(RequestError):
    """A field of the request's body cannot be used; ``param`` is its name."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""

    code = "model_not_found"


class NoWorkerError(KVFerryError):
    """No matching pair of a prefill and a decode worker is up."""

    code = "no_worker"
    retryable = True


# First match wins: subclasses stand before their bases.
_STATUS: tuple[tuple[type[KVFerryError], int, str], ...] = (
    (UnknownModelError, 404, "invalid_request_error"),
    (RequestError, 400, "invalid_request_error"),
    (OverloadedError, 429, "overloaded_error"),
    (CapacityError, 429, "overloaded_error"),
    (NoWorkerError, 503, "unavailable_error"),
    (TransferTimeoutError, 504, "timeout_error"),
    (AuthError, 502, "upstream_error"),
    (ConnectError, 502, "upstream_error"),
    (TransportError, 502, "upstream_error"),
    (ConfigError, 500, "internal_error"),
)


def http_status(error: KVFerryError) -> int:
    """The HTTP status of an error; what is not known is a 502: something behind the gateway failed."""
    return next((status for cls, status, _ in _STATUS if isinstance(error, cls)), 502)


def error_body(error: KVFerryError, request_id: str | None = None) -> dict[str, Any]:
    """An error as OpenAI clients expect it, also for an event of a stream."""
    kind = next((kind for cls, _, kind in _STATUS if isinstance(error, cls)), "upstream_error")
    return {
        "error": {
            "message": str(error),
            "type": kind,
            "param": getattr(error, "param", None),
            "code": error.code,
            **({} if request_id is None else {"request_id": request_id}),
        }
    }


def request_headers(request_id: str) -> dict[str, str]:
    """The header that names the request of an answer, good or bad."""
    return {"x-request-id": request_id}


def error_headers(error: KVFerryError) -> dict[str, str]:
    """Headers that go with an error: when to come back."""
    if http_status(error) in (429, 503):
        return {"retry-after": str(RETRY_AFTER_S)}
    return {}
