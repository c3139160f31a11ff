"""Who may use the paged KV: a bounded, first-come-first-served line for blocks and places."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvferry.core.clock import is_past
from kvferry.core.errors import OverloadedError, RequestError
from kvferry.engine.workers.requests import POLL_S

__all__ = ["Admission", "Place"]


class Place:
    """Blocks and a place held by one request; given back once, by whoever ends it."""

    def __init__(self, admission: Admission, blocks: int) -> None:
        self._admission = admission
        self.blocks = blocks
        self._held = False

    def leave(self) -> None:
        """Give everything back; a second call does nothing."""
        self._admission._leave(self)


class Admission:
    """Hands out ``blocks`` paged blocks and ``places``; requests beyond that wait in line.

    It only counts: the blocks themselves are allocated by whoever was let in, who then never finds
    too few. Thread safe.
    """

    def __init__(self, *, blocks: int, places: int, max_waiting: int, what: str) -> None:
        self._total = blocks
        self._free = blocks
        self._places = places
        self._max_waiting = max_waiting
        self._what = what
        self._line: deque[Place] = deque()
        self._running = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def running(self) -> int:
        """Requests that were let in and have not left."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._line)

    def enter(self, blocks: int, deadline: float, still_wanted: Callable[[], None]) -> Place:
        """Wait in line until ``blocks`` and a place are free.

        Args:
            blocks: Paged blocks that the request needs in all.
            deadline: By when it must be let in.
            still_wanted: Called every now and then while waiting; raises to give up.

        Raises:
            RequestError: If it needs more blocks than there are.
            OverloadedError: If the line is full, the deadline passes, or the worker is closing.
        """
        if blocks > self._total:
            raise RequestError(
                f"the request needs {blocks} blocks of paged KV, this {self._what} has {self._total}; "
                "shorten it, or give the worker more memory (kv.memory)"
            )
        place = Place(self, blocks)
        with self._changed:
            if self._closed:
                raise OverloadedError(f"this {self._what} is shutting down")
            if len(self._line) >= self._max_waiting and not self._fits(blocks, ahead=len(self._line)):
                raise OverloadedError(
                    f"{len(self._line)} requests wait at this {self._what}, no more than "
                    f"{self._max_waiting} may; try again later"
                )
            self._line.append(place)
        try:
            self._wait_turn(place, deadline, still_wanted)
        except BaseException:
            with self._changed:
                if not place._held:
                    self._line.remove(place)
                self._changed.notify_all()
            place.leave()
            raise
        return place

    def close(self) -> None:
        """Let nobody in any more; those in line give up."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_idle(self, deadline: float) -> bool:
        """Wait until nobody holds a place or waits for one; ``False`` at the deadline."""
        with self._changed:
            while self._running or self._line:
                if is_past(deadline):
                    return False
                self._changed.wait(POLL_S)
        return True

    def _fits(self, blocks: int, *, ahead: int) -> bool:
        return not ahead and self._running < self._places and blocks <= self._free

    def _wait_turn(self, place: Place, deadline: float, still_wanted: Callable[[], None]) -> None:
        while True:
            with self._changed:
                if self._closed:
                    raise OverloadedError(f"this {self._what} is shutting down")
                if self._line[0] is place and self._fits(place.blocks, ahead=0):
                    self._line.popleft()
                    self._running += 1
                    self._free -= place.blocks
                    place._held = True
                    self._changed.notify_all()
                    return
                if is_past(deadline):
                    raise OverloadedError(
                        f"no room at this {self._what} in time: {self._running} requests run, "
                        f"{self._free} of {self._total} blocks are free, {place.blocks} are needed"
                    )
                self._changed.wait(POLL_S)
            still_wanted()

    def _leave(self, place: Place) -> None:
        with self._changed:
            if place._held:
                place._held = False
                self._running -= 1
                self._free += place.blocks
                self._changed.notify_all()
