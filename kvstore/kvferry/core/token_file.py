"""Tokens in files: one word, in a file that only its owner may use."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvferry.core.errors import ConfigError
from kvferry.core.user_path import user_path

__all__ = ["TOKEN_FILE_VARIABLE", "TOKEN_VARIABLE", "read_token", "require_owners_alone", "token_source"]

TOKEN_VARIABLE: Final = "KVFERRY_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_FILE_VARIABLE: Final = "KVFERRY_TOKEN_FILE"  # noqa: S105
_LEAST: Final = 16
_MOST: Final = 4096


def read_token(path: Path) -> str:
    """The token in a file.

    Raises:
        ConfigError: If the file is not there, others may read it, or it holds no token.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"the token file {path} cannot be read: {error.strerror}") from error
    with os.fdopen(number, "rb") as file:
        require_owners_alone(number, f"the token file {path}")
        text = file.read(_MOST + 1).decode("ascii", "replace").strip()
    _require_token(text, f"the token file {path}")
    return text


def require_owners_alone(fd: int, what: str) -> None:
    """Refuse an open file with secrets that others than its owner may use, or that is somebody else's.

    Root's are taken, since root may make it for the user that runs this.

    Raises:
        ConfigError: If it is such a file, or no file; the message begins with ``what``.
    """
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{what} must be a file that only its owner may use: chmod 600")


def _require_token(text: str, where: str) -> None:
    if not _LEAST <= len(text) <= _MOST or not text.isprintable() or not text.isascii() or " " in text:
        raise ConfigError(f"{where} must hold one word of {_LEAST} to {_MOST} ASCII characters")


def token_source(file: str | None) -> Callable[[], bytes] | None:
    """What gives the token to show: ``file``, else ``$KVFERRY_TOKEN_FILE``, else ``$KVFERRY_TOKEN``.

    A file is read each time, so that a token may be changed while its user runs.

    Returns:
        ``None`` if there is no token to show.
    """
    path = file or os.environ.get(TOKEN_FILE_VARIABLE) or None
    if path is not None:
        where = user_path(path, "the token file")
        return lambda: read_token(where).encode("ascii")
    text = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not text:
        return None
    _require_token(text, f"${TOKEN_VARIABLE}")
    token = text.encode("ascii")
    return lambda: token
