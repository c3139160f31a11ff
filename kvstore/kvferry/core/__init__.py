"""Words that every other part of kvferry uses; depends on no other part.

Heavier modules are imported by their own names: ``kvferry.core.config``, ``kvferry.core.metrics``,
``kvferry.core.registry``, ``kvferry.core.arena``, ``kvferry.core.memory``.
"""

from kvferry.core.blockstore import (
    BlockStore,
    Completion,
    Hit,
    Namespace,
    ReadLease,
    Stats,
    WriteLease,
)
from kvferry.core.buffers import Buf, page_aligned
from kvferry.core.clock import deadline_in, remaining
from kvferry.core.errors import KVFerryError
from kvferry.core.keys import BlockKey, Media, block_keys
from kvferry.core.spec import DType, KeyScope, KVSpec, LayerSpec, Restore, TensorSpec, namespace_id

__all__ = [
    "BlockKey",
    "BlockStore",
    "Buf",
    "Completion",
    "DType",
    "Hit",
    "KVFerryError",
    "KVSpec",
    "KeyScope",
    "LayerSpec",
    "Media",
    "Namespace",
    "ReadLease",
    "Restore",
    "Stats",
    "TensorSpec",
    "WriteLease",
    "block_keys",
    "deadline_in",
    "namespace_id",
    "page_aligned",
    "remaining",
]
