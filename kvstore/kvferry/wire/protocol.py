"""The wire protocol without I/O: messages to buffers, received bytes to events.

:class:`WireProtocol` never sees payload bytes and never blocks. Its owner (:class:`kvferry.wire.Channel`)
sends what :meth:`WireProtocol.encode` returns, receives exactly :attr:`WireProtocol.wanted` bytes at a
time, and puts payloads where they belong. Which message may be sent by whom in which state is the table
:data:`TRANSITIONS`; both sides follow the same one. ``docs/wire.md`` describes the bytes.
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple, TypeAlias, cast

import msgspec
from xxhash import xxh3_64_intdigest

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
from kvferry.wire.encoding import MAGIC, decode_message, encode_message, kind_numbers, kinds
from kvferry.wire.messages import Message
from kvferry.wire.printable import magic_hint, printable
from kvferry.wire.tables import (
    DESCRIPTOR_TYPES,
    NAMES,
    NUMBERS,
    PAYLOAD_TYPES,
    TRANSITIONS,
    TYPE_NUMBERS,
    TYPES,
    Side,
    State,
    next_state,
)

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

_HEADER = struct.Struct("<4sHHIQIQ")
# The same bytes, with magic, version and type as one number, by which a frame is recognised.
_SHORT_HEADER = struct.Struct("<QIQIQ")
_TRAILER = struct.Struct("<Q")
FLAG_TRAILER: Final = 1
"""Bit of the header's flags: the frame ends with its checksum. All other bits are zero."""
HEADER_NBYTES: Final = _HEADER.size
TRAILER_NBYTES: Final = _TRAILER.size


class MessageReceived(msgspec.Struct, frozen=True, gc=False):
    """A message came. If ``payload_nbytes`` > 0 its payload comes next and is the owner's to receive.

    With a payload and ``has_trailer`` the message is only known to be whole once the trailer is, too.
    """

    message: Message
    request_id: int
    payload_nbytes: int
    has_trailer: bool


class TrailerReceived(NamedTuple):
    """The checksum of the frame whose payload was just taken, as the sender computed it."""

    digest: int


Event: TypeAlias = "MessageReceived | TrailerReceived"


class _Header(NamedTuple):
    cls: type[Message]
    request_id: int
    meta_nbytes: int
    payload_nbytes: int
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
        checksum: Whether this end wants checksums of frames; they are off only if both want
            them off. Those of the handshake always have one.
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
        """Whether frames have a trailer: what this end wants, then what was agreed."""
        self._flags = FLAG_TRAILER  # of all frames: in the handshake a trailer, then what was agreed
        self._peer = peer
        self._phase = _AT_HEADER
        self._have = bytearray()
        self._header: _Header | None = None
        # what may come and be sent without a look at the table of states: nothing before it is open
        self._kinds: dict[int, type[Message]] = {}
        self._kind_numbers: dict[type[Message], int] = {}
        self.head = b""
        """Header and meta of the frame whose payload is due, if it has a trailer, which covers them."""
        self.head_nbytes = HEADER_NBYTES
        """Bytes of the last message received, up to its payload: those of the next are often as many."""

    @property
    def _shaking_hands(self) -> bool:
        return self.state is _START or self.state is _OFFERED

    @property
    def kinds(self) -> tuple[dict[int, type[Message]], dict[type[Message], int]]:
        """What an open connection carries: classes by the first 8 bytes of a header, and these by class."""
        return self._kinds, self._kind_numbers

    @property
    def flags(self) -> int:
        """Of the headers of all frames: as agreed once the connection is open."""
        return self._flags

    # ---- sending -----------------------------------------------------------------------------

    def encode(self, message: Message, payload_nbytes: int = 0, request_id: int = 0) -> bytes:
        """The start of a frame, which payload and :meth:`trailer` follow; without a payload, a whole frame.

        Raises:
            ProtocolError: If the message may not be sent now, is too long, or cannot be encoded: a
                mistake of this process. Nothing was changed.
        """
        cls = type(message)
        kind = self._kind_numbers.get(cls)
        if kind is None:
            return self._encode_by_table(message, payload_nbytes, request_id)
        try:
            meta = encode_message(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"{NAMES[cls]} cannot be encoded: {error}") from error
        meta_nbytes, flags, limits = len(meta), self._flags, self.limits
        if meta_nbytes > limits.max_meta_nbytes or (
            payload_nbytes and (payload_nbytes > limits.max_payload_nbytes or cls not in PAYLOAD_TYPES)
        ):
            self._check_lengths(cls, meta_nbytes, payload_nbytes, remote=False)
        head = _SHORT_HEADER.pack(kind, flags, request_id, meta_nbytes, payload_nbytes) + meta
        if flags and not payload_nbytes:
            return head + _TRAILER.pack(xxh3_64_intdigest(head))
        return head

    def _encode_by_table(self, message: Message, payload_nbytes: int, request_id: int) -> bytes:
        """A frame of the handshake, or the error that says why it may not be sent."""
        cls = type(message)
        after, flags = self._state_after(cls), self._flags
        try:
            meta = encode_message(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"{NAMES[cls]} cannot be encoded: {error}") from error
        self._check_lengths(cls, len(meta), payload_nbytes, remote=False)
        if cls is m.Welcome:
            self._agree_as_server(cast("m.Welcome", message))
        version, number = self.version or self.versions.lowest, NUMBERS[cls]
        head = _HEADER.pack(MAGIC, version, number, flags, request_id, len(meta), payload_nbytes) + meta
        self.state = after
        if cls is m.Welcome:
            self._open()
        if flags and not payload_nbytes:
            return head + _TRAILER.pack(xxh3_64_intdigest(head))
        return head

    def _open(self) -> None:
        """The handshake is over: from the next frame on it is as agreed."""
        self._flags = FLAG_TRAILER if self.checksum else 0
        self._kinds, self._kind_numbers = kinds(self.version), kind_numbers(self.version)

    def _state_after(self, cls: type[Message]) -> State:
        if cls not in NUMBERS:
            raise ProtocolError(f"{cls.__name__} has no type number, it is no message of this protocol")
        after = next_state(self.state, self.side, cls)
        if after is None:
            raise ProtocolError(f"{self.side.value} may not send {NAMES[cls]} in state {self.state.value!r}")
        return after

    @staticmethod
    def trailer(digest: int) -> bytes:
        """The bytes that end a frame whose xxh3_64, from its header to its payload, is ``digest``."""
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
            return self._end_of_meta - len(self._have)
        if self._phase is _AT_TRAILER:
            return TRAILER_NBYTES - len(self._have)
        return 0

    @property
    def _end_of_meta(self) -> int:
        """Where the frame being received is over, up to its payload: if it has none, with its trailer."""
        assert self._header is not None
        end = HEADER_NBYTES + self._header.meta_nbytes
        return end if self._header.payload_nbytes or not self._flags else end + TRAILER_NBYTES

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
        message = self.receive_whole(data)
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

    def receive_whole(self, data: memoryview) -> MessageReceived | None:
        """The message at the start of ``data`` if one begins there, is whole and good, the connection open.

        It took :attr:`head_nbytes` bytes. Otherwise nothing was taken, and :meth:`receive` tells why.
        """
        nbytes = len(data)
        if nbytes < HEADER_NBYTES or self._phase is not _AT_HEADER or self._have:
            return None
        kind, flags, request_id, meta_nbytes, payload_nbytes = _SHORT_HEADER.unpack_from(data)
        cls = self._kinds.get(kind)
        end = HEADER_NBYTES + meta_nbytes
        if (
            cls is None
            or flags != self._flags
            or not HEADER_NBYTES < end <= nbytes
            or meta_nbytes > self.limits.max_meta_nbytes
        ):
            return None
        if payload_nbytes:
            if cls not in PAYLOAD_TYPES or payload_nbytes > self.limits.max_payload_nbytes:
                return None
        elif flags and (
            end + TRAILER_NBYTES > nbytes
            or _TRAILER.unpack_from(data, end)[0] != xxh3_64_intdigest(data[:end])
        ):
            return None
        try:
            message = decode_message(data[HEADER_NBYTES:end])
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
            return None
        if type(message) is not cls:
            return None
        if payload_nbytes:
            self._phase = _AT_PAYLOAD
            if flags:
                self.head = bytes(data[:end])
        elif flags:
            end += TRAILER_NBYTES
        self.head_nbytes = end
        return MessageReceived(message, request_id, payload_nbytes, flags != 0)

    def payload_due(self, head: bytes) -> None:
        """Tell that a frame was taken up to its payload, which is due; ``head`` is its header and meta."""
        self._phase, self.head = _AT_PAYLOAD, head

    def payload_taken(self) -> None:
        """Tell that the payload was received; its trailer or the next frame is wanted now."""
        if self._phase is not _AT_PAYLOAD:
            raise ProtocolError("no payload is due")
        self._phase = _AT_TRAILER if self._flags else _AT_HEADER

    def trailer_taken(self) -> None:
        """Tell that the whole trailer was received and compared; the next frame is wanted now."""
        if self._phase is not _AT_TRAILER or self._have:
            raise ProtocolError("no trailer is due")
        self._phase = _AT_HEADER

    def _advance(self) -> Event | None:
        have = self._have
        if self._phase is _AT_HEADER:
            if len(have) >= 4 and have[:4] != MAGIC:
                raise self._refuse(f"does not speak kvferry: {magic_hint(bytes(have[:4]))}")
            if len(have) == HEADER_NBYTES:
                self._header, self._phase = self._parse_header(have), _AT_META
            return None
        if self._phase is _AT_META and self._header is not None:
            if len(have) < self._end_of_meta:
                return None
            self._have = bytearray()
            return self._parse_message(self._header, memoryview(have))
        if self._phase is _AT_TRAILER and len(have) == TRAILER_NBYTES:
            self._have = bytearray()
            self._phase = _AT_HEADER
            return TrailerReceived(int(_TRAILER.unpack(have)[0]))
        return None

    def _parse_header(self, data: memoryview | bytearray) -> _Header:
        magic, version, number, flags, request_id, meta_nbytes, payload_nbytes = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise self._refuse(f"does not speak kvferry: {magic_hint(magic)}")
        cls = TYPES.get(number)
        handshake = self._shaking_hands
        if not handshake and version != self.version:
            raise self._refuse(f"sent a frame of version {version}, agreed was {self.version}")
        if cls is None:
            raise self._refuse(f"sent message type {number}, unknown to version {self.version or version}")
        after = next_state(self.state, self.side.other, cls)
        if after is None:
            raise self._refuse(f"sent {NAMES[cls]!r} in state {self.state.value!r}")
        if flags != self._flags:
            raise self._refuse(f"sent {NAMES[cls]!r} with flags {flags:#x}, expected were {self._flags:#x}")
        if meta_nbytes == 0:
            raise self._refuse(f"sent {NAMES[cls]!r} without meta")
        self._check_lengths(cls, meta_nbytes, payload_nbytes, remote=True)
        return _Header(cls, request_id, meta_nbytes, payload_nbytes, after)

    def _parse_message(self, header: _Header, data: memoryview) -> MessageReceived:
        """The message in ``data``, a frame up to its payload."""
        name, flags = NAMES[header.cls], self._flags
        head = data[: HEADER_NBYTES + header.meta_nbytes]
        if flags and header.payload_nbytes:
            self.head = bytes(head)
        elif flags:
            found, sent = xxh3_64_intdigest(head), _TRAILER.unpack_from(data, len(head))[0]
            if found != sent:
                raise self._refuse(
                    f"sent {name!r} that was damaged: xxh3_64 {found:016x}, sent was {sent:016x}"
                )
        try:
            message = decode_message(head[HEADER_NBYTES:])
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise self._refuse(f"sent a malformed {name!r}: {printable(str(error))}") from error
        if type(message) is not header.cls:
            raise self._refuse(f"sent a frame of type {name!r} that holds {NAMES[type(message)]!r}")
        self.state = header.next_state
        self._phase = _AT_PAYLOAD if header.payload_nbytes else _AT_HEADER
        self.head_nbytes = len(data)
        if isinstance(message, m.Hello):
            self._agree_on_hello(message)
        elif isinstance(message, m.Welcome):
            self._agree_on_welcome(message)
        return MessageReceived(message, header.request_id, header.payload_nbytes, flags != 0)

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
        self._open()

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
                f"{who} {NAMES[cls]!r} with {meta_nbytes} bytes of meta, the limit is {most}", remote=remote
            )
        if payload_nbytes > limits.max_payload_nbytes:
            raise ProtocolError(
                f"{who} {NAMES[cls]!r} with {payload_nbytes} payload bytes, "
                f"the limit is {limits.max_payload_nbytes} (max_payload_nbytes)",
                remote=remote,
            )
        if payload_nbytes and cls not in PAYLOAD_TYPES:
            raise ProtocolError(
                f"{who} {NAMES[cls]!r} with {payload_nbytes} payload bytes, it carries none", remote=remote
            )

    def _refuse(self, what: str) -> ProtocolError:
        return ProtocolError(f"{self._peer} {what}", remote=True)
