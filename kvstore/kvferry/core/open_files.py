"""What a process without free descriptors is told, and says."""

from __future__ import annotations

import errno
import resource
from pathlib import Path
from typing import Final

from kvferry.core.errors import CapacityError

__all__ = ["OUT_OF_FILES", "lack_of_files", "open_files", "open_files_limit"]

OUT_OF_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})
_REMEDY: Final = "raise its limit (ulimit -n, LimitNOFILE= of a service), or close some connections"


def lack_of_files(error: BaseException) -> CapacityError | None:
    """What a request is refused with that failed by ``error``, if that is for want of a descriptor."""
    if isinstance(error, OSError) and error.errno in OUT_OF_FILES:
        where = "this system has" if error.errno == errno.ENFILE else "the process that was asked has"
        return CapacityError(f"{where} no descriptor left ({error.strerror}): {_REMEDY}")
    return None


def open_files() -> int:
    """How many descriptors this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1


def open_files_limit() -> int | None:
    """How many it may have once it has raised its limit; ``None`` if there is no limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard
