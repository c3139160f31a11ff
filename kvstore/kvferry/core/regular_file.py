"""Files that somebody names by path: a FIFO would hold up whoever opens it for ever, a device never ends."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_regular"]


def open_regular(path: Path) -> BinaryIO:
    """Open the file at ``path`` for reading, without waiting.

    Raises:
        OSError: If it cannot be opened, or is no regular file.
    """
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise
