"""Where the bytes of one receiving call go."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvferry.transports.ucx.frames import MAX_MESSAGE_NBYTES, cut

__all__ = ["Slot", "Target"]


class Slot:
    """A piece of a view, as long as the message that may come for it.

    Attributes:
        view: Where its bytes go.
        request: Handle of the receive that was posted for exactly this piece, 0 once it is over; ``None`` if
            there is none.
    """

    __slots__ = ("request", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.request: int | None = None


class Target:
    """The views of one call as slots, filled in order.

    Attributes:
        slots: Those that are not filled, in order.
        wanted: Bytes of all views.
        left: Bytes that have not come.
        given_up: Handles of receives for which no message will come, to be taken back.
    """

    __slots__ = ("given_up", "left", "slots", "wanted")

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.slots: deque[Slot] = deque()
        self.given_up: list[int] = []
        wanted = 0
        for view in views:
            if nbytes := len(view):
                wanted += nbytes
                if nbytes <= MAX_MESSAGE_NBYTES:
                    self.slots.append(Slot(view))
                else:
                    self.slots.extend(map(Slot, cut(view)))
        self.wanted = self.left = wanted

    @property
    def got(self) -> int:
        """Bytes that have come."""
        return self.wanted - self.left

    def fill_first(self) -> None:
        """The first slot is full."""
        self.left -= len(self.slots.popleft().view)

    def give_up_first(self) -> None:
        """No message comes for what was posted for the first slot: a wrong guess."""
        slot = self.slots[0]
        if slot.request:
            self.given_up.append(slot.request)
        slot.request = None

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

    def next(self, nbytes: int) -> list[memoryview]:
        """Views of the next ``nbytes``, or of all that is left, which stay in their slots."""
        views = []
        for slot in self.slots:
            view = slot.view
            if nbytes < len(view):
                view = view[:nbytes]
            views.append(view)
            nbytes -= len(view)
            if not nbytes:
                break
        return views

    def fill(self, nbytes: int) -> None:
        """The next ``nbytes`` have come into their slots; nothing may be posted for these."""
        self.left -= nbytes
        slots = self.slots
        while nbytes:
            view = slots[0].view
            if nbytes < len(view):
                slots[0].view = view[nbytes:]
                return
            nbytes -= len(view)
            slots.popleft()

    def take(self, nbytes: int) -> list[memoryview]:
        """Views of the next ``nbytes``, or of all that is left: bytes that come without a message.

        What was posted for them is given up; no message can have come for it.
        """
        taken = []
        while nbytes and self.slots:
            self.give_up_first()
            slot = self.split_first(min(nbytes, len(self.slots[0].view)))
            taken.append(slot.view)
            nbytes -= len(slot.view)
            self.fill_first()
        return taken
