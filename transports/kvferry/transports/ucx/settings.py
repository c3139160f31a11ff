"""What UCX is told, and by whom: the environment first, then the address, then defaults of our own.

Nothing is overwritten: an option of the address that the environment contradicts is refused, and a default
is left away where the environment sets the variable. Ours go through the configuration of the context, never
through the environment of the process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from kvferry.core.address import Address, parse_url
from kvferry.core.errors import ConfigError
from kvferry.core.units import parse_nbytes, parse_seconds
from kvferry.transports.peer_owner import AllowedUsers, parse_allowed

__all__ = [
    "DEFAULTS",
    "EAGER_NBYTES",
    "Options",
    "advertised",
    "context_config",
    "parse_address",
    "source_of",
]

EAGER_NBYTES: Final = 8 << 10
"""Smaller messages are copied when they are sent, and do not wait for their receiver."""
DEFAULTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        # the segments of UCX's own size reach half of what TCP gives
        "TCP_TX_SEG_SIZE": "256k",
        "TCP_RX_SEG_SIZE": "256k",
        # what goes through UCX here is announced and large: no copy, and never more than the peer asked for
        "RNDV_THRESH": str(EAGER_NBYTES),
    }
)
"""Set where neither the environment nor the address says otherwise, by name without ``UCX_``."""

_UCX_OPTIONS: Final = {"tls": "TLS", "net_devices": "NET_DEVICES"}
_LOCAL_OPTIONS: Final = ("require", "inline", "spin", "allow_uid")
_REQUIRABLE: Final = ("rdma", "shm", "tcp")
_NUMBER: Final = re.compile(r"\b(\d+)([kmg]?)b?\b")
_SHIFT: Final = {"": 0, "k": 10, "m": 20, "g": 30}
_MAX_INLINE_NBYTES: Final = 1 << 16
_MAX_SPIN_S: Final = 0.01
_DEFAULT_INLINE_NBYTES: Final = 16 << 10
_DEFAULT_SPIN_S: Final = 200e-6


@dataclass(frozen=True, slots=True)
class Options:
    """The options of an address.

    Attributes:
        ucx: Options of UCX by name without ``UCX_``, as the address asks for them.
        require: Kind of transport without which no connection is made; empty for any.
        inline_nbytes: Parts up to this size go through the socket.
        spin_s: How long a call that waits looks for progress before it sleeps.
        allowed: Who else of this machine may be at the other end of a loopback connection.
    """

    ucx: tuple[tuple[str, str], ...] = ()
    require: str = ""
    inline_nbytes: int = _DEFAULT_INLINE_NBYTES
    spin_s: float = _DEFAULT_SPIN_S
    allowed: AllowedUsers = field(default_factory=AllowedUsers)


def parse_address(address: str) -> tuple[Address, Options]:
    """An address ``ucx://host:port?tls=…&require=…`` and its options.

    Raises:
        ConfigError: If it is malformed, or contradicts the environment.
    """
    parsed = parse_url(address, options=(*_UCX_OPTIONS, *_LOCAL_OPTIONS))
    if parsed.scheme != "ucx":
        raise ConfigError(f"address {address!r}: is not a ucx address")
    given = parsed.options
    try:
        inline = parse_nbytes(given["inline"]) if "inline" in given else _DEFAULT_INLINE_NBYTES
        spin = parse_seconds(given["spin"]) if "spin" in given else _DEFAULT_SPIN_S
        allowed = parse_allowed(given.get("allow_uid"))
    except ConfigError as error:
        raise ConfigError(f"address {address!r}: {error}") from error
    if not EAGER_NBYTES <= inline <= _MAX_INLINE_NBYTES:
        raise ConfigError(
            f"address {address!r}: inline is {EAGER_NBYTES} to {_MAX_INLINE_NBYTES} bytes, not {inline}"
        )
    if spin > _MAX_SPIN_S:
        raise ConfigError(f"address {address!r}: spin is at most 10ms, a longer one only heats the machine")
    require = given.get("require", "")
    if require and require not in _REQUIRABLE:
        raise ConfigError(f"address {address!r}: require is one of {', '.join(_REQUIRABLE)}, not {require!r}")
    ucx = tuple((_UCX_OPTIONS[name], given[name]) for name in _UCX_OPTIONS if name in given)
    for name, value in ucx:
        _check_clash(address, name, value)
    return parsed, Options(ucx, require, inline, spin, allowed)


def _check_clash(address: str, name: str, value: str) -> None:
    set_value = os.environ.get(f"UCX_{name}")
    if set_value is not None and set_value != value:
        raise ConfigError(
            f"address {address!r}: {name.lower()}={value} contradicts the environment, which has "
            f"UCX_{name}={set_value}; remove one of them (the environment is never overwritten)"
        )


def advertised(parsed: Address) -> Mapping[str, str]:
    """The options that a listener's address carries: not its own devices; whom it trusts must trust it."""
    options = {name: value for name, value in parsed.options.items() if name != "net_devices"}
    if "allow_uid" in options:
        options["allow_uid"] = str(os.geteuid())
    return options


def context_config(options: Options) -> dict[str, str]:
    """What a context is told beyond the environment, by name without ``UCX_``.

    Raises:
        ConfigError: If the environment has UCX announce messages that are taken to be copied when sent:
            a receiver could take what a sender that gave up has changed since.
    """
    threshold = os.environ.get("UCX_RNDV_THRESH", "")
    for number, unit in _NUMBER.findall(threshold.lower()):
        if int(number) << _SHIFT[unit] < EAGER_NBYTES:
            raise ConfigError(
                f"UCX_RNDV_THRESH={threshold}: kvferry needs {EAGER_NBYTES} or more, as it takes smaller "
                "messages to be copied when they are sent; raise it, or unset it"
            )
    wanted = {**DEFAULTS, **dict(options.ucx)}
    return {name: value for name, value in wanted.items() if f"UCX_{name}" not in os.environ}


def source_of(name: str, options: Options) -> str:
    """Who decides on the option ``name``: ``environment``, ``address``, ``kvferry`` or ``UCX``."""
    if f"UCX_{name}" in os.environ:
        return "environment"
    if name in dict(options.ucx):
        return "address"
    return "kvferry" if name in DEFAULTS else "UCX"
