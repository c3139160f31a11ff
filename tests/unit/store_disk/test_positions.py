"""Numbers of blocks in chains that cannot be: of another daemon, or found in somebody's store."""

from __future__ import annotations

import pytest

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.store.tier import BlockRead, BlockWrite, ReadOutcome, WriteOutcome
from kvferry.testing.blocks import block_bytes, small_spec
from kvferry.testing.tiers_common import chain, opened

from .conftest import MakeTier

SPEC = small_spec("positions")


@pytest.mark.parametrize(("position", "kept"), [(2**62, -1), (10**12, -1), (-(2**62), 6)])
def test_a_number_that_has_no_place_in_a_header_is_not_known(
    make_tier: MakeTier, position: int, kept: int
) -> None:
    """The whole batch was lost by it, with a traceback."""
    tier = make_tier()
    namespace = opened(tier, SPEC)
    keys = chain(namespace, 1, 3)
    blocks = [
        BlockWrite(key, memoryview(block_bytes(key, SPEC.block_nbytes)), keys[0], place)
        for key, place in zip(keys, (5, position, 7), strict=True)
    ]
    written = tier.write(namespace, blocks, deadline=deadline_in(20))
    assert {result.outcome for result in written} == {WriteOutcome.STORED}
    tier.close()
    again = make_tier()
    again.open(namespace)
    reads = [BlockRead(key, page_aligned(SPEC.block_nbytes)) for key in keys]
    found = again.read_into(namespace, reads, deadline=deadline_in(20))
    assert {result.outcome for result in found} == {ReadOutcome.HIT}
    assert [result.position for result in found] == [5, kept, 7]
