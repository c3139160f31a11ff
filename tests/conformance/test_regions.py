from __future__ import annotations

from typing import ClassVar

from kvferry.testing.memory_regions import MemoryRegions
from kvferry.testing.regions import RegionSuite
from kvferry.transports.region import RegionTransport


class TestMemoryRegions(RegionSuite):
    """The reference, so that the suite itself is tested."""

    largest_nbytes: ClassVar[int] = 16 << 20

    def endpoint(self) -> RegionTransport:
        return MemoryRegions()
