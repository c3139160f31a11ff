"""How many connections the limit of open files leaves room for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kvferry.core.open_files import open_files, open_files_limit
from kvferry.wire.server import MOST_ARRIVING

if TYPE_CHECKING:
    from kvferry.core.config import Config

__all__ = ["fitting_connections"]

log = logging.getLogger(__name__)

HTTP_CONNECTIONS: Final = 128 + 64  # with a request under way, and without
_RESERVE: Final = 128  # segments to come, files of the disk tier, servers of remote ones, staging memory
_A_FOLDER: Final = 288  # of a disk tier: its folders stay open as they are used
_A_CONNECTION: Final = 2  # over unix
_LEAST: Final = 8


def fitting_connections(config: Config, addresses: int, folders: int) -> tuple[int, tuple[str, ...]]:
    """Connections that each address may have, so that there are descriptors left for all else.

    Call it when the stores are open, and nothing listens yet.

    Args:
        config: The daemon's.
        addresses: How many it listens on.
        folders: Directories of disk tiers, of all tenants.

    Returns:
        ``wire.max_connections``, or less, and then a note that says so; it is logged.
    """
    wanted, limit = config.wire.max_connections, open_files_limit()
    if limit is None:
        return wanted, ()
    own = (
        open_files()
        + _RESERVE
        + folders * _A_FOLDER
        + addresses * MOST_ARRIVING
        + (0 if config.daemon.http is None else HTTP_CONNECTIONS)
    )
    room = (limit - own) // (addresses * _A_CONNECTION)
    if room >= wanted:
        return wanted, ()
    fitting = min(wanted, max(room, _LEAST))
    needed = own + addresses * _A_CONNECTION * wanted
    note = (
        f"the limit of open files is {limit}, and {needed} may be needed: each address takes {fitting} "
        f"connections instead of wire.max_connections={wanted}; raise the limit (ulimit -Hn, LimitNOFILE=)"
    )
    if room < fitting:
        note += "; even so it may run out of them, and refuse what needs one"
    log.warning("%s", note)
    return fitting, (note,)
