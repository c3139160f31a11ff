"""The region transport ``mooncake``: windows into memory through Mooncake's TransferEngine.

Needs the extra ``mooncake``. Importing this package loads nothing of it; making an endpoint does.
"""

from __future__ import annotations

from kvferry.transports.mooncake.aliases import shared_memory
from kvferry.transports.mooncake.engine import unavailable
from kvferry.transports.mooncake.regions import MooncakeRegions, device_memory

__all__ = ["MooncakeRegions", "device_memory", "shared_memory", "unavailable"]
