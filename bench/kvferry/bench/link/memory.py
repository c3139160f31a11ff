"""Memory of one end: what is sent and where it is received, each walking through at least 256 MiB."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from weakref import WeakValueDictionary

import numpy as np

from kvferry.bench.blocks import BlockSource
from kvferry.bench.ceilings import ColdWalk
from kvferry.bench.results import Sample
from kvferry.core.arena import available_memory
from kvferry.core.buffers import PAGE_NBYTES
from kvferry.core.errors import ConfigError, CorruptBlockError, KVFerryError
from kvferry.core.units import parse_nbytes

__all__ = ["LinkMemory", "MemoryPool", "SharedMemory", "parse_walk", "parts_at_once", "timed"]

_RETURN_S = 0.01  # who has just answered is about to give its memory back


def parse_walk(text: str | float) -> int:
    """Bytes of a walk.

    Raises:
        ConfigError: If it is malformed, below a page, or above the memory that is available.
    """
    nbytes, available = parse_nbytes(text), available_memory()
    if not PAGE_NBYTES <= nbytes <= available:
        raise ConfigError(
            f"--walk {nbytes}: take from {PAGE_NBYTES} bytes up to what memory is available, {available}"
        )
    return nbytes


def parts_at_once(nbytes: int, batch: int, walk_nbytes: int) -> int:
    """How many parts of ``nbytes`` a message has: ``batch``, or as many as the walk holds."""
    return max(1, min(batch, walk_nbytes // nbytes))


class LinkMemory:
    """Parts of one size to send, and places for such parts; both taken in turn.

    Every page to send starts with its own number, so both ends know what each part holds.

    Args:
        nbytes: Of a part; whole pages.
        walk_nbytes: What is walked through before a place is used again.
    """

    def __init__(self, nbytes: int, walk_nbytes: int) -> None:
        if nbytes <= 0 or nbytes % PAGE_NBYTES:
            raise ConfigError(f"a part of {nbytes} bytes: sizes are multiples of {PAGE_NBYTES} bytes")
        self.nbytes = nbytes
        self.walk_nbytes = walk_nbytes
        self._source: BlockSource | None = None
        self._target: ColdWalk | None = None
        self._next = 0

    @property
    def source(self) -> BlockSource:
        """What is sent."""
        if self._source is None:
            self._source = BlockSource(self.nbytes, self.walk_nbytes)
        return self._source

    def parts(self, batch: int) -> tuple[int, list[memoryview]]:
        """The next parts to send, and the number of the first."""
        first = self._next
        self._next = (first + batch) % len(self.source)
        return first, self.numbered(first, batch)

    def numbered(self, first: int, batch: int) -> list[memoryview]:
        """Parts by number, counted round."""
        return [self.source[first + n] for n in range(batch)]

    def places(self, batch: int, *, clear: bool = False) -> list[memoryview]:
        """The next places to receive into; with ``clear`` nothing is left of what they held."""
        if self._target is None:
            self._target = ColdWalk(self.nbytes, self.walk_nbytes, fill=0)
        places = [self._target.take() for _ in range(batch)]
        if clear:
            for place in places:
                np.frombuffer(place, np.uint8)[:] = 0
        return places

    def compare(self, first: int, places: list[memoryview]) -> None:
        """Check that ``places`` hold the parts from ``first`` on.

        Raises:
            CorruptBlockError: If one does not.
        """
        for n, place in enumerate(places):
            if not self.source.matches(first + n, place):
                raise CorruptBlockError(f"part {first + n} of {self.nbytes} bytes arrived with other bytes")


class SharedMemory:
    """Memory of one size for connections that take turns: each goes on where the last one stopped.

    Two buffers of one size may differ in speed for as long as they live, by the pages that the system found
    for them. So what is compared uses the same ones. Connections that move parts at once have different ones.
    """

    def __init__(self, nbytes: int, walk_nbytes: int) -> None:
        self.size = (nbytes, walk_nbytes)
        self._free: SimpleQueue[LinkMemory] = SimpleQueue()
        self._made = False

    def take(self) -> LinkMemory:
        """Memory for one operation."""
        if self._made:  # else nobody gives it back
            try:  # not suppress(), which takes as long as the rest: a bare baseline has nothing of this
                return self._free.get(timeout=_RETURN_S)
            except Empty:
                pass
        self._made = True
        return LinkMemory(*self.size)

    def give_back(self, memory: LinkMemory) -> None:
        """The operation is over."""
        self._free.put(memory)


class MemoryPool:
    """The memory of a peer, kept for as long as a connection uses that size."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: WeakValueDictionary[tuple[int, int], SharedMemory] = WeakValueDictionary()

    def of(self, nbytes: int, walk_nbytes: int) -> SharedMemory:
        """For parts of ``nbytes``."""
        with self._lock:
            found = self._sizes.get((nbytes, walk_nbytes))
            if found is None:
                found = self._sizes[nbytes, walk_nbytes] = SharedMemory(nbytes, walk_nbytes)
            return found


def timed(
    operations: Iterator[Callable[[], int]],
    failed: Callable[[KVFerryError], None],
    cpu_s: Callable[[], float] = time.process_time,
) -> Sample:
    """Run operations, each of which returns the bytes that its receiver counted.

    The time and the bytes of an operation that fails are left out; ``failed`` hears of it.
    """
    latencies: list[float] = []
    moved = 0
    cpu = cpu_s()
    for operation in operations:
        start = time.perf_counter()
        try:
            nbytes = operation()
        except KVFerryError as error:
            failed(error)
            continue
        latencies.append(time.perf_counter() - start)
        moved += nbytes
    return Sample(sum(latencies), moved, cpu_s() - cpu, tuple(latencies))
