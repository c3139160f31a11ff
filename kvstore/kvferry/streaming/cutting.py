"""What the model hands over, checked and cut into parts that are sent one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvferry.core.buffers import Buf, as_bytes_view
from kvferry.core.errors import ConfigError, ProtocolError
from kvferry.streaming.delivery import Delivery, Hold, LayerPart
from kvferry.streaming.layout import StreamLayout

__all__ = ["PartCutter"]

_PADDING = bytes(64)


class PartCutter:
    """Knows which blocks of which layers are still to come. Used by the model's thread.

    Args:
        layout: Of the stream.
        wanted: Blocks that the receiver asked for, the tail included.
        delivery: How a block goes.
        max_nbytes: Of one part; at least a block.
        who: The stream, for messages.
    """

    def __init__(
        self,
        layout: StreamLayout,
        wanted: Collection[int],
        delivery: Callable[[int], Delivery],
        max_nbytes: int,
        who: str,
    ) -> None:
        self._layout = layout
        self._wanted = wanted
        self._delivery = delivery
        self._max_nbytes = max_nbytes
        self._who = who
        self._unsent = [set(wanted) for _ in range(layout.layers)]  # by layer: blocks that were not cut yet

    def gaps(self) -> list[tuple[int, int]]:
        """Layers that are incomplete, each with the first block that is missing."""
        return [(layer, min(left)) for layer, left in enumerate(self._unsent) if left]

    def cut(
        self, layer: int, blocks: Sequence[tuple[int, Sequence[Buf]]], hold: Hold | None = None
    ) -> list[LayerPart]:
        """One layer of some blocks, as parts, which all have ``hold``; what is not wanted is left out.

        Raises:
            ConfigError: For a layer, block or size that does not belong to the stream.
            ProtocolError: For a block that was cut before.
        """
        if not 0 <= layer < self._layout.layers:
            raise ConfigError(f"{self._who}: layer {layer} is outside 0..{self._layout.layers - 1}")
        unsent = self._unsent[layer]
        parts: list[LayerPart] = []
        nbytes = 0
        for block, tensors in blocks:
            if not 0 <= block < self._layout.blocks:
                raise ConfigError(
                    f"{self._who}: block {block} of layer {layer} is outside 0..{self._layout.blocks - 1}"
                )
            if block not in unsent:
                if block in self._wanted:
                    raise ProtocolError(f"{self._who}: block {block} of layer {layer} was put twice")
                continue
            views = self._views(layer, block, tensors)
            size = self._layout.payload_nbytes(layer, block)
            delivery = self._delivery(block)
            if not parts or parts[-1].delivery is not delivery or nbytes + size > self._max_nbytes:
                parts.append(LayerPart(delivery, layer, (), [], hold=hold))
                nbytes = 0
            parts[-1].blocks += (block,)
            parts[-1].parts.extend(views)
            nbytes += size
            parts[-1].nbytes = nbytes
            unsent.discard(block)
        return parts

    def _views(self, layer: int, block: int, tensors: Sequence[Buf]) -> list[memoryview]:
        views = [as_bytes_view(t) for t in tensors]
        expected = self._layout.tensor_nbytes(layer, block)
        if len(views) != len(expected) or any(len(v) != n for v, n in zip(views, expected, strict=True)):
            raise ConfigError(
                f"{self._who}: layer {layer} of block {block} has tensors of {[len(v) for v in views]} "
                f"bytes, the spec says {list(expected)}"
            )
        pad = self._layout.pad_nbytes(layer, block)
        if pad:
            views.append(memoryview(_PADDING)[:pad])
        return views
