"""Removed blocks of one tier that nobody is shown, though it may hold them still, or for ever."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvferry.core.keys import BlockKey

__all__ = ["Hidden"]

_LOG = logging.getLogger(__name__)
_MOST: Final = 65_536  # of each kind, about 10 MB
_Name = tuple[bytes, BlockKey]


class Hidden:
    """Removed blocks that are not gone yet. Thread safe; nothing here waits.

    What could not be removed is hidden until it is, or is stored anew. Of that only so much is remembered;
    beyond, more is hidden than has to be, since a block less costs little and one that comes back is wrong.

    Args:
        tier: Name of the tier.
        most: Blocks, and namespaces, that are remembered.
    """

    def __init__(self, tier: str, most: int = _MOST) -> None:
        self._tier = tier
        self._most = most
        self._lock = threading.Lock()
        self._masked: Counter[tuple[bytes, BlockKey | None]] = Counter()  # ``None``: all of the namespace
        self._undead: set[_Name] = set()  # could not be removed
        self._unnamed: dict[
            bytes, bool
        ] = {}  # namespaces that are hidden whole; whether :meth:`named` ends it
        self._everything = False  # so it is with all namespaces
        self._anew: set[_Name] = set()  # what was stored in those since then

    # ---- what is being removed ---------------------------------------------------------------------

    def mask(self, namespace_id: bytes, keys: Sequence[BlockKey] | None) -> None:
        """Do not show ``keys``, or all of a namespace: they are being removed; ends with :meth:`unmask`."""
        with self._lock:
            self._masked.update((namespace_id, key) for key in (keys if keys is not None else (None,)))

    def unmask(self, namespace_id: bytes, keys: Sequence[BlockKey] | None) -> None:
        """End one :meth:`mask`."""
        with self._lock:
            for key in keys if keys is not None else (None,):
                name = (namespace_id, key)
                self._masked[name] -= 1
                if self._masked[name] <= 0:
                    del self._masked[name]

    def removes(self, namespace_id: bytes) -> Callable[[BlockKey], bool]:
        """Tells of each key of a namespace whether its block is being removed as of now.

        Those that could not be removed, which are not shown either, are not among them: nobody counted them.
        """
        with self._lock:
            if (namespace_id, None) in self._masked:
                return lambda _key: True
            masked = {key for ns, key in self._masked if ns == namespace_id}
        return lambda key: key in masked

    # ---- what could not be removed -----------------------------------------------------------------

    def keep(self, namespace_id: bytes, keys: Iterable[BlockKey]) -> None:
        """``keys`` could not be removed."""
        with self._lock:
            names = {(namespace_id, key) for key in keys}
            self._anew -= names
            self._undead |= names
            if len(self._undead) > self._most:
                self._keep_all({ns for ns, _ in self._undead}, until_named=False)
                self._undead.clear()

    def keep_all(self, namespace_id: bytes) -> None:
        """Nothing of a namespace could be removed, since the tier cannot tell what there is."""
        with self._lock:
            self._keep_all({namespace_id}, until_named=True)

    def _keep_all(self, namespace_ids: set[bytes], *, until_named: bool) -> None:
        self._anew = {name for name in self._anew if name[0] not in namespace_ids}
        self._unnamed |= {ns: until_named and self._unnamed.get(ns, True) for ns in namespace_ids}
        if len(self._unnamed) > self._most and not self._everything:
            self._everything = True
            _LOG.warning(
                "tier %s: what it could not remove is too much to be remembered: until the next start only "
                "what is stored from now on is found in it", self._tier,
            )  # fmt: skip
        if self._everything:
            self._unnamed.clear()

    def named(self, namespace_id: bytes) -> None:
        """The tier has told all that it has of a namespace, which is removed by its name now."""
        with self._lock:
            if self._unnamed.get(namespace_id):
                del self._unnamed[namespace_id]
                self._anew = {name for name in self._anew if name[0] != namespace_id}

    def stored(self, namespace_id: bytes, keys: Iterable[BlockKey]) -> None:
        """``keys`` were stored anew, or are gone: there is nothing to hide."""
        if not (self._undead or self._unnamed or self._everything):
            return
        with self._lock:
            names = {(namespace_id, key) for key in keys}
            self._undead -= names
            if self._everything or namespace_id in self._unnamed:
                if len(self._anew) + len(names) > self._most:
                    self._anew.clear()
                self._anew |= names

    # ---- what is not shown -------------------------------------------------------------------------

    def among(self, namespace_id: bytes, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """Those of ``keys`` that are not shown."""
        if not (self._masked or self._undead or self._unnamed or self._everything):
            return frozenset()
        with self._lock:
            if (namespace_id, None) in self._masked:
                return frozenset(keys)
            unnamed = self._everything or namespace_id in self._unnamed
            return frozenset(
                key
                for key in keys
                if (namespace_id, key) in self._masked
                or (namespace_id, key) in self._undead
                or (unnamed and (namespace_id, key) not in self._anew)
            )
