from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.core.memory import MemoryStore
from kvferry.testing.gated_device import GatedDevice


@pytest.fixture
def device() -> Iterator[GatedDevice]:
    made = GatedDevice()
    yield made
    made.open_all()
    made.close()


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    made = MemoryStore(1 << 20)
    yield made
    made.close()
