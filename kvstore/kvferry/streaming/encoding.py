"""The sender's encoding thread: layers that wait to be sent become frames of a codec."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from kvferry.codecs.adaptive import RAW
from kvferry.core.buffers import write_into
from kvferry.core.spec import LayerSpec
from kvferry.streaming.codec import Choice, LinkCodec
from kvferry.streaming.delivery import Delivery, EncodedDelivery, LayerPart
from kvferry.streaming.layout import StreamLayout
from kvferry.wire import Channel
from kvferry.wire.messages import EncodedAck, LayerAck

__all__ = ["PartEncoder"]

_log = logging.getLogger(__name__)
_CALL_NBYTES: Final = 1 << 20
"""Bytes of KV that are encoded with one call and sent as one frame: small ones cost more a byte."""
_AHEAD: Final = 3
"""Encoded frames that wait for the link."""
_TICK_S: Final = 1.0


class PartEncoder:
    """Encodes what :meth:`put` takes, in order, in a thread of its own, some frames ahead of the link.

    All state is guarded by the condition of the sender, which is notified of every change.

    Args:
        link: The codec of the link.
        layout: Of the stream.
        channel: To the receiver.
        changed: The sender's condition.
        forward: Takes a part that is ready to be sent; called with ``changed`` held.
        failed: Takes what ended the thread early.
    """

    def __init__(
        self,
        link: LinkCodec,
        layout: StreamLayout,
        channel: Channel,
        changed: threading.Condition,
        *,
        forward: Callable[[LayerPart], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._codec = link.codec
        self._choice: Choice = link.choice
        self._layout = layout
        self._delivery: Delivery = EncodedDelivery(channel)
        self._changed = changed
        self._forward = forward
        self._failed = failed
        self._waiting: deque[LayerPart] = deque()
        self._busy = False
        self._ended = False
        self._ahead = 0
        self._under_way: dict[bool, deque[LayerPart]] = {True: deque(), False: deque()}  # by whether encoded
        self._last_ack: tuple[str, float] = ("", 0.0)

    # ---- the sender's threads -----------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether parts are still to come out of it."""
        return bool(self._waiting) or self._busy

    def put(self, parts: list[LayerPart]) -> None:
        """Take parts; with the condition held. What goes as it is does not wait for the thread."""
        now = time.monotonic()
        for part in parts:
            part.ready_at, part.codec = now, ""
            if not self.pending and self._pick(part):
                self._forward(part)
            else:
                self._waiting.append(part)

    def _pick(self, part: LayerPart) -> bool:
        """Choose how a part goes; whether it goes as it is."""
        part.codec = self._choice.choose()
        part.nbytes = sum(self._layout.payload_nbytes(part.layer, block) for block in part.blocks)
        return part.codec == RAW

    def sending(self, part: LayerPart) -> None:
        """A part is about to be sent; with the condition held."""
        # not the part itself, which holds the model's memory or a buffer
        mark = LayerPart(part.delivery, part.layer, (), [], part.codec, part.nbytes, part.ready_at)
        self._under_way[part.codec != RAW].append(mark)

    def acknowledged(self, ack: LayerAck | EncodedAck) -> bool:
        """Learn from an acknowledgement, with the condition held; whether such a part was under way."""
        under_way = self._under_way[isinstance(ack, EncodedAck)]
        if not under_way:
            return False
        part, now = under_way.popleft(), time.monotonic()
        last_codec, last_at = self._last_ack
        self._last_ack = (part.codec, now)
        if isinstance(ack, EncodedAck):
            self._choice.decoded(part.codec, part.nbytes, ack.decode_s)
        if part.codec == last_codec and part.ready_at <= last_at:
            self._choice.moved(part.codec, part.nbytes, now - last_at)
        return True

    def stop(self) -> None:
        """Encode no more and end the thread; with the condition held."""
        self._ended = True
        self._waiting.clear()
        self._changed.notify_all()

    # ---- the thread -------------------------------------------------------------------------------

    def run(self) -> None:
        """The thread's work, until :meth:`stop`."""
        try:
            while (part := self._next()) is not None:
                if part.codec == RAW:
                    self._emit(part)
                else:
                    self._encode(part)
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
                del part  # waiting for the next one must not hold the memory of this one
        except Exception as error:  # noqa: BLE001 - thread root
            _log.exception("encoding of a stream failed")
            self._failed(error)

    def _next(self) -> LayerPart | None:
        with self._changed:
            while not self._ended:
                if self._waiting:
                    self._busy = True
                    part = self._waiting.popleft()
                    if not part.codec:
                        self._pick(part)
                    return part
                self._changed.wait(_TICK_S)
        return None

    def _encode(self, part: LayerPart) -> None:
        """Cut a part into calls of some size; the tail block goes alone."""
        layer = self._layout.spec.layers[part.layer]
        each = len(layer.tensors) + (self._layout.pad_nbytes(part.layer, 0) > 0)
        a_call = max(1, _CALL_NBYTES // max(layer.nbytes, 1))
        at, views = 0, 0
        while at < len(part.blocks):
            tail = self._layout.is_tail(part.blocks[at])
            stop = at + 1 if tail else min(at + a_call, len(part.blocks))
            if not tail and self._layout.is_tail(part.blocks[stop - 1]):
                stop -= 1
            count = (len(layer.tensors) if tail else each) * (stop - at)
            one = LayerPart(
                self._delivery, part.layer, part.blocks[at:stop], part.parts[views : views + count],
                part.codec, 0, part.ready_at,
            )  # fmt: skip
            if not self._encode_call(one, self._layout.tail_layer(part.layer) if tail else layer):
                return
            at, views = stop, views + count

    def _encode_call(self, part: LayerPart, layer: LayerSpec) -> bool:
        """Encode one frame as soon as there is room for it; ``False`` after :meth:`stop`."""
        with self._changed:
            while not self._ended and self._ahead >= _AHEAD:
                self._changed.wait(_TICK_S)
            if self._ended:
                return False
            self._ahead += 1
        pipeline = self._codec.pipelines[part.codec]
        count = len(part.blocks)
        part.nbytes = layer.nbytes * count
        plain = self._codec.take(part.nbytes)
        encoded = self._codec.take(pipeline.max_encoded_nbytes(layer, count))
        try:
            started_at = time.monotonic()
            _gather(part.parts, plain[: part.nbytes])
            nbytes = pipeline.encode_into(plain[: part.nbytes], layer, encoded)
            self._choice.encoded(part.codec, part.nbytes, nbytes, time.monotonic() - started_at)
        finally:
            self._codec.give(plain)
        part.parts = [encoded[:nbytes]]
        part.sent = lambda: self._sent(encoded)
        self._emit(part)
        return True

    def _sent(self, buffer: memoryview) -> None:
        self._codec.give(buffer)
        with self._changed:
            self._ahead -= 1
            self._changed.notify_all()

    def _emit(self, part: LayerPart) -> None:
        with self._changed:
            if not self._ended:
                self._forward(part)
                self._changed.notify_all()


def _gather(views: list[memoryview], target: memoryview) -> None:
    """Copy ``views`` end to end; what is left of ``target`` becomes zero."""
    array, at = np.frombuffer(target, np.uint8), 0
    for view in views:
        write_into(array, at, view)
        at += len(view)
    array[at:] = 0
