"""The two ends of the transport benchmarks: over kvferry's channels, and over bare sockets beside them."""

from __future__ import annotations

__all__: list[str] = []
