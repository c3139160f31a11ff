"""How a pool works, and its figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvferry.core.errors import ConfigError
from kvferry.core.values import require_number, require_whole

__all__ = ["PoolOptions", "PoolStats"]


@dataclass(frozen=True)
class PoolOptions:
    """How a pool works.

    Attributes:
        write: When blocks go to the store below: ``evict``: when their pages are needed. ``commit``: as soon
            as they are published.
        spare_blocks: Pages kept free in the background, so that an allocation need not wait for copies.
        room_wait_s: How long an allocation without a deadline waits for pages that are on their way out.
        copy_wait_s: How long a copy to the store below waits for room there; without any it is lost.
        close_wait_s: How long a close without a deadline waits for the store below and the device to let go.
        batch_blocks: Most blocks copied down at a time.
    """

    write: Literal["evict", "commit"] = "evict"
    spare_blocks: int = 0
    room_wait_s: float = 10.0
    copy_wait_s: float = 10.0
    close_wait_s: float = 10.0
    batch_blocks: int = 32

    def __post_init__(self) -> None:
        if self.write not in ("evict", "commit"):
            raise ConfigError(f"write is {self.write!r}, must be evict or commit")
        require_whole("spare_blocks", self.spare_blocks, least=0)
        require_whole("batch_blocks", self.batch_blocks, least=1)
        for name in ("room_wait_s", "copy_wait_s", "close_wait_s"):
            require_number(name, getattr(self, name), least=0)


@dataclass(frozen=True)
class PoolStats:
    """A snapshot; counters only grow.

    Attributes:
        num_blocks: Pages.
        free_blocks: Of them, nobody's.
        idle_blocks: Published blocks that nobody uses: their pages can be had.
        leaving_blocks: Those that are being copied down before they go.
        entries: Published blocks.
        evicted_blocks: Blocks that went for others.
        demoted_blocks: Blocks copied to the store below.
        promoted_blocks: Blocks read from there.
        lost_blocks: Blocks that went without a copy below, since there was no room or it failed.
    """

    num_blocks: int
    free_blocks: int
    idle_blocks: int
    leaving_blocks: int
    entries: int
    evicted_blocks: int
    demoted_blocks: int
    promoted_blocks: int
    lost_blocks: int
