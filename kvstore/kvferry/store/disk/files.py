"""System calls on files, and whole reads and writes over them.

:class:`Files` is the one place where a disk tier touches the file system, so that tests can make any call
fail, stall or do half of its work.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from typing import Final

from kvferry.core.buffers import total_nbytes

__all__ = [
    "CREATE_FLAGS",
    "DIRECT",
    "NO_DIRECT",
    "READ_FLAGS",
    "REUSE_FLAGS",
    "Files",
    "is_gone",
    "open_quietly",
    "read_parts",
    "reason_of",
    "write_parts",
]

DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)
NO_DIRECT: Final = frozenset((errno.EINVAL, errno.EOPNOTSUPP))
"""What a file system says that cannot do O_DIRECT, or not so."""
READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""To open a file for reading; a FIFO planted there must not hold us up."""
CREATE_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
"""To make a file."""
REUSE_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""To open a file that is written over."""
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_NO_ATIME: Final[int] = getattr(os, "O_NOATIME", 0)
_IOV_MAX: Final = 1024


class Files:
    """The system calls of a disk tier, relative to descriptors of folders. Thread safe; raises OSError."""

    def open_root(self, path: str) -> int:
        """Open the tier's own directory, which may be reached by a link: that is the owner's choice."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def may_write(self, fd: int) -> bool:
        """Whether files can be made in a folder: the file system and its rights allow that."""
        return os.access(".", os.W_OK, dir_fd=fd, effective_ids=True)

    def open_folder(self, name: str, parent: int) -> int:
        """Open a folder below ``parent``; a link there is refused."""
        return os.open(name, _FOLDER, dir_fd=parent)

    def make_folder(self, name: str, parent: int) -> bool:
        """Make a folder for the owner alone; whether it is new."""
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            return False
        return True

    def open_file(self, name: str, folder: int, flags: int = 0) -> int:
        """Open a file for reading, whatever it is; a link is refused."""
        return os.open(name, READ_FLAGS | flags, dir_fd=folder)

    def open_read(self, name: str, folder: int, flags: int = 0) -> tuple[int, int]:
        """Open a regular file for reading; returns it and its size. A link or a device there is refused."""
        fd = self.open_file(name, folder, flags)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.ELOOP, "not a regular file")
        except BaseException:
            os.close(fd)
            raise
        return fd, found.st_size

    def create(self, name: str, folder: int, flags: int = 0) -> int:
        """Create a file that must not exist."""
        return os.open(name, CREATE_FLAGS | flags, 0o600, dir_fd=folder)

    def open_write(self, name: str, folder: int, flags: int = 0) -> int:
        """Open a file to write over it."""
        return os.open(name, REUSE_FLAGS | flags, dir_fd=folder)

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Read once; returns the bytes read, 0 at the end of the file."""
        return os.preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Write once; returns the bytes written, maybe fewer than asked."""
        return os.pwritev(fd, views, offset)

    def sync_data(self, fd: int) -> None:
        """Make a file's data and size durable."""
        os.fdatasync(fd)

    def sync(self, fd: int) -> None:
        """Make a file or a folder durable."""
        os.fsync(fd)

    def rename(self, source: str, source_folder: int, target: str, target_folder: int) -> None:
        """Rename, replacing what is there."""
        os.rename(source, target, src_dir_fd=source_folder, dst_dir_fd=target_folder)

    def unlink(self, name: str, folder: int) -> None:
        """Remove a file."""
        os.unlink(name, dir_fd=folder)

    def remove_folder(self, name: str, parent: int) -> bool:
        """Remove an empty folder; whether it is gone."""
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        return True

    def status_of(self, name: str, folder: int) -> os.stat_result:
        """Size, blocks and times of a file, of a link itself."""
        return os.stat(name, dir_fd=folder, follow_symlinks=False)

    def status(self, fd: int) -> os.stat_result:
        """Size, blocks and times of an open file or folder."""
        return os.fstat(fd)

    def free_nbytes(self, fd: int) -> int:
        """Bytes that an ordinary process may still write to new files; none where no file can be made."""
        found = os.fstatvfs(fd)
        if found.f_files and not found.f_favail:  # it has a fixed number of inodes, all in use
            return 0
        return found.f_bavail * found.f_frsize

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)


def open_quietly(files: Files, name: str, folder: int) -> tuple[int, int]:
    """As :meth:`Files.open_read`, for a look: without readahead, and the time of last use stays."""
    try:
        fd, nbytes = files.open_read(name, folder, _NO_ATIME)
    except PermissionError:  # somebody else's file, which may be readable all the same
        fd, nbytes = files.open_read(name, folder)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd, nbytes


def is_gone(error: OSError) -> bool:
    """Whether an error says that there is nothing of that name."""
    return error.errno in (errno.ENOENT, errno.ESTALE)


def reason_of(error: OSError) -> str:
    """An error in words with its name, as ``No space left on device (ENOSPC)``."""
    name = errno.errorcode.get(error.errno or 0, "")
    return f"{error.strerror or error}" + (f" ({name})" if name else "")


def _rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    rest = []
    for view in views:
        if done < len(view):
            rest.append(view[done:] if done else view)
        done = max(0, done - len(view))
    return rest


def read_parts(files: Files, fd: int, views: Sequence[memoryview], start: int = 0) -> int:
    """Fill ``views`` from ``start`` on; returns the bytes read, fewer only at the end of the file."""
    views = [v for v in views if len(v)]
    wanted, done = total_nbytes(views), 0
    while done < wanted:
        got = files.preadv(fd, (_rest(views, done) if done else views)[:_IOV_MAX], start + done)
        if got == 0:
            break
        done += got
    return done


def write_parts(files: Files, fd: int, views: Sequence[memoryview], done: int = 0) -> int:
    """Write ``views`` from the start of the file, all of them but the first ``done`` bytes.

    Raises:
        OSError: Also if the device takes no more without saying why.
    """
    views = [v for v in views if len(v)]
    wanted = total_nbytes(views)
    while done < wanted:
        put = files.pwritev(fd, (_rest(views, done) if done else views)[:_IOV_MAX], done)
        if put == 0:
            raise OSError(errno.ENOSPC, f"the device took {done} of {wanted} bytes")
        done += put
    return done
