"""A connection that carries messages: the one place where protocol and connection meet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TypeVar

from kvferry import transports
from kvferry.core.buffers import Buf, as_bytes_view
from kvferry.core.clock import deadline_in, earliest, is_past, time_left
from kvferry.core.errors import (
    KVFerryError,
    ProtocolError,
    TransferTimeoutError,
    TransportError,
    error_from_code,
)
from kvferry.transports.base import Connection, SharedMemoryConnection
from kvferry.wire.handshake import shaking_hands
from kvferry.wire.incoming import Incoming
from kvferry.wire.messages import Failure, Hello, Message, Welcome
from kvferry.wire.options import ChannelOptions, Peer
from kvferry.wire.payload import SMALL_NBYTES, sealed
from kvferry.wire.protocol import (
    DESCRIPTOR_TYPES,
    MessageReceived,
    Side,
    State,
    WireProtocol,
    printable,
)
from kvferry.wire.reader import FrameReader

__all__ = ["Channel", "Incoming"]

M = TypeVar("M", bound=Message)

_FAILURE_TIMEOUT_S = 1.0


class Channel:
    """One connection after its handshake.

    One thread may receive while others send (sends take turns); :meth:`abort` may be called from any
    thread and wakes the others with :class:`ConnectionClosedError`. After any exception inside a frame
    the connection is aborted, since both ends no longer agree where the next frame starts.

    Made by :meth:`connect` and :meth:`accept` only.
    """

    def __init__(self, connection: Connection, protocol: WireProtocol, options: ChannelOptions) -> None:
        self._connection = connection
        self._protocol = protocol
        self._reader = FrameReader(connection, protocol)
        # Descriptors that were read over would be lost; only servers send them.
        self._reads_ahead = protocol.side is Side.SERVER or not self.shares_memory
        self._options = options
        self._send_lock = threading.Lock()
        self._receive_lock = threading.Lock()
        self._pending: Incoming | None = None
        self._peer: Peer | None = None
        self._next_request = 0
        self._closed = False
        self._failure_received = False
        self._waiting = False
        self._last_activity = time.monotonic()

    def __repr__(self) -> str:
        return f"<Channel to {self.address} {self._protocol.state.value}>"

    # ---- making one --------------------------------------------------------------------------

    @classmethod
    def connect(cls, address: str, options: ChannelOptions, deadline: float) -> Channel:
        """Connect to ``address`` and shake hands.

        Args:
            address: URL of a :class:`kvferry.wire.ChannelServer`.
            options: What to say and accept; ``hello_timeout_s`` bounds the whole handshake.
            deadline: By which it is done, connection included.

        Raises:
            ConnectError: If there is no connection or no complete handshake in time.
            ProtocolError: If the peer speaks something else, or no common version.
            ConfigError: If the address is malformed.
            KVFerryError: Of the kind with which the peer refused.
        """
        return cls.open(transports.connect(address, deadline), options, deadline)

    @classmethod
    def open(cls, connection: Connection, options: ChannelOptions, deadline: float) -> Channel:
        """Shake hands as the client on a connection that was made already; otherwise as :meth:`connect`."""
        channel = cls(connection, options.protocol(Side.CLIENT, connection.peer_address), options)
        limit = earliest(deadline, deadline_in(options.hello_timeout_s))
        with channel._handshake(limit):
            channel._say_hello(limit)
        return channel

    @classmethod
    def accept(cls, connection: Connection, options: ChannelOptions, deadline: float) -> Channel:
        """Shake hands on a connection that a listener accepted.

        A peer that speaks the protocol but cannot be served (no common version) is told so.

        Raises:
            AuthError: If ``options.admit`` refuses the peer.
            ConnectError: If the handshake is not complete in time, or the peer left.
            ProtocolError: If the peer speaks something else, or no common version.
        """
        channel = cls(connection, options.protocol(Side.SERVER, connection.peer_address), options)
        limit = earliest(deadline, deadline_in(options.hello_timeout_s))
        with channel._handshake(limit):
            channel._await_hello(limit)
        return channel

    @classmethod
    def refuse(cls, connection: Connection, options: ChannelOptions, error: KVFerryError) -> None:
        """Hear the peer's hello, answer with ``error`` and close; never raises, takes at most 1 s."""
        channel = cls(connection, options.protocol(Side.SERVER, connection.peer_address), options)
        limit = deadline_in(min(_FAILURE_TIMEOUT_S, options.hello_timeout_s))
        try:
            # Heard first: closing a socket with unread bytes may discard the answer on its way.
            channel._read_message(limit)
            channel._send_frame(Failure.of(error), [], limit, 0)
            connection.close()
        except KVFerryError:
            connection.abort()

    def _handshake(self, limit: float) -> AbstractContextManager[None]:
        return shaking_hands(self.address, self.abort, partial(self._tell_refusal, limit=limit), limit)

    def _tell_refusal(self, error: KVFerryError, limit: float) -> None:
        """Answer a peer that did send a hello; whoever sent garbage gets nothing."""
        if self._protocol.side is Side.SERVER and self._protocol.state is State.OFFERED:
            try:
                self._send_frame(Failure.of(error), [], limit, 0)
                self._connection.close()
            except KVFerryError:
                self.abort()

    def _say_hello(self, limit: float) -> None:
        sent_at = time.monotonic()
        self._send_frame(self._options.hello(sent_at), [], limit, 0)
        message = self._read_message(limit).message
        now = time.monotonic()
        if isinstance(message, Failure):
            raise self._error_of(message)
        assert isinstance(message, Welcome)
        self._peer = Peer.from_welcome(self.address, message, sent_at, now)

    def _await_hello(self, limit: float) -> None:
        hello = self._read_message(limit).message
        received_at = time.monotonic()
        assert isinstance(hello, Hello)
        self._peer = self._options.admitted(self.address, hello, self._protocol.version, received_at)
        welcome = self._options.welcome(self._protocol, received_at, time.monotonic())
        self._send_frame(welcome, [], limit, 0)

    # ---- properties --------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """URL of the other end."""
        return self._connection.peer_address

    @property
    def peer(self) -> Peer:
        """The other end, as it described itself."""
        assert self._peer is not None, "made by connect() and accept() only"
        return self._peer

    @property
    def checksum(self) -> bool:
        """Whether frames carry a checksum on this connection."""
        return self._protocol.checksum

    @property
    def shares_memory(self) -> bool:
        """Whether descriptors of memory can be passed along with frames."""
        return isinstance(self._connection, SharedMemoryConnection)

    @property
    def peer_pid(self) -> int | None:
        """Process id of the peer as the kernel knows it, if it does."""
        return self._memory().peer_credentials[0] if self.shares_memory else None

    @property
    def closed(self) -> bool:
        """Whether this end was closed, or aborted after an error."""
        return self._closed

    @property
    def reusable(self) -> bool:
        """Whether another request may be made: no frame is open, and the peer reported no failure."""
        return not (
            self._closed or self._failure_received or self._pending is not None or self._protocol.in_frame
        )

    @property
    def idle_s(self) -> float:
        """For how many seconds a thread has been waiting for a frame with nothing moving; else 0."""
        return time.monotonic() - self._last_activity if self._waiting else 0.0

    # ---- sending -----------------------------------------------------------------------------

    def send(
        self,
        message: Message,
        payload: Sequence[Buf] = (),
        *,
        deadline: float,
        request_id: int = 0,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send one frame.

        Args:
            message: What to send.
            payload: Scattered; may be reused when the call returns.
            deadline: By which everything was handed to the transport.
            request_id: Echoed by the peer in its answer.
            descriptors: To be passed right behind the frame; the message says how many they are.

        Raises:
            ProtocolError: If the message may not be sent or is over a limit, or descriptors cannot be
                passed here (:attr:`shares_memory`); nothing was sent, and the channel stays usable.
            TransferTimeoutError: At the deadline; the connection is aborted if the frame had begun.
            ConnectionClosedError: If this end or the peer closed it.
        """
        views: list[memoryview] = []
        nbytes = 0
        for part in payload:
            view = as_bytes_view(part)
            if n := len(view):
                views.append(view)
                nbytes += n
        memory = self._memory() if descriptors else None
        lock = self._send_lock
        if not (lock.acquire(False) or lock.acquire(timeout=time_left(deadline))):
            raise TransferTimeoutError(f"{self.address}: another thread was sending until the deadline")
        try:
            self._send_frame(message, views, deadline, request_id, nbytes)
            if memory is not None:
                with self._frame():
                    memory.send_descriptors(descriptors, deadline)
        finally:
            lock.release()

    def reply(
        self, request: Incoming, message: Message, payload: Sequence[Buf] = (), *, deadline: float
    ) -> None:
        """Send the answer to ``request``; otherwise as :meth:`send`."""
        self.send(message, payload, deadline=deadline, request_id=request.request_id)

    def send_failure(self, error: KVFerryError, *, deadline: float, request_id: int = 0) -> None:
        """Tell the peer of ``error``; the errors are those of :meth:`send`."""
        self.send(Failure.of(error), deadline=deadline, request_id=request_id)

    def _send_frame(
        self, message: Message, views: list[memoryview], deadline: float, request_id: int, nbytes: int = 0
    ) -> None:
        head = self._protocol.encode(message, nbytes, request_id)
        try:
            if not views or not self._protocol.checksum:
                self._connection.send([head, *views], deadline)
            elif nbytes <= SMALL_NBYTES:
                self._connection.send([sealed(head, views)], deadline)
            else:
                self._connection.send_hashed(head, views, deadline)
        except BaseException:
            self._frame_failed()
            raise
        self._last_activity = time.monotonic()

    # ---- receiving ---------------------------------------------------------------------------

    def receive(self, deadline: float) -> Incoming:
        """The next frame. Its payload, if any, must be read or discarded before the next one.

        Raises:
            TransferTimeoutError: At the deadline; the connection is aborted.
            ConnectionClosedError: If this end or the peer closed it.
            ProtocolError: If the peer broke the protocol (the connection is aborted), or if the payload
                of the last frame is still unread (nothing is changed).
        """
        incoming = self._receive(deadline, self._reads_ahead)
        assert incoming is not None, "only who is idle takes no frame for an answer"
        return incoming

    def _receive(self, deadline: float, ahead: bool, idle: bool = False) -> Incoming | None:
        """The next frame; if ``idle``, ``None`` if none began by the deadline.

        The short way is here in one piece: what runs between the wake-up and the message is cold each time.
        """
        if not self._receive_lock.acquire(False):
            raise ProtocolError(f"{self.address}: two threads receive from one channel")
        try:
            if self._pending is not None:
                raise self._unread()
            self._waiting = True
            event = self._read_whole(deadline) if ahead and self._reader.gets_more else None
            if event is not None:
                now = self._last_activity = time.monotonic()
                message, nbytes = event.message, event.payload_nbytes
                if type(message) is Failure:
                    self._failure_received = True
                incoming = Incoming(self, event, message, nbytes, event.request_id, now)
                if nbytes:
                    self._pending = incoming
                return incoming
            if idle:
                if not self._await_frame(deadline):
                    return None
                deadline = max(deadline, deadline_in(self._options.frame_timeout_s))
            return self._read_message(deadline, ahead=ahead)
        finally:
            self._waiting = False
            self._receive_lock.release()

    def _read_whole(self, deadline: float) -> MessageReceived | None:
        try:
            return self._reader.read_whole(deadline)
        except TransferTimeoutError:
            return None  # nothing was taken: the long way says whether that is an error
        except BaseException:
            self._frame_failed()
            raise

    def receive_idle(self, deadline: float) -> Incoming | None:
        """The next frame, or ``None`` if none began to arrive by the deadline; the channel stays good.

        A frame that has begun is given ``frame_timeout_s`` of the options to complete its message, so
        the call may return that much after its deadline. Raises as :meth:`receive`.
        """
        return self._receive(deadline, self._reads_ahead, True)

    def expect(self, reply_type: type[M], deadline: float, *, request_id: int = 0) -> M:
        """The next frame, which must be a ``reply_type`` without payload.

        Raises:
            KVFerryError: Of the kind that the peer's ``Failure`` names, with the peer's address.
            ProtocolError: If it is another message, or answers another request; connection aborted.
        """
        incoming = self._receive(deadline, self._reads_ahead or DESCRIPTOR_TYPES.isdisjoint((reply_type,)))
        assert incoming is not None, "only who is idle takes no frame for an answer"
        message = incoming.message
        if request_id and incoming.request_id not in (0, request_id):
            self.abort()
            raise ProtocolError(
                f"{self.address} answered request {incoming.request_id}, asked was {request_id}", remote=True
            )
        if isinstance(message, Failure):
            raise self._error_of(message)
        if not isinstance(message, reply_type) or incoming.payload_nbytes:
            self.abort()
            raise ProtocolError(
                f"{self.address} answered with {type(message).__name__} and {incoming.payload_nbytes} "
                f"payload bytes, expected was {reply_type.__name__} without payload",
                remote=True,
            )
        return message

    def call(
        self, message: Message, reply_type: type[M], *, payload: Sequence[Buf] = (), deadline: float
    ) -> M:
        """Send ``message`` and wait for its answer; for channels on which nothing else is under way.

        Returns:
            The answer. A peer that serves one request at a time may leave its request id 0.

        Raises:
            KVFerryError: As :meth:`send` and :meth:`expect`.
        """
        self._next_request += 1
        self.send(message, payload, deadline=deadline, request_id=self._next_request)
        return self.expect(reply_type, deadline, request_id=self._next_request)

    def readable(self) -> bool:
        """Whether bytes, or the end of the stream, are there now."""
        try:
            return self._reader.holds_bytes or self._connection.wait_readable(time.monotonic())
        except TransportError:
            return True

    def _await_frame(self, deadline: float) -> bool:
        try:
            return self._reader.await_frame(deadline, ahead=self._reads_ahead)
        except BaseException:
            self.abort()
            raise

    def _read_message(self, deadline: float, *, ahead: bool = False) -> Incoming:
        try:
            event, started_at = self._reader.read_message(deadline, ahead=ahead)
        except BaseException:
            self._frame_failed()
            raise
        self._last_activity = time.monotonic()
        self._failure_received = self._failure_received or type(event.message) is Failure
        nbytes = event.payload_nbytes
        incoming = Incoming(self, event, event.message, nbytes, event.request_id, started_at)
        self._pending = incoming if nbytes else None
        return incoming

    def read_payload(self, incoming: Incoming, pieces: Iterable[list[memoryview]], deadline: float) -> None:
        """Fill ``pieces``, which hold the whole payload, then take the trailer."""
        self._begin_receiving()
        try:
            self._reader.read_payload(incoming.event, pieces, deadline)
        except BaseException:
            self._frame_failed()
            raise
        finally:
            self._pending = None
            self._receive_lock.release()
        self._last_activity = time.monotonic()

    def receive_descriptors(self, count: int, deadline: float) -> list[int]:
        """Take the ``count`` descriptors that follow the last frame; the caller closes them.

        Raises as :meth:`SharedMemoryConnection.recv_descriptors`; the connection is aborted then.
        """
        memory = self._memory()
        self._begin_receiving()
        try:
            if self._pending is not None:
                raise self._unread()
            with self._frame():
                return memory.recv_descriptors(count, deadline)
        finally:
            self._receive_lock.release()

    def _memory(self) -> SharedMemoryConnection:
        if not isinstance(self._connection, SharedMemoryConnection):
            raise ProtocolError(
                f"{self.address}: descriptors of memory pass only between processes of one machine, "
                "use a unix:// address"
            )
        return self._connection

    def holds_payload_of(self, incoming: Incoming) -> bool:
        """Whether the payload of ``incoming`` is the next thing in the connection."""
        return self._pending is incoming

    def _unread(self) -> ProtocolError:
        assert self._pending is not None
        return ProtocolError(
            f"{self.address}: {self._pending.payload_nbytes} payload bytes of the last "
            f"{type(self._pending.message).__name__} must be read or discarded first"
        )

    def _begin_receiving(self) -> None:
        if not self._receive_lock.acquire(False):
            raise ProtocolError(f"{self.address}: two threads receive from one channel")

    # ---- ending ------------------------------------------------------------------------------

    @contextmanager
    def _frame(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._frame_failed()
            raise
        self._last_activity = time.monotonic()

    def _frame_failed(self) -> None:
        """Abort the connection after any exception: half a frame is on the way or taken."""
        if self._peer is not None:  # before that the handshake ends it, with a word to the peer
            self.abort()

    def linger(self, deadline: float) -> None:
        """Read and drop what the peer still sends, until it closes or the deadline; never raises.

        For a side that has sent its last message: closing with unread bytes may discard that message.
        """
        try:
            if self._pending is not None:
                self._pending.discard(deadline)
            while not is_past(deadline):
                self.receive(deadline).discard(deadline)
        except KVFerryError:
            return  # closed by the peer, as hoped, or aborted

    def close(self) -> None:
        """End the connection after what was sent has been handed over; a second call does nothing."""
        self._closed = True
        self._connection.close()

    def abort(self) -> None:
        """End the connection at once; wakes threads that use it. Safe from any thread."""
        self._closed = True
        self._connection.abort()

    def _error_of(self, failure: Failure) -> KVFerryError:
        return error_from_code(failure.code, f"{self.address}: {printable(failure.message, 4000)}")
