"""A process that writes blocks into a disk tier until it is killed; started by ``test_disk_kill.py``.

It prints ``ready``, and ``flushed N`` each time that the chains 0 to N - 1 of its seed are behind a flush.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey, block_keys
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.store.tier import BlockWrite, TierNamespace, WriteOutcome
from kvferry.testing.blocks import block_bytes, small_spec

SPEC = small_spec("kill", pages=8, layers=4)
BLOCKS = 4


def space() -> TierNamespace:
    return TierNamespace.of("default", SPEC)


def chain(seed: int, number: int) -> list[BlockKey]:
    tokens = [seed * 1_000_000 + number] * (BLOCKS * SPEC.block_tokens)
    return block_keys(space().namespace_id, tokens, SPEC.block_tokens)


def write(tier: DiskTier, keys: Sequence[BlockKey]) -> list[WriteOutcome]:
    blocks = []
    for position, key in enumerate(keys):
        data = page_aligned(SPEC.block_nbytes)
        data[:] = block_bytes(key, len(data))
        blocks.append(BlockWrite(key, data, keys[position - 1] if position else None, position))
    return [r.outcome for r in tier.write(space(), blocks, deadline=deadline_in(30))]


def main(directories: str, capacity: int, seed: int, sync: str) -> None:
    options = DiskOptions(tuple(directories.split(":")), capacity, sync=sync, direct="off")  # type: ignore[arg-type]
    tier = DiskTier("disk", options)
    tier.open(space())
    print("ready", flush=True)
    for number in range(1_000_000):
        assert set(write(tier, chain(seed, number))) == {WriteOutcome.STORED}
        if number % 2:
            assert tier.flush(deadline=deadline_in(30))
            print("flushed", number + 1, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
