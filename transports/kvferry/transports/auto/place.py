"""Where a process is: the host as others may compare it, and a private folder for its sockets."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import time
from itertools import islice
from pathlib import Path
from typing import Final

from kvferry.core.errors import ConnectError
from kvferry.core.open_files import OUT_OF_FILES
from kvferry.core.runtime_folder import runtime_folder

__all__ = ["host_identity", "socket_path"]

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES: Final = ("mnt", "net", "pid", "user")
_PREFIX: Final = "auto-"
_MAX_PATH_NBYTES: Final = 107  # sun_path without its closing zero byte
_MAX_SWEPT: Final = 64
_OLD_S: Final = 60.0  # between making a socket's file and listening on it pass microseconds


def host_identity() -> str:
    """The same for two processes that share a kernel and its namespaces of mounts, network, processes, users.

    So two containers of one machine are two hosts. Empty where the kernel does not say, which is then the
    same as nobody.

    Raises:
        OSError: If there is no descriptor left to ask it.
    """
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]  # noqa: PTH115
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in OUT_OF_FILES:
            raise
        return ""
    return "/".join([boot, *spaces])


def socket_path() -> str:
    """A free name for a socket in this user's private folder.

    Raises:
        ConnectError: If there is no such folder; with the remedy.
    """
    folder = runtime_folder()
    _sweep(folder)
    path = str(folder / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}")
    if len(os.fsencode(path)) > _MAX_PATH_NBYTES:
        raise ConnectError(
            f"the folder {folder} is too long for a socket: set XDG_RUNTIME_DIR to a shorter one"
        )
    return path


def _sweep(folder: Path) -> None:
    """Remove sockets that killed processes left behind."""
    with contextlib.suppress(OSError):
        for path in islice(folder.glob(f"{_PREFIX}*"), _MAX_SWEPT):
            with contextlib.suppress(OSError):
                found = path.lstat()
                if stat.S_ISSOCK(found.st_mode) and time.time() - found.st_mtime > _OLD_S:
                    _remove_if_dead(path)


def _remove_if_dead(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
