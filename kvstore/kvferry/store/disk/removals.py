"""Removals that could not be carried out: remembered until the file can go, so that no block comes back.

In memory only: what a process could not remove, the next one finds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvferry.core.keys import BlockKey

if TYPE_CHECKING:
    from kvferry.store.disk.entries import DiskEntry, NamespaceIndex

__all__ = ["Removals"]

_MAX_KEYS: Final = 65_536  # about 10 MB


class Removals:
    """What is to be removed, by directory. Not thread safe: the index's lock is held for every call.

    A directory is *absent* while what it holds is not known: it is down, or was not looked through yet.
    Nothing is written to it then, so that all that is found there later is older than what is said here.

    Args:
        max_keys: Keys remembered for one directory; the namespaces that have more of them lose all they
            have there, since a block less costs little and one that comes back is wrong.

    Attributes:
        absent: Numbers of the absent directories.
        resisting: Entries in the others whose files could not be removed; their bytes count.
    """

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self.absent: set[int] = set()
        self.resisting: list[DiskEntry] = []
        self._max_keys = max_keys
        self._keys: dict[int, set[tuple[NamespaceIndex, BlockKey]]] = {}
        self._spaces: dict[int, set[NamespaceIndex]] = {}

    def add(self, root: int, home: NamespaceIndex, key: BlockKey) -> None:
        """A block was removed; its file may lie in that directory."""
        if home in self._spaces.get(root, ()):
            return
        keys = self._keys.setdefault(root, set())
        keys.add((home, key))
        if len(keys) > self._max_keys:
            self._spaces.setdefault(root, set()).update(each for each, _ in keys)
            del self._keys[root]

    def add_absent(self, home: NamespaceIndex, key: BlockKey) -> None:
        """A block was removed; its file may lie in any absent directory."""
        for root in self.absent:
            self.add(root, home, key)

    def add_namespace(self, home: NamespaceIndex) -> None:
        """All blocks of a namespace were removed; files may lie in any absent directory."""
        for root in self.absent:
            self._spaces.setdefault(root, set()).add(home)

    def cancel(self, home: NamespaceIndex, key: BlockKey) -> None:
        """The block was written anew."""
        for keys in self._keys.values():
            keys.discard((home, key))

    def lose(self, root: int) -> int:
        """A directory is absent from now on; returns the bytes of what resisted there."""
        self.absent.add(root)
        lost = [entry for entry in self.resisting if entry.root == root]
        self.resisting = [entry for entry in self.resisting if entry.root != root]
        for entry in lost:
            self.add(root, entry.index, entry.key)
        return sum(entry.nbytes for entry in lost)

    def find(self, root: int) -> _Removed | None:
        """A directory was looked through and is absent no more; returns what was removed from it, if any."""
        self.absent.discard(root)
        spaces, keys = self._spaces.pop(root, set()), self._keys.pop(root, set())
        return _Removed(spaces, keys) if spaces or keys else None


class _Removed:
    def __init__(self, spaces: set[NamespaceIndex], keys: set[tuple[NamespaceIndex, BlockKey]]) -> None:
        self._spaces = spaces
        self._keys = keys

    def has(self, home: NamespaceIndex, key: BlockKey) -> bool:
        """Whether a block was removed."""
        return home in self._spaces or (home, key) in self._keys
