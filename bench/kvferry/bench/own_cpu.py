"""Each end of a connection on a CPU of its own.

The scheduler may put the two ends on the same CPU, where nothing overlaps, and those of a baseline apart, and
change that between two rounds; on two machines, which is what is stood in for, they never share one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["cpu_pair", "on_cpu", "staying_on"]

T = TypeVar("T")


def cpu_pair() -> tuple[int | None, int | None]:
    """A CPU for this end and one for the other; none where there are not two."""
    cpus = sorted(os.sched_getaffinity(0))
    return (cpus[0], cpus[1]) if len(cpus) > 1 else (None, None)


@contextmanager
def staying_on(cpu: int | None) -> Iterator[None]:
    """The calling thread, and processes that it starts meanwhile, run on ``cpu``; anywhere if ``None``."""
    if cpu is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def on_cpu(cpu: int | None, subjects: Mapping[str, Callable[[], T]]) -> dict[str, Callable[[], T]]:
    """``subjects``, each run by the calling thread on ``cpu``."""

    def bound(run: Callable[[], T]) -> Callable[[], T]:
        def runs() -> T:
            with staying_on(cpu):
                return run()

        return runs

    return {name: bound(run) for name, run in subjects.items()}
