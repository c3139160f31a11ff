"""The sender's encoding thread: layers that wait to be sent become frames of a codec."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

import numpy as np

from kvferry.codecs.adaptive import RAW
from kvferry.core.buffers import write_into
from kvferry.core.spec import LayerSpec
from kvferry.streaming.codec import Choice, LinkCodec
from kvferry.streaming.delivery import Delivery, EncodedDelivery, LayerPart
from kvferry.streaming.layout import StreamLayout
from kvferry.wire import Channel
from kvferry.wire.messages import EncodedAck, LayerAck

__all__ = ["KEPT_TOKENS", "PartEncoder"]

_log = logging.getLogger(__name__)
_CALL_NBYTES: Final = 1 << 20
"""Bytes of KV that are encoded with one call and sent as one frame: small ones cost more a byte."""
_AHEAD: Final = 3
"""Encoded frames that wait for the link."""
_SETTLE: Final = 3
"""Pieces after a change of the pipeline that say nothing: they find the other one's work in their way."""
_SETTLE_S: Final = 0.005
"""Nor do more of them up to then, a quarter of the layers at most: a link that is limited lets pass at once
what it saved up while there was nothing to send."""
_REPORT_S: Final = 0.002
"""Some pieces are looked at and told together: what goes as it is has no time to lose."""
_MOST_ACKS: Final = 6
_CLOCK_S: Final = 1e-6
_TICK_S: Final = 1.0
KEPT_TOKENS: Final = 4
"""At the start of a prompt, which go as they are where a pipeline is lossy: they take much of every head's
attention, whatever they say (attention sinks; after KVQuant), so an error of their keys is in every score."""
_KEPT: Final = "as it is"
"""In place of a pipeline; nothing is learnt from such a part."""

_Mark: TypeAlias = tuple[str, int, float]
"""Of a part under way: its pipeline, bytes of KV, and when the model handed it over."""


class PartEncoder:
    """Decides how the parts of a stream go, and encodes them in a thread of its own, ahead of the link.

    Parts wait here in the order in which :meth:`put` took them. Where the choice rests on raw they are with
    what is ready to be sent, as if there were no codec, and come back when something else might be chosen.
    Else the sending thread takes each with :meth:`pull` when it can send it. Where a pipeline is chosen, the
    encoding thread takes them, some frames ahead of the link, until something else is chosen. Either way a
    choice is made for one part at a time, when its turn comes.

    Args:
        link: The codec of the link.
        layout: Of the stream.
        channel: To the receiver.
        lock: Of the sender, guards all state.
        changed: Its condition, with that lock; notified of frames that are ready.
        ready: Parts that are ready to be sent, with that lock.
        start: Starts the thread, which is to call :meth:`run`; called once, when there is work for it.
        failed: Takes what ended the thread early.
    """

    def __init__(
        self,
        link: LinkCodec,
        layout: StreamLayout,
        channel: Channel,
        lock: threading.RLock,
        changed: threading.Condition,
        *,
        ready: deque[LayerPart],
        start: Callable[[Callable[[], None]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._link = link
        self._codec = link.codec
        self._choice: Choice = link.choice
        self._layout = layout
        self._kept_blocks = -(-KEPT_TOKENS // layout.spec.block_tokens)
        self._delivery: Delivery = EncodedDelivery(channel)
        self._changed = changed
        self._work = threading.Condition(lock)  # wakes the encoding thread alone
        self._ready = ready
        self._start = start
        self._failed = failed
        self._started = False
        self._waiting: deque[LayerPart] = deque()
        self._probing: deque[LayerPart] = deque()  # one part that goes another way, for the thread
        self._encoding = False  # what waits is for the thread
        self._quiet_until = self._choice.quiet_until
        self._resting = self._quiet = time.monotonic() < self._quiet_until
        self._unmarked = 0  # under way as they are, before those in ``_plain``; nothing is learnt from them
        self._busy = False
        self._ended = False
        self._ahead = 0
        self._plain: deque[_Mark] = deque()  # under way as they are
        self._encoded_ones: deque[_Mark] = deque()  # under way encoded
        self._acks = 0  # of parts in ``_plain`` that were not looked at
        self._acks_a_look = 1
        self._last_codec = ""
        self._last_at = 0.0
        self._in_a_row = 0
        self._row_began_at = 0.0
        self._most_unsettled = len(layout.spec.layers) // 4
        self._moved_nbytes = 0
        self._moved_s = 0.0

    # ---- the sender's threads -----------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether parts are still to come out of it."""
        return bool(self._waiting or self._probing) or self._busy

    def put(self, parts: list[LayerPart]) -> None:
        """Take parts; with the lock held."""
        now = time.monotonic()
        if self._quiet and now < self._quiet_until:
            self._ready.extend(parts)
            return
        for part in parts:
            part.ready_at = now
        if self._resting and not self._quiet and self._ready:
            self._ready.extend(parts)
            return
        self._take_back()
        self._wait(parts)
        if self._encoding:
            self._work.notify()

    def _wait(self, parts: Iterable[LayerPart]) -> None:
        for part in parts:
            part.codec = ""
            self._waiting.append(part)

    def _rest(self) -> None:
        """What waits goes as it is, until :meth:`_take_back`."""
        for part in self._waiting:
            part.codec = RAW
        self._ready.extend(self._waiting)
        self._waiting.clear()
        self._resting = True

    def _take_back(self) -> None:
        """A choice is made for each part again."""
        if not self._resting:
            return
        self._resting = self._quiet = False
        parts = list(self._ready)
        self._ready.clear()
        self._ready.extend(part for part in parts if part.codec != RAW)
        self._wait(part for part in parts if part.codec == RAW)

    def _keep_quiet(self) -> None:
        """Learn nothing for a while: what is known of the link was just confirmed."""
        self._unmarked += len(self._plain) - self._acks
        self._plain.clear()
        self._acks, self._acks_a_look = 0, 1
        self._last_codec = ""
        self._quiet, self._quiet_until = True, self._choice.quiet_until

    def pull(self) -> LayerPart | None:
        """A part to be sent as it is, if that is how the next one goes; with the lock held."""
        while self._waiting and not self._encoding:
            part = self._waiting[0]
            if not part.codec and len(self._waiting) > 1 and not self._probing:
                part.codec = self._choice.probe()
                if part.codec:
                    self._probing.append(self._waiting.popleft())
                    self._wake()
                    continue
            part.codec = part.codec or self._choice.choose()
            if part.codec == RAW:
                self._waiting.popleft()
                if self._choice.rests:
                    self._rest()
                return part
            self._encoding = True
            self._wake()
        return None

    def _wake(self) -> None:
        if not self._started:
            self._started = True
            self._start(self.run)
        self._work.notify()

    def sending(self, part: LayerPart) -> None:
        """A part is about to be sent; with the lock held."""
        if self._quiet:
            self._unmarked += 1
            return
        # not the part itself, which holds the model's memory or a buffer
        mark = (part.codec, part.nbytes, part.ready_at)
        (self._plain if part.codec in (RAW, _KEPT) else self._encoded_ones).append(mark)

    def acknowledged(self, ack: LayerAck | EncodedAck, count: int) -> bool:
        """Learn from an acknowledgement, with the lock held; whether ``count`` such parts were under way."""
        if isinstance(ack, EncodedAck):
            if not self._encoded_ones:
                return False
            mark = self._encoded_ones.popleft()
            self._choice.decoded(mark[0], mark[1], ack.decode_s)
            self._learn([mark])
            return True
        if self._unmarked:
            if self._quiet and time.monotonic() >= self._quiet_until:
                self._take_back()
            unmarked = min(count, self._unmarked)
            self._unmarked -= unmarked
            count -= unmarked
            if not count:
                return True
        self._acks += count
        if self._acks > len(self._plain):
            return False
        if self._acks >= self._acks_a_look:
            marks = [self._plain.popleft() for _ in range(self._acks)]
            self._acks = 0
            self._learn(marks)
        return True

    def _learn(self, marks: list[_Mark]) -> None:
        """Parts came into place since the last call, the last one now."""
        marks = [mark for mark in marks if mark[0] != _KEPT]
        if not marks:
            return
        codec, now = marks[-1][0], time.monotonic()
        last_at, self._last_at = self._last_at, now
        if any(ready_at > last_at or name != self._last_codec for name, _, ready_at in marks):
            self._in_a_row = self._moved_nbytes = 0
            self._moved_s = 0.0
            self._row_began_at = now
            self._acks_a_look = 1
        elif not self._settled(now):
            self._in_a_row += 1
        else:
            self._moved_nbytes += sum(nbytes for _, nbytes, _ in marks)
            self._moved_s += now - last_at
            if self._moved_s >= _REPORT_S:
                self._choice.moved(codec, self._moved_nbytes, self._moved_s)
                self._moved_nbytes, self._moved_s = 0, 0.0
                each = max(now - last_at, _CLOCK_S) / len(marks)
                self._acks_a_look = min(max(int(_REPORT_S / each), 1), _MOST_ACKS)
                if self._resting and not self._choice.rests:
                    self._choice.choose()  # decides, mostly that nothing is to be taken back
                if not self._choice.rests:
                    self._take_back()
                elif self._resting and now < self._choice.quiet_until:
                    self._keep_quiet()
                    return
        self._last_codec = codec

    def _settled(self, now: float) -> bool:
        """Whether what comes into place now tells what the pipeline costs, and no more what was before it."""
        if self._in_a_row < _SETTLE:
            return False
        return self._in_a_row >= self._most_unsettled or now - self._row_began_at >= _SETTLE_S

    def stop(self) -> None:
        """Encode no more and end the thread; with the lock held."""
        self._ended = True
        self._waiting.clear()
        self._probing.clear()
        self._work.notify_all()

    # ---- the thread -------------------------------------------------------------------------------

    def run(self) -> None:
        """The thread's work, until :meth:`stop`."""
        try:
            while (part := self._next()) is not None:
                self._encode(part)
                with self._changed:
                    self._busy = False
                    if self._ended or not self.pending:
                        self._changed.notify_all()
                del part  # waiting for the next one must not hold the memory of this one
        except Exception as error:  # noqa: BLE001 - thread root
            _log.exception("encoding of a stream failed")
            self._failed(error)

    def _next(self) -> LayerPart | None:
        """The next part to be encoded; where one is to go as it is, the sending thread goes on with it."""
        with self._changed:
            while not self._ended:
                if (part := self._take()) is not None:
                    self._busy = True
                    return part
                self._work.wait(_TICK_S)
        return None

    def _take(self) -> LayerPart | None:
        if self._probing:
            return self._probing.popleft()
        if not (self._encoding and self._waiting):
            return None
        part = self._waiting[0]
        if not part.codec:
            part.codec = self._choice.probe() or self._choice.choose()
        if part.codec == RAW:
            self._encoding = False
            self._changed.notify_all()
            return None
        return self._waiting.popleft()

    def _encode(self, part: LayerPart) -> None:
        """Cut a part into calls of some size; the tail block goes alone, and what is kept as it is."""
        layer = self._layout.spec.layers[part.layer]
        each = len(layer.tensors) + (self._layout.pad_nbytes(part.layer, 0) > 0)
        a_call = max(1, _CALL_NBYTES // max(layer.nbytes, 1))
        kept = 0 if self._codec.pipelines[part.codec].lossless else self._kept_blocks
        at, views = 0, 0
        while at < len(part.blocks):
            tail = self._layout.is_tail(part.blocks[at])
            stop = self._stop(part.blocks, at, a_call, kept)
            count = (len(layer.tensors) if tail else each) * (stop - at)
            one = LayerPart(
                self._delivery, part.layer, part.blocks[at:stop], part.parts[views : views + count],
                part.codec, 0, part.ready_at, hold=part.hold,
            )  # fmt: skip
            if part.blocks[at] < kept:
                self._keep(one, part.delivery)
            elif not self._encode_call(one, self._layout.tail_layer(part.layer) if tail else layer):
                return
            elif one.codec == _KEPT:
                self._keep(one, part.delivery)
            at, views = stop, views + count

    def _stop(self, blocks: tuple[int, ...], at: int, most: int, kept: int) -> int:
        """Where a call that starts at ``at`` ends: blocks that go alone are not among others."""
        if self._layout.is_tail(blocks[at]) or blocks[at] < kept:
            return at + 1
        stop = at + 1
        while stop < min(at + most, len(blocks)):
            if self._layout.is_tail(blocks[stop]) or blocks[stop] < kept:
                break
            stop += 1
        return stop

    def _encode_call(self, part: LayerPart, layer: LayerSpec) -> bool:
        """Encode one frame as soon as there is room for it; ``False`` after :meth:`stop`.

        Where the codec fails nothing is sent, and the part is marked to go as it is.
        """
        with self._changed:
            while not self._ended and self._ahead >= _AHEAD:
                self._work.wait(_TICK_S)
            if self._ended:
                return False
            self._ahead += 1
        try:
            encoded = self._encoded(part, layer)
        except Exception as error:  # noqa: BLE001 - a stage of others may raise anything: the part goes as it is
            self._choice = self._link.failed(part.codec, error)
            part.codec = _KEPT
            self._sent(None)
            return True
        part.parts, part.hold = [encoded[0][: encoded[1]]], None
        part.sent = lambda: self._sent(encoded[0])
        self._emit(part)
        return True

    def _encoded(self, part: LayerPart, layer: LayerSpec) -> tuple[memoryview, int]:
        """A buffer with the frame of a part, and how long that is."""
        pipeline = self._codec.pipelines[part.codec]
        count = len(part.blocks)
        part.nbytes = layer.nbytes * count
        encoded = self._codec.take(pipeline.max_encoded_nbytes(layer, count))
        plain = self._codec.take(part.nbytes)
        try:
            started_at = time.thread_time()  # waiting for a core is in the flow, this is what it must take
            _gather(part.parts, plain[: part.nbytes])
            nbytes = pipeline.encode_into(plain[: part.nbytes], layer, encoded)
            self._choice.encoded(part.codec, part.nbytes, nbytes, time.thread_time() - started_at)
        finally:
            self._codec.give(plain)
        return encoded, nbytes

    def _keep(self, part: LayerPart, delivery: Delivery) -> None:
        """Send a part as it is, amid others that are encoded."""
        part.delivery, part.codec = delivery, _KEPT
        self._emit(part)

    def _sent(self, buffer: memoryview | None) -> None:
        if buffer is not None:
            self._codec.give(buffer)
        with self._changed:
            self._ahead -= 1
            self._work.notify()

    def _emit(self, part: LayerPart) -> None:
        with self._changed:
            if not self._ended:
                self._take_back()  # encoded frames go first, in their order
                self._ready.append(part)
                self._changed.notify_all()


def _gather(views: list[memoryview], target: memoryview) -> None:
    """Copy ``views`` end to end; what is left of ``target`` becomes zero."""
    array, at = np.frombuffer(target, np.uint8), 0
    for view in views:
        write_into(array, at, view)
        at += len(view)
    array[at:] = 0
