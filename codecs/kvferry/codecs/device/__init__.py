"""Codecs on torch tensors, wherever they lie: the frames that the host writes, bit for bit.

Imports torch, so nothing imports this package but who asks for it.
"""

from __future__ import annotations

from kvferry.codecs.device.pipeline import DevicePipeline

__all__ = ["DevicePipeline"]
