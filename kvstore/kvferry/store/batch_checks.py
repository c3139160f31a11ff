"""What tiers of any kind refuse in a batch of blocks, and the counters that its outcomes go into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvferry.core.errors import ConfigError
from kvferry.core.keys import KEY_NBYTES, BlockKey
from kvferry.store.tier import BlockRead, BlockWrite, ReadOutcome, WriteOutcome

__all__ = ["READ_COUNTERS", "WRITE_COUNTERS", "require_reads", "require_writes"]

READ_COUNTERS: Final = {
    ReadOutcome.HIT: "hits",
    ReadOutcome.MISS: "misses",
    ReadOutcome.CORRUPT: "corrupt_reads",
    ReadOutcome.FAILED: "failed_reads",
}
WRITE_COUNTERS: Final = {
    WriteOutcome.STORED: "stored",
    WriteOutcome.PRESENT: "present",
    WriteOutcome.REFUSED: "refused",
    WriteOutcome.FAILED: "failed_writes",
}


def require_reads(blocks: Sequence[BlockRead], nbytes: int) -> None:
    """Refuse a key or a buffer that no block of ``nbytes`` can be read with.

    Raises:
        ConfigError: With what it should be.
    """
    for block in blocks:
        _require_block(block.key, block.into, nbytes)
        if block.into.readonly:
            raise ConfigError("the buffer to read into is read-only")


def require_writes(blocks: Sequence[BlockWrite], nbytes: int) -> None:
    """Refuse a key, a parent or a buffer that no block of ``nbytes`` can have.

    Raises:
        ConfigError: With what it should be.
    """
    for block in blocks:
        _require_block(block.key, block.data, nbytes)
        if block.parent is not None and len(block.parent) != KEY_NBYTES:
            raise ConfigError(f"a parent has {len(block.parent)} bytes, a key has {KEY_NBYTES}")


def _require_block(key: BlockKey, data: memoryview, nbytes: int) -> None:
    if len(key) != KEY_NBYTES:
        raise ConfigError(f"key {bytes(key)[:8].hex()}… has {len(key)} bytes, a key has {KEY_NBYTES}")
    if data.nbytes != nbytes or data.ndim != 1 or data.itemsize != 1:
        raise ConfigError(
            f"a buffer of {data.nbytes} bytes, format {data.format!r}; a block of this namespace is a flat "
            f"view of {nbytes} bytes"
        )
