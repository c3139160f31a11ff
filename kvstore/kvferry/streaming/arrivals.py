"""Which layers of which blocks have arrived at the receiver, and what may still come."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

from kvferry.core.errors import ProtocolError
from kvferry.streaming.layout import StreamLayout
from kvferry.wire.messages import LayerPlaced, PutEncoded, PutLayer

__all__ = ["Arrivals", "LayerMessage"]

LayerMessage: TypeAlias = "PutLayer | LayerPlaced | PutEncoded"


class Arrivals:
    """The books of one stream; guarded by its receiver.

    Args:
        layout: Of the stream.
        expected: Blocks that are to come, the tail included.
        who: The stream, for messages.

    Attributes:
        kv_nbytes: Bytes of KV that are in place.
    """

    def __init__(self, layout: StreamLayout, expected: Collection[int], who: str) -> None:
        self._layout = layout
        self._who = who
        self._left = [set(expected) for _ in range(layout.layers)]
        self.kv_nbytes = 0

    @property
    def complete(self) -> bool:
        """Whether everything is in place."""
        return not any(self._left)

    def has_layer(self, layer: int) -> bool:
        """Whether a layer is in place for all blocks."""
        return not self._left[layer]

    def has(self, layer: int, block: int) -> bool:
        """Whether a layer of a block is in place, or never had to come."""
        return block not in self._left[layer]

    def nbytes(self, message: LayerMessage) -> int:
        """Bytes of KV that a message brings."""
        return sum(self._layout.payload_nbytes(message.layer, block) for block in message.blocks)

    def check(self, message: LayerMessage) -> int:
        """Bytes of KV that a message brings.

        Raises:
            ProtocolError: If its layer or blocks were not asked for.
        """
        layer, layout = message.layer, self._layout
        if not 0 <= layer < layout.layers:
            raise ProtocolError(f"{self._who}: layer {layer} is outside 0..{layout.layers - 1}", remote=True)
        left = self._left[layer]
        wrong = [b for b in message.blocks if b not in left]
        if wrong or len(set(message.blocks)) != len(message.blocks):
            raise ProtocolError(
                f"{self._who}: layer {layer} came for blocks {wrong[:8] or list(message.blocks[:8])} that "
                "were not asked for, or came before",
                remote=True,
            )
        return self.nbytes(message)

    def add(self, message: LayerMessage, nbytes: int) -> bool:
        """What a message brought is in place; whether its layer now is for all blocks."""
        self.kv_nbytes += nbytes
        left = self._left[message.layer]
        left.difference_update(message.blocks)
        return not left

    def progress(self) -> str:
        """How far it is, for messages."""
        complete = sum(not left for left in self._left)
        return f"{complete} of {len(self._left)} layers complete, {self.kv_nbytes} bytes received"

    def check_complete(self) -> None:
        """At the end of the stream.

        Raises:
            ProtocolError: If something is missing.
        """
        gaps = [(layer, min(left)) for layer, left in enumerate(self._left) if left]
        if gaps:
            raise ProtocolError(
                f"{self._who}: the sender finished with {self.progress()}; first gap: block {gaps[0][1]} of "
                f"layer {gaps[0][0]}",
                remote=True,
            )
