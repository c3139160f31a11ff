"""The blocking client of the cache daemon: a ``BlockStore`` whose blocks are kept by another process."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Final

import msgspec

from kvferry.client.leases import ClientReadLease, ClientWriteLease
from kvferry.client.link import GRACE_S, Link
from kvferry.client.mover import BlockMover
from kvferry.client.namespace import ClientNamespace
from kvferry.client.options import ClientCounters, ClientOptions
from kvferry.core.address import parse_url
from kvferry.core.blockstore import Completion, Stats
from kvferry.core.clock import checked_deadline, deadline_in
from kvferry.core.errors import (
    ConfigError,
    LeaseExpiredError,
    OverloadedError,
    TransportError,
    UnavailableError,
)
from kvferry.core.keys import BlockKey, split_keys
from kvferry.core.nearest import shown
from kvferry.core.paged_copy import BlockCopier
from kvferry.core.runtime_folder import DAEMON_PORT, daemon_socket
from kvferry.core.spec import KeyScope, KVSpec
from kvferry.core.values import require_text
from kvferry.wire import daemon_messages as d

__all__ = ["Client", "default_url"]

_DEFAULT_SCOPE = KeyScope()
_DEFAULT_OPTIONS: Final = ClientOptions()


def _with_port(url: str) -> str:
    """``url`` with the daemon's port where it has none."""
    if parse_url(url, default_port=0).port != 0:
        return url
    return str(parse_url(url, default_port=DAEMON_PORT))


_AWAY: Final = (TransportError, UnavailableError, OverloadedError)
_LEASE_ID: Final = re.compile("[0-9a-fA-F]{1,16}")
_POLL_PAUSE_S: Final = 0.02
_PREFETCH_S: Final = 90.0  # longer than any prefetch


def default_url() -> str:
    """Where a daemon of this user and machine listens if nothing else is said."""
    return f"unix://{daemon_socket()}"


class Client:
    """The blocks of a cache daemon. Thread safe; a :class:`kvferry.core.blockstore.BlockStore`.

    On the daemon's machine, over ``unix``, loads are views of its memory and saves are written there; else
    bytes go over the connection. It connects by itself, also again. While the daemon is away lookups and
    loads miss and saves are refused, at once; nothing from before its restart is ever taken for valid.

    Args:
        url: Where the daemon is; the socket of this user's own if not given.
        options: See :class:`ClientOptions`.
        session: Short for ``options.session``.
        copiers: What moves blocks to and from regions on a device, by its kind; see :class:`BlockMover`.

    Attributes:
        link: Its connections.
        mover: What moves blocks to and from regions; without a thread before the first is registered.

    Raises:
        ConfigError: If the address or an option cannot be used. A daemon that cannot be reached is no error.
        AuthError: If the daemon refuses the credential.
        ProtocolError: If something else answers at the address.
    """

    def __init__(
        self, url: str | None = None, options: ClientOptions = _DEFAULT_OPTIONS, *, session: str = "",
        copiers: Mapping[str, BlockCopier] | None = None,
    ) -> None:  # fmt: skip
        if url is not None:
            require_text("url", url)
        if not isinstance(options, ClientOptions):
            raise ConfigError(f"options is {options!r}, must be ClientOptions")
        if session:
            options = replace(options, session=session)
        self.link = Link(_with_port(url) if url is not None else default_url(), options)
        self.mover = BlockMover(copiers)
        self._prefetched_at = 0.0
        self._prefetches = 0
        self._polled_at = 0.0
        self.link.connect_first(deadline_in(options.connect_timeout_s))

    def __repr__(self) -> str:
        return f"<Client of {self.link.url}>"

    @property
    def url(self) -> str:
        """Where its daemon is."""
        return self.link.url

    @property
    def session(self) -> str:
        """Name of its session; a client of another process made with the same one shares its leases."""
        return self.link.session

    @property
    def counters(self) -> ClientCounters:
        """What it has counted of itself."""
        return replace(self.link.counters)

    @property
    def away(self) -> str:
        """Why the daemon cannot be reached; empty if it can."""
        return self.link.away

    def namespace(
        self, spec: KVSpec, scope: KeyScope = _DEFAULT_SCOPE, *, takes_lossy: bool = False
    ) -> ClientNamespace:
        """The namespace of ``spec`` and ``scope``; nothing is asked before its first call.

        A daemon that understands the spec otherwise refuses it there (:class:`SpecMismatchError`). One that
        is too old to leave out what has lost something gives nothing, unless ``takes_lossy``.

        Raises:
            ConfigError: If the spec or the scope is none.
        """
        for name, given, kind in (("spec", spec, KVSpec), ("scope", scope, KeyScope)):
            if not isinstance(given, kind):
                raise ConfigError(f"{name} is {shown(given)}, must be a {kind.__name__}")
        return ClientNamespace(self, spec, scope, takes_lossy=takes_lossy)

    def find_lease(self, lease_id: str) -> ClientReadLease | ClientWriteLease | None:
        """The lease of that id, taken by another process of the session; ``None`` if it has ended.

        Raises:
            ConfigError: If it is no such id.
            UnavailableError: If the daemon is away.
        """
        deadline = self.link.call_deadline()
        if not isinstance(lease_id, str) or not _LEASE_ID.fullmatch(lease_id):
            raise ConfigError(f"lease_id is {shown(lease_id)}, must be that of a lease: 1 to 16 hex digits")
        number = int(lease_id, 16)
        with self.link.line(deadline) as line:
            inline = not line.shares
            request = d.FindLease(
                lease=number, inline=inline, ended=line.take_ended(), abandoned=line.take_abandoned()
            )
            try:
                incoming = line.ask(request, d.FoundLease, deadline)
            except LeaseExpiredError:
                return None
            found = incoming.message
            assert isinstance(found, d.FoundLease)
            if found.spec is None:
                raise line.wrong("a lease without a spec")
            keys: tuple[BlockKey, ...] = tuple(split_keys(found.keys))
            if found.lossy is not msgspec.UNSET and max(found.lossy, default=0) >= len(keys):
                raise line.wrong(f"lossy blocks {found.lossy[:8]} among {len(keys)}")
            namespace = self.namespace(found.spec)
            blocks = namespace.take_found(line, incoming, found, len(keys), deadline)
            kind = ClientReadLease if found.kind == "read" else ClientWriteLease
            return kind(
                self.link, found.spec, keys, number=number, epoch=line.epoch, blocks=blocks,
                expires_at=line.local(found.expires_at), found=True, lossy=found.lossy,
            )  # fmt: skip

    def prefetching(self, epoch: str) -> None:
        """A prefetch was asked for, whose end :meth:`poll` reports."""
        del epoch
        self._prefetches += 1
        self._prefetched_at = time.monotonic()

    @property
    def prefetches(self) -> int:
        """Prefetches whose end :meth:`poll` has not reported."""
        return self._prefetches

    def poll(self) -> list[Completion]:
        """What ended in the background since the last call: jobs of regions, and prefetches.

        Asks nobody while there are no prefetches.
        """
        ended = self.mover.poll()
        return ended + self._poll_prefetches() if self._prefetches else ended

    def _poll_prefetches(self) -> list[Completion]:
        now = time.monotonic()
        if now - self._polled_at < _POLL_PAUSE_S:
            return []
        self._polled_at = now
        if now - self._prefetched_at > _PREFETCH_S:
            self._prefetches = 0
        deadline = self.link.call_deadline()
        try:
            with self.link.line(deadline) as line:
                request = d.PollStore(ended=line.take_ended(), abandoned=line.take_abandoned())
                found = list(line.call(request, d.Completions, deadline).completions)
        except _AWAY:
            self._prefetches = 0  # whoever comes back does not know of them
            return []
        self._prefetches = max(0, self._prefetches - len(found))
        return found

    def flush(self, *, deadline: float) -> bool:
        """Wait until everything committed has reached its slower tiers; ``False`` if not, or it is away."""
        limit = max(checked_deadline(deadline), time.monotonic() + GRACE_S)
        try:
            with self.link.line(limit) as line:
                left = limit - time.monotonic()
                request = d.FlushStore(
                    timeout_s=max(0.0, left - min(0.05, left / 2)),
                    ended=line.take_ended(),
                    abandoned=line.take_abandoned(),
                )
                return bool(line.call(request, d.Done, limit).count)
        except _AWAY:
            return False

    def stats(self) -> Stats:
        """Counters and gauges of the tenant's store; zeros while the daemon is away."""
        deadline = self.link.call_deadline()
        try:
            with self.link.line(deadline) as line:
                request = d.GetStats(ended=line.take_ended(), abandoned=line.take_abandoned())
                return line.call(request, d.StoreStats, deadline).stats
        except _AWAY:
            return Stats()

    def close(self) -> None:
        """End its jobs, leases and connections; the blocks stay. A second call does nothing."""
        self.mover.close()
        self.link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
