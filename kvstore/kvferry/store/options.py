"""How a store works besides its tiers."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.errors import ConfigError
from kvferry.core.placement import ANYWHERE, Placement

__all__ = ["StoreOptions"]


@dataclass(frozen=True)
class StoreOptions:
    """How a store works besides its tiers.

    Attributes:
        watermarks: (low, high) shares of memory: above ``high`` blocks are evicted in the background until
            ``low`` is reached, so that saves find room at once. ``None``: only when a save needs room.
        room_wait_s: How long a load that could give a part waits for copies under way, which are about to
            give room for more.
        prefetch_jobs: Most prefetches that wait; further ones are dropped and counted.
        prefetch_timeout_s: Longest time of one prefetch.
        close_s: Seconds that ``close`` may take to write what is on its way to slower tiers.
        placement: Where the memory comes from.
    """

    watermarks: tuple[float, float] | None = None
    room_wait_s: float = 0.25
    prefetch_jobs: int = 256
    prefetch_timeout_s: float = 60.0
    close_s: float = 10.0
    placement: Placement = ANYWHERE

    def __post_init__(self) -> None:
        if self.watermarks is not None and not 0 <= self.watermarks[0] < self.watermarks[1] <= 1:
            raise ConfigError(f"watermarks are {self.watermarks}; needs 0 <= low < high <= 1")
        if self.prefetch_jobs < 1 or not self.prefetch_timeout_s > 0:
            raise ConfigError("prefetch_jobs >= 1 and prefetch_timeout_s > 0 are needed")
        if self.close_s < 0 or self.room_wait_s < 0:
            raise ConfigError("close_s >= 0 and room_wait_s >= 0 are needed")
