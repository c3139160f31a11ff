"""How a store works besides its tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from kvferry.core.errors import ConfigError
from kvferry.core.placement import ANYWHERE, Placement
from kvferry.core.values import require_number, require_whole

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
        remove_s: Seconds that ``remove`` and ``clear`` wait for slower tiers in all. What is not gone by then
            goes in the background, and nobody sees it meanwhile.
        placement: Where the memory comes from.
        shared: Other processes of the tenant may map the memory writable.
    """

    watermarks: tuple[float, float] | None = None
    room_wait_s: float = 0.25
    prefetch_jobs: int = 256
    prefetch_timeout_s: float = 60.0
    close_s: float = 10.0
    remove_s: float = 5.0
    placement: Placement = ANYWHERE
    shared: bool = True

    def __post_init__(self) -> None:
        if self.watermarks is not None:
            _require_watermarks(self.watermarks)
        require_whole("prefetch_jobs", self.prefetch_jobs, least=1)
        require_number("prefetch_timeout_s", self.prefetch_timeout_s, above=0)
        require_number("room_wait_s", self.room_wait_s, least=0)
        require_number("close_s", self.close_s, least=0)
        require_number("remove_s", self.remove_s, least=0)
        if not isinstance(self.placement, Placement):
            raise ConfigError(f"placement is {self.placement!r}, must be a Placement")


def _require_watermarks(pair: object) -> None:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ConfigError(f"watermarks are {pair!r}; needs two shares of memory, low and high")
    low, high = cast("tuple[float, float]", pair)
    require_number("watermarks[0]", low)
    require_number("watermarks[1]", high)
    if not 0 <= low < high <= 1:
        raise ConfigError(f"watermarks are {pair}; needs 0 <= low < high <= 1")
