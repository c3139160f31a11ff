"""How something is made once in the user's cache folder, whatever else runs or is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvferry.core.cachedir import cache_dir
from kvferry.core.clock import deadline_in, is_past, time_left
from kvferry.core.errors import ConfigError, TransferTimeoutError

__all__ = ["Progress", "make_once"]

Progress = Callable[[str], None]


def make_once(
    name: str,
    is_complete: Callable[[Path], bool],
    build: Callable[[Path], Path],
    progress: Progress,
    *,
    timeout_s: float,
    needed_nbytes: int = 0,
) -> Path:
    """The folder ``name`` of the cache, built now unless it is there and complete.

    Only one process builds at a time (a lock file that the kernel gives back however the holder ends). It
    builds in a temporary folder beside the final one, which is renamed when all is on the disk; what a
    killed process left is removed by the next.

    Args:
        name: Name of the folder.
        is_complete: Whether a folder has everything.
        build: Gets a temporary folder, returns the finished folder inside it.
        progress: Told when another process has to be waited for.
        timeout_s: How long to wait for it.
        needed_nbytes: Free space that building takes.

    Raises:
        ConfigError: The cache folder cannot be used.
        TransferTimeoutError: Another process held the lock for too long.
    """
    cache = cache_dir()
    final = cache / name
    if is_complete(final):
        return final
    with _mapped_os_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{name}.lock", progress, timeout_s):
            if is_complete(final):  # another process made it while this one waited
                return final
            for stale in cache.glob(f".{name}.*.partial"):
                shutil.rmtree(stale, ignore_errors=True)
            _require_space(cache, name, needed_nbytes)
            work = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=cache))
            try:
                made = build(work)
                _sync(made)
                if final.exists():  # what is there was found incomplete
                    shutil.rmtree(final)
                made.rename(final)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return final


def _require_space(folder: Path, name: str, needed_nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_nbytes:
        raise ConfigError(
            f"{folder} has {free >> 20} MiB free, {needed_nbytes >> 20} MiB are needed to make {name}; "
            "free some, or set KVFERRY_CACHE_DIR to another folder"
        )


def _sync(directory: Path) -> None:
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())


@contextlib.contextmanager
def _locked(path: Path, progress: Progress, timeout_s: float) -> Iterator[None]:
    deadline, told = deadline_in(timeout_s), False
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if is_past(deadline):
                    raise TransferTimeoutError(
                        f"another process has held {path} for {timeout_s:g} s; end it and run again"
                    ) from None
                if not told:
                    progress(f"another process is making {path.stem.lstrip('.')}; waiting for it")
                    told = True
                time.sleep(min(0.2, time_left(deadline)))
        yield


@contextlib.contextmanager
def _mapped_os_errors(cache: Path) -> Iterator[None]:
    try:
        yield
    except TimeoutError:  # an OSError, but one of ours
        raise
    except OSError as error:
        raise ConfigError(
            f"cannot use the cache folder {cache}: {error}; set KVFERRY_CACHE_DIR to another one"
        ) from error
