"""What a disk tier knows of one block and of one namespace, and the room that one write has taken."""

from __future__ import annotations

from kvferry.core.chains import ChainIndex
from kvferry.core.eviction import Entry
from kvferry.core.keys import BlockKey
from kvferry.store.encoded_block import Encoding
from kvferry.store.tier import UNKNOWN_PARENT, TierNamespace

__all__ = ["DiskEntry", "NamespaceIndex", "Reservation"]


class DiskEntry(Entry):
    """A block on disk. Compared by identity; the index's lock is held for every change.

    Attributes:
        parent: ``None`` also while it is not known, that is until ``verified``.
        position: Its number in the chain; -1 while or if that is not known.
        root: Number of the directory that it lies in.
        verified: Whether its header was compared since the start.
        encoding: How it is encoded, if it is and that is known.
    """

    __slots__ = ("_nbytes", "encoding", "position", "root", "verified")

    index: NamespaceIndex

    def __init__(
        self, index: NamespaceIndex, key: BlockKey, parent: BlockKey | None, nbytes: int, root: int,
        position: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(index, key, None if parent == UNKNOWN_PARENT else parent)
        self._nbytes = nbytes
        self.position = position
        self.root = root
        self.verified = parent != UNKNOWN_PARENT
        self.encoding: Encoding | None = None

    @property
    def nbytes(self) -> int:
        """What it takes of the capacity."""
        return self._nbytes

    @property
    def is_lossy(self) -> bool:
        """Whether it is known to have lost something."""
        return self.encoding is not None and self.encoding.lossy


class Reservation:
    """Room taken for one write, of which parts are spent on what it makes. One thread's own.

    Attributes:
        left: Bytes not spent yet.
        spare: A discarded entry whose bytes are in ``left`` and whose file is still there, to be used again.
        claimed: Bytes of the device's free room that are held for it.
    """

    __slots__ = ("claimed", "left", "spare")

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        self.claimed = 0
        self.spare: DiskEntry | None = None

    def spend(self, nbytes: int) -> None:
        """So many bytes are on disk now; more than were taken is settled when the rest is given back."""
        self.left -= nbytes


class NamespaceIndex(ChainIndex[DiskEntry]):
    """The entries of one namespace of one tenant.

    Attributes:
        tenant: Whose they are.
        name: Tenant and namespace.
        told: The namespace as the store told it; ``None`` for one only found on disk.
    """

    __slots__ = ("name", "tenant", "told")

    def __init__(self, tenant: str, namespace_id: bytes) -> None:
        super().__init__(namespace_id, 0)
        self.tenant = tenant
        self.name = (tenant, namespace_id)
        self.told: TierNamespace | None = None

    def link(self, entry: DiskEntry, parent: BlockKey | None) -> None:
        """Enter the parent of a stored entry, which was not known before."""
        above = None if parent is None else self.entries.get(parent)
        entry.parent = parent if above is None else above.key  # one bytes object a key
        if above is not None:
            above.children += 1
        elif parent is not None:
            self._orphans[parent] = self._orphans.get(parent, 0) + 1
