"""What two ends agree on before anything else: the version of the protocol, and what is too long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from kvferry.core.errors import ProtocolError

__all__ = ["DEFAULT_LIMITS", "MIN_VERSION", "SUPPORTED", "VERSION", "Limits", "Versions", "negotiate"]

VERSION: Final = 1
MIN_VERSION: Final = 1
"""The oldest version that this code speaks: N−1 once there is one."""


class Versions(NamedTuple):
    """A range of protocol versions, both ends included."""

    lowest: int
    highest: int

    def __str__(self) -> str:
        return f"{self.lowest}..{self.highest}"


SUPPORTED: Final = Versions(MIN_VERSION, VERSION)


def negotiate(ours: Versions, theirs: Versions) -> int:
    """The highest version that both sides speak.

    Raises:
        ProtocolError: If there is none, with both ranges; or if theirs is no range.
    """
    if not 1 <= theirs.lowest <= theirs.highest <= 0xFFFF:
        raise ProtocolError(f"the peer offers protocol versions {theirs}, which is no range", remote=True)
    version = min(ours.highest, theirs.highest)
    if version < max(ours.lowest, theirs.lowest):
        older = "the peer" if theirs.highest < ours.lowest else "this side"
        raise ProtocolError(
            f"no common protocol version: this side speaks {ours}, the peer {theirs}; update {older}",
            remote=True,
        )
    return version


@dataclass(frozen=True, slots=True)
class Limits:
    """Lengths above which a frame is refused before anything is allocated for it.

    Attributes:
        max_meta_nbytes: Of the encoded message.
        max_payload_nbytes: Of the payload.
        max_handshake_nbytes: Of a hello, a welcome, or a refusal, as long as no peer is known.
    """

    max_meta_nbytes: int = 4 << 20
    max_payload_nbytes: int = 4 << 30
    max_handshake_nbytes: int = 64 << 10


DEFAULT_LIMITS: Final = Limits()
