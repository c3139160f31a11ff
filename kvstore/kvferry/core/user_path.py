"""Paths as users write them, with ``~`` for a home folder."""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.core.errors import ConfigError

__all__ = ["user_path"]


def user_path(path: str | os.PathLike[str], what: str) -> Path:
    """The path with its leading ``~`` or ``~USER`` replaced by that home folder.

    Args:
        path: As it was given.
        what: Which option or file it is, for the error.

    Raises:
        ConfigError: If there is no such home folder: an unknown user, or one without ``HOME`` and account.
    """
    found = os.path.expanduser(path)  # noqa: PTH111  Path raises RuntimeError for an unknown user
    if found.startswith("~"):
        raise ConfigError(f"{what} is {os.fspath(path)!r}: that home folder is not known; write a whole path")
    return Path(found)
