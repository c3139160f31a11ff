"""Where the directories of a disk tier may lie, and how they are made."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from kvferry.core.errors import ConfigError, TierError
from kvferry.store.disk import names
from kvferry.store.disk.files import Files
from kvferry.store.disk.lock import is_in_use

__all__ = ["RootDownError", "make_directory", "open_directory", "require_apart", "require_outside"]


class RootDownError(OSError):
    """The directory cannot be used now; a tier's own, never leaves it."""


def make_directory(path: str) -> None:
    """Make a directory for the owner alone, and those above it, unless it is there.

    Raises:
        OSError: If it cannot be made; what stands in the way is named.
    """
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise _in_the_way(path, error) from error


def open_directory(files: Files, path: str) -> int:
    """Open a tier's directory.

    Raises:
        OSError: If that cannot be done; what stands in the way is named.
    """
    try:
        return files.open_root(path)
    except NotADirectoryError as error:
        raise _in_the_way(path, error) from error


def _in_the_way(path: str, error: OSError) -> OSError:
    for part in (Path(path), *Path(path).parents):
        if os.path.lexists(part) and not part.is_dir():
            what = "a link that leads nowhere" if part.is_symlink() else "a file"
            return NotADirectoryError(errno.ENOTDIR, f"{part} is {what}, not a directory")
    return error


def require_apart(directories: Sequence[str]) -> None:
    """Refuse two names of one directory, and one directory inside another; links are followed.

    Raises:
        ConfigError: With the names as they were given.
    """
    real = {path: Path(os.path.realpath(path)) for path in directories}
    for one, other in combinations(directories, 2):
        if real[one] == real[other] or _same(one, other):
            raise ConfigError(f"{one} and {other} are the same directory: give each once")
        for inner, outer in ((one, other), (other, one)):
            if any(above == real[outer] or _same(above, outer) for above in real[inner].parents):
                raise ConfigError(f"{inner} lies inside {outer}: give directories side by side")


def _same(one: str | Path, other: str | Path) -> bool:
    """Whether both are one directory, by whatever links and mounts."""
    try:
        return Path(one).samefile(other)
    except OSError:
        return False


def require_outside(path: str) -> None:
    """Refuse a directory inside one that a disk tier uses now.

    Raises:
        TierError: With the names of both.
    """
    for above in Path(os.path.realpath(path)).parents:
        if not (above / names.LOCK_NAME).is_file():
            continue
        try:
            fd = os.open(above, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            if is_in_use(fd):
                raise TierError(
                    f"{path} lies inside {above}, the directory of a disk tier that is in use; give each a "
                    "directory of its own"
                )
        finally:
            os.close(fd)
