"""The ``mooncake`` tier: memory pooled by Mooncake Store (extra ``mooncake``).

Importing this package loads nothing of the library; the first use of a tier does.
"""

from __future__ import annotations

from kvferry.store.remote.mooncake.options import MooncakeOptions
from kvferry.store.remote.mooncake.tier import MooncakeTier

__all__ = ["MooncakeOptions", "MooncakeTier"]
