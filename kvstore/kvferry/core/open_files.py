"""What a process without free descriptors is told, and says."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Final

from kvferry.core.errors import CapacityError

__all__ = [
    "OUT_OF_FILES",
    "caused_by_lack_of_files",
    "lack_of_files",
    "open_files",
    "open_files_limit",
    "require_descriptors",
]

OUT_OF_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})
_WORDS: Final = tuple(os.strerror(number) for number in sorted(OUT_OF_FILES))
_REMEDY: Final = "raise its limit (ulimit -n, LimitNOFILE= of a service), or close some connections"


def lack_of_files(error: BaseException) -> CapacityError | None:
    """What a request is refused with that failed by ``error``, if that is for want of a descriptor."""
    if isinstance(error, OSError) and error.errno in OUT_OF_FILES:
        where = "this system has" if error.errno == errno.ENFILE else "the process that was asked has"
        return CapacityError(f"{where} no descriptor left ({error.strerror}): {_REMEDY}")
    return None


def caused_by_lack_of_files(error: BaseException) -> bool:
    """Whether ``error``, or what it was raised from, is for want of a descriptor, by errno or in words.

    The loader of shared libraries has words only.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, OSError) and cause.errno in OUT_OF_FILES:
            return True
        if isinstance(cause, (OSError, ImportError)) and any(words in str(cause) for words in _WORDS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def require_descriptors(count: int, purpose: str) -> None:
    """Check that this process may open ``count`` more descriptors, by opening them for a moment.

    For libraries that end the process, or keep an empty result for good, where they cannot open one.

    Args:
        count: 1 or more.
        purpose: What they are for, as a message says it.

    Raises:
        CapacityError: If there are fewer; with the remedy.
    """
    held: list[int] = []
    try:
        held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        held += (os.dup(held[0]) for _ in range(count - 1))
    except OSError as error:
        if error.errno not in OUT_OF_FILES:
            raise
        raise CapacityError(
            f"{purpose} takes {count} free descriptors, {len(held)} are left ({error.strerror}): {_REMEDY}"
        ) from error
    finally:
        for descriptor in held:
            os.close(descriptor)


def open_files() -> int:
    """How many descriptors this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1


def open_files_limit() -> int | None:
    """How many it may have once it has raised its limit; ``None`` if there is no limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard
