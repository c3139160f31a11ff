"""Options of the peer tier."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.address import Address, parse_url
from kvferry.core.errors import ConfigError
from kvferry.core.runtime_folder import DAEMON_PORT
from kvferry.store.remote.options import check_options, option

__all__ = ["PeerOptions", "peer_id"]

_NO_PEERS = ("inproc", "http", "https")


def peer_id(address: Address) -> str:
    """What a peer is called where keys are placed: its place without scheme and options."""
    if address.port is None:
        return f"{address.scheme}:{address.path}"
    return f"{address.host.lower()}:{address.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """What the peer tier takes.

    Attributes:
        peers: Addresses of the other daemons, as their ``daemon.listen`` has them; the port is 8450 if none
            is given. Daemons that are to find each other's blocks name them alike; their order is no matter.
        timeout_s: For one request to one peer, the connection included.
        connections: Most requests under way at one peer.
    """

    peers: tuple[str, ...] = option("list", "Other daemons: tcp://host:8450, tls://host:8450?ca=….")
    timeout_s: float = option("time", "For one request.", 2.0, least=0.01, most=300)
    connections: int = option("whole", "Most requests under way at one peer.", 4, least=1, most=32)

    def __post_init__(self) -> None:
        check_options(self)
        ids = [peer_id(address) for address in self.addresses()]
        for number, one in enumerate(ids):
            if one in ids[:number]:
                raise ConfigError(f"peers names {one} twice: leave one away")

    def addresses(self) -> list[Address]:
        """The peers.

        Raises:
            ConfigError: If one is no address of a daemon.
        """
        found: list[Address] = []
        for url in self.peers:
            address = parse_url(url, default_port=DAEMON_PORT)
            if address.scheme in _NO_PEERS or address.port == 0:
                raise ConfigError(f"peer {url}: a daemon is reached at tcp, tls, ucx, unix or auto addresses")
            found.append(address)
        return found
