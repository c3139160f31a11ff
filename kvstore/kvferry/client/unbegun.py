"""What a call gives whose turn did not come by its deadline: what it gives while the daemon is away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvferry.client.leases import ClientReadLease
from kvferry.client.namespace import ClientNamespace
from kvferry.core.blockstore import Hit, Stats
from kvferry.core.errors import LeaseExpiredError, UnavailableError
from kvferry.core.keys import require_keys

if TYPE_CHECKING:
    from kvferry.client.client import Client

__all__ = ["unbegun"]


def unbegun(client: Client, target: object, verb: str, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - by verb
    """The answer of a verb that was not begun.

    Args:
        client: Counts it as it counts those that the daemon did not answer.
        target: Whose verb it is.
        verb: Its name.
        arguments: Its arguments by their names.

    Raises:
        UnavailableError: Of verbs whose answer cannot be a miss.
        LeaseExpiredError: Of ``renew``.
        ConfigError: If a key is none, as when it is begun.
    """
    link = client.link
    most = link.options.max_connections
    why = f"{client.url}: {verb} was not begun by its deadline: {most} calls are under way (max_connections)"
    if isinstance(target, ClientNamespace):
        blocks = _blocks(arguments)
        if verb == "lookup":
            link.count("missed_lookups")
            return Hit((None,) * blocks)
        if verb == "load":
            link.count("missed_loads")
            return ClientReadLease(link, target.spec, ())
        if verb in ("reserve", "save"):
            link.count("refused_saves")
            link.count("refused_blocks", blocks)
            raise UnavailableError(why)
    if verb == "renew":
        raise LeaseExpiredError(f"{target!r} cannot be renewed: {why}")
    empty = {"flush": False, "stats": Stats(), "pin": 0, "prefetch": None, "unpin": None, "poll": []}
    if verb not in empty:
        raise UnavailableError(why)
    return empty[verb]


def _blocks(arguments: Mapping[str, Any]) -> int:
    """How many blocks a call is about."""
    if "keys" in arguments:
        return len(require_keys(arguments["keys"]))
    return sum(1 for _ in arguments.get("blocks", ()))
