"""A process that may open no more files, or only a few."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

__all__ = ["few_more_files", "no_more_files"]


@contextlib.contextmanager
def few_more_files(free: int) -> Iterator[None]:
    """This process can open just ``free`` more descriptors meanwhile."""
    next_free = [os.dup(0) for _ in range(free + 1)]
    for descriptor in next_free:
        os.close(descriptor)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def no_more_files() -> contextlib.AbstractContextManager[None]:
    """This process can open no descriptor meanwhile."""
    return few_more_files(0)
