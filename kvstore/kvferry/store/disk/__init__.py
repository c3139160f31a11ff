"""The disk tier: one safetensors file a block. See :mod:`kvferry.store.disk.header` for the format."""

from kvferry.store.disk.options import DiskOptions
from kvferry.store.disk.tier import DiskTier

__all__ = ["DiskOptions", "DiskTier"]
