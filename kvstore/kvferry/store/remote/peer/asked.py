"""What the tier needs of whoever asks another daemon for it; ``kvferry.client.peer`` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvferry.store.tier import BlockRead, BlockWrite, ReadResult, TierNamespace

__all__ = ["AskedPeer", "PeerMaker"]


class AskedPeer(Protocol):
    """Another daemon. Thread safe; nothing is asked before the first call.

    Every call ends by its deadline and raises ``KVFerryError`` if the peer does not answer, or refuses;
    :class:`~kvferry.core.errors.UnavailableError` at once while it is known to be away.
    """

    @property
    def away(self) -> str:
        """Why it cannot be reached; empty if it can, or nobody has tried."""
        ...

    def has(self, namespace: TierNamespace, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Which keys it holds itself."""
        ...

    def read(
        self, namespace: TierNamespace, blocks: Sequence[BlockRead], deadline: float
    ) -> list[ReadResult]:
        """Read blocks: ``HIT`` with the stored parent and position, or ``MISS``; parents are not compared."""
        ...

    def write(self, namespace: TierNamespace, blocks: Sequence[BlockWrite], deadline: float) -> list[bool]:
        """Store blocks of different keys; whether each is new. A ``CapacityError``: it has no room."""
        ...

    def remove(self, namespace: TierNamespace, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Forget blocks; whether each was held."""
        ...

    def close(self) -> None:
        """End the connections."""
        ...


class PeerMaker(Protocol):
    """Makes what asks the daemon at an address; connects to nobody yet."""

    def __call__(self, url: str, *, connections: int, timeout_s: float) -> AskedPeer:
        """An :class:`AskedPeer` with at most ``connections``, each made within ``timeout_s``."""
        ...
