"""The ``redis`` tier: Redis 6 and newer, Valkey, single or as a cluster."""

from __future__ import annotations

from kvferry.store.remote.redis.options import RedisOptions
from kvferry.store.remote.redis.tier import RedisTier

__all__ = ["RedisOptions", "RedisTier"]
