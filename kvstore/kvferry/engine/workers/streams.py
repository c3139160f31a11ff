"""KV streams that the decode worker expects: announced by the gateway, opened by a prefill worker."""

from __future__ import annotations

import logging
import threading

from kvferry.core.blockstore import BlockStore
from kvferry.core.clock import deadline_in, earliest, time_left
from kvferry.core.errors import KVFerryError, LeaseExpiredError, RequestCancelledError, RequestError
from kvferry.core.keys import KEY_NBYTES
from kvferry.core.memory import MemoryStore
from kvferry.core.spec import KeyScope, KVSpec
from kvferry.streaming import (
    LayerReceiver,
    RegionGrant,
    SegmentGrant,
    SlotGrant,
    StreamCodec,
    WindowKeeper,
    WriterWatch,
)
from kvferry.transports import RegionTransport
from kvferry.wire import Channel, Incoming
from kvferry.wire.messages import BeginStream

__all__ = ["ExpectedStream", "StreamTable"]

log = logging.getLogger(__name__)


class ExpectedStream:
    """One stream that was announced; its receiver is there once the prefill worker has opened it.

    The thread that wants the KV waits here, the thread that serves the KV connection reports here.
    """

    def __init__(self, stream: str, prompt_tokens: int, scope: KeyScope, deadline: float) -> None:
        self.stream = stream
        self.prompt_tokens = prompt_tokens
        self.scope = scope
        self.deadline = deadline
        self._changed = threading.Condition()
        self._receiver: LayerReceiver | None = None
        self._taken = False
        self._ended = False
        self._error: KVFerryError | None = None

    def take(self) -> None:
        """Claim the stream for one connection.

        Raises:
            RequestError: If another one has it.
        """
        with self._changed:
            if self._taken:
                raise RequestError(f"stream {self.stream!r} was opened before")
            self._taken = True

    def attach(self, receiver: LayerReceiver) -> None:
        """The stream has begun.

        Raises:
            RequestCancelledError: If nobody waits for it any more.
        """
        with self._changed:
            if self._ended:
                raise RequestCancelledError(f"stream {self.stream!r} is not wanted any more")
            self._receiver = receiver
            self._changed.notify_all()

    def fail(self, error: KVFerryError) -> None:
        """The stream ended early; the first reason counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def receiver(self, until: float) -> LayerReceiver | None:
        """The receiver, or ``None`` if the stream has not begun by ``until``.

        Raises:
            KVFerryError: If it was refused.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._receiver or self._error, time_left(until))
            if self._receiver is None and self._error is not None:
                raise self._error
            return self._receiver

    def received_nbytes(self) -> int:
        """Bytes of KV that have come so far."""
        with self._changed:
            return self._receiver.kv_nbytes if self._receiver is not None else 0

    def end(self) -> None:
        """Nobody waits any more: give up leases and slots, and cut the transfer if it still runs.

        Raises:
            LeaseExpiredError: If a lease ran out while the KV was read.
        """
        with self._changed:
            self._ended = True
            receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()


class StreamTable:
    """All streams expected at one decode worker, by name. Thread safe."""

    def __init__(
        self,
        store: BlockStore,
        spec: KVSpec,
        *,
        ring: int,
        codec: StreamCodec | None = None,
        regions: RegionTransport | None = None,
        takes_lossy: bool = False,
    ) -> None:
        self._takes_lossy = takes_lossy
        self._store = store
        self._spec = spec
        self._ring = ring
        self._codec = codec
        self._lock = threading.Lock()
        self._expected: dict[str, ExpectedStream] = {}
        self._watch = WriterWatch()
        self._regions = regions
        self._keeper = WindowKeeper()

    def __len__(self) -> int:
        with self._lock:
            return len(self._expected)

    def received_nbytes(self) -> int:
        """Bytes of KV that the open streams have brought so far."""
        with self._lock:
            expected = list(self._expected.values())
        return sum(one.received_nbytes() for one in expected)

    def expect(self, stream: str, prompt_tokens: int, scope: KeyScope, deadline: float) -> ExpectedStream:
        """Announce a stream.

        Raises:
            RequestError: If one of that name is expected already.
        """
        expected = ExpectedStream(stream, prompt_tokens, scope, deadline)
        with self._lock:
            if stream in self._expected:
                raise RequestError(f"stream {stream!r} is expected already; a stream needs a name of its own")
            self._expected[stream] = expected
        return expected

    def forget(self, expected: ExpectedStream) -> None:
        """End a stream in any state; whoever still opens it is refused."""
        with self._lock:
            self._expected.pop(expected.stream, None)
        try:
            expected.end()
        except LeaseExpiredError as error:
            log.warning("%s", error)

    def serve(self, channel: Channel, incoming: Incoming, *, grant: SlotGrant | None = None) -> None:
        """Receive a stream; runs in the thread that serves the KV connection.

        Args:
            channel: From the prefill worker.
            incoming: The opening message.
            grant: From :meth:`grant`, for this channel.

        Raises:
            RequestError: If nobody expects the stream, or it has another length than was announced.
            KVFerryError: What ended it early.
        """
        begin = incoming.message
        assert isinstance(begin, BeginStream)
        with self._lock:
            expected = self._expected.get(begin.stream)
        if expected is None:
            raise RequestError(f"stream {begin.stream[:80]!r} is not expected here (any more)")
        expected.take()
        try:
            self._check(begin, expected)
            namespace = self._store.namespace(self._spec, expected.scope, takes_lossy=self._takes_lossy)
            receiver = LayerReceiver(
                channel, namespace, begin, ring=self._ring, grant=grant, codec=self._codec
            )
            expected.attach(receiver)
            receiver.start()
            receiver.run(earliest(expected.deadline, deadline_in(begin.timeout_s)))
        except KVFerryError as error:
            expected.fail(error)
            raise

    def grant(self, channel: Channel) -> SlotGrant | None:
        """Lets a prefill worker write into the slots itself, if it can; one a channel."""
        store = self._store
        if not isinstance(store, MemoryStore):
            return None
        if self._regions is not None and not channel.shares_memory:
            return RegionGrant(channel, store.arena, self._regions, self._keeper)
        return SegmentGrant(channel, store.arena, self._watch)

    def reap(self) -> None:
        """Free the slots of prefill processes that ended within a stream; for a call every second or so."""
        self._watch.reap()
        self._keeper.reap()

    def close(self) -> None:
        """Forget the processes that are watched, before the store is closed."""
        self._watch.close()

    def _check(self, begin: BeginStream, expected: ExpectedStream) -> None:
        if begin.spec.block_tokens != self._spec.block_tokens:
            return  # the receiver refuses the spec and shows both
        tokens = len(begin.keys) // KEY_NBYTES * self._spec.block_tokens + begin.tail_tokens
        if tokens != expected.prompt_tokens:
            raise RequestError(
                f"stream {begin.stream!r} brings KV of {tokens} tokens, not {expected.prompt_tokens}"
            )
