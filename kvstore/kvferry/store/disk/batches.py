"""What the verbs of a disk tier do with a batch of blocks before it goes to the threads, and after."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

from kvferry.core.keys import BlockKey
from kvferry.store.disk.reads import LATE
from kvferry.store.disk.state import Home
from kvferry.store.io_pool import Batch
from kvferry.store.tier import BlockWrite

__all__ = [
    "Missing", "collect", "placed", "share_of",
    "shares_of",
]  # fmt: skip

T = TypeVar("T")
_SHARE: Final = 8
_SHARE_NBYTES: Final = 1 << 20


def share_of(count: int, nbytes: int, threads: int) -> int:
    """How many of ``count`` files of ``nbytes`` a thread takes at once: none is left without work by that."""
    return max(1, min(_SHARE, _SHARE_NBYTES // nbytes, count // threads))


def shares_of(count: int, most: int, threads: int) -> list[range]:
    """Divide ``count`` files in shares of ``most``, the first and the last of each thread half as large.

    So the device has something to do soon, and the threads end together.
    """
    small = max(1, most // 2)
    edge = threads * small
    if threads < 2 or small == most or count < 2 * edge + threads * most:
        return [range(at, min(at + most, count)) for at in range(0, count, most)]
    starts = [*range(0, edge, small), *range(edge, count - edge, most), *range(count - edge, count, small)]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], count], strict=True)]


class Missing(NamedTuple):
    """Why an item of a batch has no result, and when the hand on its buffers is off them."""

    reason: str
    in_flight: threading.Event | None


def collect(batch: Batch[T]) -> list[T | Missing]:
    """The results of a batch; for an item without one, why."""
    results, begun = batch.cancel()
    settled = batch.settled.is_set()

    def missing(number: int) -> Missing:
        if number not in begun:
            return Missing(LATE, None)
        if settled:
            return Missing("an internal error; see the log", None)
        return Missing("not done by the deadline; the device may hang", batch.settled)

    return [missing(n) if result is None else result for n, result in enumerate(results)]


def placed(home: Home, blocks: Sequence[BlockWrite]) -> Sequence[BlockWrite]:
    """The blocks with positions, also where only those of their parents are known, here or on disk."""
    if all(block.position >= 0 for block in blocks):
        return blocks
    known: dict[BlockKey, int] = {}
    found: list[BlockWrite] = []
    for block in blocks:
        if block.position < 0 and block.parent is None:
            block = block._replace(position=0)
        elif block.position < 0 and block.parent is not None:
            above = home.held.entries.get(block.parent)
            position = known.get(block.parent, -1 if above is None else above.position)
            block = block._replace(position=position + 1 if position >= 0 else -1)
        known[block.key] = block.position
        found.append(block)
    return found
