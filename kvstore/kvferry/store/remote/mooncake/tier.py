"""The mooncake tier."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.core.clock import deadline_in
from kvferry.store.problems import Problems
from kvferry.store.remote.listing import known_entries
from kvferry.store.remote.mooncake.backend import MooncakeBackend
from kvferry.store.remote.mooncake.options import MooncakeOptions
from kvferry.store.remote.tier import RemoteTier
from kvferry.store.tier import TierEntry, TierNamespace

__all__ = ["MooncakeTier"]


class MooncakeTier(RemoteTier[MooncakeOptions]):
    """Keeps blocks in memory that Mooncake Store pools. Nothing is asked of it before the first use.

    It cannot say what it holds: :meth:`scan` and ``capacity`` know what this process wrote. Without memory
    of this process in the pool (``contribute``) blocks outlive it, though not the clients that hold them.

    See :class:`~kvferry.store.remote.tier.RemoteTier` for arguments and errors.
    """

    options_class = MooncakeOptions
    persistent = False

    def make_backend(self, options: MooncakeOptions, problems: Problems) -> MooncakeBackend:
        """See :class:`~kvferry.store.remote.tier.RemoteTier`."""
        return MooncakeBackend(self.name, options, problems)

    def forget(self, namespace: TierNamespace) -> None:
        """See :class:`~kvferry.store.tier.Tier`. Also what other processes wrote."""
        backend = self.backend
        assert isinstance(backend, MooncakeBackend)
        backend.delete_under(self.names.home(namespace), deadline_in(self.options.timeout_s))

    def scan(self) -> Iterator[TierEntry]:
        """See :class:`~kvferry.store.tier.Tier`. What this process wrote, as far as it is remembered."""
        return known_entries(self.names, dict(self._tenants), self._index)
