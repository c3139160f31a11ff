"""Memory for blocks that come over a connection: used again once nobody looks at it any more."""

from __future__ import annotations

import sys
import threading
from typing import Final

import numpy as np

from kvferry.core.buffers import ByteArray, page_aligned

__all__ = ["RecycledMemory"]

_GRAIN: Final = 1 << 16
_ONLY_KEPT: Final = 2  # references to a piece that only the list has: the list's and that of the call


class RecycledMemory:
    """Page-aligned pieces. Thread safe.

    New pages cost half the bandwidth of a receive, so a piece is used again when the last view of it is
    gone, which the count of its references tells; nobody has to give it back.

    Args:
        most_nbytes: Bytes kept for later, in use or not; more is made and freed each time.
    """

    def __init__(self, most_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self._lock = threading.Lock()
        self._kept: list[ByteArray] = []
        self._nbytes = 0

    @property
    def kept_nbytes(self) -> int:
        """Bytes of all pieces that are kept."""
        return self._nbytes

    def piece(self, nbytes: int) -> memoryview:
        """A writable piece of exactly ``nbytes``; what it holds is not defined."""
        wanted = max(_GRAIN, -(-nbytes // _GRAIN) * _GRAIN)
        with self._lock:
            for index in range(len(self._kept)):
                fits = wanted <= len(self._kept[index]) <= 2 * wanted
                if fits and sys.getrefcount(self._kept[index]) <= _ONLY_KEPT:
                    return self._kept[index].data[:nbytes]
            self._make_room(wanted)
            if wanted > self._most_nbytes - self._nbytes:
                return page_aligned(nbytes)
            made = np.frombuffer(page_aligned(wanted), np.uint8)
            self._kept.append(made)
            self._nbytes += wanted
            return made.data[:nbytes]

    def _make_room(self, wanted: int) -> None:
        """Drop unused pieces of other sizes, the oldest first, until there is room."""
        index = 0
        while index < len(self._kept) and self._nbytes + wanted > self._most_nbytes:
            if sys.getrefcount(self._kept[index]) <= _ONLY_KEPT:
                self._nbytes -= len(self._kept[index])
                del self._kept[index]
            else:
                index += 1

    def clear(self) -> None:
        """Let all go; pieces in use live on with their views."""
        with self._lock:
            self._kept.clear()
            self._nbytes = 0
