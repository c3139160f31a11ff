"""Names of listening ``unix`` sockets in the file system: made, replaced when stale, removed when still ours.

A socket file outlives a process that was killed. Who finds one asks whether anybody listens behind it; a
lock on the folder keeps two that start at once from both replacing it, and from removing each other's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvferry.core.errors import ConnectError
from kvferry.core.open_files import OUT_OF_FILES
from kvferry.transports.ip import reason_of

__all__ = ["SocketFile", "bind_path", "peer_credentials"]

_BACKLOG: Final = 1024
_LOCK_S: Final = 2.0
_PAUSE_S: Final = 0.005
_REMEDIES: Final = {
    errno.ENOENT: "make the folder first",
    errno.ENOTDIR: "a part of the path is no folder",
    errno.EACCES: "this process may not write in that folder, choose another one",
    errno.EPERM: "this process may not write in that folder, choose another one",
    errno.EROFS: "that file system is read-only, choose another folder",
}


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process that connected, or that listens, as the kernel recorded them."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", data)
    return pid, uid, gid


@dataclass(frozen=True, slots=True)
class SocketFile:
    """The file of a listening socket, told from another of the same name by its inode."""

    path: str
    device: int
    inode: int

    def remove(self) -> None:
        """Remove it, unless somebody else's has its place; what cannot be removed is left."""
        with contextlib.suppress(OSError, ConnectError), _folder_lock(self.path):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == (self.device, self.inode):
                Path(self.path).unlink()


def bind_path(path: str, mode: int) -> tuple[socket.socket, SocketFile]:
    """A socket that listens at ``path``, its file with ``mode`` from the first moment on.

    Raises:
        ConnectError: If somebody listens there, something else lies there, or the folder cannot be used.
    """
    try:
        with _folder_lock(path):
            _clear(path)
            return _bind(path, mode)
    except OSError as error:
        remedy = "" if error.errno in OUT_OF_FILES else _REMEDIES.get(error.errno or 0, "check the path")
        why = reason_of(error) + (f"; {remedy}" if remedy else "")
        raise ConnectError(f"cannot listen on unix://{path}: {why}") from error


@contextlib.contextmanager
def _folder_lock(path: str) -> Iterator[None]:
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= until:
                    raise ConnectError(
                        f"the folder of unix://{path} is locked by another process for {_LOCK_S:g} s; "
                        "choose a folder of your own"
                    ) from error
                time.sleep(_PAUSE_S)
        yield
    finally:
        os.close(folder)


def _clear(path: str) -> None:
    """Remove the socket file of a listener that is gone."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConnectError(
            f"cannot listen on unix://{path}: something that is no socket lies there; choose another path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            Path(path).unlink(missing_ok=True)
            return
        except BlockingIOError:  # it listens, with its queue full
            owner = "a process"
        except PermissionError as error:
            raise ConnectError(
                f"cannot listen on unix://{path}: the socket there is not ours; choose another path"
            ) from error
        except OSError as error:
            if error.errno != errno.EPROTOTYPE:
                raise
            raise ConnectError(
                f"cannot listen on unix://{path}: a socket of another kind is there, such as datagrams; "
                "choose another path"
            ) from error
        else:
            owner = "process {} of uid {}".format(*peer_credentials(probe))
    raise ConnectError(
        f"cannot listen on unix://{path}: {owner} listens there; stop it, or choose another path"
    )


def _bind(path: str, mode: int) -> tuple[socket.socket, SocketFile]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound = False
    try:
        # The file takes the mode of the socket, less the umask, so that it is never open to others.
        os.fchmod(sock.fileno(), mode)
        sock.bind(path)
        bound = True
        found = os.lstat(path)
        if stat.S_IMODE(found.st_mode) != mode:
            Path(path).chmod(mode)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        if bound:
            Path(path).unlink(missing_ok=True)
        raise
    return sock, SocketFile(path, found.st_dev, found.st_ino)
