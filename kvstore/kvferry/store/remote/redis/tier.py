"""The redis tier."""

from __future__ import annotations

from kvferry.store.problems import Problems
from kvferry.store.remote.redis.backend import RedisBackend
from kvferry.store.remote.redis.options import RedisOptions
from kvferry.store.remote.tier import RemoteTier

__all__ = ["RedisTier"]


class RedisTier(RemoteTier[RedisOptions]):
    """Keeps blocks in Redis or Valkey. Nothing is asked of the servers before the first use.

    See :class:`~kvferry.store.remote.tier.RemoteTier` for arguments and errors.
    """

    options_class = RedisOptions
    separator = ":"
    tag = True  # a block and its parts lie in one slot of a cluster

    def make_backend(self, options: RedisOptions, problems: Problems) -> RedisBackend:
        """See :class:`~kvferry.store.remote.tier.RemoteTier`."""
        options.secret()  # refused now, not at the first connection
        return RedisBackend(self.name, options, problems)
