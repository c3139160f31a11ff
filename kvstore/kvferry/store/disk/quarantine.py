"""Corrupt files of one directory, put out of the way and kept for a look, within a bound."""

from __future__ import annotations

import stat
import threading
import time
from collections import deque
from collections.abc import Callable

from kvferry.core.keys import BlockKey
from kvferry.store.disk import names
from kvferry.store.disk.files import Files, is_gone, reason_of
from kvferry.store.disk.folders import OpenFolder, disk_nbytes
from kvferry.store.disk.leftovers import Leftovers
from kvferry.store.problems import Problems

__all__ = ["Quarantine"]


class Quarantine:
    """The folder ``.quarantine`` of one directory. Thread safe.

    Args:
        files: System calls.
        problems: Where what goes wrong is told.
        charge: Told of bytes taken up (negative: given back).
        max_nbytes: The bound.
        leftovers: Takes what could not be removed.

    Attributes:
        nbytes: What it takes up.
    """

    def __init__(
        self, files: Files, problems: Problems, charge: Callable[[int], None], max_nbytes: int,
        leftovers: Leftovers,
    ) -> None:  # fmt: skip
        self.nbytes = 0
        self._files = files
        self._problems = problems
        self._charge = charge
        self._max_nbytes = max_nbytes
        self._leftovers = leftovers
        self._lock = threading.Lock()
        self._held: deque[tuple[str, int]] = deque()
        self._serial = time.time_ns()

    def reset(self, found: list[tuple[str, int]]) -> None:
        """What lies there, name and bytes, the oldest first; charged by the caller."""
        with self._lock:
            self._held = deque(found)
            self.nbytes = sum(nbytes for _, nbytes in found)

    def limit(self, max_nbytes: int, root: int | None) -> None:
        """Another bound; what is above it goes now, the oldest first, if the directory is up and ours."""
        self._max_nbytes = max_nbytes
        if root is None:
            return
        try:
            self._trim(root)
        except OSError as error:
            self._problems.incident("quarantine", reason_of(error))

    def put(self, root: int, folder: OpenFolder, namespace_id: bytes, key: BlockKey, nbytes: int) -> int:
        """Put a corrupt file out of the way: in here, or away if this cannot hold it.

        Args:
            root: Descriptor of the directory.
            folder: Where the file lies.
            namespace_id: Of which namespace.
            key: Its key.
            nbytes: What is counted for it.

        Returns:
            The bytes that the caller need not count any more; 0 if the file could not be moved or removed.
        """
        name = names.block_name(key)
        with self._lock:
            self._serial += 1
            target = f"{key.hex()}.{namespace_id.hex()[:16]}.{self._serial:x}.bad"
        try:
            status = self._files.status_of(name, folder.fd)  # it may have been tampered with
            if stat.S_ISDIR(status.st_mode):  # which nobody removes with all that may be in it
                self.put_obstacle(root, folder.fd, name)
                return nbytes
            now = disk_nbytes(status)
            if now <= self._max_nbytes:
                self._move(root, folder.fd, name, target)
        except OSError as error:
            if is_gone(error):
                return nbytes
            now = self._max_nbytes + 1  # it cannot be moved: maybe it can be removed
        if now > self._max_nbytes:
            return nbytes if self._unlink(folder, name) else 0
        with self._lock:
            self._held.append((target, now))
            self.nbytes += now
        self._charge(now)
        self._trim(root)
        return nbytes

    def put_obstacle(self, root: int, folder: int, name: str) -> str:
        """Move in here what is no file of the tier; it is never removed, and counted as it was before.

        Args:
            root: Descriptor of the directory.
            folder: Descriptor of the folder that it lies in.
            name: Its name there.

        Returns:
            Where it is now, below the directory.

        Raises:
            OSError: If it cannot be moved.
        """
        with self._lock:
            self._serial += 1
            target = f"{name[:80]}.{self._serial:x}.obstacle"
        self._move(root, folder, name, target)
        return f"{names.QUARANTINE_NAME}/{target}"

    def _unlink(self, folder: OpenFolder, name: str) -> bool:
        try:
            self._files.unlink(name, folder.fd)
        except OSError as error:
            if not is_gone(error):
                self._problems.incident("quarantine", f"{name} cannot be removed: {reason_of(error)}")
                return False
        return True

    def _move(self, root: int, folder: int, name: str, target: str) -> None:
        if self._files.make_folder(names.QUARANTINE_NAME, root):
            self._charge(4096)
        fd = self._files.open_folder(names.QUARANTINE_NAME, root)
        try:
            self._files.rename(name, folder, target, fd)
        finally:
            self._files.close(fd)

    def _trim(self, root: int) -> None:
        """Remove the oldest until the rest is within the bound."""
        while self.nbytes > self._max_nbytes:
            fd = self._files.open_folder(names.QUARANTINE_NAME, root)
            name, nbytes = self._take_oldest()
            try:
                if name:
                    self._files.unlink(name, fd)
            except OSError as error:
                if not is_gone(error):
                    self._leftovers.add(names.QUARANTINE_NAME, name, nbytes)  # its bytes stay charged
                    continue
            finally:
                self._files.close(fd)
            if not name:
                return
            self._charge(-nbytes)

    def _take_oldest(self) -> tuple[str, int]:
        """What is to go, not counted here any more; nothing if the rest is within the bound."""
        with self._lock:
            if self.nbytes <= self._max_nbytes or not self._held:
                return "", 0
            name, nbytes = self._held.popleft()
            self.nbytes -= nbytes
            return name, nbytes
