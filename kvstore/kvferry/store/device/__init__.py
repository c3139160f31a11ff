"""KV on a device: the pool that an engine computes with, and the tier over spare device memory.

Imported only where it is configured.
"""

from __future__ import annotations

from kvferry.store.device.pool import DevicePool, PoolOptions, PoolStats
from kvferry.store.device.space import PoolSpace, Restored

__all__ = ["DevicePool", "PoolOptions", "PoolSpace", "PoolStats", "Restored"]
