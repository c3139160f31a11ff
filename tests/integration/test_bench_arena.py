"""The benchmark of the shared arena: that it runs, compares bytes, and prints what is promised."""

from __future__ import annotations

import pytest

from kvferry.bench.registry import Options
from kvferry.bench.scenarios import transport_arena
from kvferry.core.errors import ConfigError


def test_both_figures_stand_beside_their_baselines() -> None:
    seen: list[str] = []
    options = Options(runs=2, warmup=1, params={"block": "1MiB", "requests": 20})
    available, first_read = transport_arena.run(options, lambda label, done, total: seen.append(label))
    assert available.scenario == first_read.scenario == "transport.unix.arena"
    assert available.unit == "us"
    assert set(available.ratios) == {"block_64KiB", "raw_unix"}
    assert available.p50_us is not None
    assert available.p99_us is not None
    assert 0 < available.p50_us <= available.p99_us
    assert first_read.unit == "GB/s"
    assert set(first_read.ratios) == {"own_memory"}
    assert first_read.verified
    assert first_read.value > 0
    assert len(seen) == 3 * 3 + 3 * 2


@pytest.mark.parametrize(("block", "says"), [("64KiB", "take a larger one"), ("1PiB", "take a smaller one")])
def test_a_block_that_cannot_be_measured(block: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        next(iter(transport_arena.run(Options(params={"block": block}), lambda *_: None)))
