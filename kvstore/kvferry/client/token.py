"""The token that a client shows, and where it may be shown."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.client.options import ClientOptions
from kvferry.core.address import parse_url
from kvferry.core.errors import ConfigError
from kvferry.core.process import is_loopback
from kvferry.core.token_file import token_source

__all__ = ["shown_token"]


def shown_token(url: str, options: ClientOptions) -> Callable[[], bytes | None]:
    """What gives the token for a new connection to ``url``.

    Raises:
        ConfigError: If there is one and it would go over a network in the clear.
    """
    if options.role == "peer" and options.token_file is None:  # a daemon is not whoever started it
        return lambda: None
    credential = options.credential
    source = token_source(options.token_file) if credential is None else None
    if credential is None and source is None:
        return lambda: None
    address = parse_url(url, default_port=0)
    if address.scheme != "tls" and not is_loopback(url) and not options.trusted_network:
        raise ConfigError(
            f"{url}: the token would go there in the clear: use a tls:// address, or set trusted_network if "
            "nobody on that network listens"
        )
    return source or (lambda: credential)
