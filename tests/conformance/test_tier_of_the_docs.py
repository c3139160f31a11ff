"""The tier that ``docs/tiers.md`` shows how to write passes the suite."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import cast

from kvferry.store.tier import Tier
from kvferry.testing.tiers import TierSuite

PAGE = Path(__file__).parents[2] / "docs" / "tiers.md"


def example() -> type[Tier]:
    (source,) = [c for c in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "Tier):" in c]
    module = ModuleType("dict_tier")
    exec(compile("from __future__ import annotations\n" + source, str(PAGE), "exec"), module.__dict__)
    return cast("type[Tier]", module.__dict__["DictTier"])


class TestTierOfTheDocs(TierSuite):
    def make_tier(self, medium: Path, blocks: int) -> Tier:
        return example().from_options("dict", {"capacity": blocks * 8192})
