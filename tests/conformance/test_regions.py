from __future__ import annotations

import os
from typing import ClassVar

import pytest

from kvferry.testing.memory_regions import MemoryRegions
from kvferry.testing.regions import RegionSuite
from kvferry.transports.mooncake import MooncakeRegions, shared_memory, unavailable
from kvferry.transports.region import RegionTransport


class TestMemoryRegions(RegionSuite):
    """The reference, so that the suite itself is tested."""

    largest_nbytes: ClassVar[int] = 16 << 20

    def endpoint(self) -> RegionTransport:
        return MemoryRegions()


@pytest.mark.skipif(bool(unavailable()) and "CI" not in os.environ, reason=unavailable())
class TestMooncakeRegions(RegionSuite):
    largest_nbytes: ClassVar[int] = 16 << 20
    child_setup: ClassVar[str] = (
        "from kvferry.transports.mooncake import MooncakeRegions, shared_memory as allocate\n"
        "endpoint = MooncakeRegions(trusted_peers=['127.0.0.1'])"
    )

    def endpoint(self) -> RegionTransport:
        return MooncakeRegions(trusted_peers=["127.0.0.1"])

    def allocate(self, nbytes: int) -> memoryview:
        return shared_memory(nbytes)


@pytest.mark.soak
class TestMooncakeRegionsAtFullScale(TestMooncakeRegions):
    largest_nbytes: ClassVar[int] = 64 << 20
