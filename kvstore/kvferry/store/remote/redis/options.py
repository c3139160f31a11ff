"""Options of the redis tier."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.address import Address, parse_url
from kvferry.core.errors import ConfigError
from kvferry.store.remote.options import RemoteOptions, option, read_secret

__all__ = ["RedisOptions"]

_DEFAULT_PORT = 6379
_SCHEMES = ("tcp", "tls", "unix")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions(RemoteOptions):
    """What the redis tier takes, beside :class:`~kvferry.store.remote.options.RemoteOptions`.

    Attributes:
        urls: One server; of a cluster as many as wanted, from one of which the others are learnt. ``tcp://``,
            ``tls://`` with the options of that transport, or ``unix://``.
        username: Of the ACL user; without it the password is that of the default user.
        password: Its password; better given in a file.
        password_file: File whose first line is the password; read again for each connection.
        ttl_s: After this time without being written anew a block is gone; 0: it stays.
        cluster: Whether the servers are a cluster; ``auto`` asks them.
    """

    urls: tuple[str, ...] = option("list", "Servers: tcp://host:6379, tls://host:6379?ca=…, unix:///path.")
    username: str | None = option("text", "Name of the ACL user.", None)
    password: str | None = option("text", "Its password; better in a file.", None, secret=True)
    password_file: str | None = option("text", "File whose first line is the password.", None)
    ttl_s: float = option(
        "time", "How long a block stays after it was written; 0: for ever.", 0.0, least=0, most=1e9
    )
    cluster: str = option("text", "Whether the servers are a cluster.", "auto", one_of=("auto", "on", "off"))

    def __post_init__(self) -> None:
        RemoteOptions.__post_init__(self)
        if self.password is not None and self.password_file is not None:
            raise ConfigError("give password or password_file, not both")
        if self.username is not None and self.password is None and self.password_file is None:
            raise ConfigError("username is given without a password: give password_file too")
        if 0 < self.ttl_s < 1:
            raise ConfigError(f"ttl is {self.ttl_s:g} s, must be 0 or at least 1 s")
        addresses = self.addresses()
        if len(addresses) > 1 and self.cluster == "off":
            raise ConfigError(f"cluster is off, and there are {len(addresses)} urls: give one")
        if self.cluster == "on" and any(a.scheme == "unix" for a in addresses):
            raise ConfigError("a cluster is not reached through a unix socket: give tcp or tls addresses")

    def addresses(self) -> list[Address]:
        """The servers.

        Raises:
            ConfigError: If one is no address.
        """
        found: list[Address] = []
        for url in self.urls:
            address = parse_url(url, default_port=_DEFAULT_PORT)
            if address.scheme not in _SCHEMES:
                near = {"redis": "tcp", "valkey": "tcp", "rediss": "tls", "valkeys": "tls"}.get(
                    address.scheme
                )
                hint = f"; write {near}://" if near else ""
                raise ConfigError(f"address {address}: the scheme must be one of {', '.join(_SCHEMES)}{hint}")
            found.append(address)
        return found

    def secret(self) -> bytes | None:
        """The password as it is now."""
        if self.password is not None:
            return self.password.encode()
        return read_secret(self.password_file, "password_file")
