"""How a client behaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, cast

from kvferry.core.errors import ConfigError
from kvferry.core.values import require_bool, require_number, require_text, require_whole

__all__ = ["ClientCounters", "ClientOptions"]

_LONGEST_S: Final = 86400.0


@dataclass(frozen=True)
class ClientOptions:
    """How a client behaves.

    Attributes:
        session: Name of the session; processes of one engine share it to share leases. A random one if empty.
        credential: Token shown to the daemon; never logged.
        token_file: File with that token, for its owner alone, read for every connection;
            ``$KVFERRY_TOKEN_FILE``, else ``$KVFERRY_TOKEN``, if not given.
        trusted_network: Whether a token may go in the clear to an address beyond loopback; else that takes
            ``tls``.
        checksum: Whether frames carry a checksum; they do unless the daemon says no too. Blocks in shared
            memory have none.
        connect_timeout_s: For making a connection.
        call_timeout_s: For verbs that take no deadline.
        max_connections: Calls under way at once; a further one waits for a connection, until its deadline.
        first_pause_s: After the daemon was found away, before it is tried again; doubles up to
            ``last_pause_s``. Meanwhile every call answers at once as if nothing were stored.
        last_pause_s: See ``first_pause_s``.
        max_mapped_nbytes: Most bytes of the daemon's memory to map; that of the machine if not given.
        kept_nbytes: Memory kept for blocks that come over a connection.
        staging_nbytes: Most memory for what is saved on the daemon's machine where its memory may not be
            written (``daemon.arena=copy``): blocks are put there, and the daemon copies them. What finds no
            room is sent.
        share_memory: Whether to use the daemon's memory where both are on one machine.
        role: What this end says it is; ``peer`` where it is a daemon itself.
    """

    session: str = ""
    credential: bytes | None = field(default=None, repr=False)
    token_file: str | None = None
    trusted_network: bool = False
    checksum: bool = True
    connect_timeout_s: float = 1.0
    call_timeout_s: float = 5.0
    max_connections: int = 8
    first_pause_s: float = 0.05
    last_pause_s: float = 0.5
    max_mapped_nbytes: int | None = None
    kept_nbytes: int = 256 << 20
    staging_nbytes: int = 64 << 20
    share_memory: bool = True
    role: str = "client"

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "call_timeout_s", "first_pause_s", "last_pause_s"):
            require_number(name, cast("float", getattr(self, name)), above=0, most=_LONGEST_S)
        for name in ("trusted_network", "checksum", "share_memory"):
            require_bool(name, getattr(self, name))
        for name in ("session", "role"):
            require_text(name, getattr(self, name))
        if self.token_file is not None:
            require_text("token_file", self.token_file)
        # not shown: it may be the token
        if self.credential is not None and not isinstance(self.credential, bytes):
            kind = type(self.credential).__name__
            raise ConfigError(f"credential is of type {kind}, must be bytes (of a text: .encode()), or None")
        require_whole("max_connections", self.max_connections, least=1)
        require_whole("kept_nbytes", self.kept_nbytes, least=0)
        require_whole("staging_nbytes", self.staging_nbytes, least=0)
        if self.max_mapped_nbytes is not None:
            require_whole("max_mapped_nbytes", self.max_mapped_nbytes, least=1)


@dataclass(slots=True)
class ClientCounters:
    """What a client counts of itself; all only grow.

    Attributes:
        connects: Connections made.
        reconnects: How often the daemon was reached again after connections to it had been lost.
        restarts: How often it was another run of the daemon then.
        missed_lookups: Lookups answered with misses because it was away.
        missed_loads: Loads, the same.
        corrupt_loads: Loads answered with misses because their bytes came damaged.
        refused_saves: Saves and reservations refused because it was away.
        refused_blocks: Their blocks.
        timeouts: Calls that had no answer by their deadline.
        refused_reads: Lookups and loads that were not asked for, since the daemon is too old to leave out
            blocks that have lost something.
    """

    connects: int = 0
    reconnects: int = 0
    restarts: int = 0
    missed_lookups: int = 0
    missed_loads: int = 0
    corrupt_loads: int = 0
    refused_saves: int = 0
    refused_blocks: int = 0
    timeouts: int = 0
    refused_reads: int = 0
