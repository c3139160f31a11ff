"""Memory between the stages of a pipeline: of a thread, used again, never shared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

from kvferry.core.buffers import page_aligned

__all__ = ["Buffers", "Scratch"]

Buffers: TypeAlias = "Callable[[str, int], memoryview]"
"""A buffer of a size by name, page-aligned; one asked for again under its name is the same memory."""
_KEPT_NBYTES: Final = 64 << 20


class Scratch:
    """Named buffers of each thread, grown to their largest use.

    Stages may use pipelines themselves: each use that begins inside another has buffers of its own. A
    buffer of more than 64 MiB is not kept for the next use.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    @contextmanager
    def taken(self) -> Iterator[Buffers]:
        """The buffers of one use, valid until its end."""
        held: list[dict[str, memoryview]] = self._local.__dict__.setdefault("held", [])
        own = held.pop() if held else {}

        def buffer(name: str, nbytes: int) -> memoryview:
            found = own.get(name)
            if found is None or len(found) < nbytes:
                found = own[name] = page_aligned(nbytes)
            return found[:nbytes]

        try:
            yield buffer
        finally:
            held.append({name: view for name, view in own.items() if len(view) <= _KEPT_NBYTES})
