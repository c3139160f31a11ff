"""Values that a store answers with, one behind the other: received and hashed in one call (``replies.h``).

Each is a start, a prefix, data, the xxh3_64 of the data, 8 bytes little-endian, and two bytes that end it.
The first one of another form is left to the caller, with what was taken ahead of it.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvferry.core.buffers import address_of, addresses_of
from kvferry.transports.native_calls import NativeCall, native_call

__all__ = ["Ahead", "Form", "ReplyStream", "Taken", "reply_stream"]

# kvc_replies of replies.h up to `got`
_STATE: Final = struct.Struct("@PQQPQQQPQQQdiiQQQQ")
_INDEX_AT, _AHEAD_AT, _UNTIL_AT, _MOVED_AT = 16, 72, 88, 104
_U64, _TWO, _DOUBLE = struct.Struct("@Q"), struct.Struct("@QQ"), struct.Struct("@d")
_PLACE_FIELDS: Final = 4


class Form(NamedTuple):
    """What all of them are like: how each starts, and the sizes of its prefix and of its data."""

    start: bytes
    prefix_nbytes: int
    nbytes: int


class Taken(NamedTuple):
    """One that has come: its prefix, the checksum of its data, and the one that came with it."""

    prefix: memoryview
    hashed: int
    sent: int


class Ahead:
    """What was taken of a connection ahead of its use: ``buffer`` from ``at`` to ``end``.

    ``moved`` are the bytes that the last call received, and ``came`` is the monotonic time of the first ones.
    """

    __slots__ = ("at", "buffer", "came", "end", "moved")

    def __init__(self, buffer: memoryview, at: int = 0, end: int = 0) -> None:
        self.buffer, self.at, self.end = buffer, at, end
        self.moved, self.came = 0, 0.0


def reply_stream() -> ReplyStream | None:
    """For one connection; ``None`` where the library is not."""
    call = native_call("replies", "receive")
    return None if call is None else ReplyStream(call)


class ReplyStream:
    """Receives from a socket that blocks, with limits of its own; one thread at a time.

    Each call takes ``until`` and returns a code as those of :class:`~kvferry.transports.hashed.HashedStream`,
    or :data:`OTHER`; then :attr:`taken` are those before.
    """

    OTHER: Final = -5
    """The next one is of another form."""

    def __init__(self, call: NativeCall) -> None:
        self._call = call.function
        self._state = ctypes.create_string_buffer(call.state_nbytes)
        self._address = ctypes.addressof(self._state)
        self._places = array("Q")
        self._prefixes = memoryview(b"")
        self._prefix_nbytes = self._total = 0
        self._held: tuple[object, ...] = ()
        self._form: Form | None = None
        self._start = ctypes.create_string_buffer(0)

    def receive(
        self, fd: int, flags: int, form: Form, views: Sequence[memoryview], ahead: Ahead, until: float
    ) -> int:
        """Receive a value of ``form`` for each of ``views``, which its data fills."""
        size, count = form.prefix_nbytes, len(views)
        self._prefixes, self._prefix_nbytes = memoryview(bytearray(size * count)), size
        at = address_of(self._prefixes)
        self._places = array("Q")
        for address in addresses_of(views):
            self._places.extend((at, address, 0, 0))
            at += size
        self._total = count * (len(form.start) + size + form.nbytes + 10)
        self._held = (views, ahead)
        if form is not self._form:
            self._form, self._start = form, ctypes.create_string_buffer(form.start)
        _STATE.pack_into(
            self._state, 0, self._places.buffer_info()[0], count, 0, ctypes.addressof(self._start),
            len(form.start), size, form.nbytes, address_of(ahead.buffer), len(ahead.buffer), ahead.at,
            ahead.end, until, fd, flags, 0, 0, 0, 0,
        )  # fmt: skip
        return self._run(ahead)

    def go_on(self, ahead: Ahead, until: float) -> int:
        """Do the rest."""
        _DOUBLE.pack_into(self._state, _UNTIL_AT, until)
        return self._run(ahead)

    def _run(self, ahead: Ahead) -> int:
        code = int(self._call(self._address))
        ahead.at, ahead.end = _TWO.unpack_from(self._state, _AHEAD_AT)
        ahead.moved, came = _TWO.unpack_from(self._state, _MOVED_AT)
        ahead.came = came / 1e9
        return code

    @property
    def taken(self) -> list[Taken]:
        """Those that have come, whole."""
        (count,) = _U64.unpack_from(self._state, _INDEX_AT)
        size, prefixes, places = self._prefix_nbytes, self._prefixes, self._places
        hashed = places[2 : count * _PLACE_FIELDS : _PLACE_FIELDS]
        sent = places[3 : count * _PLACE_FIELDS : _PLACE_FIELDS]
        return [
            Taken(prefixes[n * size : (n + 1) * size], *both)
            for n, both in enumerate(zip(hashed, sent, strict=True))
        ]

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that have moved, and all of them."""
        return int(_U64.unpack_from(self._state, _MOVED_AT)[0]), self._total

    def end(self) -> None:
        """What was received into need not live any more."""
        self._held = ()
