"""An arena as other processes have it: what they are told of its segments, and a map of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.errors import ConfigError, StoreError
from kvferry.core.segments import MappedSegment, MappedSlots, SegmentInfo, Slot

__all__ = ["ArenaLayout", "ArenaMap"]


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """What another process needs beside the descriptors; plain data that msgspec encodes.

    ``epoch`` differs for every arena ever made: after a restart of the owner old maps show nothing new.
    """

    tenant: str
    epoch: str
    segments: tuple[SegmentInfo, ...]


class ArenaMap:
    """An arena as a client process sees it: views and generation checks, none of the owner's code.

    Built from the plain layout and the descriptors that were passed along. Thread safe once built;
    :meth:`add` is for one thread at a time.
    """

    def __init__(self, tenant: str, epoch: str) -> None:
        self.tenant = tenant
        self.epoch = epoch
        self._segments: dict[int, MappedSegment] = {}
        self._known = 0

    @classmethod
    def from_fds(
        cls, layout: ArenaLayout, fds: Sequence[tuple[int, int]], *, writable: bool = False
    ) -> ArenaMap:
        """Map every segment of ``layout``.

        Args:
            layout: From :meth:`Arena.layout`.
            fds: (data, generations) descriptors in the same order; they stay the caller's.
            writable: Map the data writable.

        Raises:
            ProtocolError: If a descriptor is not what ``layout`` says.
            ValueError: If there are not as many pairs as segments.
        """
        arena = cls(layout.tenant, layout.epoch)
        for info, (data_fd, generations_fd) in zip(layout.segments, fds, strict=True):
            arena.add(info, data_fd, generations_fd, writable=writable)
        return arena

    def add(self, info: SegmentInfo, data_fd: int, generations_fd: int, *, writable: bool = False) -> None:
        """Map one more segment, which the owner made since; one that is retired is only known.

        Raises:
            ConfigError: If it belongs to another tenant.
            ProtocolError: As :meth:`from_fds`.
        """
        if info.tenant != self.tenant:
            raise ConfigError(
                f"segment {info.segment} is tenant {info.tenant}'s, this map is {self.tenant}'s"
            )
        if MappedSegment.told_gone(info, generations_fd) < info.nbytes:
            self._segments[info.segment] = MappedSegment(info, data_fd, generations_fd, writable=writable)
        self._known = max(self._known, info.segment + 1)

    def forget_retired(self) -> int:
        """Let go of segments that the owner does not use any more; bytes that are mapped less.

        Leases keep what they have. For one thread at a time, as :meth:`add`.
        """
        retired = [number for number, segment in list(self._segments.items()) if segment.is_retired]
        return sum(self._segments.pop(number).info.nbytes for number in retired)

    @property
    def segments(self) -> int:
        """How many segments are known, those included that are retired."""
        return self._known

    @property
    def mapped_nbytes(self) -> int:
        """Bytes of all segments that are mapped, without what their owner has given back."""
        return sum(one.info.nbytes - one.gone_nbytes for one in list(self._segments.values()))

    def __contains__(self, slot: Slot) -> bool:
        return slot.segment in self._segments

    def view(self, slot: Slot) -> memoryview:
        """The bytes of ``slot``; tentative until :meth:`is_current` was true after the last read."""
        return self._segment(slot).view(slot)

    def is_current(self, slot: Slot) -> bool:
        """Whether ``slot`` has not been freed since it was handed out."""
        return self._segment(slot).generation(slot.offset) == slot.generation

    def slots(self, words: Sequence[int], nbytes: int) -> MappedSlots:
        """Many slots of one size at once; see :class:`MappedSlots`."""
        return MappedSlots(self._segments, words, nbytes)

    def close(self) -> None:
        """Forget the mappings; the memory goes with the last view."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def _segment(self, slot: Slot) -> MappedSegment:
        found = self._segments.get(slot.segment)
        if found is None:
            raise StoreError(
                f"{slot}: segment {slot.segment} is not mapped here ({sorted(self._segments)} are); "
                "ask the owner for its descriptors"
            )
        return found
