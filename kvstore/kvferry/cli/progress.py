"""Progress of long work on standard error: a live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_lines"]

_EVERY_S = 10.0


@contextmanager
def progress_lines(start: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show progress within the block.

    Args:
        start: What is said at once.

    Yields:
        A function to call with a label, how many steps are done, and how many there are.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        lines = _Lines(start)
        yield lines.show
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(start)
        yield lambda label, done, total: bar.update(task, description=f"{label}: {done} of {total}")


class _Lines:
    """A line when the label changes, else one in ten seconds."""

    def __init__(self, start: str) -> None:
        self._started = self._last = time.monotonic()
        self._label = ""
        print(start, file=sys.stderr, flush=True)

    def show(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if label == self._label and now - self._last < _EVERY_S:
            return
        self._label, self._last = label, now
        print(f"{now - self._started:5.0f} s  {label}: {done} of {total}", file=sys.stderr, flush=True)
