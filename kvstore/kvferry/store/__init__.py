"""Stores of blocks over tiers: the store, the contract of a tier and the policies.

Tiers themselves are plug-ins in their own modules (``kvferry.store.disk``).
"""

from __future__ import annotations

from kvferry.store.groups import restorable
from kvferry.store.level import LevelOptions
from kvferry.store.open import open_store
from kvferry.store.options import StoreOptions
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
from kvferry.store.tiered import TieredStore

__all__ = [
    "UNKNOWN_PARENT",
    "BlockRead",
    "BlockWrite",
    "LevelOptions",
    "ReadOutcome",
    "ReadResult",
    "StoreOptions",
    "Tier",
    "TierEntry",
    "TierNamespace",
    "TierUsage",
    "TieredStore",
    "WriteOutcome",
    "WriteResult",
    "open_store",
    "restorable",
]
