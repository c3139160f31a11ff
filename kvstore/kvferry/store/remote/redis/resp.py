"""The protocol of Redis, version 2, over a connection: commands out, replies in, no byte of a value copied.

What comes is taken from the connection a few bytes ahead at most, so that the bytes of a value go from the
socket into the caller's memory, which is what a client library does not offer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, TypeAlias

from kvferry.core.errors import ProtocolError, TierError
from kvferry.transports.base import Connection
from kvferry.transports.hashed_socket import HashedSocketConnection
from kvferry.transports.replies import Ahead, Form, Taken
from kvferry.transports.spin import Look

__all__ = ["MISSING", "Reply", "ReplyError", "ReplyReader", "command"]

Reply: TypeAlias = "int | bytes | list[Reply] | None"
MISSING: Final = -1
"""The size of a value that is not there."""
_AHEAD_NBYTES: Final = 32  # never reaches beyond the first bytes of a value, which are no data
_BUFFER_NBYTES: Final = 16 << 10
_MAX_LINE_NBYTES: Final = 8 << 10
_MAX_BULK_NBYTES: Final = 16 << 20
_MAX_ITEMS: Final = 1 << 20
_MAX_DEPTH: Final = 8
_DRAIN_NBYTES: Final = 64 << 10


class ReplyError(TierError):
    """The server answered with an error.

    Attributes:
        word: Its first word, such as ``OOM`` or ``MOVED``.
        rest: What follows.
    """

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.word, _, self.rest = line.partition(" ")


def command(*words: bytes) -> bytes:
    """A command with all its arguments."""
    return b"".join((b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)))


class ReplyReader:
    """Takes replies from a connection, in order. For one thread at a time.

    Args:
        connection: Where they come from.
        spin_s: How long to look for one before sleeping, while they come that fast
            (:mod:`kvferry.transports.spin`).

    Attributes:
        received: Whether anything has come yet.
    """

    def __init__(self, connection: Connection, spin_s: float = 0.0) -> None:
        self._connection = connection
        self._look = Look(spin_s)
        self._bytes = bytearray(_BUFFER_NBYTES)
        self._buffer = memoryview(self._bytes)
        self._line_end = memoryview(bytearray(2))
        self._at = 0  # of what was taken ahead
        self._end = 0
        self.received = False

    # -- small replies ---------------------------------------------------------------------------------

    def read(self, deadline: float) -> Reply:
        """The next reply, whole.

        Raises:
            ReplyError: If it is an error.
            ProtocolError: If it is none, or larger than any that is asked for.
            TransportError: As of the connection.
        """
        return self._read(deadline, 0)

    def skip(self, reply: bytes) -> bool:
        """Whether the next reply was taken ahead and is this one, which is left behind then."""
        if not self._bytes.startswith(reply, self._at, self._end):
            return False
        self._at += len(reply)
        return True

    def skips(self, reply: bytes, deadline: float) -> bool:
        """As :meth:`skip`, after waiting for it. Raises as :meth:`read`."""
        if self._at == self._end:
            self._take_ahead(_BUFFER_NBYTES, deadline)
        return self.skip(reply)

    def _read(self, deadline: float, depth: int) -> Reply:
        kind, text = self._line(deadline)
        if kind == b"+":
            return text
        if kind == b"-":
            raise ReplyError(text.decode("utf-8", "replace"))
        number = _number(kind, text)
        if kind == b":":
            return number
        if number < 0:
            return None
        if kind == b"$":
            return self._bulk(number, deadline)
        if kind != b"*" or number > _MAX_ITEMS or depth >= _MAX_DEPTH:
            raise ProtocolError(f"a reply begins with {kind + text[:32]!r}", remote=True)
        return [self._read(deadline, depth + 1) for _ in range(number)]

    def _bulk(self, nbytes: int, deadline: float) -> bytes:
        if nbytes > _MAX_BULK_NBYTES:
            raise ProtocolError(
                f"a reply of {nbytes} bytes, at most {_MAX_BULK_NBYTES} are taken", remote=True
            )
        found = bytearray(nbytes + 2)
        self._fill([memoryview(found)], deadline)
        return bytes(found[:nbytes])

    # -- values ----------------------------------------------------------------------------------------

    def value_nbytes(self, deadline: float) -> int:
        """The size of the value that comes next, or :data:`MISSING`; then :meth:`value` and :meth:`end`.

        Raises:
            ReplyError: As :meth:`read`.
            ProtocolError: As :meth:`read`.
        """
        kind, text = self._line(deadline, _AHEAD_NBYTES)
        if kind == b"-":
            raise ReplyError(text.decode("utf-8", "replace"))
        if kind != b"$":
            raise ProtocolError(
                f"a value was asked for, a reply begins with {kind + text[:32]!r}", remote=True
            )
        return _number(kind, text)

    def value(self, views: Sequence[memoryview], deadline: float, *, last: bool = False) -> None:
        """The next bytes of the value into ``views``; the ``last``, and then there is no :meth:`end`."""
        self._fill([*views, self._line_end] if last else views, deadline)

    def values(self, form: Form, views: Sequence[memoryview], deadline: float) -> list[Taken]:
        """The next values, as long as they are of ``form``, the data of each into one of ``views``.

        For a connection that :attr:`~HashedSocketConnection.receives_values`. Raises as that.
        """
        connection = self._connection
        assert isinstance(connection, HashedSocketConnection)
        start, waits, looked = time.monotonic(), self._at == self._end, False
        if waits:
            looked = self._look.look(self._is_there, start, deadline)
        ahead = Ahead(self._buffer, self._at, self._end)
        try:
            return connection.recv_values(form, views, ahead, deadline)
        finally:
            self._at, self._end = ahead.at, ahead.end
            if ahead.moved:
                self.received = True
                if waits:
                    self._look.waited(ahead.came - start, looked=looked)

    def fits(self, form: Form) -> bool:
        """Whether :meth:`values` can be called."""
        connection = self._connection
        return (
            isinstance(connection, HashedSocketConnection)
            and connection.receives_values
            and len(form.start) + form.prefix_nbytes <= _BUFFER_NBYTES
        )

    def end(self, unread_nbytes: int, deadline: float) -> None:
        """Leave the rest of the value."""
        left = unread_nbytes + 2
        scratch = memoryview(bytearray(min(left, _DRAIN_NBYTES)))
        while left > 0:
            piece = scratch[:left]
            self._fill([piece], deadline)
            left -= len(piece)

    # -- bytes -----------------------------------------------------------------------------------------

    def _take_ahead(self, most: int, deadline: float) -> None:
        """What is there, up to ``most`` bytes, after waiting for the first."""
        start = time.monotonic()
        looked = self._look.look(self._is_there, start, deadline)
        taken = self._connection.recv_at_least(self._buffer[:most], 1, deadline)
        self._look.waited(time.monotonic() - start, looked=looked)
        self._at, self._end, self.received = 0, taken, True

    def _line(self, deadline: float, ahead: int = _BUFFER_NBYTES) -> tuple[bytes, bytes]:
        """The first byte of a line, and the others."""
        line = b""
        while True:
            if self._at == self._end:
                self._take_ahead(ahead, deadline)
            found = self._bytes.find(b"\n", self._at, self._end)
            end = self._end if found < 0 else found + 1
            line += self._buffer[self._at : end]
            self._at = end
            if found >= 0:
                break
            if len(line) > _MAX_LINE_NBYTES:
                break
        if len(line) < 3 or not line.endswith(b"\r\n"):
            raise ProtocolError(f"a reply begins with {line[:32]!r}; is it a Redis server?", remote=True)
        return line[:1], line[1:-2]

    def _is_there(self) -> bool:
        return self._connection.wait_readable(0.0)

    def _fill(self, views: Sequence[memoryview], deadline: float) -> None:
        left = [view for view in views if len(view)]
        while left and self._at < self._end:
            taken = self._buffer[self._at : min(self._end, self._at + len(left[0]))]
            left[0][: len(taken)] = taken
            self._at += len(taken)
            left[0] = left[0][len(taken) :]
            if not len(left[0]):
                del left[0]
        if left:
            self._connection.recv_into(left, deadline)


def _number(kind: bytes, text: bytes) -> int:
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > 18:
        raise ProtocolError(f"a reply begins with {kind + text[:32]!r}", remote=True)
    return int(text)
