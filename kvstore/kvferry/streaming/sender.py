"""The prefill side of a stream: :class:`LayerSender`."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial

import msgspec

from kvferry.core.buffers import Buf
from kvferry.core.clock import deadline_in, time_left
from kvferry.core.errors import (
    ConfigError,
    ConnectionClosedError,
    KVFerryError,
    ProtocolError,
    RequestCancelledError,
    TransferTimeoutError,
    error_from_code,
)
from kvferry.core.keys import BlockKey
from kvferry.core.spec import KeyScope, KVSpec
from kvferry.streaming.codec import LinkCodec
from kvferry.streaming.cutting import PartCutter
from kvferry.streaming.delivery import Delivery, FrameDelivery, Hold, LayerPart
from kvferry.streaming.encoding import PartEncoder
from kvferry.streaming.layout import StreamLayout, checked_missing, clean_error
from kvferry.streaming.loss import require_exact
from kvferry.streaming.opening import Opened, open_stream
from kvferry.streaming.windows import placed_delivery
from kvferry.transports.region import RegionTransport
from kvferry.wire import Channel, SharedArena
from kvferry.wire import messages as m

__all__ = ["LayerSender"]

_log = logging.getLogger(__name__)
_ABORT_TIMEOUT_S = 1.0


class LayerSender:
    """Sends the KV of one prompt layer by layer over one channel.

    The model's thread calls :meth:`put_layer`, which only queues; one background thread sends and one
    reads the acknowledgements, so the peer can always answer and neither side waits on the other for
    ever. At most ``ring`` frames (granted by the receiver) are under way unacknowledged; what is
    beyond stays queued here, its memory held.

    The first error is kept (:attr:`error`), the channel is aborted, later :meth:`put_layer` calls do
    nothing, and :meth:`finish` raises it: the model's thread is never broken in the middle of a layer.
    Poll :attr:`error` between layers to stop computing early.

    One stream a sender. After :meth:`finish` the channel is good for another stream; after an error
    or :meth:`abort` it is closed. As a context manager it aborts unless finished.

    Args:
        channel: A channel after its handshake; this sender alone uses it until finish or abort.
        spec: Shape and identity of the blocks.
        scope: Adapter and salt of the keys.
        name: For thread names and messages; the stream's name by default.
        max_frame_nbytes: A ``put_layer`` with a larger payload is split between blocks: the receiver
            shows that it goes on, and renews its leases, once a frame.
        arena: The receiver's arena, as far as it is mapped here; with it, KV is written straight into the
            receiver's slots where it grants them (both ends name :data:`STREAM_CAPABILITIES`).
        codec: How layers are encoded on this link, as far as the receiver can decode it; what is written
            into its slots is not.
        regions: The endpoint of a region transport; with it, KV is written into windows that the receiver
            opens (this end names :func:`windows_capability`).
    """

    def __init__(
        self,
        channel: Channel,
        spec: KVSpec,
        scope: KeyScope = KeyScope(),  # noqa: B008 - frozen
        *,
        name: str = "",
        max_frame_nbytes: int = 32 << 20,
        arena: SharedArena | None = None,
        codec: LinkCodec | None = None,
        regions: RegionTransport | None = None,
    ) -> None:
        self._channel = channel
        self._spec = spec
        self._scope = scope
        self._name = name
        self._max_frame_nbytes = max_frame_nbytes
        self._lock = threading.RLock()
        self._cond = threading.Condition(self._lock)  # wakes the sending thread
        self._ended = threading.Condition(self._lock)  # wakes who waits for the end
        self._queue: deque[LayerPart] = deque()
        self._arena = arena
        self._by_frame: Delivery = FrameDelivery(channel)
        self._opened = Opened()
        self._regions = regions
        self._placing: Delivery | None = None
        self._codec = codec
        self._encoder: PartEncoder | None = None
        self._layout = StreamLayout(spec, 0, 0)
        self._wanted: frozenset[int] = frozenset()
        self._cutter = PartCutter(self._layout, self._wanted, self._delivery, max_frame_nbytes, str(self))
        self._ring = 0
        self._under_way = 0
        self._deadline = 0.0
        self._handoff: m.Handoff | None = None
        self._done: m.StreamDone | None = None
        self._holds: weakref.WeakSet[Hold] = weakref.WeakSet()
        self._error: Exception | None = None
        self._threads: list[threading.Thread] = []
        self._acks_ended = threading.Event()
        self._begun = False
        self._wire_s = 0.0
        self._takes_lossy = False
        self._lossy: tuple[int, ...] = ()

    @property
    def takes_lossy(self) -> bool:
        """Whether the receiver takes KV that has lost something; known once the stream has begun."""
        return self._takes_lossy

    @property
    def error(self) -> Exception | None:
        """What ended the stream early, or ``None``."""
        return self._error

    @property
    def missing(self) -> frozenset[int]:
        """Blocks that the receiver asked for, the tail included; known once the stream has begun."""
        return self._wanted

    def __repr__(self) -> str:
        return f"stream {self._name!r} to {self._channel.address}"

    def __enter__(self) -> LayerSender:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._done is None:
            self.abort("the sender left before finish")

    # ---- opening --------------------------------------------------------------------------------

    def begin(
        self, stream: str, keys: Sequence[BlockKey], tail_tokens: int, *, deadline: float
    ) -> frozenset[int]:
        """Open the stream; no KV moves before the receiver has agreed.

        Args:
            stream: Name of the stream, the same that the receiver was told to expect.
            keys: Keys of the full blocks, in order.
            tail_tokens: Tokens after the last full block, less than ``block_tokens``.
            deadline: By when the **whole** stream must be done, not only its opening: sending in the
                background obeys it, and the receiver is told the time left.

        Returns:
            The blocks that the receiver does not hold; the others need not be put. The tail block,
            number ``len(keys)``, is not among them and is always sent.

        Raises:
            SpecMismatchError: If the receiver describes its KV differently; the message shows both.
            CapacityError: If the receiver has no room.
            KVFerryError: Any other refusal of the receiver, or an error of the channel.
        """
        if self._begun or self._error is not None:
            raise ProtocolError(f"{self}: begin was called before, or after abort; one stream a sender")
        if not 0 <= tail_tokens < self._spec.block_tokens:
            raise ConfigError(
                f"stream {stream!r}: tail of {tail_tokens} tokens, must be 0..{self._spec.block_tokens - 1}"
            )
        self._begun = True
        self._name = self._name or stream
        self._layout = StreamLayout(self._spec, len(keys), tail_tokens)
        self._deadline = deadline
        codecs = self._codec.agree(self._channel.peer.capabilities, self._spec) if self._codec else ()
        opening = m.BeginStream(
            stream=stream, spec=self._spec, keys=b"".join(keys), tail_tokens=tail_tokens, scope=self._scope,
            timeout_s=time_left(deadline), codecs=codecs, tells_lossy=True,
        )  # fmt: skip
        try:
            ready = open_stream(
                self._channel, opening, self._opened,
                arena=self._arena, regions=self._regions is not None, deadline=deadline, who=str(self),
            )  # fmt: skip
            missing = self._accepted(ready, codecs)
        except KVFerryError as exc:
            self._fail(exc)
            self._end_channel()
            raise
        self._start_threads()
        return missing

    def _accepted(self, ready: m.StreamReady, codecs: Sequence[str]) -> frozenset[int]:
        missing = checked_missing(ready, self._layout, str(self))
        self._wanted = missing | ({self._layout.full_blocks} if self._layout.tail_tokens else set())
        self._cutter = PartCutter(
            self._layout, self._wanted, self._delivery, self._max_frame_nbytes, str(self)
        )
        self._ring = ready.ring
        self._takes_lossy = ready.takes_lossy is True
        self._placing = placed_delivery(
            self._channel, self._spec, missing,
            arena=self._arena, slots=self._opened.slots, regions=self._regions, windows=self._opened.windows,
            stopped=lambda: self._error is not None,
        )  # fmt: skip
        if self._placing is None and self._codec is not None and codecs:
            self._encoder = PartEncoder(
                self._codec, self._layout, self._channel, self._lock, self._cond,
                ready=self._queue, start=partial(self._start, "encode"), failed=self._fail_and_cut,
            )  # fmt: skip
        return missing

    def _start_threads(self) -> None:
        with self._cond:
            if self._error is None:  # else aborted meanwhile
                self._start("send", self._send_loop)
                self._start("acks", self._ack_loop)

    def _start(self, kind: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"kvferry-stream-{kind}-{self._name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # ---- the model's thread ---------------------------------------------------------------------

    def put_layer(
        self,
        layer: int,
        blocks: Sequence[tuple[int, Sequence[Buf]]],
        *,
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue the KV of one layer of some blocks. Never blocks on the peer and never copies.

        Blocks that are not missing at the receiver are skipped. After an error, or abort, it does
        nothing. A chunked prefill calls it for the same layer again with the blocks of each chunk;
        layers and blocks may come in any order.

        Args:
            layer: Number of the layer.
            blocks: Pairs of block number and one contiguous buffer a tensor of the layer, in the
                order of the spec: whole tensors for a full block, the first ``tail_tokens`` rows for
                the tail block. They are held, and must stay unchanged, until ``sent`` is called, or
                :meth:`finish` or :meth:`abort` has returned.
            sent: Called once, from any thread, when none of these buffers is needed any more, however the
                stream goes on; also if none was needed at all. It must be quick.

        Raises:
            ProtocolError: Before begin, after finish, or for a block that was put before.
            ConfigError: For a layer, block or size that does not belong to the stream.
        """
        hold = None if sent is None else Hold(sent, self._holds)  # gone with its last part
        if not self._begun:
            raise ProtocolError(f"{self}: put_layer before begin")
        if self._error is not None:
            return
        frames = self._cutter.cut(layer, blocks, hold)
        with self._cond:
            if self._handoff is not None:
                raise ProtocolError(f"{self}: put_layer({layer}) after finish")
            if self._error is None:
                if self._encoder is None:
                    self._queue.extend(frames)
                else:
                    self._encoder.put(frames)
                self._cond.notify_all()

    def _delivery(self, block: int) -> Delivery:
        placed = self._placing
        return placed if placed is not None and placed.takes(block) else self._by_frame

    # ---- the background threads -----------------------------------------------------------------

    def _send_loop(self) -> None:
        try:
            while (frame := self._next_frame()) is not None:
                started_at = time.monotonic()
                frame.delivery.send(frame, self._deadline)
                self._wire_s += time.monotonic() - started_at
                del frame  # waiting for the next one must not hold the memory of this one
            self._send_end()
        except KVFerryError as exc:
            self._send_failed(exc)
        except Exception as exc:  # noqa: BLE001 - thread root
            _log.exception("%s: sending failed", self)
            self._fail(exc)
            self._say_abort(exc)
            self._channel.abort()

    def _next_frame(self) -> LayerPart | None:
        """Wait for a frame and room in the ring; ``None`` once all is acknowledged, or after an error."""
        with self._cond:
            while self._error is None:
                if self._under_way < self._ring and (frame := self._next_ready()) is not None:
                    self._under_way += 1
                    if self._encoder is not None:
                        self._encoder.sending(frame)
                    return frame
                encoding = self._encoder is not None and self._encoder.pending
                if self._handoff is not None and not (self._queue or self._under_way or encoding):
                    if self._encoder is not None:
                        self._encoder.stop()
                    return None
                if not self._cond.wait(time_left(self._deadline)) and time_left(self._deadline) == 0:
                    raise TransferTimeoutError(
                        f"{self}: past its deadline with {len(self._queue)} frames queued and "
                        f"{self._under_way} of {self._ring} unacknowledged"
                    )
        return None

    def _next_ready(self) -> LayerPart | None:
        if self._queue:
            return self._queue.popleft()
        return self._encoder.pull() if self._encoder is not None else None

    def _send_end(self) -> None:
        with self._cond:
            handoff, error = self._handoff, self._error
        if error is None and handoff is not None:
            lossy = self._lossy or msgspec.UNSET
            end = m.FinishStream(handoff=handoff, wire_s=self._wire_s, lossy=lossy)
            self._channel.send(end, deadline=self._deadline)
        elif isinstance(error, RequestCancelledError) or self._opened.slots is not None:
            self._say_abort(error)
            self._channel.close()

    def _say_abort(self, reason: BaseException | None) -> None:
        """Tell the receiver, from the thread that writes: its slots are not written any more."""
        with contextlib.suppress(KVFerryError):
            self._channel.send(m.AbortStream(reason=str(reason)), deadline=deadline_in(_ABORT_TIMEOUT_S))

    def _send_failed(self, error: KVFerryError) -> None:
        """Keep ``error``, unless the receiver's own reason is about to arrive: it says more."""
        if isinstance(error, ConnectionClosedError):
            self._acks_ended.wait(_ABORT_TIMEOUT_S)
        self._fail(error)
        if self._opened.slots is not None:
            self._say_abort(error)
        self._channel.abort()

    def _ack_loop(self) -> None:
        try:
            while self._take_answer():
                pass
        except KVFerryError as exc:
            self._fail(exc)
            self._acks_failed()
        except Exception as exc:  # noqa: BLE001 - thread root
            _log.exception("%s: reading acknowledgements failed", self)
            self._fail(exc)
            self._acks_failed()
        finally:
            self._acks_ended.set()

    def _acks_failed(self) -> None:
        """End the channel, unless the sending thread is about to do it, with a word to the receiver."""
        if self._opened.slots is None or not self._threads[0].is_alive():
            self._channel.abort()

    def _take_answer(self) -> bool:
        """Take one message; ``False`` after the last."""
        # not receive(), which would end the channel at the deadline, before the word to the receiver
        incoming = self._channel.receive_idle(self._deadline)
        if incoming is None:
            raise TransferTimeoutError(f"{self}: nothing came from the receiver by the deadline")
        message = incoming.message
        if isinstance(message, m.Failure):
            raise error_from_code(message.code, f"{self}: the receiver failed: {message.message}")
        with self._cond:
            if self._acknowledged(message):
                self._cond.notify_all()
                return True
            if isinstance(message, m.StreamDone) and self._handoff is not None and not self._under_way:
                self._done = message
                self._ended.notify_all()
                return False
            under_way = self._under_way
        raise ProtocolError(
            f"{self}: the receiver sent {message!r} with {under_way} frames unacknowledged", remote=True
        )

    def _acknowledged(self, message: m.Message) -> bool:
        """Count an acknowledgement, with the condition held; whether it is one, of what is under way."""
        if not isinstance(message, (m.LayerAck, m.EncodedAck)):
            return False
        count = message.count if isinstance(message, m.LayerAck) else 1
        if not 1 <= count <= self._under_way:
            return False
        self._under_way -= count
        if self._encoder is None:
            return isinstance(message, m.LayerAck)
        return self._encoder.acknowledged(message, count)

    def _fail_and_cut(self, error: BaseException) -> None:
        self._fail(error)
        self._channel.abort()

    def _fail(self, error: BaseException) -> None:
        """Keep the first error, drop what is queued, wake everybody."""
        with self._cond:
            if self._error is None and self._done is None:
                self._error = clean_error(error)
            self._queue.clear()
            if self._encoder is not None:
                self._encoder.stop()
            self._cond.notify_all()
            self._ended.notify_all()

    # ---- ending ---------------------------------------------------------------------------------

    def finish(self, handoff: m.Handoff, deadline: float, *, lossy: Collection[int] = ()) -> m.StreamDone:
        """Wait until everything was sent and acknowledged, hand over, and wait until it is published.

        Afterwards, also after an exception, no buffer given to :meth:`put_layer` is referenced.

        Args:
            handoff: What decode needs beside the KV.
            deadline: By when; the deadline of :meth:`begin` holds too.
            lossy: Numbers of the full blocks that had lost something here, or were computed behind such a
                block. None unless :attr:`takes_lossy`.

        Returns:
            The receiver's figures.

        Raises:
            KVFerryError: What ended the stream (:attr:`error`); nothing is visible at the receiver.
            ProtocolError: If a layer of a block was never put; the stream is aborted.
            TransferTimeoutError: At the deadline; the stream is aborted.
        """
        if not self._threads and self._error is None:
            raise ProtocolError(f"{self}: finish before begin")
        require_exact(lossy, str(self), takes_lossy=self._takes_lossy or self._error is not None)
        gaps = self._cutter.gaps()
        if gaps and self._error is None:
            self.abort("the sender has not put every layer")
            raise ProtocolError(
                f"{self}: finish, but {len(gaps)} layers are incomplete; first: block {gaps[0][1]} of "
                f"layer {gaps[0][0]} was never put"
            )
        with self._cond:
            self._handoff, self._lossy = handoff, tuple(sorted(lossy))
            self._cond.notify_all()
            self._ended.wait_for(lambda: self._done or self._error, time_left(deadline))
            done, error = self._done, self._error
        if done is None and error is None:
            error = TransferTimeoutError(
                f"{self}: not taken over by the receiver within the deadline of finish"
            )
            self._fail(error)
        if done is None:
            self._end_channel()
        self._join()
        if done is not None:
            return done
        assert error is not None
        raise clean_error(error)

    def abort(self, reason: str) -> None:
        """Give up: nothing of the stream becomes visible. Safe from any thread; takes 2 s at most.

        Tells the receiver if no frame is half sent, else cuts the connection. When it has returned no
        buffer is referenced. Does nothing after :meth:`finish`.
        """
        if self._done is not None:
            return
        self._fail(RequestCancelledError(reason))
        self._end_channel(wait=True)
        self._join()

    def _end_channel(self, *, wait: bool = False) -> None:
        """End the channel; first the sending thread takes leave, if it is between two frames."""
        if self._opened.slots is not None and not self._threads:
            self._say_abort(self._error)
        if wait or self._opened.slots is not None:
            limit = deadline_in(_ABORT_TIMEOUT_S)
            for thread in self._threads[:1]:
                thread.join(time_left(limit))
        self._channel.abort()

    def _join(self) -> None:
        limit = deadline_in(_ABORT_TIMEOUT_S)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(time_left(limit))
            if thread.is_alive() and thread is not threading.current_thread():
                _log.error("%s: thread %s does not end; its buffers stay referenced", self, thread.name)
                return
        for hold in list(self._holds):
            hold.release()
