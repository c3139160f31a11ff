"""What lets the sender of a stream write into the receiver's reserved slots itself."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Protocol

from kvferry.core.segments import Slot

__all__ = ["OpenSlots", "SlotGrant"]


class OpenSlots(Protocol):
    """Slots of one stream that its sender may write."""

    @property
    def blocks(self) -> frozenset[int]:
        """Their blocks."""
        ...

    @property
    def needs_word(self) -> bool:
        """Whether the end needs a word of the sender, so that the channel must not be cut before."""
        ...

    def send(self, deadline: float) -> None:
        """Tell the sender.

        Raises:
            KVFerryError: As :meth:`Channel.send`; :meth:`end` is due all the same.
        """
        ...

    def end(self, writing: contextlib.ExitStack, error: BaseException | None) -> None:
        """Close ``writing``, which keeps the slots in quarantine, once nobody can write them any more.

        That may be after it has returned. Called once; never raises a :class:`KVFerryError`.

        Args:
            writing: Owned from here on.
            error: What ended the stream; ``None`` if the sender has said that it is done.
        """
        ...


class SlotGrant(Protocol):
    """One way to let the senders of one channel write; thread safe."""

    @property
    def usable(self) -> bool:
        """Whether it can be used with this sender now."""
        ...

    def prepare(self, slots: Mapping[int, Slot]) -> OpenSlots | None:
        """Open these slots, by block; ``None`` if that cannot be done, so that KV goes by frames."""
        ...
