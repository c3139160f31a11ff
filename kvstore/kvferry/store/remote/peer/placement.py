"""Which peer keeps a key: rendezvous hashing, so that a list of other peers moves only the keys that must."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from kvferry.core.keys import BlockKey

__all__ = ["Placement"]


class Placement:
    """Where keys lie. All daemons that name a peer alike put a key on the same one.

    The score of a peer is blake2b-64 over its id's length (u32, little-endian), the id and the key; the
    highest has the key. (D. Thaler, C. Ravishankar: *A name-based mapping scheme for rendezvous*, 1996.)

    Args:
        ids: Of the peers, all different.
    """

    def __init__(self, ids: Sequence[str]) -> None:
        self._begun = []
        for peer in ids:
            name = peer.encode()
            self._begun.append(blake2b(len(name).to_bytes(4, "little") + name, digest_size=8))

    def owner(self, key: BlockKey) -> int:
        """The number of the peer that keeps the key."""
        if len(self._begun) == 1:
            return 0
        best, found = b"", 0
        for number, begun in enumerate(self._begun):
            score = begun.copy()
            score.update(key)
            if (digest := score.digest()) > best:
                best, found = digest, number
        return found
