"""Options of the ``device`` tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from kvferry.core.errors import ConfigError
from kvferry.core.tier_plugins import require_policy
from kvferry.device.pinned import PinFailure
from kvferry.store.remote.options import check_options, option

__all__ = ["DeviceTierOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTierOptions:
    """What a device tier takes.

    Attributes:
        device: Which device, such as ``musa:1``.
        capacity_nbytes: Memory of the device that it takes, at once.
        page_nbytes: Unit in which blocks take it up.
        slots: Pinned slots a direction that copies pass through.
        slot_nbytes: Bytes of a slot.
        eviction: Policy that says what goes first.
        on_pin_failure: ``pageable``: go on with memory whose copies block; ``stop``: refuse.
    """

    device: str = option("text", "Kind and number of the device: musa:0, cuda:1, cpu.")
    capacity_nbytes: int = option("size", "Memory of the device that it takes, at once.", least=4096)
    page_nbytes: int = option("size", "Unit in which blocks take it up.", 64 << 10, least=4096, most=64 << 20)
    slots: int = option("whole", "Pinned slots a direction.", 4, least=1, most=1024)
    slot_nbytes: int = option("size", "Bytes of a pinned slot.", 4 << 20, least=4096, most=1 << 30)
    eviction: str = option("text", "What goes first.", "lru")
    on_pin_failure: str = option(
        "text", "If memory cannot be pinned: go on, or refuse.", "pageable", one_of=("pageable", "stop")
    )

    def __post_init__(self) -> None:
        check_options(self)
        require_policy("eviction", self.eviction)
        if self.capacity_nbytes < self.page_nbytes:
            raise ConfigError(f"capacity is {self.capacity_nbytes} bytes, a page has {self.page_nbytes}")

    @property
    def num_pages(self) -> int:
        """Whole pages."""
        return self.capacity_nbytes // self.page_nbytes

    @property
    def pin_failure(self) -> PinFailure:
        """See :attr:`on_pin_failure`."""
        return cast("PinFailure", self.on_pin_failure)
