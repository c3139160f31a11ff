"""What was made for the keys used last: bounded, since there may be any number of keys."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

__all__ = ["Recent"]

_MOST: Final = 1024
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The values of the keys used last; one that was forgotten is made again. Thread safe.

    Args:
        make: Makes the value of a key, under no lock; what it raises goes to the caller.
        most: How many are kept.
    """

    def __init__(self, make: Callable[[K], V], most: int = _MOST) -> None:
        self._make = make
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: K) -> V:
        """The value of ``key``, made if it is not kept."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = self._make(key)
        with self._lock:
            found = self._kept.setdefault(key, made)  # the same one for all who asked at once
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return found

    def items(self) -> list[tuple[K, V]]:
        """Those kept now, from the one used longest ago."""
        with self._lock:
            return list(self._kept.items())
