"""The errors of kvferry.

Every class carries two class attributes: ``code``, the stable name that crosses the wire, and
``retryable``, whether the same call may succeed later without a change by the caller. Messages name
the object, the number and the remedy. Foreign errors are mapped once, at the boundary where they
arise, with ``raise … from``.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AuthError",
    "CapacityError",
    "CodecError",
    "ConfigError",
    "ConnectError",
    "ConnectionClosedError",
    "CorruptBlockError",
    "DeviceError",
    "KVFerryError",
    "LeaseExpiredError",
    "OverloadedError",
    "PluginUnavailableError",
    "ProtocolError",
    "RequestCancelledError",
    "RequestError",
    "SpecMismatchError",
    "StoreError",
    "TierError",
    "TransferTimeoutError",
    "TransportError",
    "UnavailableError",
    "UnknownPluginError",
    "UnsupportedModelError",
    "error_from_code",
]


class KVFerryError(Exception):
    """Base of all errors raised by kvferry."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    request: str = ""
    """The name of the request that it ended, where that is known: for log lines."""


class ConfigError(KVFerryError, ValueError):
    """A configuration value, an option or a file of settings cannot be used."""

    code = "config"


class UnknownPluginError(ConfigError):
    """No plug-in of that name is registered."""

    code = "unknown_plugin"


class PluginUnavailableError(ConfigError):
    """The plug-in is known, but what it needs is not installed; the message has the pip hint."""

    code = "plugin_unavailable"


class UnsupportedModelError(ConfigError):
    """The checkpoint is of a kind that the reference engine cannot run, or is incomplete."""

    code = "unsupported_model"


class SpecMismatchError(KVFerryError):
    """Two sides describe the KV differently; the message shows both."""

    code = "spec_mismatch"


class RequestError(KVFerryError, ValueError):
    """A request that can never be served as it stands (a 4xx at the HTTP edge)."""

    code = "bad_request"


class OverloadedError(KVFerryError):
    """A bounded queue is full or the component is draining; try again later."""

    code = "overloaded"
    retryable = True


class RequestCancelledError(KVFerryError):
    """The request was cancelled by its owner, who has no use for an answer."""

    code = "cancelled"


class AuthError(KVFerryError):
    """The credential is missing, unknown or lacks the right."""

    code = "auth"


class TransportError(KVFerryError):
    """Bytes could not be moved."""

    code = "transport"
    retryable = True


class ConnectError(TransportError):
    """No connection could be made, or its handshake did not finish in time."""

    code = "connect"


class ConnectionClosedError(TransportError):
    """The connection ended, here or at the peer, before the call was done."""

    code = "connection_closed"


class TransferTimeoutError(TransportError, TimeoutError):
    """A transfer was not done by its deadline."""

    code = "timeout"


class ProtocolError(KVFerryError):
    """A peer, or this process, broke the wire protocol.

    Attributes:
        remote: Whether it was the peer (its bytes were wrong); else it is a mistake of this process.
    """

    code = "protocol"

    def __init__(self, message: str = "", *, remote: bool = False) -> None:
        super().__init__(message)
        self.remote = remote


class CodecError(KVFerryError):
    """Bytes could not be encoded or decoded."""

    code = "codec"


class CorruptBlockError(CodecError):
    """A checksum, length or identity does not match what was stored or sent."""

    code = "corrupt_block"


class StoreError(KVFerryError):
    """A store could not do what was asked."""

    code = "store"


class CapacityError(StoreError):
    """There is no room, and nothing may be evicted to make some."""

    code = "capacity"
    retryable = True


class UnavailableError(CapacityError):
    """The store cannot be reached now; nothing was stored. It is tried again in the background."""

    code = "unavailable"


class LeaseExpiredError(StoreError):
    """The lease is past its deadline, released, or its slot was used again."""

    code = "lease_expired"
    retryable = True


class TierError(StoreError):
    """One tier failed; the others go on."""

    code = "tier"
    retryable = True


class DeviceError(KVFerryError):
    """A device failed or cannot do what was asked. After a failed kernel or copy it stays failed."""

    code = "device"


def _all_subclasses(cls: type[KVFerryError]) -> list[type[KVFerryError]]:
    found = [cls]
    for sub in cls.__subclasses__():
        found.extend(_all_subclasses(sub))
    return found


def error_from_code(code: str, message: str) -> KVFerryError:
    """Rebuild an error that a peer reported.

    Args:
        code: The ``code`` of the class that the peer raised.
        message: Its message; the caller adds whose it is.

    Returns:
        An instance of the class with that code, or of :class:`KVFerryError` for a code that this
        version does not know (a newer peer's).
    """
    for cls in _all_subclasses(KVFerryError):
        if cls.code == code:
            return cls(message)
    return KVFerryError(f"{message} [{code}]")
