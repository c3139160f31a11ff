"""What the parts of the tier suite share: fixtures, hooks, and a few short calls."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Literal

import pytest

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey, block_keys
from kvferry.core.spec import KeyScope, KVSpec
from kvferry.store.tier import (
    BlockRead,
    BlockWrite,
    ReadOutcome,
    ReadResult,
    Tier,
    TierNamespace,
    WriteOutcome,
    WriteResult,
)
from kvferry.testing.blocks import block_bytes, small_spec

__all__ = [
    "BLOCKS",
    "HIT",
    "MISS",
    "PRESENT",
    "SPEC",
    "STORED",
    "Damage",
    "Fault",
    "TierFixtures",
    "chain",
    "closing",
    "opened",
    "outcomes",
    "read",
    "write",
    "write_outcomes",
]

SPEC = small_spec("tier-suite")
BLOCKS = 16
"""Blocks of :data:`SPEC` that the tier under test holds at least, and not more than 8 times as many."""
_SECONDS = 20.0

Damage = Literal["flip", "truncate", "empty", "swap"]
"""What :meth:`TierFixtures.damage` does to a stored block: one bit of its data, half of it gone, all of it
gone, or the bytes of another block of the namespace under its name."""
Fault = Literal["read", "write", "full", "stall"]
"""What :meth:`TierFixtures.fault` lets fail: reads or writes with an I/O error, writes for want of space; or
reads hang until the fault is over."""


def chain(namespace: TierNamespace, number: int, blocks: int) -> list[BlockKey]:
    """Keys of a chain that shares no block with a chain of another number."""
    tokens = [number] * (blocks * namespace.spec.block_tokens)
    return block_keys(namespace.namespace_id, tokens, namespace.spec.block_tokens)


def write(
    tier: Tier, namespace: TierNamespace, keys: Sequence[BlockKey], *, seconds: float = _SECONDS
) -> list[WriteResult]:
    """Write the known bytes of a chain."""
    blocks = []
    for position, key in enumerate(keys):
        data = page_aligned(namespace.spec.block_nbytes)
        data[:] = block_bytes(key, len(data))
        blocks.append(BlockWrite(key, data, keys[position - 1] if position else None, position))
    return tier.write(namespace, blocks, deadline=deadline_in(seconds))


def read(
    tier: Tier, namespace: TierNamespace, keys: Sequence[BlockKey], *, seconds: float = _SECONDS
) -> list[ReadResult]:
    """Read blocks and compare what is called a hit with the known bytes."""
    blocks = [BlockRead(key, page_aligned(namespace.spec.block_nbytes)) for key in keys]
    results = tier.read_into(namespace, blocks, deadline=deadline_in(seconds))
    assert len(results) == len(keys)
    for block, result in zip(blocks, results, strict=True):
        if result.outcome is ReadOutcome.HIT:
            assert bytes(block.into) == block_bytes(block.key, len(block.into)), "a hit with wrong bytes"
    return results


def outcomes(results: Sequence[ReadResult]) -> list[ReadOutcome]:
    """The outcomes alone."""
    return [result.outcome for result in results]


def write_outcomes(results: Sequence[WriteResult]) -> list[WriteOutcome]:
    """The outcomes alone."""
    return [result.outcome for result in results]


HIT, MISS = ReadOutcome.HIT, ReadOutcome.MISS
STORED, PRESENT = WriteOutcome.STORED, WriteOutcome.PRESENT


class TierFixtures:
    """What a tier under test brings along. Only :meth:`make_tier` is needed; the rest widens the suite."""

    @abstractmethod
    def make_tier(self, medium: Path, blocks: int) -> Tier:
        """A tier on ``medium`` (an empty folder of its own, if it wants one) for that many blocks of SPEC.

        Called again with the same medium after the first tier was closed, for a tier that is persistent.
        """

    def damage(
        self, tier: Tier, namespace: TierNamespace, key: BlockKey, how: Damage, other: BlockKey
    ) -> None:
        """Change a stored block behind the tier's back; ``other`` is the block to swap with."""
        del tier, namespace, key, how, other
        pytest.skip("this tier's medium cannot be damaged")

    def lose(self, tier: Tier, namespace: TierNamespace, key: BlockKey) -> None:
        """Remove a stored block behind the tier's back."""
        del tier, namespace, key
        pytest.skip("nothing can be removed behind this tier's back")

    def fault(self, tier: Tier, kind: Fault) -> AbstractContextManager[object]:
        """While open, the medium fails in that way."""
        del tier, kind
        pytest.skip("this tier's medium cannot be made to fail")

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        """A tier of :data:`BLOCKS` blocks, closed after the test."""
        with closing(self.make_tier(tmp_path, BLOCKS)) as tier:
            yield tier

    @pytest.fixture
    def namespace(self, tier: Tier) -> TierNamespace:
        """The namespace of :data:`SPEC`, opened."""
        return opened(tier, SPEC)

    @pytest.fixture
    def keys(self, namespace: TierNamespace) -> list[BlockKey]:
        """A stored chain of 6 blocks is written under these by the tests."""
        return chain(namespace, 1, 6)


@contextmanager
def closing(tier: Tier) -> Iterator[Tier]:
    """Close the tier at the end, and see that it does not take long."""
    try:
        yield tier
    finally:
        start = time.monotonic()
        tier.close()
        tier.close()
        assert time.monotonic() - start < 15


def opened(
    tier: Tier,
    spec: KVSpec,
    tenant: str = "default",
    scope: KeyScope = KeyScope(),  # noqa: B008
) -> TierNamespace:
    """A namespace that the tier was told of, twice."""
    namespace = TierNamespace.of(tenant, spec, scope)
    tier.open(namespace)
    tier.open(TierNamespace.of(tenant, spec, scope))
    return namespace
