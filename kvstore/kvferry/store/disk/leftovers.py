"""Files of one directory that are nobody's and could not be removed: tried again until they are gone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Final

from kvferry.store.disk.files import Files, is_gone

__all__ = ["Leftover", "Leftovers"]

_ENOUGH: Final = 8  # failures after which the rest waits for the next turn

Leftover = tuple[str, str, int]
"""The path of its folder below the directory, its name, and the bytes that are counted for it."""


class Leftovers:
    """Temporaries of writes that failed, and what fell out of the quarantine. Thread safe.

    Args:
        files: System calls.
        charge: Told of bytes that are taken up (negative: given back).
    """

    def __init__(self, files: Files, charge: Callable[[int], None]) -> None:
        self._files = files
        self._charge = charge
        self._lock = threading.Lock()
        self._left: dict[tuple[str, str], int] = {}

    def __len__(self) -> int:
        return len(self._left)

    def reset(self, found: Iterable[Leftover] = ()) -> None:
        """What lies there now; the bytes are charged already, or given back by the caller."""
        with self._lock:
            self._left = {(folder, name): nbytes for folder, name, nbytes in found}

    def add(self, folder: str, name: str, nbytes: int) -> None:
        """One more, whose bytes are charged already."""
        with self._lock:
            self._left[folder, name] = nbytes

    def retry(self, root: int) -> bool:
        """Try to remove each from the directory ``root``; whether some are left. One thread's own."""
        with self._lock:
            left = list(self._left)
        failures = 0
        for folder, name in left:
            if not self._remove(root, folder, name):
                failures += 1
                if failures >= _ENOUGH:
                    break
                continue
            with self._lock:
                nbytes = self._left.pop((folder, name), 0)  # nothing any more if it was reset meanwhile
            self._charge(-nbytes)
        return failures > 0

    def _remove(self, root: int, folder: str, name: str) -> bool:
        try:
            fd = os.dup(root)
            try:
                for step in folder.split("/") if folder else ():
                    above, fd = fd, self._files.open_folder(step, fd)
                    self._files.close(above)
                self._files.unlink(name, fd)
            finally:
                self._files.close(fd)
        except OSError as error:
            return is_gone(error)
        return True
