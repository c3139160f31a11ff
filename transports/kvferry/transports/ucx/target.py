"""Where the bytes of one receiving call go."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvferry.core.buffers import total_nbytes
from kvferry.transports.ucx.frames import cut
from kvferry.transports.ucx.library import Request

__all__ = ["Slot", "Target"]


class Slot:
    """A piece of a view, as long as the message that may come for it.

    Attributes:
        view: Where its bytes go.
        request: The receive that was posted for exactly this piece, if any.
        guessed: Whether it was posted before its message was seen.
    """

    __slots__ = ("guessed", "request", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.request: Request | None = None
        self.guessed = False


class Target:
    """The views of one call as slots, filled in order.

    Attributes:
        slots: Those that are not filled, in order.
        wanted: Bytes of all views.
        left: Bytes that have not come.
    """

    __slots__ = ("left", "slots", "wanted")

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.slots = deque(Slot(piece) for view in views if len(view) for piece in cut(view))
        self.wanted = self.left = total_nbytes(slot.view for slot in self.slots)

    @property
    def got(self) -> int:
        """Bytes that have come."""
        return self.wanted - self.left

    def fill_first(self) -> None:
        """The first slot is full."""
        self.left -= len(self.slots.popleft().view)

    def split_first(self, nbytes: int) -> Slot:
        """Make the first slot ``nbytes`` long, its rest the second; nothing may be posted for it."""
        slot = self.slots[0]
        if nbytes < len(slot.view):
            rest = Slot(slot.view[nbytes:])
            slot.view = slot.view[:nbytes]
            self.slots.popleft()
            self.slots.appendleft(rest)
            self.slots.appendleft(slot)
        return slot

    def take(self, nbytes: int) -> list[memoryview]:
        """Views of the next ``nbytes``, or of all that is left: bytes that come without a message.

        What was posted for them is given up; no message can have come for it.
        """
        taken = []
        while nbytes and self.slots:
            slot = self.slots[0]
            slot.request = None  # whose end takes it back
            slot = self.split_first(min(nbytes, len(slot.view)))
            taken.append(slot.view)
            nbytes -= len(slot.view)
            self.fill_first()
        return taken
