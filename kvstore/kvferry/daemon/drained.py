"""What came of a drain, and what is so where not all of it was done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.core.log import redact
from kvferry.core.units import format_nbytes

if TYPE_CHECKING:
    from kvferry.store.tiered import TieredStore

__all__ = ["Drained", "unwritten"]


@dataclass(frozen=True)
class Drained:
    """What came of a drain.

    Attributes:
        waits: What was still to be done when its time was over.
        lost: What more time would not have brought: blocks that did not reach a tier, and why.
    """

    waits: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """Whether all was done and written."""
        return not self.waits and not self.lost

    @property
    def text(self) -> str:
        """What was not, for people."""
        return "; ".join((*self.waits, *self.lost))


def unwritten(tenant: str, store: TieredStore) -> Drained:
    """Why a store whose flush was not whole has not written all."""
    waits: list[str] = []
    lost: list[str] = []
    problems = store.problems()
    of = "" if tenant == "default" else f" of tenant {tenant}"
    for tier, figures in store.stats().per_tier.items():
        if nbytes := int(figures.get("queued_nbytes", 0)):
            waits.append(f"{format_nbytes(nbytes)}{of} wait to be written to tier {tier}")
        if count := int(figures.get("lost_blocks", 0)):
            why = "; ".join(f"{what}: {redact(text)}" for what, text in problems.get(tier, {}).items())
            lost.append(
                f"{count} blocks{of} were not written to tier {tier} since the start, "
                + (f"which does not work: {why}" if why else "which works now; the log says why")
            )
    if not waits and not lost:
        lost.append(f"a tier{of} did not say that what it has is on disk")
    return Drained(tuple(waits), tuple(lost))
