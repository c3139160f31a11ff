from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.encoding import TierCodec
from kvferry.testing.faulty_files import FaultyFiles

MakeTier = Callable[..., DiskTier]


LOGGER = "kvferry.store.disk.tier"


def lines(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    """What the tier has logged with that word in it."""
    return [r.getMessage() for r in caplog.records if r.name == LOGGER and word in r.getMessage()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def make_tier(folder: Path) -> Iterator[MakeTier]:
    """Makes tiers on ``folder`` (or on ``directories``); closes them after the test."""
    with ExitStack() as stack:

        def make(
            files: FaultyFiles | None = None, codec: TierCodec | None = None, **options: Any
        ) -> DiskTier:
            settings = {
                "directories": (str(folder),),
                "capacity_nbytes": 4 << 20,
                "direct": "off",
                "retry_s": 0.05,
                **options,
            }
            tier = DiskTier("disk", DiskOptions(**settings), files=files, codec=codec)
            stack.callback(tier.close)
            return tier

        yield make
