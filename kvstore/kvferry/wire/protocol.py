"""The wire protocol without I/O: messages to buffers, received bytes to events.

:class:`WireProtocol` never sees payload bytes and never blocks. Its owner (:class:`kvferry.wire.Channel`)
sends what :meth:`WireProtocol.encode` returns, receives exactly :attr:`WireProtocol.wanted` bytes at a
time, and puts payloads where they belong. Which message may be sent by whom in which state is the table
:data:`TRANSITIONS`; both sides follow the same one. ``docs/wire.md`` describes the bytes.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias, cast

import msgspec

from kvferry.core.buffers import Buf, as_bytes_view
from kvferry.core.errors import ProtocolError
from kvferry.wire import messages as m
from kvferry.wire.agreement import (
    DEFAULT_LIMITS,
    MIN_VERSION,
    SUPPORTED,
    VERSION,
    Limits,
    Versions,
    negotiate,
)
from kvferry.wire.messages import AnyMessage, Message
from kvferry.wire.printable import magic_hint, printable

__all__ = [
    "DESCRIPTOR_TYPES",
    "FLAG_TRAILER",
    "HEADER_NBYTES",
    "MAGIC",
    "MIN_VERSION",
    "PAYLOAD_TYPES",
    "SUPPORTED",
    "TRAILER_NBYTES",
    "TRANSITIONS",
    "TYPE_NUMBERS",
    "VERSION",
    "Event",
    "Limits",
    "MessageReceived",
    "Side",
    "State",
    "TrailerReceived",
    "Versions",
    "WireProtocol",
    "negotiate",
    "printable",
]

MAGIC: Final = b"KVFY"

_HEADER = struct.Struct("<4sHHIQIQ")
_TRAILER = struct.Struct("<Q")
FLAG_TRAILER: Final = 1
"""Bit of the header's flags: the payload is followed by its checksum. All other bits are zero."""
HEADER_NBYTES: Final = _HEADER.size
TRAILER_NBYTES: Final = _TRAILER.size

# Append only: a number is never given to another message, not even after its message is gone.
TYPE_NUMBERS: Final[Mapping[type[Message], int]] = MappingProxyType(
    {
        m.Hello: 1,
        m.Welcome: 2,
        m.Failure: 3,
        m.Ping: 4,
        m.Pong: 5,
        m.BeginStream: 16,
        m.StreamReady: 17,
        m.PutLayer: 18,
        m.LayerAck: 19,
        m.FinishStream: 20,
        m.StreamDone: 21,
        m.AbortStream: 22,
        m.StreamSlots: 23,
        m.LayerPlaced: 24,
        m.PutEncoded: 25,
        m.EncodedAck: 26,
        m.Describe: 32,
        m.Description: 33,
        m.Prefill: 34,
        m.PrefillDone: 35,
        m.Generate: 36,
        m.GenerateReady: 37,
        m.TokensOut: 38,
        m.Finished: 39,
        m.Cancel: 40,
        m.Status: 41,
        m.StatusReport: 42,
        m.AttachArena: 48,
        m.ArenaSegments: 49,
    }
)
_TYPES: Final[Mapping[int, type[Message]]] = {number: cls for cls, number in TYPE_NUMBERS.items()}
_NAMES: Final[Mapping[type[Message], str]] = {cls: str(cls.__struct_config__.tag) for cls in TYPE_NUMBERS}

PAYLOAD_TYPES: Final[frozenset[type[Message]]] = frozenset({m.PutLayer, m.PutEncoded, m.Prefill})
"""Messages whose frame may have a payload; in any other frame one is refused unread."""
DESCRIPTOR_TYPES: Final[frozenset[type[Message]]] = frozenset({m.ArenaSegments})
"""Messages behind whose frame descriptors may come, where the connection can pass them. Servers send them."""

# Over the union, not per class: only so is the tag required and compared.
_DECODER: Final = msgspec.msgpack.Decoder(AnyMessage)
_ENCODER: Final = msgspec.msgpack.Encoder()


class Side(enum.Enum):
    """The two ends of a connection."""

    CLIENT = "client"
    SERVER = "server"

    @property
    def other(self) -> Side:
        """The end that this one talks to."""
        return Side.SERVER if self is Side.CLIENT else Side.CLIENT


class State(enum.Enum):
    """Where a connection stands."""

    START = "start"
    OFFERED = "offered"
    """The hello is on its way or has come; the welcome is owed."""
    OPEN = "open"
    REFUSED = "refused"


# Who may send what in which state, and the state after it. ``Message`` stands for every message
# that has no line of its own in the state.
TRANSITIONS: Final[Mapping[State, Mapping[tuple[Side, type[Message]], State]]] = MappingProxyType(
    {
        State.START: {
            (Side.CLIENT, m.Hello): State.OFFERED,
            (Side.SERVER, m.Failure): State.REFUSED,
        },
        State.OFFERED: {
            (Side.SERVER, m.Welcome): State.OPEN,
            (Side.SERVER, m.Failure): State.REFUSED,
        },
        State.OPEN: {
            (Side.CLIENT, Message): State.OPEN,
            (Side.SERVER, Message): State.OPEN,
        },
        State.REFUSED: {},
    }
)
_HANDSHAKE_ONLY: Final[frozenset[type[Message]]] = frozenset({m.Hello, m.Welcome})


def _next_state(state: State, sender: Side, cls: type[Message]) -> State | None:
    """The state after ``sender`` sent a ``cls``; ``None`` where the table does not allow it."""
    rules = TRANSITIONS[state]
    found = rules.get((sender, cls))
    if found is None and cls not in _HANDSHAKE_ONLY:
        found = rules.get((sender, Message))
    return found


class MessageReceived(NamedTuple):
    """A message came. If ``payload_nbytes`` > 0 its payload comes next and is the owner's to receive."""

    message: Message
    request_id: int
    payload_nbytes: int
    has_trailer: bool


class TrailerReceived(NamedTuple):
    """The checksum of the payload that was just taken, as the sender computed it."""

    digest: int


Event: TypeAlias = "MessageReceived | TrailerReceived"


class _Header(NamedTuple):
    cls: type[Message]
    request_id: int
    meta_nbytes: int
    payload_nbytes: int
    has_trailer: bool
    next_state: State


class _Phase(enum.Enum):
    HEADER = enum.auto()
    META = enum.auto()
    PAYLOAD = enum.auto()
    TRAILER = enum.auto()
    FAILED = enum.auto()


# Python 3.11 takes ten times as long to find a member by way of its class.
_OPEN, _START, _OFFERED = State.OPEN, State.START, State.OFFERED
_AT_HEADER, _AT_META, _AT_PAYLOAD, _AT_TRAILER = _Phase.HEADER, _Phase.META, _Phase.PAYLOAD, _Phase.TRAILER


class WireProtocol:
    """One end of one connection.

    One thread may encode while another receives once the state is ``OPEN``; during the handshake all
    calls come from one thread.

    Args:
        side: Which end this is.
        limits: Lengths above which a frame is refused.
        versions: Those this end speaks.
        checksum: Whether this end wants payload checksums; they are off only if both want them off.
        peer: Name of the other end, for messages.
    """

    def __init__(
        self,
        side: Side,
        limits: Limits = DEFAULT_LIMITS,
        *,
        versions: Versions = SUPPORTED,
        checksum: bool = True,
        peer: str = "the peer",
    ) -> None:
        self.side = side
        self.limits = limits
        self.versions = versions
        self.state = _START
        self.version = 0
        """The agreed version; 0 until it is known."""
        self.checksum = checksum
        """Whether payloads have a trailer: what this end wants, then what was agreed."""
        self._peer = peer
        self._phase = _AT_HEADER
        self._have = bytearray()
        self._header: _Header | None = None
        self._has_trailer = False
        self.head_nbytes = HEADER_NBYTES
        """Bytes of header and meta of the last message received: those of the next are often as many."""

    @property
    def _shaking_hands(self) -> bool:
        return self.state is _START or self.state is _OFFERED

    # ---- sending -----------------------------------------------------------------------------

    def encode(self, message: Message, payload_nbytes: int = 0, request_id: int = 0) -> list[bytes]:
        """The buffers that start a frame: header and meta. Payload and :meth:`trailer` follow them.

        Raises:
            ProtocolError: If the message may not be sent now, is too long, or cannot be encoded: a
                mistake of this process. Nothing was changed.
        """
        cls = type(message)
        number = TYPE_NUMBERS.get(cls)
        if number is None:
            raise ProtocolError(f"{cls.__name__} has no type number, it is no message of this protocol")
        after: State | None = self.state
        if after is not _OPEN or cls in _HANDSHAKE_ONLY:  # else the table says: as before
            after = _next_state(self.state, self.side, cls)
        if after is None:
            raise ProtocolError(f"{self.side.value} may not send {_NAMES[cls]} in state {self.state.value!r}")
        try:
            meta = _ENCODER.encode(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"{_NAMES[cls]} cannot be encoded: {error}") from error
        self._check_lengths(cls, len(meta), payload_nbytes, remote=False)
        if cls is m.Welcome:
            self._agree_as_server(cast("m.Welcome", message))
        flags = FLAG_TRAILER if payload_nbytes and self.checksum else 0
        version = self.version or self.versions.lowest
        header = _HEADER.pack(MAGIC, version, number, flags, request_id, len(meta), payload_nbytes)
        self.state = after
        return [header, meta]

    @staticmethod
    def trailer(digest: int) -> bytes:
        """The bytes that follow a payload whose xxh3_64 is ``digest``."""
        return _TRAILER.pack(digest)

    def _agree_as_server(self, welcome: m.Welcome) -> None:
        if welcome.version != self.version:
            raise ProtocolError(f"welcome with version {welcome.version}, negotiated was {self.version}")
        if welcome.checksum != self.checksum:
            raise ProtocolError(f"welcome with checksum={welcome.checksum}, agreed was {self.checksum}")

    # ---- receiving ---------------------------------------------------------------------------

    @property
    def wanted(self) -> int:
        """How many bytes to receive next; 0 while a payload is due or after an error."""
        if self._phase is _AT_HEADER:
            # Whoever speaks another protocol is recognised by four bytes: its first line may be short.
            goal = 4 if self._shaking_hands and len(self._have) < 4 else HEADER_NBYTES
            return goal - len(self._have)
        if self._phase is _AT_META:
            assert self._header is not None
            return self._header.meta_nbytes - len(self._have)
        if self._phase is _AT_TRAILER:
            return TRAILER_NBYTES - len(self._have)
        return 0

    @property
    def in_frame(self) -> bool:
        """Whether a frame has begun to arrive and is not over."""
        return self._phase is not _AT_HEADER or bool(self._have)

    def receive(self, data: Buf) -> Event | None:
        """Take the next bytes of the stream.

        Returns:
            What ``data``, at most :attr:`wanted` received bytes, completed, if anything.

        Raises:
            ProtocolError: If they are no valid frame, or one that is not allowed now (``remote``); or
                if ``data`` is longer than wanted. After a remote error nothing can be received.
        """
        view = as_bytes_view(data)
        if len(view) > self.wanted:
            raise ProtocolError(f"{len(view)} bytes were fed to the protocol, {self.wanted} are wanted")
        self._have += view
        try:
            return self._advance()
        except ProtocolError:
            self._phase = _Phase.FAILED
            self._have.clear()
            raise

    def receive_ahead(self, data: memoryview) -> tuple[Event | None, int]:
        """As :meth:`receive`, from bytes that may go on behind what is wanted.

        Returns:
            What they completed, if anything, and how many bytes were taken: all, if nothing was completed.
        """
        if self.between_frames:
            message = self._receive_whole(data)
            if message is not None:
                return message, self.head_nbytes
        taken, event = 0, None
        while event is None and (n := min(self.wanted, len(data) - taken)):
            event = self.receive(data[taken : taken + n])
            taken += n
        return event, taken

    @property
    def between_frames(self) -> bool:
        """Whether a frame may begin, on an open connection."""
        return self._phase is _AT_HEADER and self.state is _OPEN and not self._have

    def _receive_whole(self, data: memoryview) -> MessageReceived | None:
        """The message at the start of ``data`` if it is whole and good; else the long way tells why."""
        if len(data) < HEADER_NBYTES:
            return None
        magic, version, number, flags, request_id, meta_nbytes, payload_nbytes = _HEADER.unpack_from(data)
        cls = _TYPES.get(number)
        has_trailer = payload_nbytes > 0 and self.checksum
        end = HEADER_NBYTES + meta_nbytes
        if (
            magic != MAGIC
            or version != self.version
            or flags != has_trailer * FLAG_TRAILER
            or not HEADER_NBYTES < end <= len(data)
            or meta_nbytes > self.limits.max_meta_nbytes
            or cls in _HANDSHAKE_ONLY
            or (
                payload_nbytes
                and not (cls in PAYLOAD_TYPES and payload_nbytes <= self.limits.max_payload_nbytes)
            )
        ):
            return None
        try:
            message = _DECODER.decode(data[HEADER_NBYTES:end])
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
            return None
        if type(message) is not cls:
            return None
        self._has_trailer = has_trailer
        if payload_nbytes:
            self._phase = _AT_PAYLOAD
        self.head_nbytes = end
        return MessageReceived(message, request_id, payload_nbytes, has_trailer)

    def payload_taken(self) -> None:
        """Tell that the payload was received; its trailer or the next frame is wanted now."""
        if self._phase is not _AT_PAYLOAD:
            raise ProtocolError("no payload is due")
        self._phase = _AT_TRAILER if self._has_trailer else _AT_HEADER

    def trailer_taken(self, data: memoryview) -> int:
        """Take the whole trailer; the checksum in it."""
        if self._phase is not _AT_TRAILER or self._have:
            raise ProtocolError("no trailer is due")
        self._phase = _AT_HEADER
        return int(_TRAILER.unpack(data)[0])

    def _advance(self) -> Event | None:
        have = self._have
        if self._phase is _AT_HEADER:
            if len(have) >= 4 and have[:4] != MAGIC:
                raise self._refuse(f"does not speak kvferry: {magic_hint(bytes(have[:4]))}")
            if len(have) == HEADER_NBYTES:
                self._header, self._phase = self._parse_header(have), _AT_META
                have.clear()
            return None
        if self._phase is _AT_META and self._header is not None:
            if len(have) < self._header.meta_nbytes:
                return None
            self._have = bytearray()
            return self._parse_meta(self._header, have)
        if self._phase is _AT_TRAILER and len(have) == TRAILER_NBYTES:
            self._have = bytearray()
            return TrailerReceived(self.trailer_taken(memoryview(have)))
        return None

    def _parse_header(self, data: memoryview | bytearray) -> _Header:
        magic, version, number, flags, request_id, meta_nbytes, payload_nbytes = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise self._refuse(f"does not speak kvferry: {magic_hint(magic)}")
        cls = _TYPES.get(number)
        handshake = self._shaking_hands
        if not handshake and version != self.version:
            raise self._refuse(f"sent a frame of version {version}, agreed was {self.version}")
        if cls is None:
            raise self._refuse(f"sent message type {number}, unknown to version {self.version or version}")
        after = _next_state(self.state, self.side.other, cls)
        if after is None:
            raise self._refuse(f"sent {_NAMES[cls]!r} in state {self.state.value!r}")
        has_trailer = payload_nbytes > 0 and self.checksum
        if flags != has_trailer * FLAG_TRAILER:
            raise self._refuse(
                f"sent {_NAMES[cls]!r} with flags {flags:#x} and {payload_nbytes} payload bytes"
            )
        if meta_nbytes == 0:
            raise self._refuse(f"sent {_NAMES[cls]!r} without meta")
        self._check_lengths(cls, meta_nbytes, payload_nbytes, remote=True)
        return _Header(cls, request_id, meta_nbytes, payload_nbytes, has_trailer, after)

    def _parse_meta(self, header: _Header, meta: memoryview | bytearray) -> MessageReceived:
        name = _NAMES[header.cls]
        try:
            message = _DECODER.decode(meta)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise self._refuse(f"sent a malformed {name!r}: {printable(str(error))}") from error
        if type(message) is not header.cls:
            raise self._refuse(f"sent a frame of type {name!r} that holds {_NAMES[type(message)]!r}")
        self.state = header.next_state
        self._phase = _AT_PAYLOAD if header.payload_nbytes else _AT_HEADER
        self._has_trailer = header.has_trailer
        self.head_nbytes = HEADER_NBYTES + header.meta_nbytes
        if isinstance(message, m.Hello):
            self._agree_on_hello(message)
        elif isinstance(message, m.Welcome):
            self._agree_on_welcome(message)
        return MessageReceived(message, header.request_id, header.payload_nbytes, header.has_trailer)

    def _agree_on_hello(self, hello: m.Hello) -> None:
        self.version = negotiate(self.versions, Versions(hello.min_version, hello.max_version))
        self.checksum = self.checksum or hello.checksum

    def _agree_on_welcome(self, welcome: m.Welcome) -> None:
        if not self.versions.lowest <= welcome.version <= self.versions.highest:
            raise self._refuse(f"chose protocol version {welcome.version}, offered were {self.versions}")
        if self.checksum and not welcome.checksum:
            raise self._refuse("turned checksums off, which only both sides together can")
        self.version = welcome.version
        self.checksum = welcome.checksum

    def _check_lengths(
        self, cls: type[Message], meta_nbytes: int, payload_nbytes: int, *, remote: bool
    ) -> None:
        limits = self.limits
        most = limits.max_handshake_nbytes if self._shaking_hands else limits.max_meta_nbytes
        if meta_nbytes <= most and (
            not payload_nbytes or (payload_nbytes <= limits.max_payload_nbytes and cls in PAYLOAD_TYPES)
        ):
            return
        who = f"{self._peer} sent" if remote else "this side would send"
        if meta_nbytes > most:
            raise ProtocolError(
                f"{who} {_NAMES[cls]!r} with {meta_nbytes} bytes of meta, the limit is {most}", remote=remote
            )
        if payload_nbytes > limits.max_payload_nbytes:
            raise ProtocolError(
                f"{who} {_NAMES[cls]!r} with {payload_nbytes} payload bytes, "
                f"the limit is {limits.max_payload_nbytes} (max_payload_nbytes)",
                remote=remote,
            )
        if payload_nbytes and cls not in PAYLOAD_TYPES:
            raise ProtocolError(
                f"{who} {_NAMES[cls]!r} with {payload_nbytes} payload bytes, it carries none", remote=remote
            )

    def _refuse(self, what: str) -> ProtocolError:
        return ProtocolError(f"{self._peer} {what}", remote=True)
