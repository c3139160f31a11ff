"""A connection that carries messages: the one place where protocol and connection meet."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

from kvferry import transports
from kvferry.core.buffers import Buf, as_bytes_view, total_nbytes
from kvferry.core.clock import deadline_in, earliest, is_past, time_left
from kvferry.core.errors import (
    KVFerryError,
    ProtocolError,
    TransferTimeoutError,
    TransportError,
    error_from_code,
)
from kvferry.transports.base import Connection
from kvferry.wire.channel_state import ChannelState
from kvferry.wire.handshake import shaking_hands
from kvferry.wire.incoming import Incoming
from kvferry.wire.messages import Failure, Hello, Message, Welcome
from kvferry.wire.options import ChannelOptions, Peer
from kvferry.wire.payload import SMALL_NBYTES, damaged, sealed
from kvferry.wire.protocol import (
    DESCRIPTOR_TYPES,
    MessageReceived,
    Side,
    State,
    printable,
)
from kvferry.wire.short import DAMAGED, DONE, MessageWay, ShortWay, short_way

__all__ = ["Channel", "Incoming"]

M = TypeVar("M", bound=Message)


class Channel(ChannelState):
    """One connection after its handshake.

    One thread may receive while others send (sends take turns); :meth:`abort` may be called from any
    thread and wakes the others with :class:`ConnectionClosedError`. After any exception inside a frame
    the connection is aborted, since both ends no longer agree where the next frame starts.

    Made by :meth:`connect` and :meth:`accept` only.
    """

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
        within_s = min(options.hello_timeout_s, time_left(deadline))
        limit = earliest(deadline, deadline_in(within_s))
        with channel._handshake(limit, within_s):
            channel._say_hello(limit)
        channel._open()
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
        within_s = min(options.hello_timeout_s, time_left(deadline))
        limit = earliest(deadline, deadline_in(within_s))
        with channel._handshake(limit, within_s):
            channel._await_hello(limit)
        channel._open()
        return channel

    def _handshake(self, limit: float, within_s: float) -> AbstractContextManager[None]:
        refuse = partial(self._tell_refusal, limit=limit)
        return shaking_hands(self.address, self.abort, refuse, within_s)

    def _tell_refusal(self, error: KVFerryError, limit: float) -> None:
        """Answer a peer that did send a hello; whoever sent garbage gets nothing."""
        if self._protocol.side is Side.SERVER and self._protocol.state is State.OFFERED:
            try:
                self._send_frame(Failure.of(error), [], limit, 0)
                self._connection.close()
            except KVFerryError:
                self.abort()

    def _open(self) -> None:
        """The handshake is over."""
        self._short_place = self._reader.place
        self._short = short_way(self._connection, self._protocol, self._short_place)
        self._took_long_way = True

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

    # ---- sending -----------------------------------------------------------------------------

    def send(
        self,
        message: Message,
        payload: Sequence[Buf] = (),
        *,
        deadline: float,
        request_id: int = 0,
        descriptors: Sequence[int] = (),
        lent: bool = False,
    ) -> None:
        """Send one frame.

        Args:
            message: What to send.
            payload: Scattered; may be reused when the call returns, unless it is ``lent``.
            deadline: By which everything was handed to the transport.
            request_id: Echoed by the peer in its answer.
            descriptors: To be passed right behind the frame; the message says how many they are.
            lent: Whether the payload stays as it is until the frame is answered, so that the kernel need not
                copy it. Where it changes before, the receiver finds it damaged.

        Raises:
            ProtocolError: If the message may not be sent or is over a limit, or descriptors cannot be
                passed here (:attr:`shares_memory`); nothing was sent, and the channel stays usable.
            TransferTimeoutError: At the deadline; the connection is aborted if the frame had begun.
            ConnectionClosedError: If this end or the peer closed it.
        """
        memory = self._memory() if descriptors else None
        lock = self._send_lock
        if not (lock.acquire(False) or lock.acquire(timeout=time_left(deadline))):
            raise TransferTimeoutError(f"{self.address}: another thread was sending until the deadline")
        try:
            short = self._short
            if short is None or not self._send_short(short, message, payload, deadline, request_id, lent):
                views = [view for part in payload if len(view := as_bytes_view(part))]
                self._send_frame(message, views, deadline, request_id, total_nbytes(views))
            if memory is not None:
                with self._frame():
                    memory.send_descriptors(descriptors, deadline)
        finally:
            lock.release()

    def _send_short(
        self, short: ShortWay | MessageWay, message: Message, payload: Sequence[Buf], deadline: float,
        request_id: int, lent: bool,
    ) -> bool:  # fmt: skip
        """Whether that was all."""
        try:
            code = short.send(message, request_id, payload, deadline, lent)
            if code is None:
                return False
            if code != DONE:
                raise short.error(code, "sending")
        except BaseException:
            self._frame_failed()
            raise
        self._last_activity = time.monotonic()
        return True

    def reply(
        self, request: Incoming, message: Message, payload: Sequence[Buf] = (), *, deadline: float,
        lent: bool = False,
    ) -> None:  # fmt: skip
        """Send the answer to ``request``; otherwise as :meth:`send`."""
        self.send(message, payload, deadline=deadline, request_id=request.request_id, lent=lent)

    def send_failure(self, error: KVFerryError, *, deadline: float, request_id: int = 0) -> None:
        """Tell the peer of ``error``; the errors are those of :meth:`send`."""
        self.send(Failure.of(error), deadline=deadline, request_id=request_id)

    def _send_frame(
        self, message: Message, views: list[memoryview], deadline: float, request_id: int, nbytes: int = 0
    ) -> None:
        head = self._protocol.encode(message, nbytes, request_id)
        self._connection.begin_sending()
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
            if self._short is not None and (found := self._receive_short(self._short, deadline, ahead)):
                return found
            self._took_long_way = True
            event = self._read_whole(deadline) if ahead and self._reader.gets_more else None
            if event is not None:
                now = self._last_activity = time.monotonic()
                message, nbytes = event.message, event.payload_nbytes
                if type(message) is Failure:
                    self._failure_received = True
                incoming = Incoming(self, message, nbytes, event.request_id, now, event.has_trailer)
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

    def _receive_short(self, short: ShortWay | MessageWay, deadline: float, ahead: bool) -> Incoming | None:
        """The next frame; ``None`` if it is for the long way, which has what came of it."""
        if self._took_long_way:
            if not self._reader.between_frames:
                return None
            self._took_long_way = False
        try:
            found = short.receive(deadline, ahead)
            if type(found) is tuple:
                message, request_id, nbytes = found
                now = self._last_activity = time.monotonic()
                if type(message) is Failure:
                    self._failure_received = True
                incoming = Incoming(self, message, nbytes, request_id, now, self._protocol.checksum)
                if nbytes:
                    self._pending = incoming
                return incoming
            if type(found) is int:
                if found <= 0:
                    raise short.error(found, "receiving")
                self._reader.take_over(self._short_place, 0, found)
        except BaseException:
            self._frame_failed()
            raise
        return None

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
        self, message: Message, reply_type: type[M], *, payload: Sequence[Buf] = (), deadline: float,
        lent: bool = False,
    ) -> M:  # fmt: skip
        """Send ``message`` and wait for its answer; for channels on which nothing else is under way.

        ``lent``: as :meth:`send`.

        Returns:
            The answer. A peer that serves one request at a time may leave its request id 0.

        Raises:
            KVFerryError: As :meth:`send` and :meth:`expect`.
        """
        self._next_request += 1
        self.send(message, payload, deadline=deadline, request_id=self._next_request, lent=lent)
        return self.expect(reply_type, deadline, request_id=self._next_request)

    def readable(self) -> bool:
        """Whether bytes, or the end of the stream, are there now; for who would receive them."""
        now = time.monotonic()
        try:
            if self._pending is None:
                return self._reader.await_frame(now, ahead=False)
            return self._reader.holds_bytes or self._connection.wait_readable(now)
        except TransportError:
            return True

    def peer_is_gone(self) -> bool:
        """Whether the peer has ended the stream behind its last message, whose answer it does not wait for.

        Ask right before something is done that cannot be undone: who has given up, and thinks that it failed,
        must not find it done later. For the thread that receives, when no payload is unread.
        """
        self._begin_receiving()
        try:
            self._took_long_way = True  # the reader may hold bytes afterwards
            self._reader.look()
        except TransportError:
            return True
        finally:
            self._receive_lock.release()
        return False

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
        incoming = Incoming(self, event.message, nbytes, event.request_id, started_at, event.has_trailer)
        self._pending = incoming if nbytes else None
        return incoming

    def read_directly(self, incoming: Incoming, views: Sequence[memoryview], deadline: float) -> bool:
        """Fill ``views`` in one call and compare the trailer; ``False`` if that is for the long way."""
        short = self._short
        if short is None or self._pending is not incoming:
            return False
        self._begin_receiving()
        try:
            code = short.receive_payload(views, deadline)
            if code is None:
                return False
            self._pending = None
            if code != DONE:
                if code == DAMAGED:
                    raise damaged(self.address, incoming, *short.progress())
                raise short.error(code, "receiving")
        except BaseException:
            self._frame_failed()
            raise
        finally:
            self._receive_lock.release()
        self._last_activity = time.monotonic()
        return True

    def read_payload(self, incoming: Incoming, pieces: Iterable[list[memoryview]], deadline: float) -> None:
        """Fill ``pieces``, which hold the whole payload, then take the trailer."""
        self._begin_receiving()
        try:
            if self._short is not None:
                head_nbytes, nbytes = self._short.hand_over()
                self._took_long_way = True
                if head_nbytes:
                    self._reader.take_over(self._short_place, head_nbytes, nbytes)
            self._reader.read_payload(incoming, pieces, deadline)
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

    def send_descriptors(self, descriptors: Sequence[int], deadline: float) -> None:
        """Pass descriptors that the peer is waiting for with :meth:`receive_descriptors`.

        Raises as :meth:`SharedMemoryConnection.send_descriptors`; the connection is aborted then.
        """
        memory = self._memory()
        with self._send_lock, self._frame():
            memory.send_descriptors(descriptors, deadline)

    def holds_payload_of(self, incoming: Incoming) -> bool:
        """Whether the payload of ``incoming`` is the next thing in the connection."""
        return self._pending is incoming

    def _begin_receiving(self) -> None:
        if not self._receive_lock.acquire(False):
            raise ProtocolError(f"{self.address}: two threads receive from one channel")

    # ---- ending ------------------------------------------------------------------------------

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

    def _error_of(self, failure: Failure) -> KVFerryError:
        return error_from_code(failure.code, f"{self.address}: {printable(failure.message, 4000)}")
