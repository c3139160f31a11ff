"""Blocks of a device tier, and copies of them that are under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvferry.core.chains import ChainIndex
from kvferry.core.clock import time_left
from kvferry.core.errors import KVFerryError, RequestCancelledError, TransferTimeoutError
from kvferry.core.keys import BlockKey
from kvferry.device.base import DeviceBytes
from kvferry.device.tickets import CopyPart, CopyTicket
from kvferry.store.device.table import PoolBlock

__all__ = ["Flight", "TierBlock", "parts_of"]


class TierBlock(PoolBlock):
    """A block of the tier, in as many pages as it takes.

    Attributes:
        checksum: xxh3_64 of its bytes.
        position: Number in its chain, -1 if it is not known.
    """

    __slots__ = ("checksum", "position")

    def __init__(
        self,
        index: ChainIndex[PoolBlock],
        key: BlockKey,
        parent: BlockKey | None,
        pages: tuple[int, ...],
        checksum: int,
        position: int,
    ) -> None:
        super().__init__(index, key, parent, pages)
        self.checksum, self.position = checksum, position


class Flight:
    """The copy of one block. Whoever waits for it may leave; then ``left_behind`` is called at its end.

    Attributes:
        over: Set when no byte is read or written for it any more.
    """

    def __init__(self, left_behind: Callable[[], None]) -> None:
        self.over = threading.Event()
        self._lock = threading.Lock()
        self._left_behind = left_behind
        self._left = False
        self._ticket: CopyTicket | None = None

    def start(self, copy: Callable[..., CopyTicket], parts: Sequence[CopyPart]) -> None:
        """Ask for the copy.

        Raises:
            KVFerryError: If it can't be asked for; nothing is under way then.
        """
        self._ticket = copy(parts, done=self._done)

    def wait(self, deadline: float) -> KVFerryError | None:
        """Why the copy failed, if it did: :class:`TransferTimeoutError` at the deadline."""
        assert self._ticket is not None
        if not self.over.wait(time_left(deadline)):
            self._ticket.cancel(deadline)
            with self._lock:
                if not self.over.is_set():
                    self._left = True
                    return TransferTimeoutError("it was not copied by its deadline")
        error = self._ticket.error
        if isinstance(error, RequestCancelledError):
            return TransferTimeoutError("the copy was ended before it was done")
        return error

    def _done(self, ticket: CopyTicket) -> None:
        del ticket
        with self._lock:
            left = self._left
            if not left:
                self.over.set()
        if left:
            self._left_behind()
            self.over.set()


def parts_of(memory: DeviceBytes, pages: Sequence[int], page_nbytes: int, view: memoryview) -> list[CopyPart]:
    """The bytes of a block with the memory of its pages; neighbours are copied at once."""
    parts: list[CopyPart] = []
    first = 0
    for number in range(1, len(pages) + 1):
        if number < len(pages) and pages[number] == pages[number - 1] + 1:
            continue
        begin, end = first * page_nbytes, min(number * page_nbytes, len(view))
        start = pages[first] * page_nbytes
        parts.append((memory[start : start + end - begin], view[begin:end]))
        first = number
    return parts
