"""Transports move bytes between two processes, chosen by the scheme of a URL.

The transports themselves are plug-ins: one is imported when a URL of its scheme is used first.
"""

from __future__ import annotations

from typing import Final

from kvferry.core.errors import CapacityError, ConfigError, ConnectError, KVFerryError
from kvferry.core.registry import Registry
from kvferry.transports.base import Connection, Listener, SharedMemoryConnection, Transport
from kvferry.transports.choices import Choice, explain, recent_choices
from kvferry.transports.ip import reason_of
from kvferry.transports.region import RegionTransport

__all__ = [
    "Choice",
    "Connection",
    "Listener",
    "RegionTransport",
    "SharedMemoryConnection",
    "Transport",
    "connect",
    "explain",
    "get_transport",
    "listen",
    "recent_choices",
    "region_registry",
    "registry",
    "require_scheme",
]

registry: Final[Registry[type[Transport]]] = Registry("kvferry.transports")
"""The transports by scheme."""

region_registry: Final[Registry[type[RegionTransport]]] = Registry("kvferry.regions")
"""The region transports by name."""

_DEFAULT_SCHEME: Final = "tcp"


def get_transport(scheme: str) -> Transport:
    """The transport for URLs of ``scheme``.

    Raises:
        UnknownPluginError: If there is none; the message has the nearest name.
        PluginUnavailableError: If what it needs is not installed; the message says how to install it.
    """
    return registry.load(scheme)()


def require_scheme(url: str, option: str) -> None:
    """See that there is a transport of an address, without loading it.

    Args:
        url: The address.
        option: What says so.

    Raises:
        ConfigError: If there is none; names the address, the option and the transports that there are.
    """
    scheme, separator, _ = url.strip().partition("://")
    names = registry.names()
    if separator and scheme not in names:
        there = ", ".join(names)
        raise ConfigError(f"{url} ({option}): there is no transport {scheme!r}; there are: {there}")


def _transport_of(url: str) -> Transport:
    if not isinstance(url, str):
        raise ConfigError(f"{url!r} is no address: write one as text, as in tcp://127.0.0.1:8410")
    scheme, separator, _ = url.strip().partition("://")
    return get_transport(scheme if separator else _DEFAULT_SCHEME)


def connect(url: str, deadline: float) -> Connection:
    """Connect to ``url`` over the transport that its scheme names (``tcp`` without one).

    Raises:
        ConnectError: If it cannot be reached by the deadline; the message names the address.
        ConfigError: If the URL or one of its options is malformed, or its scheme is unknown.
    """
    try:
        return _transport_of(url).connect(url, deadline)
    except CapacityError as error:  # of descriptors
        raise ConnectError(f"cannot connect to {url}: {error}") from error
    except KVFerryError:
        raise
    except OSError as error:
        raise ConnectError(f"cannot connect to {url}: {reason_of(error)}") from error


def listen(url: str) -> Listener:
    """Listen on ``url``; the listener's ``address`` is what others dial.

    Raises:
        ConnectError: If it cannot be bound; the message names the address, the reason and the remedy.
        ConfigError: If the URL or one of its options is malformed, or its scheme is unknown.
    """
    try:
        return _transport_of(url).listen(url)
    except CapacityError as error:  # of descriptors
        raise ConnectError(f"cannot listen on {url}: {error}") from error
    except KVFerryError:
        raise
    except OSError as error:
        raise ConnectError(f"cannot listen on {url}: {reason_of(error)}") from error
