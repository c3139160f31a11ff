"""The token of admin requests: in a file of its owner alone, compared in constant time, never logged."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
from pathlib import Path
from typing import Final

from kvferry.core.errors import ConfigError, KVFerryError
from kvferry.core.runtime_folder import runtime_folder, runtime_folder_path
from kvferry.core.token_file import read_token
from kvferry.core.user_path import user_path

__all__ = ["AdminToken", "read_token", "token_path"]

log = logging.getLogger(__name__)

_NAME: Final = "admin.token"


def token_path(setting: str) -> Path | None:
    """Where the token is by ``daemon.token_file``; both daemon and commands compute it.

    Raises:
        ConfigError: If the path is not absolute.
    """
    if setting == "none":
        return None
    if setting == "auto":
        return runtime_folder_path() / _NAME
    path = user_path(setting, "daemon.token_file")
    if not path.is_absolute():
        raise ConfigError(f"daemon.token_file is {setting!r}: write an absolute path, auto or none")
    return path


def _make(path: Path) -> None:
    """A token of our own, unless there is one."""
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise ConfigError(f"the token file {path} cannot be made: {error.strerror}") from error
    with os.fdopen(number, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(32) + "\n")


class AdminToken:
    """What admin requests must show. Thread safe.

    Args:
        setting: ``daemon.token_file``; with ``auto`` the file is made if it is not there.

    Raises:
        ConfigError: If the file cannot be used.
    """

    def __init__(self, setting: str) -> None:
        self._path = token_path(setting)
        self._digest = b""
        if setting != "auto":
            self.reload()
            return
        try:
            _make(runtime_folder() / _NAME)
            self.reload()
        except KVFerryError as error:  # nobody asked for it: everything else works
            log.warning("there are no admin requests: %s", error)

    def __repr__(self) -> str:
        return f"<AdminToken of {self._path}>"

    @property
    def given(self) -> bool:
        """Whether there is one; without, nobody may change anything."""
        return bool(self._digest)

    def reload(self) -> None:
        """Read the file again; if that fails the old one goes on.

        Raises:
            ConfigError: As the constructor.
        """
        if self._path is not None:
            self._digest = _digest(read_token(self._path))

    def matches(self, shown: str) -> bool:
        """Whether it is the one; takes the same time however much of it is right."""
        return self.given and hmac.compare_digest(self._digest, _digest(shown))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
