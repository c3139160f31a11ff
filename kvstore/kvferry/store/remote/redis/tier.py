"""The redis tier."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvferry.core.tier_plugins import TierOption
from kvferry.store.disk.problems import Problems
from kvferry.store.encoding import CODEC_OPTIONS, TierCodec
from kvferry.store.remote.names import Names
from kvferry.store.remote.options import describe_options, option_names, read_options, read_secret
from kvferry.store.remote.redis.backend import RedisBackend
from kvferry.store.remote.redis.options import RedisOptions
from kvferry.store.remote.tier import RemoteTier

__all__ = ["RedisTier"]

_log = logging.getLogger(__name__)


class RedisTier(RemoteTier):
    """Keeps blocks in Redis or Valkey. Nothing is asked of the servers before the first use.

    Args:
        name: Name of the tier.
        options: See :class:`~kvferry.store.remote.redis.options.RedisOptions`.
        codec: Encodes blocks on their way there; ``None``: they are stored as they are.

    Raises:
        ConfigError: If a file of a secret cannot be read.
    """

    option_names = (*option_names(RedisOptions), *CODEC_OPTIONS)

    def __init__(self, name: str, options: RedisOptions, codec: TierCodec | None = None) -> None:
        secret = read_secret(options.secret_file, f"tier {name}: secret_file")
        options.secret()  # refused now, not at the first connection
        self.options = options
        problems = Problems(name, _log)
        names = Names(options.prefix, secret, separator=":", tag=True)
        super().__init__(name, options, RedisBackend(name, options, problems), names, problems, codec)

    @classmethod
    def from_options(cls, name: str, options: Mapping[str, object]) -> RedisTier:
        """See :class:`~kvferry.store.tier.Tier`."""
        codec, rest = TierCodec.from_options(f"tier {name}", options)
        return cls(name, read_options(RedisOptions, f"tier {name}", rest), codec)

    @classmethod
    def describe_options(cls, name: str, options: Mapping[str, object]) -> list[TierOption]:
        """See :class:`~kvferry.store.tier.Tier`."""
        codec, rest = TierCodec.from_options(f"tier {name}", options)
        return [*describe_options(RedisOptions, f"tier {name}", rest), *codec.describe(options)]
