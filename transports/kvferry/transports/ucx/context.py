"""Contexts of UCX: one for each set of options that is in use, and what the host offers through it."""

from __future__ import annotations

import logging
import os
import re
import threading
from dataclasses import dataclass, field
from typing import Any, Final

from kvferry.core.errors import CapacityError, ConfigError, ConnectError
from kvferry.transports.choices import record_use
from kvferry.transports.ucx.library import Library, library
from kvferry.transports.ucx.rdma import kinds, rdma_remedy
from kvferry.transports.ucx.settings import DEFAULTS, Options, context_config, parse_address, source_of

__all__ = ["Context", "Setting", "UcxReport", "effective_settings", "get_context"]

_log = logging.getLogger(__name__)
_RESOURCE: Final = re.compile(r"^#\s+resource\b.*\s(\S+)/(\S+)\s*$", re.MULTILINE)
_PATTERN: Final = re.compile(r"[\^\[*?]")  # UCX takes patterns, and lists of what to leave away
_REPORTED: Final = ("TLS", "NET_DEVICES", "SHM_DEVICES", *DEFAULTS, "MAX_RNDV_RAILS", "KEEPALIVE_INTERVAL")
_lock: Final = threading.Lock()
_contexts: Final[dict[tuple[int, tuple[tuple[str, str], ...]], Context]] = {}


@dataclass(frozen=True, eq=False)
class Context:
    """A context of UCX. It lives as long as the process.

    Attributes:
        ucx: The library.
        config: What it was told beyond the environment.
        transports: (transport, device) that UCX uses through it.
        handle: The object of ``ucxx``.
    """

    ucx: Library
    config: dict[str, str]
    transports: tuple[tuple[str, str], ...]
    handle: Any = field(repr=False)

    @property
    def names(self) -> list[str]:
        """The names of the transports."""
        return sorted({name for name, _ in self.transports})


@dataclass(frozen=True, slots=True)
class Setting:
    """One option of UCX as it takes effect.

    Attributes:
        name: As a variable of the environment, with ``UCX_``.
        value: What UCX uses.
        source: Who decided: ``environment``, ``address``, ``kvferry`` or ``UCX``.
    """

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class UcxReport:
    """What UCX is and does in this process; for ``kvferry doctor`` and status.

    Attributes:
        version: Of UCX.
        path: The file of libucp.
        transports: (transport, device) that UCX uses, with the options asked about.
        settings: Those that matter here, and all that the environment sets.
        rdma_remedy: Why there is no RDMA and what to do; empty where there is.
    """

    version: str
    path: str
    transports: tuple[tuple[str, str], ...]
    settings: tuple[Setting, ...]
    rdma_remedy: str


def get_context(options: Options) -> Context:
    """The context for ``options``; made once.

    Raises:
        PluginUnavailableError: If ``ucxx`` is not installed.
        ConfigError: If UCX does not take an option, or what is required is not there.
        ConnectError: If this process was forked from one that uses UCX already, or has too few descriptors.
    """
    config = context_config(options)
    key = (os.getpid(), tuple(sorted(config.items())))
    with _lock:
        if any(pid != os.getpid() for pid, _ in _contexts):
            raise ConnectError(
                "this process was forked from one that uses UCX, which cannot go on in the child: "
                "start processes with spawn or exec, or fork before the first ucx address is used"
            )
        if key not in _contexts:
            try:
                _contexts[key] = _new_context(config)
                record_use(f"ucx {len(_contexts)}", _use_of(_contexts[key], options))
            except CapacityError as error:  # of descriptors
                raise ConnectError(f"UCX is left alone, it would end this process: {error}") from error
        context = _contexts[key]
    if options.require and options.require not in kinds(context.names):
        raise ConfigError(_missing(options, context))
    return context


def _use_of(context: Context, options: Options) -> str:
    """What a status says of it: the transports, and everything that UCX was told, with whose word it is."""
    ways = ", ".join("/".join(pair) for pair in context.transports)
    told = ", ".join(
        f"UCX_{name}={value} ({source_of(name, options)})" for name, value in _told(context.config).items()
    )
    return f"UCX {context.ucx.version} over {ways}; {told}"


def _new_context(config: dict[str, str]) -> Context:
    ucx = library()
    try:
        handle = ucx.new_context(config)
    except ucx.error as error:
        told = ", ".join(f"{name}={value}" for name, value in _told(config).items())
        available = ", ".join(f"{name} ({device})" for name, device in _everything(ucx))
        raise ConfigError(
            f"UCX {ucx.version} cannot use its options ({told}): {error}. "
            f"This host has: {available or 'nothing it can use'}; UCX's lines in the log say which is wrong"
        ) from error
    found = Context(ucx, config, _resources(handle.info), handle)
    _check_devices(found)
    _log.debug("UCX %s uses %s", ucx.version, ", ".join("/".join(pair) for pair in found.transports))
    return found


def _check_devices(context: Context) -> None:
    """Refuse names of devices that do not exist, which UCX leaves away with no more than a line in the log.

    Raises:
        ConfigError: With the name, and those there are.
    """
    asked = context.config.get("NET_DEVICES", "all").split(",")
    plain = [name for name in asked if name != "all" and not _PATTERN.search(name)]
    known = {device for _, device in context.transports}
    if any(name not in known for name in plain):
        known |= {device for _, device in _everything(context.ucx)}
    for name in plain:
        if name not in known and not any(device.startswith(f"{name}:") for device in known):
            raise ConfigError(
                f"net_devices={','.join(asked)}: UCX {context.ucx.version} has no device {name!r} here; "
                f"it has {', '.join(sorted(known - {'memory'})) or 'none'}"
            )


def _resources(info: str) -> tuple[tuple[str, str], ...]:
    return tuple(dict.fromkeys(_RESOURCE.findall(info)))


def _told(config: dict[str, str]) -> dict[str, str]:
    """Everything that UCX was told: the configuration and the environment."""
    environment = {name[4:]: value for name, value in os.environ.items() if name.startswith("UCX_")}
    return {**environment, **config}


def _everything(ucx: Library) -> tuple[tuple[str, str], ...]:
    """What the host has when UCX may take all."""
    try:
        return _resources(ucx.new_context({"TLS": "all", "NET_DEVICES": "all"}).info)
    except ucx.error:
        return ()


def _missing(options: Options, context: Context) -> str:
    found = ", ".join("/".join(pair) for pair in context.transports) or "nothing"
    if options.require == "rdma":
        remedy = _rdma_remedy(context)
    else:
        tls = _told(context.config).get("TLS", "all")
        remedy = f"UCX was told TLS={tls} (by {source_of('TLS', options)}): let it have {options.require} too"
    return f"asked for {options.require} through UCX {context.ucx.version}, found {found}: {remedy}"


def _rdma_remedy(context: Context) -> str:
    told = _told(context.config)
    return rdma_remedy(told.get("TLS", "all"), told.get("NET_DEVICES", "all"), context.ucx.path)


def effective_settings(address: str = "") -> UcxReport:
    """What takes effect in this process, with whose word it is.

    Args:
        address: Takes its options into account; without one it is for an address without options.

    Raises:
        PluginUnavailableError: If ``ucxx`` is not installed.
        ConfigError: If UCX does not take an option.
    """
    options = parse_address(address)[1] if address else Options()
    context = get_context(Options(ucx=options.ucx))
    values = {**dict(context.handle.config), **context.config}
    environment = sorted(name[4:] for name in os.environ if name.startswith("UCX_"))
    settings = []
    for name in dict.fromkeys((*_REPORTED, *environment)):
        value = os.environ.get(f"UCX_{name}") if name not in context.config else context.config[name]
        settings.append(Setting(f"UCX_{name}", value or values.get(name, ""), source_of(name, options)))
    remedy = "" if "rdma" in kinds(context.names) else _rdma_remedy(context)
    return UcxReport(context.ucx.version, context.ucx.path, context.transports, tuple(settings), remedy)
