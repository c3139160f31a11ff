"""The user's private folder for sockets: there, and where the daemon's socket is by default."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Final

from kvferry.core.errors import ConnectError

__all__ = ["DAEMON_PORT", "daemon_socket", "runtime_folder", "runtime_folder_path"]

DAEMON_PORT: Final = 8450
"""Of an address of a daemon that names none."""


def runtime_folder_path() -> Path:
    """``$XDG_RUNTIME_DIR/kvferry``, else ``kvferry-UID`` in the folder for temporary files; not made."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    own = f"kvferry-{os.geteuid()}"
    return Path(given) / "kvferry" if Path(given).is_absolute() else _temporary_folder() / own


def _temporary_folder() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # also where no file can be opened to try one
        os.close(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
        raise


def runtime_folder() -> Path:
    """The same, made if need be, and seen to be this user's alone.

    Raises:
        ConnectError: If it cannot be had; with the remedy.
    """
    folder = runtime_folder_path()
    remedy = "set XDG_RUNTIME_DIR to a folder of your own"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConnectError(f"the folder {folder} cannot be made: {error.strerror}; {remedy}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConnectError(f"{folder} is not a folder that only uid {os.geteuid()} may use; {remedy}")
    return folder


def daemon_socket() -> str:
    """Path of the daemon's socket where nothing else is said; both daemon and clients compute it."""
    return str(runtime_folder_path() / "daemon.sock")
