"""What a choice of a pipeline says about itself; for people, status and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["RAW", "CandidateStatus", "ChoiceStatus"]

RAW: Final = "raw"
"""The name of KV as it is."""


@dataclass(frozen=True, slots=True)
class CandidateStatus:
    """What is known of one pipeline. Rates are bytes of KV a second, 0 while unknown.

    Attributes:
        name: Its text form, or ``raw``.
        ratio: Bytes before over bytes after encoding.
        encode_rate: Of one encoding thread.
        decode_rate: Of one decoding thread at the other end.
        predicted_s_per_gb: Seconds that 1e9 bytes of KV are predicted to take; 0 while unknown.
    """

    name: str
    ratio: float
    encode_rate: float
    decode_rate: float
    predicted_s_per_gb: float


@dataclass(frozen=True, slots=True)
class ChoiceStatus:
    """What is used, and why.

    Attributes:
        chosen: The pipeline in use.
        reason: For people.
        link_rate: Bytes a second that the link carries; 0 while unknown.
        candidates: ``raw`` first.
        switches: How often the choice changed.
    """

    chosen: str
    reason: str
    link_rate: float
    candidates: tuple[CandidateStatus, ...]
    switches: int

    def line(self) -> str:
        """All of it in one line."""
        if not self.candidates:
            return f"{self.chosen}: {self.reason}"
        parts = [
            f"{c.name} {c.predicted_s_per_gb:.3g} s/GB"
            + (
                f" (x{c.ratio:.2f}, encode {c.encode_rate / 1e9:.2f}, decode {c.decode_rate / 1e9:.2f} GB/s)"
                if c.encode_rate
                else ""
            )
            for c in self.candidates
            if c.predicted_s_per_gb
        ]
        link = f"link {self.link_rate / 1e9:.3g} GB/s" if self.link_rate else "link not measured"
        return f"{self.chosen}: {self.reason}; {link}; {', '.join(parts) or 'nothing predicted'}"
