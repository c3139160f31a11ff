"""What the headers of each namespace look like: several KiB each, so kept for those in use only."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from kvferry.store.disk.entries import NamespaceIndex
from kvferry.store.disk.header import HeaderTemplate
from kvferry.store.tier import TierNamespace

__all__ = ["Templates"]

_MOST: Final = 64


class Templates:
    """The templates of the namespaces used last. Thread safe.

    Args:
        most: How many are kept; one that is not is made again, in a fraction of a millisecond.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[NamespaceIndex, tuple[TierNamespace, HeaderTemplate]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, home: NamespaceIndex, namespace: TierNamespace) -> HeaderTemplate:
        """That of ``home``, made from just this ``namespace``: not from what a file has said of itself.

        Raises:
            ConfigError: If the spec cannot be written into a header.
        """
        found = self._find(home)
        if found is not None and found[0] is namespace:
            return found[1]
        made = HeaderTemplate(namespace)
        with self._lock:
            self._kept[home] = namespace, made
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return made

    def known(self, home: NamespaceIndex) -> HeaderTemplate | None:
        """That of ``home`` if it is kept."""
        found = self._find(home)
        return None if found is None else found[1]

    def _find(self, home: NamespaceIndex) -> tuple[TierNamespace, HeaderTemplate] | None:
        with self._lock:
            found = self._kept.get(home)
            if found is not None:
                self._kept.move_to_end(home)
            return found
