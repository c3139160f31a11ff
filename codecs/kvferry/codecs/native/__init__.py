"""The native kernels; how their library is found says :mod:`kvferry.core.native`."""

from __future__ import annotations

from kvferry.core.native import ABI, Native, load, native

__all__ = ["ABI", "Native", "load", "native"]
