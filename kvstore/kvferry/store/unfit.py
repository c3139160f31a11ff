"""What a tier that is asked over a network has seen of blocks that some or all of its readers cannot use."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Final, Generic, TypeVar

__all__ = ["UnfitBlocks"]

_MOST: Final = 100_000
_REMEMBERED_S: Final = 60.0
K = TypeVar("K", bound=Hashable)


class UnfitBlocks(Generic[K]):
    """Blocks that were seen to have lost something, or to be of a codec that is not installed. Thread safe.

    Others may put better ones in their place, so each is remembered for a minute, and asked for again then.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until: OrderedDict[K, tuple[float, bool]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, names: Iterable[K], *, for_all: bool = False) -> None:
        """They lie there and have lost something; ``for_all``: nobody here can read them."""
        until = self._clock() + _REMEMBERED_S
        with self._lock:
            for name in names:
                self._until[name] = (until, for_all)
                self._until.move_to_end(name)
            while len(self._until) > _MOST:
                self._until.popitem(last=False)

    def discard(self, names: Iterable[K]) -> None:
        """They are not there any more, or exact ones are."""
        if self._until:
            with self._lock:
                for name in names:
                    self._until.pop(name, None)

    def has(self, name: K, *, takes_lossy: bool = False) -> bool:
        """Whether a reader cannot use what lies there under that name."""
        found = self._until.get(name)
        if found is None or found[0] < self._clock():
            return False
        return found[1] or not takes_lossy
