"""Options of the mooncake tier."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.address import Address, parse_url
from kvferry.core.errors import ConfigError
from kvferry.core.trusted_peers import TrustedPeers
from kvferry.store.remote.options import RemoteOptions, option

__all__ = ["MooncakeOptions"]

_PORT = 50051


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeOptions(RemoteOptions):
    """What the mooncake tier takes, beside :class:`~kvferry.store.remote.options.RemoteOptions`.

    Attributes:
        connections: Batches at once.
        timeout_s: For one request to the master, and without progress of a transfer.
        master: Host and port of Mooncake's master; port 50051 if none is given.
        metadata: Of its transfer engines: ``P2PHANDSHAKE``, or the URL of a metadata server.
        host: Where Mooncake's other clients reach this process.
        wire: What bytes go over: ``tcp`` or ``rdma``.
        devices: RDMA devices to use; ``None``: all.
        trusted_peers: Addresses or networks of the pool's other clients: they reach what this process gives
            to the pool, nobody else but this host does. ``None``: none.
        contribute_nbytes: Memory that this process gives to the pool; it is lost with the process. 0: none.
        register: Whether memory of blocks is registered with the library: ``auto`` (over rdma, where it has
            to be) or ``always``.
    """

    master: str = option("text", "Host and port of the master.")
    metadata: str = option("text", "P2PHANDSHAKE, or the URL of a metadata server.", "P2PHANDSHAKE")
    host: str = option("text", "Where other clients reach this process.", "127.0.0.1")
    wire: str = option("text", "What bytes go over.", "tcp", one_of=("tcp", "rdma"))
    devices: tuple[str, ...] | None = option("list", "RDMA devices to use; all if none.", None)
    trusted_peers: tuple[str, ...] | None = option(
        "list", "Addresses or networks of the pool's other clients, which reach what is given to it.", None
    )
    contribute_nbytes: int = option("size", "Memory given to the pool; 0: none.", 0, least=0)
    register: str = option("text", "Whether blocks' memory is registered.", "auto", one_of=("auto", "always"))

    def __post_init__(self) -> None:
        RemoteOptions.__post_init__(self)
        self.address()
        if parse_url(self.host, default_port=1).host_port != f"{self.host}:1":
            raise ConfigError(f"host is {self.host!r}, must be a host without a port, such as 10.1.0.7")
        if 0 < self.contribute_nbytes < 16 << 20:
            raise ConfigError(f"contribute is {self.contribute_nbytes} bytes, must be 0 or at least 16 MiB")

        if self.peers().host_names:
            raise ConfigError(
                "trusted_peers has host names: write addresses or networks, such as 10.1.0.0/24"
            )

    def peers(self) -> TrustedPeers:
        """Who reaches this process.

        Raises:
            ConfigError: If one is no address and no network.
        """
        return TrustedPeers(self.trusted_peers or ())

    def address(self) -> Address:
        """The master's.

        Raises:
            ConfigError: If it is none.
        """
        found = parse_url(self.master, default_port=_PORT)
        if found.scheme != "tcp" or found.options:
            raise ConfigError(f"master is {self.master!r}, must be host:port")
        return found

    @property
    def registers(self) -> bool:
        """Whether memory has to be registered before it is read from or written into."""
        return self.register == "always" or self.wire == "rdma"
