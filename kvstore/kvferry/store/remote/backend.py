"""What a remote store must be able to do for blocks to be kept in it: values by name, in batches.

A backend moves bytes and knows nothing of blocks. It bounds every request and the number of connections,
leaves a server alone that fails, tells each problem once, and heals by itself.
"""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvferry.store.remote.payload import IncomingBlock, Pieces, Received, Sink

__all__ = ["Answer", "Backend", "Done", "Get", "Listed", "Put"]


class Done(enum.Enum):
    """What became of one request."""

    OK = "ok"
    """It was done: read whole, written, there, or removed."""
    NO = "no"
    """It was not done, as nothing is there to be read or removed, or something is there already."""
    REFUSED = "refused"
    """No room for it there. Not a fault."""
    FAILED = "failed"
    """The store cannot do it now."""


class Answer(NamedTuple):
    """The result of one request.

    Attributes:
        done: See :class:`Done`.
        reason: For people; no secrets in it.
        received: What the sink returned, for a value that was read.
        in_flight: See :class:`~kvferry.store.tier.ReadResult`.
    """

    done: Done
    reason: str = ""
    received: Received | None = None
    in_flight: threading.Event | None = None


class Put(NamedTuple):
    """A value to write.

    Attributes:
        name: Under which.
        nbytes: Of the whole value.
        source: Gives its bytes, just ``nbytes``, told whether it is the last one of those sent in a row;
            called again if the request has to be made again.
        only_new: Leave what is there already.
        final: Whether it is the last value of a block; others may go by themselves after a while.
        sealed: For a backend that hashes what it sends by itself, which may take this in place of ``source``:
            gives two parts, the value being these and the xxh3_64 of the second, 8 bytes little-endian.
    """

    name: str
    nbytes: int
    source: Callable[[bool], Iterable[Pieces]]
    only_new: bool = True
    final: bool = True
    sealed: Callable[[], tuple[bytes, memoryview]] | None = None


class Get(NamedTuple):
    """A value to read.

    Attributes:
        name: Of the value.
        sink: Given its size, makes what takes it.
        most: Only so many bytes from its start, which are then its size; ``None``: all.
        expected: For a backend that :attr:`~Backend.moves_whole` values: makes views that take one of
            the size that most have, among them those of the sink, which is given it all the same.
        sealed: For a backend that hashes what it receives by itself: a value of just the size of this
            block it may take as a manifest, data and a checksum, and have that judged, in place of ``sink``.
    """

    name: str
    sink: Callable[[int], Sink]
    most: int | None = None
    expected: Callable[[], list[memoryview]] | None = None
    sealed: IncomingBlock | None = None


class Listed(NamedTuple):
    """A stored value."""

    name: str
    nbytes: int


class Backend(ABC):
    """Values by name in one remote store. Thread safe; one answer a request, in order, by the deadline.

    Attributes:
        tells_deleted: Whether :meth:`delete` tells what was there.
        lists: Whether :meth:`listing` can tell what is there.
        moves_whole: Whether it moves values in one piece, and so wants :attr:`Get.expected`.
    """

    tells_deleted: bool = True
    lists: bool = True
    moves_whole: bool = False

    @abstractmethod
    def max_value_nbytes(self, deadline: float) -> int:
        """The largest value that it takes; asked of it if not known, and guessed if it does not say."""

    @abstractmethod
    def exists(self, names: Sequence[str], deadline: float) -> list[Answer]:
        """Whether there are values of these names: ``OK`` or ``NO``."""

    @abstractmethod
    def get(self, gets: Sequence[Get], deadline: float) -> list[Answer]:
        """Read values."""

    @abstractmethod
    def put(self, puts: Sequence[Put], deadline: float) -> list[Answer]:
        """Write values, each whole or not at all."""

    @abstractmethod
    def keep(self, names: Sequence[str], deadline: float) -> None:
        """Values that were not final belong to a block now: they stay as long as final ones."""

    @abstractmethod
    def delete(self, names: Sequence[str], deadline: float) -> list[Answer]:
        """Remove values: ``OK``, or ``NO`` where there was none."""

    @abstractmethod
    def listing(self, start: str, deadline: float) -> Iterator[list[Listed]]:
        """All values whose names begin with ``start``, some at a time, in any order; one may come twice.

        Raises:
            TierError: If it cannot be told by the deadline.
        """

    @abstractmethod
    def problems(self) -> Mapping[str, str]:
        """What does not work now, by where."""

    @abstractmethod
    def status(self) -> Mapping[str, str]:
        """Facts for people: versions, modes, advice."""

    @abstractmethod
    def counters(self) -> Mapping[str, float]:
        """Counts that only grow."""

    @abstractmethod
    def close(self) -> None:
        """End all requests, threads and connections; a second call has no effect."""
