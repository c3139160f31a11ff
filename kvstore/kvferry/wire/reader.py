"""The receiving half of a channel: bytes of a connection to messages, and payloads to their places."""

from __future__ import annotations

import time
from collections.abc import Iterable

from xxhash import xxh3_64, xxh3_64_intdigest

from kvferry.core.errors import TransferTimeoutError
from kvferry.transports.base import Connection
from kvferry.wire.payload import SMALL_NBYTES, Frame, damaged
from kvferry.wire.protocol import (
    HEADER_NBYTES,
    TRAILER_NBYTES,
    MessageReceived,
    WireProtocol,
)

__all__ = ["FrameReader"]

_META_PIECE_NBYTES = 64 << 10
_AHEAD_NBYTES = 16 << 10
_READY_S = 1.0


class FrameReader:
    """Reads frames from ``connection``; one thread at a time.

    A frame is received with one call up to its payload, a small one with its payload: as many bytes as the
    last one had are taken if they are there. What of a payload is received so is copied to its place.
    """

    __slots__ = ("_ahead", "_connection", "_first", "_last", "_place", "_protocol", "_usual", "gets_more")

    def __init__(self, connection: Connection, protocol: WireProtocol) -> None:
        self._connection = connection
        self._protocol = protocol
        # Received ahead of its use: bytes [first, last) of the buffer.
        self._ahead = memoryview(bytearray(_AHEAD_NBYTES))
        self._first = self._last = 0
        self._usual = HEADER_NBYTES  # what is asked for, and the place for it
        self._place = self._ahead[: self._usual]
        self.gets_more = type(connection).recv_at_least is not Connection.recv_at_least
        """Whether a call brings more than its minimum, so that waiting by receiving one byte saves a call."""

    @property
    def holds_bytes(self) -> bool:
        """Whether bytes were received that no frame has taken yet."""
        return self._first < self._last

    @property
    def place(self) -> memoryview:
        """For what is received ahead of its use; replaced if a message is long."""
        return self._ahead

    @property
    def between_frames(self) -> bool:
        """Whether all bytes that came were used, and a frame may begin."""
        return self._first == self._last and self._protocol.between_frames

    def take_over(self, place: memoryview, head_nbytes: int, nbytes: int) -> None:
        """Go on from ``nbytes`` at ``place``; the first ``head_nbytes`` of them were the last message."""
        self._ahead, self._first, self._last = place, head_nbytes, nbytes
        self._place = place[: self._usual]
        if head_nbytes:
            self._protocol.payload_due(bytes(place[:head_nbytes]))

    def await_frame(self, deadline: float, *, ahead: bool) -> bool:
        """Wait for the start of a frame, or the end of the stream; ``False`` if none came by ``deadline``."""
        if self._first < self._last:
            return True
        protocol = self._protocol
        if not protocol.in_frame:
            self._connection.begin_receiving(0)
        ahead = ahead and self.gets_more and protocol.between_frames
        if not (ahead and deadline > time.monotonic()):
            return self._connection.wait_readable(deadline)
        # takes it at once, which saves the look before; with one byte as minimum none is lost at the deadline
        try:
            n = self._connection.recv_at_least(self._place, 1, deadline)
        except TransferTimeoutError:
            return False
        self._first, self._last = 0, n
        return True

    def look(self) -> None:
        """Take a byte, or several, if one is there; does not wait. For who is between two frames.

        Raises:
            ConnectionClosedError: If the stream has ended.
        """
        now = time.monotonic()
        if self.await_frame(now, ahead=False) and self._first == self._last:
            self._last = self._connection.recv_at_least(self._place, 1, now + _READY_S)
            self._first = 0

    def read_whole(self, deadline: float) -> MessageReceived | None:
        """The short way: wait by receiving, and take the message if it came whole.

        Returns:
            The message; ``None`` if it is for :meth:`read_message` to go on with what came.

        Raises:
            TransferTimeoutError: At the deadline; nothing was taken.
        """
        if self._first < self._last:
            return None
        place, usual, protocol = self._place, self._usual, self._protocol
        self._connection.begin_receiving(0)
        n = self._connection.recv_at_least(place, 1, deadline)
        self._first, self._last = 0, n
        message = protocol.receive_whole(place if n == usual else place[:n])
        if message is not None:
            self._first = head_nbytes = protocol.head_nbytes
            if head_nbytes != usual or 0 < message.payload_nbytes <= SMALL_NBYTES:
                self._expect_next(message)
        return message

    def _expect_next(self, message: MessageReceived) -> None:
        """Have place for another frame like this one: they often are alike."""
        usual, nbytes = self._protocol.head_nbytes, message.payload_nbytes
        if nbytes and nbytes <= SMALL_NBYTES:
            usual += nbytes + message.has_trailer * TRAILER_NBYTES
        if usual != self._usual and usual <= _AHEAD_NBYTES:
            self._usual = usual
            self._place = self._ahead[:usual]

    def read_message(self, deadline: float, *, ahead: bool = True) -> tuple[MessageReceived, float]:
        """The next message, and when it began to arrive.

        Args:
            deadline: By which it is complete.
            ahead: ``False``: do not receive a byte behind the message.
        """
        event: MessageReceived | None = None
        started_at = 0.0
        if not self._protocol.in_frame:
            self._connection.begin_receiving(self._last - self._first)
        if self._first < self._last:
            event, started_at = self._take(), time.monotonic()
        while event is None:
            self._receive(deadline, ahead=ahead)
            started_at = started_at or time.monotonic()
            event = self._take()
        self._expect_next(event)
        return event, started_at

    def _take(self) -> MessageReceived | None:
        # often what came is what fits into the usual place
        whole = self._first == 0 and self._last == self._usual
        data = self._place if whole else self._ahead[self._first : self._last]
        message = self._protocol.receive_whole(data)
        if message is not None:
            self._first += self._protocol.head_nbytes
            return message
        event, taken = self._protocol.receive_ahead(data)
        self._first += taken
        return event if type(event) is MessageReceived else None

    def _receive(self, deadline: float, *, ahead: bool) -> None:
        wanted = self._protocol.wanted
        if ahead and wanted == HEADER_NBYTES:
            place = self._place
        else:
            if wanted > _AHEAD_NBYTES:
                wanted = min(wanted, _META_PIECE_NBYTES)
                if wanted > len(self._ahead):
                    self._ahead = memoryview(bytearray(_META_PIECE_NBYTES))
                    self._place = self._ahead[: self._usual]
            place = self._ahead[:wanted]
        self._first = self._last = 0
        self._last = self._connection.recv_at_least(place, wanted, deadline)

    def read_payload(self, event: Frame, pieces: Iterable[list[memoryview]], deadline: float) -> None:
        """Fill ``pieces``, which hold the whole payload of ``event``, then take the trailer.

        Raises:
            CorruptBlockError: If it does not match.
        """
        first = self._first
        end = first + event.payload_nbytes
        if end + event.has_trailer * TRAILER_NBYTES <= self._last:  # all of it is here already
            self._copy_payload(event, pieces, first, end)
            return
        if event.has_trailer:
            if isinstance(pieces, tuple) and len(pieces) == 1:
                self._receive_hashed(event, pieces[0], deadline)
            else:
                self._receive_pieces(event, pieces, deadline)
            return
        for piece in pieces:
            views = self._fill(piece) if self._first < self._last else piece
            if views:
                self._connection.recv_into(views, deadline)
        self._protocol.payload_taken()

    def _receive_hashed(self, event: Frame, views: list[memoryview], deadline: float) -> None:
        """Fill ``views``, the whole payload, and take the trailer."""
        protocol, start, first = self._protocol, self._protocol.head, self._first
        nbytes = event.payload_nbytes - (self._last - first)
        if nbytes <= 0:  # only bytes of the trailer are missing
            self._receive_pieces(event, [views], deadline)
            return
        if first < self._last:
            start += self._ahead[first : self._last]
            views = self._fill(views)
        found, sent = self._connection.recv_hashed(start, views, deadline)
        protocol.payload_taken()
        protocol.trailer_taken()
        if sent != found:
            raise damaged(self._connection.peer_address, event, found, sent)

    def _receive_pieces(self, event: Frame, pieces: Iterable[list[memoryview]], deadline: float) -> None:
        """Fill ``pieces``, whose places may be the same over and over, and take the trailer."""
        trailer, hasher = memoryview(bytearray(TRAILER_NBYTES)), xxh3_64(self._protocol.head)
        left = event.payload_nbytes
        for piece in pieces:
            left -= sum(map(len, piece))
            views = piece if left else [*piece, trailer]
            if self._first < self._last:
                views = self._fill(views)
            if views:
                self._connection.recv_into(views, deadline)
            for view in piece:
                hasher.update(view)
        self._protocol.payload_taken()
        self._protocol.trailer_taken()
        sent = int.from_bytes(trailer, "little")
        if sent != hasher.intdigest():
            raise damaged(self._connection.peer_address, event, hasher.intdigest(), sent)

    def _copy_payload(self, event: Frame, pieces: Iterable[list[memoryview]], first: int, end: int) -> None:
        """Give ``pieces`` the bytes [first, end) received ahead, if the trailer behind them matches."""
        ahead, protocol = self._ahead, self._protocol
        protocol.payload_taken()
        self._first = end
        if event.has_trailer:
            self._first += TRAILER_NBYTES
            found = xxh3_64_intdigest(protocol.head + ahead[first:end])
            protocol.trailer_taken()
            sent = int.from_bytes(ahead[end : self._first], "little")
            if sent != found:
                raise damaged(self._connection.peer_address, event, found, sent)
        for piece in pieces:
            for view in piece:
                last = first + len(view)
                view[:] = ahead[first:last]
                first = last

    def _fill(self, views: list[memoryview]) -> list[memoryview]:
        """Fill the first of ``views`` with what was received ahead; what is left to be filled."""
        for number, view in enumerate(views):
            n = min(len(view), self._last - self._first)
            view[:n] = self._ahead[self._first : self._first + n]
            self._first += n
            if n < len(view):
                return [view[n:], *views[number + 1 :]]
        return []
