"""What somebody has put where a folder or a file of a block belongs: a link, a folder, a device."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from typing import Final

from kvferry.store.disk.files import Files, is_gone
from kvferry.store.disk.folders import allocated_nbytes
from kvferry.store.disk.quarantine import Quarantine

__all__ = ["IN_THE_WAY", "Obstacles"]

IN_THE_WAY: Final = frozenset((errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EEXIST, errno.ENOTEMPTY))
"""What the system says where something else is in the place of a file or of its folder."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


class Obstacles:
    """Moves obstacles of one directory into its quarantine. Thread safe.

    Args:
        files: System calls.
        quarantine: Of the directory.
        charge: Told of bytes that were not counted before.

    Attributes:
        known: Paths of those that were there at the start, and were counted then.
    """

    def __init__(self, files: Files, quarantine: Quarantine, charge: Callable[[int], None]) -> None:
        self.known: set[str] = set()
        self._files = files
        self._quarantine = quarantine
        self._charge = charge

    def clear(self, root: int, path: Sequence[str]) -> str:
        """Look along the way to a file for what is of another kind than it has to be, and move it away.

        Args:
            root: Descriptor of the directory that ``path`` starts from.
            path: Names of folders, and of a file at the end.

        Returns:
            What was moved where, for people; empty if nothing is in the way.

        Raises:
            OSError: If something is, and cannot be moved.
        """
        fd = os.dup(root)
        try:
            for number, name in enumerate(path):
                try:
                    status = self._files.status_of(name, fd)
                except OSError as error:
                    if is_gone(error):
                        return ""
                    raise
                is_last = number == len(path) - 1
                if stat.S_IFMT(status.st_mode) != (stat.S_IFREG if is_last else stat.S_IFDIR):
                    return self._move(root, fd, "/".join(path[: number + 1]), status)
                if not is_last:
                    above, fd = fd, self._files.open_folder(name, fd)
                    self._files.close(above)
        finally:
            self._files.close(fd)
        return ""

    def _move(self, root: int, folder: int, path: str, status: os.stat_result) -> str:
        what = f"{_KINDS.get(stat.S_IFMT(status.st_mode), 'a device')} in the place of {path}"
        try:
            target = self._quarantine.put_obstacle(root, folder, path.rpartition("/")[2])
        except OSError as error:
            raise OSError(error.errno, f"{what} cannot be moved away: {error.strerror}") from error
        if path in self.known:
            self.known.discard(path)
        else:  # itself: what is inside is counted by the next start, as that of all folders of others
            self._charge(allocated_nbytes(status))
        return f"{what}, moved to {target}"
