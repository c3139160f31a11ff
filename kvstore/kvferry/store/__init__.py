"""Stores of blocks over tiers: the contract of a tier here, tiers and policies in their own modules."""

from __future__ import annotations

from kvferry.store.tier import (
    UNKNOWN_PARENT,
    BlockRead,
    BlockWrite,
    ReadOutcome,
    ReadResult,
    Tier,
    TierEntry,
    TierNamespace,
    TierUsage,
    WriteOutcome,
    WriteResult,
)

__all__ = [
    "UNKNOWN_PARENT",
    "BlockRead",
    "BlockWrite",
    "ReadOutcome",
    "ReadResult",
    "Tier",
    "TierEntry",
    "TierNamespace",
    "TierUsage",
    "WriteOutcome",
    "WriteResult",
]
