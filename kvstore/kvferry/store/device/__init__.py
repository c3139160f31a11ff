"""KV on a device: the pool that an engine computes with, and the tier over spare device memory.

Imported only where it is configured.
"""

from __future__ import annotations

from kvferry.store.device.pool import DevicePool
from kvferry.store.device.pool_options import PoolOptions, PoolStats
from kvferry.store.device.space import PoolSpace, Restored
from kvferry.store.device.tier import DeviceTier
from kvferry.store.device.tier_options import DeviceTierOptions

__all__ = [
    "DevicePool",
    "DeviceTier",
    "DeviceTierOptions",
    "PoolOptions",
    "PoolSpace",
    "PoolStats",
    "Restored",
]
