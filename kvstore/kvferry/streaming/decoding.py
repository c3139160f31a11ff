"""The receiver's decoding thread: encoded frames become layer slices in reserved slots."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvferry.codecs import decode_frame
from kvferry.codecs.frame import MAX_HEADER_NBYTES, Frame
from kvferry.core.buffers import copy_into
from kvferry.core.clock import time_left
from kvferry.core.errors import KVFerryError, ProtocolError, TransferTimeoutError
from kvferry.core.spec import LayerSpec
from kvferry.streaming.codec import StreamCodec
from kvferry.streaming.layout import StreamLayout
from kvferry.streaming.slots import BlockSlots
from kvferry.wire import Incoming
from kvferry.wire.messages import PutEncoded

__all__ = ["SliceDecoder"]

_log = logging.getLogger(__name__)
_TICK_S: Final = 1.0
_JOIN_S: Final = 5.0


@dataclass(slots=True)
class _Frame:
    message: PutEncoded
    payload: memoryview
    buffer: memoryview
    layer: LayerSpec
    targets: list[memoryview]
    slots: BlockSlots


class SliceDecoder:
    """Decodes frames in the order in which they came, in a thread of its own, while the next one comes.

    Args:
        codec: Says whether loss is accepted, and lends buffers.
        layout: Of the stream.
        frames: That may wait to be decoded.
        done: Called in the thread for each frame whose slices are in place, with the processor seconds
            that it took.
        name: For messages and the thread.
    """

    def __init__(
        self,
        codec: StreamCodec,
        layout: StreamLayout,
        frames: int,
        done: Callable[[PutEncoded, float], None],
        name: str,
    ) -> None:
        self._layout = layout
        self._codec = codec
        self._frames = frames
        self._done = done
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[_Frame] = deque()
        self._ended = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"kvferry-stream-decode-{name}", daemon=True)
        self._thread.start()

    def take(self, incoming: Incoming, slots: BlockSlots, tail: memoryview, deadline: float) -> None:
        """Receive the payload of a :class:`PutEncoded`, to be decoded into ``slots`` or the ``tail`` buffer.

        Raises:
            ProtocolError: If it is longer than its slices can be, or the tail block is not alone; nothing
                was received.
            TransferTimeoutError: If frames before it are not decoded by the deadline.
            KVFerryError: What ended the thread, or as :meth:`Incoming.read_into`.
        """
        message = incoming.message
        assert isinstance(message, PutEncoded)
        layer, targets = self._targets(message, slots, tail)
        nbytes, most = incoming.payload_nbytes, layer.nbytes * len(targets) + MAX_HEADER_NBYTES
        if nbytes > most:
            raise ProtocolError(
                f"{self._name}: an encoded frame of {nbytes} bytes for {len(targets)} slices of "
                f"{layer.nbytes}; it has {most} at most",
                remote=True,
            )
        with self._changed:
            room = self._changed.wait_for(
                lambda: self.error is not None or len(self._waiting) < self._frames, time_left(deadline)
            )
        self.check()
        if not room:
            raise TransferTimeoutError(f"{self._name}: {self._frames} frames were not decoded in time")
        buffer = self._codec.take(nbytes)
        incoming.read_into([buffer[:nbytes]], deadline)
        with self._changed:
            self._waiting.append(_Frame(message, buffer[:nbytes], buffer, layer, targets, slots))
            self._changed.notify_all()

    def _targets(
        self, message: PutEncoded, slots: BlockSlots, tail: memoryview
    ) -> tuple[LayerSpec, list[memoryview]]:
        layout, layer, blocks = self._layout, message.layer, message.blocks
        if not any(map(layout.is_tail, blocks)):
            return layout.spec.layers[layer], [slots.writable(block, layer) for block in blocks]
        if len(blocks) > 1:
            raise ProtocolError(f"{self._name}: the tail block is encoded with others", remote=True)
        spec, start = layout.tail_layer(layer), layout.tail_slice(layer).start
        return spec, [tail[start : start + spec.nbytes]]

    def check(self) -> None:
        """Whether the thread goes on.

        Raises:
            KVFerryError: What ended it.
        """
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Drop what waits and join the thread; no slot is written afterwards."""
        with self._changed:
            self._ended = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            _log.error("%s: the decoding thread does not end", self._name)

    def _run(self) -> None:
        try:
            while (frame := self._next()) is not None:
                started_at = time.thread_time()  # without waiting for a core
                if self._decode(frame).lossy:
                    frame.slots.mark_lossy(frame.message.blocks)
                took = time.thread_time() - started_at
                self._codec.give(frame.buffer)
                message = frame.message
                del frame
                self._done(message, took)
        except KVFerryError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - thread root
            _log.exception("%s: decoding failed", self._name)
            self._fail(KVFerryError(f"{self._name}: decoding failed: {type(error).__name__}"))

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = error
            self._waiting.clear()
            self._changed.notify_all()

    def _next(self) -> _Frame | None:
        with self._changed:
            while not self._ended:
                if self._waiting:
                    frame = self._waiting.popleft()
                    self._changed.notify_all()
                    return frame
                self._changed.wait(_TICK_S)
        return None

    def _decode(self, frame: _Frame) -> Frame:
        layer, targets, lossless = frame.layer, frame.targets, not self._codec.accepts_lossy
        if len(targets) == 1:
            return decode_frame(frame.payload, layer, targets[0], lossless_only=lossless)
        size = layer.nbytes
        plain = self._codec.take(size * len(targets))
        try:
            found = decode_frame(frame.payload, layer, plain[: size * len(targets)], lossless_only=lossless)
            for index, target in enumerate(targets):
                copy_into(target, plain[index * size : (index + 1) * size])
            return found
        finally:
            self._codec.give(plain)
