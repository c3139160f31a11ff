"""Streams whose sender writes into the receiver's slots from another node, over a region transport.

The receiver opens windows on the slots it has reserved, for this stream alone, and sends their grants before
it accepts the stream. The sender writes layer slices there, and says so in a frame once the transport has
told it that they are in place. However the stream ends, the receiver closes the windows: from then on
nothing can be written through them any more, and the slots are free.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvferry.core.address import parse_url
from kvferry.core.arena import Arena
from kvferry.core.clock import deadline_in, earliest, is_past
from kvferry.core.errors import ConfigError, KVFerryError, TransferTimeoutError, TransportError
from kvferry.core.segments import Slot
from kvferry.core.spec import KVSpec
from kvferry.streaming.delivery import Delivery, FrameDelivery, Hold, LayerPart, SegmentDelivery
from kvferry.transports.region import RegionPart, RegionTransfer, RegionTransport, Window
from kvferry.wire import Channel, SharedArena
from kvferry.wire.messages import LayerPlaced, StreamSlots, StreamWindows

__all__ = [
    "STREAM_WINDOWS",
    "RegionDelivery",
    "RegionGrant",
    "WindowKeeper",
    "placed_delivery",
    "windows_capability",
]

_log = logging.getLogger(__name__)
STREAM_WINDOWS: Final = "stream_windows"
"""With a colon and the name of the region transport, the capability of :func:`windows_capability`."""

_MOST_WINDOWS: Final = 4096
_LOOK_S: Final = 0.02


def windows_capability(regions: RegionTransport) -> str:
    """The capability: this end understands ``stream_windows`` over that transport, and ``layer_placed``."""
    return f"{STREAM_WINDOWS}:{regions.name}"


# ---- the receiver -----------------------------------------------------------------------------------


class WindowKeeper:
    """Keeps slots in quarantine whose windows could not be withdrawn, and tries again. Thread safe.

    Has no thread: whoever needs the room calls :meth:`reap`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[tuple[list[Window], contextlib.ExitStack]] = []

    def withdraw(self, windows: Sequence[Window], writing: contextlib.ExitStack) -> None:
        """Close ``windows``; close ``writing``, which keeps the slots, once that was done."""
        if left := _close(windows):
            with self._lock:
                self._held.append((left, writing))
            _log.error(
                "%d windows of a stream cannot be withdrawn; their slots stay in quarantine", len(left)
            )
        else:
            writing.close()

    def reap(self) -> int:
        """Try again; returns how many streams still hold slots."""
        with self._lock:
            held, self._held = self._held, []
        for windows, writing in held:
            self.withdraw(windows, writing)
        with self._lock:
            return len(self._held)


def _close(windows: Sequence[Window]) -> list[Window]:
    """Close windows; those that refuse."""
    left = []
    for window in windows:
        try:
            window.close()
        except TransportError as error:
            _log.warning("a window cannot be closed: %s", error)
            left.append(window)
    return left


class RegionGrant:
    """Lets the senders of one channel write into slots of an arena over a region transport.

    Args:
        channel: From the sender.
        arena: In which the store reserves the slots.
        regions: The endpoint of this process; the sender's host must be among those it trusts.
        keeper: Where slots go whose windows cannot be withdrawn; one a store.
    """

    def __init__(
        self, channel: Channel, arena: Arena, regions: RegionTransport, keeper: WindowKeeper
    ) -> None:
        self._channel = channel
        self._arena = arena
        self._regions = regions
        self._keeper = keeper
        self._trusted = regions.trusts(_host(channel.address))

    @property
    def usable(self) -> bool:
        """Whether the sender knows how, and is trusted."""
        return self._trusted and windows_capability(self._regions) in self._channel.peer.capabilities

    def prepare(self, slots: Mapping[int, Slot]) -> _OpenWindows | None:
        """Open windows on the slots; slots side by side share one. ``None`` if that cannot be done."""
        self._keeper.reap()
        windows: list[Window] = []
        placed: list[tuple[int, int, int]] = []
        try:
            for first, nbytes, blocks in _runs(slots)[:_MOST_WINDOWS]:
                whole = Slot(first.segment, first.offset, nbytes, first.generation)
                windows.append(self._regions.open_window(self._arena.view(whole), "write"))
                placed += [(b, len(windows) - 1, slots[b].offset - first.offset) for b in blocks]
        except KVFerryError as error:
            _log.warning("KV goes by frames: no window for %s: %s", self._channel.address, error)
            self._keeper.withdraw(windows, contextlib.ExitStack())
            return None
        message = StreamWindows(
            transport=self._regions.name,
            grants=tuple(window.grant for window in windows),
            slots=tuple(placed),
        )
        return _OpenWindows(self._channel, self._keeper, windows, message)


class _OpenWindows:
    """The windows of one stream."""

    needs_word = False
    """What the sender says does not matter: closing the windows ends its writes."""

    def __init__(
        self, channel: Channel, keeper: WindowKeeper, windows: list[Window], message: StreamWindows
    ) -> None:
        self.blocks = frozenset(block for block, _, _ in message.slots)
        self._channel = channel
        self._keeper = keeper
        self._windows = windows
        self._message = message

    def send(self, deadline: float) -> None:
        self._channel.send(self._message, deadline=deadline)

    def end(self, writing: contextlib.ExitStack, error: BaseException | None) -> None:  # noqa: ARG002
        self._keeper.withdraw(self._windows, writing)


def _host(address: str) -> str:
    try:
        return parse_url(address, default_port=0).host
    except ConfigError:  # of a transport whose addresses are no URLs
        return ""


def _runs(slots: Mapping[int, Slot]) -> list[tuple[Slot, int, list[int]]]:
    """Slots that lie side by side: the first, the bytes of all, and their blocks."""
    found: list[tuple[Slot, int, list[int]]] = []
    for block, slot in sorted(slots.items(), key=lambda item: (item[1].segment, item[1].offset)):
        if found:
            first, _, blocks = found[-1]
            start = slot.offset - first.offset
            # a slot ends on a page border, its block may end before
            if first.segment == slot.segment and start == slots[blocks[-1]].slot_nbytes * len(blocks):
                found[-1] = (first, start + slot.nbytes, [*blocks, block])
                continue
        found.append((slot, slot.nbytes, [block]))
    return found


# ---- the sender -------------------------------------------------------------------------------------


class RegionDelivery:
    """The payload is written into the receiver's windows.

    Where the transport fails, this part and all later ones go by frames: a write that was not seen to end
    would bring the same bytes, so their memory is held until the stream is over.

    Args:
        channel: To the receiver.
        regions: The endpoint of this process.
        granted: The windows.
        spec: Shape of the blocks.
        blocks: Numbers that may be among them.
        stopped: Whether the stream has ended, so that nothing is waited for any more.
    """

    def __init__(
        self,
        channel: Channel,
        regions: RegionTransport,
        granted: StreamWindows,
        spec: KVSpec,
        blocks: frozenset[int],
        *,
        stopped: Callable[[], bool],
    ) -> None:
        self._channel = channel
        self._regions = regions
        self._grants = granted.grants
        self._spec = spec
        self._frames = FrameDelivery(channel)
        self._stopped = stopped
        self._failed = granted.transport != regions.name
        self._unsettled: list[Hold | None] = []
        self._slots = {
            block: (window, offset)
            for block, window, offset in granted.slots
            if block in blocks and window < len(granted.grants)
        }
        _log.debug("%s: %d blocks go over %s", channel.address, len(self._slots), granted.transport)

    def takes(self, block: int) -> bool:
        """Whether there is a window for the block."""
        return not self._failed and block in self._slots

    def send(self, part: LayerPart, deadline: float) -> None:
        """Write, wait until all is in place, then send the message alone."""
        if not self._failed:
            try:
                self._write(part, deadline)
            except TransferTimeoutError:
                self._unsettled.append(part.hold)
                raise
            except KVFerryError as error:
                self._failed = True
                self._unsettled.append(part.hold)
                _log.warning("%s: KV goes by frames from here on: %s", self._channel.address, error)
        if self._failed:
            self._frames.send(part, deadline)
        else:
            self._channel.send(LayerPlaced(layer=part.layer, blocks=part.blocks), deadline=deadline)

    def _write(self, part: LayerPart, deadline: float) -> None:
        by_window: dict[int, list[RegionPart]] = {}
        start = self._spec.layer_slice(part.layer).start
        each = len(part.parts) // len(part.blocks)
        for index, block in enumerate(part.blocks):
            window, offset = self._slots[block]
            parts, at = by_window.setdefault(window, []), offset + start
            for view in part.parts[index * each : (index + 1) * each]:
                parts.append(RegionPart(view, at))
                at += len(view)
        under_way = [self._regions.write(self._grants[w], parts) for w, parts in by_window.items()]
        for transfer in under_way:
            self._await(transfer, deadline)

    def _await(self, transfer: RegionTransfer, deadline: float) -> None:
        while True:
            try:
                transfer.wait(earliest(deadline, deadline_in(_LOOK_S)))
                return
            except TransferTimeoutError:
                if is_past(deadline) or self._stopped():
                    raise


def placed_delivery(
    channel: Channel,
    spec: KVSpec,
    blocks: frozenset[int],
    *,
    arena: SharedArena | None,
    slots: StreamSlots | None,
    regions: RegionTransport | None,
    windows: StreamWindows | None,
    stopped: Callable[[], bool],
) -> Delivery | None:
    """How KV gets into the receiver's slots without its help; ``None`` if it goes by frames.

    Args:
        channel: To the receiver.
        spec: Shape of the blocks.
        blocks: The full blocks that it misses.
        arena: Its arena, as far as it is mapped here.
        slots: What it said of its slots there.
        regions: The endpoint of this process.
        windows: What it said of its windows.
        stopped: Whether the stream has ended.
    """
    if arena is not None and arena.epoch and slots is not None:
        return SegmentDelivery(channel, arena.map, slots, spec, blocks)
    if regions is None or windows is None:
        return None
    return RegionDelivery(channel, regions, windows, spec, blocks, stopped=stopped)
