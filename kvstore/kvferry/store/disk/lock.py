"""The lock of a directory: one store at a time, whatever happens to the file by which others see it.

Two locks are taken: of the file ``.lock``, which names its holder, and of the directory itself, which holds
on when somebody removes that file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from pathlib import Path
from typing import Final

from kvferry.core.errors import TierError
from kvferry.store.disk import names

__all__ = ["DirectoryLock", "has_lock_file", "is_in_use", "lock_owner", "take_lock"]

_NO_FILE: Final = frozenset((errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT))
_LOCK_FILE: Final = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not hold us up
_PID: Final = re.compile(rb"\s*([0-9]{1,10})\s*")
_TRIES: Final = 5
_PAUSE_S: Final = 0.02


class DirectoryLock:
    """What :func:`take_lock` gives; held until :meth:`release`. One thread at a time uses it.

    Args:
        file: Descriptor of the locked file; ``None`` where none could be made.
        folder: Descriptor of the locked directory; ``None`` where directories cannot be locked.
    """

    def __init__(self, file: int | None, folder: int | None) -> None:
        self._file = file
        self._folder = folder

    def is_whole(self, root: int) -> bool:
        """Whether the file at its name is the locked one."""
        if self._file is None:
            return False
        ours = os.fstat(self._file)
        try:
            found = os.stat(names.LOCK_NAME, dir_fd=root, follow_symlinks=False)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)

    def mend(self, root: int, path: str) -> None:
        """Make and lock the file anew, which somebody has removed; where none can be made, nothing changes.

        Raises:
            TierError: If another store has locked what lies there now.
        """
        file = _open_file(root)
        if file is None:
            return
        _lock(file, root, path)
        _write_pid(root)
        old, self._file = self._file, file
        if old is not None:
            os.close(old)

    def release(self) -> None:
        """Give it back."""
        for fd in (self._file, self._folder):
            if fd is not None:
                os.close(fd)
        self._file = self._folder = None


def take_lock(root: int, path: str) -> DirectoryLock | None:
    """Lock a directory against other stores.

    Returns:
        ``None`` where nothing can be written: then nobody can do harm either.

    Raises:
        TierError: If somebody else holds it; the message has the process.
    """
    file = _open_file(root)
    folder: int | None = None
    try:
        if file is None and not os.access(".", os.W_OK, dir_fd=root, effective_ids=True):
            return None
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=root)
        try:
            _lock(folder, root, path)
        except OSError:  # a file system that locks files only
            os.close(folder)
            folder = None
            if file is None:
                return None
        if file is not None:
            _lock(file, root, path)
            _write_pid(root)
    except BaseException:
        for fd in (file, folder):
            if fd is not None:
                os.close(fd)
        raise
    return DirectoryLock(file, folder)


def _open_file(root: int) -> int | None:
    try:
        # read-only: a descriptor for writing would keep the file system from being remounted read-only
        fd = os.open(names.LOCK_NAME, _LOCK_FILE, 0o600, dir_fd=root)
    except OSError as error:
        if error.errno in _NO_FILE:
            return None
        raise OSError(error.errno, f"{names.LOCK_NAME} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EEXIST, f"{names.LOCK_NAME} is not a regular file: remove what lies there")
    return fd


def _lock(fd: int, root: int, path: str) -> None:
    """Take one of the locks; who only tries it, as another start does, is gone in a moment.

    Raises:
        TierError: If it is held.
        OSError: If it cannot be taken for another reason.
    """
    for left in reversed(range(_TRIES)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise
            if not left:
                raise TierError(f"{path} is used by {_holder(root)}; give each its own directory") from error
            time.sleep(_PAUSE_S)
        else:
            return


def _holder(root: int) -> str:
    pid = _written_pid(root)
    if pid == os.getpid():  # two containers may have the same pid
        here = lock_owner(root) == pid
        return "another tier of this process" if here else f"a process elsewhere (pid {pid} there)"
    return f"another process (pid {'unknown' if pid is None else pid})"


def _written_pid(root: int) -> int | None:
    try:
        fd = os.open(names.LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=root)
        try:
            found = _PID.fullmatch(os.pread(fd, 32, 0))
        finally:
            os.close(fd)
    except OSError:
        return None
    return None if found is None else int(found[1])


def has_lock_file(root: int) -> bool:
    """Whether there is a file as :func:`take_lock` makes it, held or not."""
    return _written_pid(root) is not None


def _write_pid(root: int) -> None:
    with contextlib.suppress(OSError):  # a full disk: the lock holds without the pid
        fd = os.open(names.LOCK_NAME, os.O_WRONLY | os.O_NOFOLLOW, dir_fd=root)
        try:
            os.pwrite(fd, f"{os.getpid():<15}\n".encode(), 0)
        finally:
            os.close(fd)


def lock_owner(root: int) -> int | None:
    """The process that holds the lock of a directory, without touching the lock."""
    pid = _written_pid(root)
    try:
        found = os.stat(names.LOCK_NAME, dir_fd=root, follow_symlinks=False)
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    for line in lines:
        words = line.split()
        if "FLOCK" not in words:
            continue
        at = words.index("FLOCK") + 3  # FLOCK ADVISORY WRITE pid device:inode start end
        owner, place = int(words[at]), words[at + 1]
        # some file systems show another device here than to stat: then the pid has to be the written one
        if place == f"{device}:{found.st_ino}" or (owner == pid and place.endswith(f":{found.st_ino}")):
            return owner
    return None


def is_in_use(root: int) -> bool:
    """Whether a directory is one of a disk tier that a store uses now, of this process or of another."""
    return _written_pid(root) is not None and lock_owner(root) is not None
