"""What a worker says of the codec of each link that it sends KV over; part of its status report."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["CodecCandidate", "CodecLink"]

_Figure = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Name = Annotated[str, msgspec.Meta(max_length=256)]


class CodecCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """One way to send: a pipeline or ``raw``; rates in bytes of KV a second, 0 while unknown."""

    name: _Name
    ratio: _Figure = 0.0
    encode_rate: _Figure = 0.0
    decode_rate: _Figure = 0.0
    predicted_s_per_gb: _Figure = 0.0


class CodecLink(msgspec.Struct, frozen=True, kw_only=True):
    """What is chosen for one address, what is known of it, and how often the choice changed."""

    address: _Name
    chosen: _Name
    link_rate: _Figure = 0.0
    switches: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    candidates: Annotated[tuple[CodecCandidate, ...], msgspec.Meta(max_length=32)] = ()
