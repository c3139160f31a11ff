"""The decode side of a stream: :class:`LayerReceiver`."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from kvferry.core.blockstore import Namespace
from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in, earliest, is_past, time_left
from kvferry.core.errors import (
    KVFerryError,
    LeaseExpiredError,
    ProtocolError,
    RequestCancelledError,
    SpecMismatchError,
    TransferTimeoutError,
    error_from_code,
)
from kvferry.streaming.arrivals import Arrivals, LayerMessage
from kvferry.streaming.codec import StreamCodec
from kvferry.streaming.decoding import SliceDecoder
from kvferry.streaming.grants import OpenSlots, SlotGrant
from kvferry.streaming.layout import MAX_NAME, StreamLayout, checked_keys, clean_error, describe_mismatch
from kvferry.streaming.loss import mark_told, ready_message, require_told
from kvferry.streaming.slots import BlockSlots
from kvferry.wire import Channel, Incoming
from kvferry.wire.messages import (
    AbortStream,
    BeginStream,
    EncodedAck,
    Failure,
    FinishStream,
    Handoff,
    LayerAck,
    LayerPlaced,
    PutEncoded,
    PutLayer,
    StreamDone,
)

__all__ = ["LayerReceiver"]

_log = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = _ANSWER_TIMEOUT_S = 5.0
_LOOK_S = 0.05


class LayerReceiver:
    """Receives the KV of one prompt layer by layer, straight into reserved slots of a store.

    The thread that serves the channel calls :meth:`start` and :meth:`run`; another thread may use the
    layers as they arrive (:meth:`wait_layer`, :meth:`view`) and at the end calls :meth:`wait` and
    :meth:`close`. Until all layers of all blocks are in place nothing is published. Whatever ends the
    stream early (an error, a deadline, the peer's end, :meth:`close`), the slots go back at once and
    waiting threads get the error.

    It does not close the channel: an exception of :meth:`start` or :meth:`run` is for the caller to
    tell the peer (``ChannelServer`` does). As a context manager it closes itself.

    Args:
        channel: The channel on which ``begin`` came.
        namespace: Where the blocks go; says which spec and scope are expected.
        begin: The opening message.
        ring: Layer frames that the sender may have under way unacknowledged.
        reserve_timeout_s: How long to wait for room in the store.
        grant: Lets the sender write into the slots itself, if it can.
        codec: Whether lossy codecs are accepted; by default only lossless ones. Then, or where the namespace
            takes lossy blocks, so is what had lost something at the sender.
    """

    def __init__(
        self,
        channel: Channel,
        namespace: Namespace,
        begin: BeginStream,
        *,
        ring: int = 8,
        reserve_timeout_s: float = 5.0,
        grant: SlotGrant | None = None,
        codec: StreamCodec | None = None,
    ) -> None:
        self._channel = channel
        self._namespace = namespace
        self._begin = begin
        self._ring = ring
        self._reserve_timeout_s = reserve_timeout_s
        self._grant = grant
        self._codec = codec or StreamCodec()
        self._takes_lossy = self._codec.accepts_lossy or namespace.takes_lossy
        self._decoder: SliceDecoder | None = None
        self._decoding = contextlib.ExitStack()
        self._placed: frozenset[int] = frozenset()  # blocks whose slots the sender may write
        self._writing = contextlib.ExitStack()
        self._open_slots: OpenSlots | None = None
        self._needs_word = False
        self._layout = StreamLayout(namespace.spec, 0, 0)
        self._cond = threading.Condition()
        self._slots: BlockSlots | None = None
        self._tail = memoryview(b"")
        self._arrivals = Arrivals(self._layout, (), str(self))
        self._opened = False
        self._handoff: Handoff | None = None
        self._error: Exception | None = None
        self._deadline = 0.0
        self._running = self._closed = False
        self._wire_s = self._started_at = self._complete_at = 0.0

    def __repr__(self) -> str:
        return f"stream {self._begin.stream[:MAX_NAME]!r} from {self._channel.address}"

    def __enter__(self) -> LayerReceiver:
        return self

    def __exit__(self, kind: object, *exc_info: object) -> None:
        try:
            self.close()
        except LeaseExpiredError:
            if kind is None:  # an error on its way says more than its consequence
                raise

    @property
    def error(self) -> Exception | None:
        """What ended the stream early, or ``None``; tells a late layer from a stream that timed out."""
        return self._error

    @property
    def missing(self) -> frozenset[int]:
        """The full blocks that were not stored at :meth:`start` and are received."""
        return self._slots.missing if self._slots is not None else frozenset()

    @property
    def tail_tokens(self) -> int:
        """Tokens of the tail block, 0 if there is none."""
        return self._begin.tail_tokens

    @property
    def kv_nbytes(self) -> int:
        """Bytes of KV received, decoded."""
        return self._arrivals.kv_nbytes

    @property
    def wire_s(self) -> float:
        """Busy time on the wire, in sum over the frames, as the slower of both ends saw it.

        Here a frame takes from its first byte until it is received; at the sender as long as sending it.
        """
        return self._wire_s

    @property
    def complete_at(self) -> float:
        """Monotonic time at which the last layer was in place; 0 before."""
        return self._complete_at

    # ---- opening --------------------------------------------------------------------------------

    def start(self) -> None:
        """Check the opening message, take leases and slots, and answer which blocks are missing.

        Raises:
            SpecMismatchError: If the sender describes its KV differently; the message shows both.
            ProtocolError: If the opening message makes no sense.
            CapacityError: If there is no room for the missing blocks.
            KVFerryError: Any other error; after each of them nothing is held.
        """
        self._started_at = time.monotonic()
        with self._ending_on_error():
            begin, spec = self._begin, self._namespace.spec
            scope = self._namespace.scope
            if begin.spec.fingerprint() != spec.fingerprint() or begin.scope != scope:
                raise SpecMismatchError(
                    f"{self} refused: {describe_mismatch(begin.spec, spec, begin.scope, scope)}"
                )
            self._codec.check(begin.codecs, f"{self} refused")
            require_told(begin, str(self), takes_lossy=self._takes_lossy)
            keys = checked_keys(begin, str(self))
            self._deadline = deadline_in(begin.timeout_s)
            self._layout = StreamLayout(spec, len(keys), begin.tail_tokens)
            slots = BlockSlots(self._namespace, keys)
            with self._cond:
                if self._error is not None:
                    raise clean_error(self._error)
                self._slots = slots
            grant = self._grant if self._grant is not None and self._grant.usable else None
            slots.take(earliest(self._deadline, deadline_in(self._reserve_timeout_s)))
            self._tail = page_aligned(self._layout.tail_buffer_nbytes)
            expected = slots.missing | ({len(keys)} if begin.tail_tokens else set())
            with self._cond:
                self._arrivals = Arrivals(self._layout, expected, str(self))
                self._opened = True
            if not expected:
                self._complete_at = time.monotonic()
            if grant is not None:
                self._grant_slots(grant, slots)
            ready = ready_message(slots, ring=self._ring, takes_lossy=self._takes_lossy)
            self._channel.send(ready, deadline=self._deadline)

    def _grant_slots(self, grant: SlotGrant, slots: BlockSlots) -> None:
        """Let the sender write into the slots; from here on they are used again only once it does not."""
        if not (placed := slots.addresses()):
            return
        self._writing.enter_context(slots.writing())
        if (opened := grant.prepare(placed)) is None:
            self._writing.pop_all().close()
            return
        self._open_slots, self._needs_word, self._placed = opened, opened.needs_word, opened.blocks
        opened.send(self._deadline)

    # ---- receiving ------------------------------------------------------------------------------

    def run(self, deadline: float) -> Handoff:
        """Receive all layers, publish, and answer; called once, after :meth:`start`.

        Args:
            deadline: By when; the sender's own limit of the opening message holds too if earlier.

        Returns:
            What the sender handed over.

        Raises:
            RequestCancelledError: If the sender gave up, or :meth:`close` was called meanwhile.
            CorruptBlockError: If a payload does not match its checksum.
            TransferTimeoutError: At the deadline.
            KVFerryError: Any other error; after each of them nothing is visible and the slots are back.
        """
        slots = self._slots
        if slots is None:
            raise ProtocolError(f"{self}: run before start")
        deadline = earliest(deadline, self._deadline)
        with self._ending_on_error():
            with self._cond:
                if self._error is not None:
                    raise clean_error(self._error)
                self._running = True
            if not self._placed:
                self._writing.enter_context(slots.writing())
            with self._decoding:
                handoff = self._receive_all(slots, deadline)
            stored = slots.publish()
            with self._cond:
                if self._error is not None:  # closed meanwhile
                    raise clean_error(self._error)
                self._handoff = handoff
                self._cond.notify_all()
        self._answer(stored, deadline)
        return handoff

    def _receive_all(self, slots: BlockSlots, deadline: float) -> Handoff:
        while True:
            incoming = self._next(slots, deadline)
            message = incoming.message
            if isinstance(message, (PutLayer, LayerPlaced, PutEncoded)):
                self._take_layer(slots, incoming, message, deadline)
                continue
            incoming.discard(deadline)
            if isinstance(message, FinishStream):
                self._end_writing(None)
                self._arrivals.check_complete()
                mark_told(slots, message, str(self), takes_lossy=self._takes_lossy)
                # A sender that paces is busy while nothing arrives; one that fills the kernel's buffers
                # is done before we are.
                longest = time.monotonic() - self._started_at
                self._wire_s = max(self._wire_s, min(message.wire_s, longest))
                return message.handoff
            if isinstance(message, AbortStream):
                self._end_writing(None)
                raise RequestCancelledError(f"{self}: the sender gave up: {message.reason}")
            if isinstance(message, Failure):
                raise error_from_code(message.code, f"{self}: the sender failed: {message.message}")
            raise ProtocolError(f"{self}: {type(message).__name__} inside a stream", remote=True)

    def _next(self, slots: BlockSlots, deadline: float) -> Incoming:
        while True:
            slots.renew()
            until = earliest(deadline, slots.renew_at)
            # with slots that the sender writes, close() cannot cut the channel to wake this thread
            incoming = self._channel.receive_idle(
                earliest(until, deadline_in(_LOOK_S)) if self._needs_word or self._decoder else until
            )
            if self._needs_word and self._error is not None:
                raise clean_error(self._error)
            if self._decoder is not None:
                self._decoder.check()
            if incoming is not None:
                return incoming
            if is_past(deadline):
                raise TransferTimeoutError(f"{self}: {self._arrivals.progress()} at the deadline")

    def _take_layer(
        self, slots: BlockSlots, incoming: Incoming, message: LayerMessage, deadline: float
    ) -> None:
        try:
            nbytes = self._arrivals.check(message)
            if isinstance(message, PutEncoded):
                self._take_encoded(slots, incoming, deadline)
                return
            views = self._views(slots, incoming, message, nbytes)
        except ProtocolError:
            incoming.discard(deadline)  # so that the peer can still be told
            raise
        if views:
            incoming.read_into(views, deadline)
        self._wire_s += time.monotonic() - incoming.started_at
        self._arrived(message, nbytes)
        self._channel.send(LayerAck(), deadline=deadline)

    def _take_encoded(self, slots: BlockSlots, incoming: Incoming, deadline: float) -> None:
        """Receive a frame of a codec; its layers are in place, and acknowledged, once it is decoded."""
        if not self._begin.codecs:
            raise ProtocolError(f"{self}: a layer is encoded, which was not agreed", remote=True)
        if self._decoder is None:
            self._decoder = SliceDecoder(self._codec, self._layout, self._ring, self._decoded, str(self))
            self._decoding.callback(self._decoder.close)
        self._decoder.take(incoming, slots, self._tail, deadline)
        self._wire_s += time.monotonic() - incoming.started_at

    def _decoded(self, message: PutEncoded, seconds: float) -> None:
        """In the decoder's thread: the slices of a frame are in place."""
        self._arrived(message, self._arrivals.nbytes(message))
        self._channel.send(EncodedAck(decode_s=seconds), deadline=self._deadline)

    def _arrived(self, message: LayerMessage, nbytes: int) -> None:
        now = time.monotonic()
        with self._cond:
            if self._arrivals.add(message, nbytes):
                if self._arrivals.complete:
                    self._complete_at = now
                self._cond.notify_all()

    def _views(
        self, slots: BlockSlots, incoming: Incoming, message: PutLayer | LayerPlaced, nbytes: int
    ) -> list[memoryview]:
        """Where the payload goes; nowhere if the sender has put it there itself."""
        layer, layout = message.layer, self._layout
        if isinstance(message, LayerPlaced):
            if not self._placed.issuperset(message.blocks):
                raise ProtocolError(
                    f"{self}: layer {layer} is said to lie in slots that were not granted", remote=True
                )
            return []
        if incoming.payload_nbytes != nbytes:
            raise ProtocolError(
                f"{self}: layer {layer} of {len(message.blocks)} blocks has {incoming.payload_nbytes} "
                f"payload bytes, the spec says {nbytes}",
                remote=True,
            )
        return [
            self._tail[layout.tail_slice(layer)] if layout.is_tail(b) else slots.writable(b, layer)
            for b in message.blocks
        ]

    def _answer(self, stored: int, deadline: float) -> None:
        done = StreamDone(
            stored_blocks=stored,
            kv_nbytes=self._arrivals.kv_nbytes,
            wire_s=self._wire_s,
            complete_at=self._complete_at,
        )
        try:
            self._channel.send(done, deadline=max(deadline, deadline_in(_ANSWER_TIMEOUT_S)))
        except KVFerryError as exc:
            # Everything is here and published, so this side goes on; the sender will see its channel end.
            _log.warning("%s: complete, but the sender could not be told: %s", self, exc)

    # ---- using the layers -----------------------------------------------------------------------

    def wait_layer(self, layer: int, deadline: float) -> None:
        """Wait until ``layer`` is in place for all blocks, those stored before included.

        Raises:
            TransferTimeoutError: At the deadline; the stream goes on.
            KVFerryError: What ended the stream early.
        """
        if not 0 <= layer < self._layout.layers:
            raise IndexError(f"layer {layer} is outside 0..{self._layout.layers - 1}")
        self._wait(lambda: self._opened and self._arrivals.has_layer(layer), f"layer {layer}", deadline)

    def wait(self, deadline: float) -> Handoff:
        """Wait until everything is received and published.

        What was read through :meth:`view` before is right once this has returned.

        Raises:
            TransferTimeoutError: At the deadline; the stream goes on.
            KVFerryError: What ended the stream early.
        """
        self._wait(lambda: self._handoff is not None, "the end", deadline)
        assert self._handoff is not None
        return self._handoff

    def _wait(self, arrived: Callable[[], bool], what: str, deadline: float) -> None:
        with self._cond:
            self._cond.wait_for(lambda: self._error is not None or arrived(), time_left(deadline))
            error = self._error
            if error is None and not arrived():
                error = TransferTimeoutError(
                    f"{self}: {what} did not arrive in time; {self._arrivals.progress()}"
                )
        if error is not None:
            raise clean_error(error)

    def view(self, layer: int, block: int) -> memoryview:
        """The bytes of ``layer`` of ``block``, read-only, valid until :meth:`close`.

        For a full block its layer slice. For the tail block, number ``len(keys)``, the ``tail_tokens``
        rows of each tensor, end to end without padding, in a private buffer.

        Raises:
            IndexError: For a layer or block outside the stream.
            ProtocolError: If the layer of the block is not in place yet.
            LeaseExpiredError: If the stream was closed or has failed.
        """
        with self._cond:
            slots = self._slots
            if slots is None or self._closed or self._error is not None:
                raise LeaseExpiredError(f"{self}: view of layer {layer} after the end of the stream")
            if not (0 <= layer < self._layout.layers and 0 <= block < self._layout.blocks):
                raise IndexError(
                    f"layer {layer} of block {block} is outside a stream of {self._layout.layers} layers and "
                    f"{self._layout.blocks} blocks"
                )
            if not self._arrivals.has(layer, block):
                raise ProtocolError(f"{self}: layer {layer} of block {block} is not in place yet; wait_layer")
            if self._layout.is_tail(block):
                return self._tail[self._layout.tail_slice(layer)].toreadonly()
            return slots.readable(block, layer)

    # ---- ending ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Give up leases and the tail buffer; ends :meth:`run` if it is still going. Idempotent.

        Raises:
            LeaseExpiredError: If a lease ran out before, so that what was read after :meth:`wait` may
                be wrong; everything is given back all the same.
        """
        with self._cond:
            if self._closed:
                return
            self._closed = True
            running = self._running
            finished = self._handoff is not None
            slots = self._slots
            self._tail = memoryview(b"")
        if finished and slots is not None:
            slots.release()
            return
        error = RequestCancelledError(f"{self} was closed before its end")
        self._end(error)
        if not running:
            self._end_writing(error)
        elif not self._needs_word or not self._ended_within(_CLOSE_TIMEOUT_S):  # else run() ends by itself
            self._channel.abort()
            if not self._ended_within(_CLOSE_TIMEOUT_S):
                _log.error("%s: run() does not end; its slots stay quarantined", self)

    def _ended_within(self, seconds: float) -> bool:
        with self._cond:
            return self._cond.wait_for(lambda: not self._running, seconds)

    def _end_writing(self, error: BaseException | None) -> None:
        """Nobody writes into the slots any more, or soon, as the grant has it."""
        with self._cond:
            writing, opened = self._writing.pop_all(), self._open_slots
            self._open_slots = None
        if opened is None:
            writing.close()
        else:
            opened.end(writing, error)

    def _end(self, error: BaseException) -> None:
        """Keep the first error, give the slots back, wake everybody; does nothing once published."""
        with self._cond:
            if self._handoff is not None:
                return
            if self._error is None:
                self._error = clean_error(error)
            self._tail = memoryview(b"")
            slots = self._slots
            self._cond.notify_all()
        if slots is not None:
            slots.give_up()

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as exc:
            self._end(exc)
            self._end_writing(exc)
            if self._closed and self._error is not None:  # what else went wrong is a consequence
                raise clean_error(self._error) from exc
            raise
        finally:
            with self._cond:
                self._running = False
                self._cond.notify_all()
