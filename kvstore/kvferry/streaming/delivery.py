"""Where the payload of a stream goes: behind a frame's message, or straight into the receiver's slots.

A :class:`Delivery` brings one layer of some blocks to the receiver and tells it with one message, so that the
rest of a stream (order, the ring of acknowledgements, the end) is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableSet
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvferry.core.arena import ArenaMap
from kvferry.core.buffers import ByteArray, write_into
from kvferry.core.errors import StoreError
from kvferry.core.segments import Slot
from kvferry.core.spec import KVSpec
from kvferry.wire import Channel
from kvferry.wire.messages import LayerPlaced, PutEncoded, PutLayer, StreamSlots

__all__ = ["Delivery", "EncodedDelivery", "FrameDelivery", "Hold", "LayerPart", "SegmentDelivery"]


class Hold:
    """Says once that some memory is not needed any more: when the last part that has it is gone.

    Args:
        gone: Called then.
        among: Where it is added.
    """

    __slots__ = ("__weakref__", "_gone")

    def __init__(self, gone: Callable[[], None], among: MutableSet[Hold]) -> None:
        self._gone: Callable[[], None] | None = gone
        among.add(self)

    def release(self) -> None:
        """It is not needed, whoever still has it: the stream is over."""
        gone, self._gone = self._gone, None
        if gone is not None:
            gone()

    def __del__(self) -> None:
        self.release()


@dataclass(slots=True)
class LayerPart:
    """One layer of some blocks, waiting to be sent; holds the model's memory.

    Attributes:
        delivery: How it goes.
        layer: Number of the layer.
        blocks: Numbers of the blocks.
        parts: Bytes of each block: its tensors and the padding, as many views a block as the others have; or
            one view, of the encoded frame.
        codec: How it is encoded.
        nbytes: Bytes of KV, before encoding.
        ready_at: Monotonic time at which the model handed it over; known where a codec is used.
        sent: Called once its memory is not used any more.
        hold: Shared by all parts of the same memory, those that are cut from them included.
    """

    delivery: Delivery
    layer: int
    blocks: tuple[int, ...]
    parts: list[memoryview]
    codec: str = "raw"
    nbytes: int = 0
    ready_at: float = 0.0
    sent: Callable[[], None] | None = None
    hold: Hold | None = None


class Delivery(Protocol):
    """One way to bring layers to the receiver. Used by one thread."""

    def takes(self, block: int) -> bool:
        """Whether it can bring this block."""
        ...

    def send(self, part: LayerPart, deadline: float) -> None:
        """Bring a part, and tell the receiver.

        Raises:
            KVFerryError: As :meth:`Channel.send`.
        """
        ...


class FrameDelivery:
    """The payload follows the message through the connection."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def takes(self, block: int) -> bool:  # noqa: ARG002 - any
        """Every block."""
        return True

    def send(self, part: LayerPart, deadline: float) -> None:
        """Send message and payload."""
        self._channel.send(PutLayer(layer=part.layer, blocks=part.blocks), part.parts, deadline=deadline)


class EncodedDelivery:
    """The payload is one frame of a codec, and follows the message."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def takes(self, block: int) -> bool:  # noqa: ARG002 - any
        """Every block."""
        return True

    def send(self, part: LayerPart, deadline: float) -> None:
        """Send message and frame."""
        self._channel.send(PutEncoded(layer=part.layer, blocks=part.blocks), part.parts, deadline=deadline)
        if part.sent is not None:
            part.sent()


class SegmentDelivery:
    """The payload is copied into the receiver's slots, which this process has mapped.

    Args:
        channel: To the receiver.
        arena: The map of its arena.
        granted: What it lets this sender write; slots that are not mapped or not current are left out.
        spec: Shape of the blocks.
        blocks: Numbers that may be among them.
    """

    def __init__(
        self, channel: Channel, arena: ArenaMap, granted: StreamSlots, spec: KVSpec, blocks: frozenset[int]
    ) -> None:
        self._channel = channel
        self._spec = spec
        self._slots: Mapping[int, ByteArray] = {
            placed.block: view
            for placed in granted.slots
            if placed.block in blocks
            and granted.epoch == arena.epoch
            and (view := _writable(arena, placed.segment, placed.offset, placed.generation, spec)) is not None
        }

    def takes(self, block: int) -> bool:
        """Whether the slot of the block is known."""
        return block in self._slots

    def send(self, part: LayerPart, deadline: float) -> None:
        """Copy, with the GIL released, then send the message alone."""
        start = self._spec.layer_slice(part.layer).start
        each = len(part.parts) // len(part.blocks)
        for index, block in enumerate(part.blocks):
            slot, at = self._slots[block], start
            for view in part.parts[index * each : (index + 1) * each]:
                write_into(slot, at, view)
                at += len(view)
        self._channel.send(LayerPlaced(layer=part.layer, blocks=part.blocks), deadline=deadline)


def _writable(arena: ArenaMap, segment: int, offset: int, generation: int, spec: KVSpec) -> ByteArray | None:
    slot = Slot(segment, offset, spec.block_nbytes, generation)
    try:
        view = arena.view(slot)
        return np.frombuffer(view, np.uint8) if arena.is_current(slot) and not view.readonly else None
    except StoreError:  # not mapped, or not inside its segment
        return None
