"""Addresses: URLs of the form ``tcp://host:port?rate=1GB/s``, ``unix:///path``, ``inproc://name``.

People may leave the scheme and the port away: ``host``, ``host:9000``, ``::1`` and ``[::1]:9000`` take
the component's defaults. An IPv6 address with a port needs its brackets, since ``::1:9000`` is itself an
address; it may carry a zone (``fe80::1%eth0``; inside a URL also ``%25eth0``, as RFC 6874 writes it).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final
from urllib.parse import quote, unquote

from kvferry.core.errors import ConfigError
from kvferry.core.nearest import did_you_mean

__all__ = ["Address", "parse_url", "same_place"]

_WILDCARDS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - recognised here, never a default

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*", re.ASCII)
_HOST: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,253}[A-Za-z0-9_.])?", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)
_ZONE: Final = re.compile(r"[A-Za-z0-9_.:-]{1,32}", re.ASCII)
_UNIX_PATH_NBYTES: Final = 107  # sun_path without its closing zero byte
# A scheme with one slash or none behind it, and no first group of an IPv6 address.
_FEW_SLASHES: Final = re.compile(
    r"(?![0-9a-f]{1,4}:)([a-z][a-z0-9+.-]*):(?=/[^/]|/$|\[|(?!\d+:)[^:@/?]+:[^:@/?]*(\?|$))", re.ASCII
)
_FORMS: Final = "write host, host:port, [ipv6]:port or scheme://host:port"


def _no_options() -> Mapping[str, str]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Address:
    """One parsed address.

    Attributes:
        scheme: The transport.
        host: Name or numeric address without brackets, with its zone; the name for ``inproc``; empty
            for ``unix``.
        port: ``None`` where the scheme has none.
        path: The socket's path for ``unix``, else empty.
        options: What stands behind the ``?``, in order.
    """

    scheme: str
    host: str = ""
    port: int | None = None
    path: str = ""
    options: Mapping[str, str] = field(default_factory=_no_options, hash=False)

    @property
    def host_port(self) -> str:
        """``host:port`` as it stands in a URL, an IPv6 host in brackets."""
        host = f"[{self.host.replace('%', '%25')}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The whole address as a URL, which :func:`parse_url` reads back to an equal one."""
        place = quote(self.path) if self.path else self.host_port
        query = "&".join(f"{name}={quote(value, safe='/:.')}" for name, value in self.options.items())
        return f"{self.scheme}://{place}" + (f"?{query}" if query else "")

    def __str__(self) -> str:
        return self.url


def parse_url(
    text: str,
    *,
    default_scheme: str = "tcp",
    default_port: int | None = None,
    options: Collection[str] | None = None,
) -> Address:
    """Parse an address.

    Args:
        text: The address; whitespace around it is ignored.
        default_scheme: Taken by an address without ``scheme://``.
        default_port: Taken by a host without a port; with ``None`` the port has to be given.
        options: The options that are known, others are refused; ``None`` lets all pass (the transport,
            which knows its own, checks them when the address is used).

    Raises:
        ConfigError: With the address, what is wrong with it and what to write instead.
    """
    stripped = text.strip()
    if not stripped:
        raise ConfigError(f"the address is empty: {_FORMS}")
    scheme, separator, rest = stripped.partition("://")
    if not separator:
        _check_slashes(text, stripped)
        scheme, rest = default_scheme, stripped
    elif not _SCHEME.fullmatch(scheme):
        raise ConfigError(f"address {text!r}: {scheme!r} is not a scheme, write one as in tcp://host:port")
    place, _, query = rest.partition("?")
    if "@" in place:
        raise _at_sign(scheme, place)
    if "#" in rest:
        raise ConfigError(f"address {text!r}: has a '#', write %23 for it")
    found = _parse_options(text, query)
    if options is not None:
        _check_options(text, scheme, found, options)
    if scheme == "unix":
        return Address(scheme, path=_parse_path(text, place), options=found)
    if scheme == "inproc":
        if not _NAME.fullmatch(place):
            raise ConfigError(f"address {text!r}: write inproc://name, a name of letters, digits and -._")
        return Address(scheme, host=place, options=found)
    host, port = _parse_host_port(text, place.removesuffix("/"), in_url=bool(separator))
    if port is None:
        port = default_port
    if port is None:
        raise ConfigError(f"address {text!r}: has no port, and there is no default; {_FORMS}")
    return Address(scheme, host=host, port=port, options=found)


def _check_slashes(text: str, stripped: str) -> None:
    if one := _FEW_SLASHES.match(stripped):
        rest = stripped[one.end() :]  # a path keeps its slash, a host has none
        right = rest if one[1] == "unix" else rest.removeprefix("/")
        raise ConfigError(f"address {text!r}: write two slashes behind the scheme: {one[1]}://{right}")


def _parse_options(text: str, query: str) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for item in query.split("&") if query else ():
        name, equals, value = item.partition("=")
        if not name or not equals or not value:
            raise ConfigError(f"address {text!r}: option {item!r} is not of the form name=value")
        if name in found:
            raise ConfigError(f"address {text!r}: option {name!r} is given twice")
        found[name] = unquote(value)
    return MappingProxyType(found)


def _check_options(text: str, scheme: str, found: Mapping[str, str], known: Collection[str]) -> None:
    for name in found:
        if name not in known:
            existing = f"known: {', '.join(sorted(known))}" if known else "it has none"
            near = did_you_mean(name, known)
            raise ConfigError(f"address {text!r}: {name!r} is not an option of {scheme}{near} ({existing})")


def _at_sign(scheme: str, place: str) -> ConfigError:
    if scheme == "unix" and place.startswith("@"):
        return ConfigError("unix://@…: abstract names have no permissions, write unix:///path")
    # not shown: a password may stand there
    return ConfigError(f"a {scheme} address has no user or password before an '@': {_FORMS}")


def _parse_path(text: str, place: str) -> str:
    path = unquote(place)
    if not path.startswith("/"):
        raise ConfigError(f"address {text!r}: the path is not absolute, write unix:///path")
    try:
        nbytes = len(path.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"address {text!r}: its path is not text ({error.reason}), write it in UTF-8"
        ) from error
    if "\0" in path:
        raise ConfigError(f"address {text!r}: a path has bytes, none of them zero: leave the %00 away")
    if nbytes > _UNIX_PATH_NBYTES:
        raise ConfigError(
            f"address {text!r}: a socket's path has at most {_UNIX_PATH_NBYTES} bytes; "
            f"this one has {nbytes}, choose a shorter folder"
        )
    return path


def _parse_host_port(text: str, place: str, *, in_url: bool) -> tuple[str, int | None]:
    if place.startswith("["):
        host, bracket, rest = place[1:].partition("]")
        if not bracket:
            raise ConfigError(f"address {text!r}: the closing ']' is missing, write [{host}]:port")
        if rest and not rest.startswith(":"):
            raise ConfigError(f"address {text!r}: {rest!r} after the ']' is not a :port")
        return _check_ipv6(text, host, in_url=True), _parse_port(text, rest[1:]) if rest else None
    if place.count(":") > 1:
        return _check_ipv6(text, place, in_url=in_url), None
    host, colon, port = place.partition(":")
    if not host:
        raise ConfigError(f"address {text!r}: has no host; {_FORMS}, with 127.0.0.1 for this machine only")
    return _check_host(text, host), _parse_port(text, port) if colon else None


def _parse_port(text: str, port: str) -> int:
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        problem = (
            f"port {port!r} is not a number from 0 to 65535" if port else "the port after the ':' is missing"
        )
        raise ConfigError(f"address {text!r}: {problem}")
    return int(port)


def _check_ipv6(text: str, host: str, *, in_url: bool) -> str:
    address, percent, zone = host.partition("%")
    if in_url and len(zone) > 2:
        zone = zone.removeprefix("25")
    try:
        ipaddress.IPv6Address(address)
    except ValueError as e:
        raise ConfigError(f"address {text!r}: {host!r} is not an IPv6 address ({e}); {_FORMS}") from e
    if percent and not _ZONE.fullmatch(zone):
        raise ConfigError(f"address {text!r}: {zone!r} is not a zone, write the interface as in fe80::1%eth0")
    return address + percent + zone


def _check_host(text: str, host: str) -> str:
    if not _HOST.fullmatch(host):
        raise ConfigError(f"address {text!r}: {host!r} is not a host name; {_FORMS}")
    if host.rpartition(".")[2].isdigit():
        try:
            ipaddress.IPv4Address(host)
        except ValueError as e:
            raise ConfigError(f"address {text!r}: {host!r} is not an IPv4 address ({e})") from e
    return host


def same_place(one: str, other: str) -> bool:
    """Whether two addresses cannot both be listened on; port 0 is another one each time."""
    a, b = parse_url(one, default_port=0), parse_url(other, default_port=0)
    if a.port is None or b.port is None:
        return (a.scheme, a.host, a.path) == (b.scheme, b.host, b.path)
    wildcard = not _WILDCARDS.isdisjoint({a.host, b.host})
    return a.port == b.port != 0 and (a.host == b.host or wildcard)
