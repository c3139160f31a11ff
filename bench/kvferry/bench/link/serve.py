"""``kvferry bench server``: the other end of the benchmark on a machine of its own."""

from __future__ import annotations

from kvferry.bench.ceilings import COLD_NBYTES
from kvferry.bench.link.memory import parse_walk
from kvferry.bench.link.peer import open_servers
from kvferry.core.address import parse_url
from kvferry.core.config import Config
from kvferry.core.errors import ConfigError, ConnectError
from kvferry.engine.process import StopSignal, listening, print_ready, require_loopback

__all__ = ["serve_link"]

_SERVED = ("tcp", "tls", "unix", "ucx")


def serve_link(url: str, walk: str | None, config: Config) -> None:
    """Serve until a signal; with a bare TCP socket beside it, whose port the other end is told.

    Raises:
        ConfigError: If the address cannot be used, is of another scheme, or leads beyond loopback without
            ``wire.trusted_network``.
    """
    if parse_url(url, default_port=0).scheme not in _SERVED:
        raise ConfigError(
            f"--listen {url}: what is measured has to be named, and be what --connect takes; serve "
            + ", ".join(_SERVED)
        )
    walk_nbytes = parse_walk(walk or COLD_NBYTES)
    require_loopback(url, "--listen", trusted_network=config.wire.trusted_network)
    stop = StopSignal()
    try:
        server = open_servers(url, bare_walk_nbytes=walk_nbytes)
    except ConnectError as error:
        raise listening(error, url, "--listen") from error
    try:
        print_ready("bench", listen=server.address)
        stop.wait()
    finally:
        server.close()
