"""Which hosts may be sent grants, and have theirs accepted."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from kvferry.core.errors import ConfigError

__all__ = ["TrustedPeers"]

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class TrustedPeers:
    """A list of hosts; immutable.

    Args:
        names: IP addresses, networks such as ``10.1.0.0/24``, or host names, which are compared as they
            are written and never looked up.

    Raises:
        ConfigError: If one of them is none of these, or a network has host bits, or there is a text in
            place of a list.
    """

    def __init__(self, names: Iterable[str]) -> None:
        if isinstance(names, str):
            raise ConfigError(f"trusted_peers is the text {names!r}: write a list, [{names!r}]")
        self.names = tuple(name.strip() for name in names)
        self._hosts: set[str] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for name in self.names:
            # no host name ends in a number: that is an address with a mistake in it
            if _HOST.fullmatch(name) and not name.rpartition(".")[2].isdigit():
                self._hosts.add(name.lower())
                continue
            try:
                self._networks.append(ipaddress.ip_network(name))
            except ValueError as error:
                raise ConfigError(
                    f"trusted_peers {name!r}: {error}; write an address, a network or a host name"
                ) from error

    @property
    def networks(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        """Those that are addresses or networks."""
        return tuple(self._networks)

    @property
    def host_names(self) -> frozenset[str]:
        """Those that are host names."""
        return frozenset(self._hosts)

    def __bool__(self) -> bool:
        return bool(self.names)

    def __str__(self) -> str:
        return ", ".join(self.names) or "(none)"

    def __contains__(self, host: object) -> bool:
        if not isinstance(host, str):
            return False
        address = _address(host)
        if address is None:
            return host.lower() in self._hosts
        return any(address in network for network in self._networks)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
