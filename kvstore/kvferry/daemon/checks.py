"""What of a configuration cannot work together, refused by name before anything is opened."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from kvferry.core.address import parse_url, same_place
from kvferry.core.arena import available_memory
from kvferry.core.cachedir import cache_dir
from kvferry.core.config_tiers import TierConfig
from kvferry.core.errors import ConfigError
from kvferry.core.process import require_loopback
from kvferry.core.runtime_folder import daemon_socket, runtime_folder
from kvferry.core.units import format_nbytes
from kvferry.core.user_path import user_path
from kvferry.store.disk.names import tenant_folder
from kvferry.store.remote.peer import PeerOptions
from kvferry.transports import require_scheme

if TYPE_CHECKING:
    from kvferry.core.config import Config, StoreConfig

__all__ = ["listen_urls", "peer_token", "require_other_peers", "require_peer_tokens", "store_config"]


def listen_urls(config: Config) -> list[tuple[str, str]]:
    """Where to listen, each with the option that says so.

    Raises:
        ConfigError: If there is nowhere, two are the same place, others could reach one, or it is no address
            for a daemon.
    """
    found: list[tuple[str, str]] = []
    path = config.daemon.socket
    if path != "none":
        if path == "auto":
            runtime_folder()
            path = daemon_socket()
        elif not Path(path).is_absolute():
            raise ConfigError(f"daemon.socket is {path!r}: write an absolute path, auto or none")
        found.append((f"unix://{quote(path)}", "daemon.socket (--socket)"))
    found += [(url, "daemon.listen (--listen)") for url in config.daemon.listen or ()]
    if not found:
        raise ConfigError("daemon.socket is none and so is daemon.listen: the daemon would be nowhere")
    for (one, option), (other, again) in combinations(found, 2):
        if same_place(one, other):
            raise ConfigError(f"{one} ({option}) and {other} ({again}) are the same place: leave one away")
    for url, option in found:
        if parse_url(url, default_port=0).scheme in ("inproc", "http", "https"):
            raise ConfigError(f"{url} ({option}): a daemon listens on unix, tcp, tls, ucx or auto addresses")
        require_scheme(url, option)
        require_loopback(
            url,
            option,
            trusted_network=config.wire.trusted_network,
            credentials=config.daemon.credentials != "none",
        )
    return found


def peer_token(config: Config, tenant: str) -> str | None:
    """File with the token that a tenant's blocks are asked for at other daemons with, if there is to be one.

    Raises:
        ConfigError: If the folder of ``daemon.peer_tokens`` is no absolute path.
    """
    if config.daemon.peer_tokens == "none":
        return None
    folder = user_path(config.daemon.peer_tokens, "daemon.peer_tokens")
    if not folder.is_absolute():
        raise ConfigError(
            f"daemon.peer_tokens is {config.daemon.peer_tokens!r}: write an absolute path or none"
        )
    return str(folder / f"{tenant_folder(tenant)}.token")


def require_other_peers(store: StoreConfig, listen: list[tuple[str, str]]) -> None:
    """Refuse a peer that is this daemon itself, as far as addresses tell; else it is seen when it answers.

    Raises:
        ConfigError: With the address and the option.
    """
    for tier in store.tiers:
        if tier.kind != "peer":
            continue
        options = PeerOptions(peers=tuple(tier.options.get("peers", ())))
        for (own, option), peer in product(listen, map(str, options.addresses())):
            if same_place(peer, own):
                name = tier.name or tier.kind
                raise ConfigError(
                    f"peer {peer} of tier {name} is this daemon itself ({option}): leave it out of its peers"
                )


def require_peer_tokens(config: Config, store: StoreConfig) -> None:
    """Refuse peers where tenants would come as nobody: whoever is at such a peer could ask for their blocks.

    Raises:
        ConfigError: With both options.
    """
    if config.daemon.credentials == "none" or config.daemon.peer_tokens != "none":
        return
    for tier in store.tiers:
        if tier.kind == "peer":
            raise ConfigError(
                f"daemon.credentials is given and store.tiers has {tier.name or tier.kind}, but "
                "daemon.peer_tokens is none: there all tenants would be one; give it the folder with a "
                "TENANT.token of each"
            )


def store_config(config: Config) -> StoreConfig:
    """The ``store`` section with the disk tier of the daemon's own, if there is to be one.

    Raises:
        ConfigError: If options contradict each other.
    """
    store, daemon = config.store, config.daemon
    available = available_memory()
    if store.dram_capacity > available and not store.hugepages:
        raise ConfigError(
            f"store.dram_capacity (--capacity) is {format_nbytes(store.dram_capacity)}, "
            f"{format_nbytes(available)} of memory are available: lower it"
        )
    given = daemon.model_fields_set
    if store.tiers:
        clash = [
            f"daemon.{name} (--{name.replace('_', '-')})"
            for name in ("disk", "disk_capacity")
            if name in given
        ]
        if clash and daemon.disk != "none":
            raise ConfigError(
                f"{' and '.join(clash)} and store.tiers are both given: name the disk in store.tiers, or "
                "leave store.tiers away"
            )
        return store
    if daemon.disk == "none":
        if "disk_capacity" in given:
            raise ConfigError(
                "daemon.disk_capacity (--disk-capacity) is given, though daemon.disk (--disk) is none"
            )
        return store
    folder = cache_dir() / "blocks" if daemon.disk == "auto" else user_path(daemon.disk, "daemon.disk")
    if not folder.is_absolute():
        raise ConfigError(f"daemon.disk is {daemon.disk!r}: write an absolute path, auto or none")
    tier = TierConfig.model_validate(
        {"kind": "disk", "directories": [str(folder)], "capacity": daemon.disk_capacity}
    )
    return store.model_copy(update={"tiers": (tier,)})
