"""What a choice knows of one pipeline that it may use."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from kvferry.codecs.choice import CandidateStatus
from kvferry.codecs.costs import CallCost, FlowCost

__all__ = ["Candidate"]

_FLOW_WINDOWS: Final = 100
"""Of a pipeline in use: a second, since pipelines that differ by some percent are not told apart by less."""


def _flow() -> FlowCost:
    return FlowCost(_FLOW_WINDOWS)


@dataclass(slots=True)
class Candidate:
    """All costs are seconds a byte of KV, before encoding."""

    name: str
    encode: CallCost = field(default_factory=CallCost)
    decode: CallCost = field(default_factory=CallCost)
    flow: FlowCost = field(default_factory=_flow)  # in use, over all times that are not forgotten
    size: float = 0.0  # encoded bytes a byte
    promised: float = 0.0  # by the formula, when it was last in use
    seen_link: float = 0.0  # the link then
    seen_traffic_s: float = 0.0  # traffic up to then
    forgotten_at: float = math.inf  # when what it cost in use says nothing any more
    probed_at: float = -math.inf

    @property
    def known(self) -> bool:
        """Whether both ends have seen what it takes."""
        return self.encode.count > 0 and self.decode.count > 0

    @property
    def work(self) -> float:
        """Seconds a byte that both ends compute."""
        return self.encode.value + self.decode.value

    def forget_flow(self) -> None:
        """What it cost in use says nothing any more."""
        self.flow, self.promised = _flow(), 0.0

    def status(self, predicted: float) -> CandidateStatus:
        """For people, with what it is predicted to cost; 0: not known."""
        size, encode, decode = self.size, self.encode.value, self.decode.value
        return CandidateStatus(
            self.name,
            ratio=1 / size if size else 0.0,
            encode_rate=1 / encode if encode else 0.0,
            decode_rate=1 / decode if decode else 0.0,
            predicted_s_per_gb=predicted * 1e9,
        )
