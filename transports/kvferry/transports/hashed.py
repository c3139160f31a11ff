"""Bytes with their checksum behind them: moved and hashed in pieces, while each is in a cache.

What is sent and received are bytes and the xxh3_64 of them all, 8 bytes little-endian. Where the native
library is, one call does that for the whole of it; else each piece is a call, and then hashed.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from kvferry.core.native import native

__all__ = [
    "AGAIN",
    "ENDED",
    "HASH_NBYTES",
    "PIECE_NBYTES",
    "STRAY",
    "HashedStream",
    "hashed_stream",
    "pieces_of",
]

PIECE_NBYTES: Final = 512 << 10
"""Payloads move and are hashed in pieces of this size, so that hashing reads from a warm cache."""
HASH_NBYTES: Final = 8
ENDED: Final = -1
STRAY: Final = -2
_SHORT: Final = -3
AGAIN: Final = frozenset({_SHORT, errno.EAGAIN, errno.EINTR})
"""Codes after which the rest is due, if there is time: see :meth:`HashedStream.go_on`."""

# kvc_stream of stream.h up to its hash, and one of its parts
_STATE: Final = struct.Struct("@PQQQQdiiIiQQ")
_PART: Final = struct.Struct("@PQ")
_LEFT_AT, _UNTIL_AT, _TRAILER_DONE_AT = 16, 40, 56
_U64, _U32, _DOUBLE = struct.Struct("@Q"), struct.Struct("@I"), struct.Struct("@d")
_HEAD_NBYTES: Final = 4 << 10
_PARTS: Final = 64


def pieces_of(views: Sequence[memoryview], size: int | None = None) -> Iterator[list[memoryview]]:
    """``views`` cut into lists of ``size`` bytes (:data:`PIECE_NBYTES`); the last may hold less."""
    room = size = size or PIECE_NBYTES
    piece: list[memoryview] = []
    for view in views:
        start = 0
        while start < len(view):
            part = view[start : start + room]
            piece.append(part)
            start += len(part)
            room -= len(part)
            if room == 0:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


class _Functions(NamedTuple):
    send: Any
    receive: Any
    go_on: Any
    hash: Any
    state_nbytes: int


@functools.lru_cache(1)
def _functions() -> _Functions | None:
    library = native().library
    if library is None:
        return None
    # addresses and sizes as plain numbers: converting them costs less than objects of their own
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    send, receive = library.kvc_stream_send, library.kvc_stream_receive
    go_on, found = library.kvc_stream_go_on, library.kvc_stream_hash
    send.argtypes = found.argtypes = (pointer,)
    receive.argtypes = (pointer, pointer, size)
    go_on.argtypes = (pointer, ctypes.c_int)
    found.restype = ctypes.c_uint64
    library.kvc_stream_nbytes.restype = size
    return _Functions(send, receive, go_on, found, int(library.kvc_stream_nbytes()))


def hashed_stream() -> HashedStream | None:
    """For one direction of one connection; ``None`` where the library is not."""
    functions = _functions()
    return None if functions is None else HashedStream(functions)


class HashedStream:
    """One direction of a connection over a socket that blocks, with limits of its own; one thread at a time.

    Each call takes ``until``, the monotonic time after which no system call may begin, and returns a code: 0
    when all is done, one of :data:`AGAIN`, :data:`ENDED`, :data:`STRAY`, or an errno. What is sent from, or
    received into, must live until then.
    """

    __slots__ = (
        "_functions",
        "_head",
        "_head_address",
        "_parts",
        "_parts_address",
        "_state",
        "_state_address",
        "_total",
    )

    def __init__(self, functions: _Functions) -> None:
        self._functions = functions
        self._state = ctypes.create_string_buffer(functions.state_nbytes)
        self._state_address = ctypes.addressof(self._state)
        head = ctypes.create_string_buffer(_HEAD_NBYTES)
        self._head = memoryview(head).cast("B")
        self._head_address = ctypes.addressof(head)
        self._total = 0
        self._make_room(_PARTS)

    def _make_room(self, parts: int) -> None:
        self._parts = ctypes.create_string_buffer(parts * _PART.size)
        self._parts_address = ctypes.addressof(self._parts)

    def send(self, fd: int, flags: int, head: bytes, views: Sequence[memoryview], until: float) -> int:
        """Send ``head``, ``views`` and their hash."""
        nbytes = len(head)
        if nbytes <= _HEAD_NBYTES:
            self._head[:nbytes] = head
            address = self._head_address
        else:
            address = _address_of(memoryview(head))
        self._begin(fd, flags, views, until, address, nbytes)
        return int(self._functions.send(self._state_address))

    def receive(self, fd: int, flags: int, start: bytes, views: Sequence[memoryview], until: float) -> int:
        """Fill ``views`` and take the hash of ``start`` and them; see :attr:`hashes`."""
        self._begin(fd, flags, views, until, 0, 0)
        return int(self._functions.receive(self._state_address, start, len(start)))

    def go_on(self, until: float, *, sending: bool) -> int:
        """Do the rest."""
        _DOUBLE.pack_into(self._state, _UNTIL_AT, until)
        return int(self._functions.go_on(self._state_address, sending))

    @property
    def hashes(self) -> tuple[int, int]:
        """The hash of what was received, and the one that came with it."""
        (sent,) = _U64.unpack_from(self._state, _STATE.size - 2 * HASH_NBYTES)
        return int(self._functions.hash(self._state_address)), sent

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that have moved, and all of them."""
        (left,) = _U64.unpack_from(self._state, _LEFT_AT)
        (trailer,) = _U32.unpack_from(self._state, _TRAILER_DONE_AT)
        return self._total - left + trailer, self._total + HASH_NBYTES

    def _begin(
        self, fd: int, flags: int, views: Sequence[memoryview], until: float, head: int, nbytes: int
    ) -> None:
        count = len(views) + 1
        if count * _PART.size > len(self._parts):
            self._make_room(count)
        put, parts, at = _PART.pack_into, self._parts, _PART.size
        put(parts, 0, head, nbytes)
        for view in views:
            if n := len(view):
                put(parts, at, _address_of(view), n)
                at += _PART.size
                nbytes += n
            else:  # has no address
                count -= 1
        self._total = nbytes
        _STATE.pack_into(
            self._state, 0, self._parts_address, count, nbytes, 0, 0, until, fd, flags, 0, 0, 0, 0
        )


_Byte = ctypes.c_char
_addressof = ctypes.addressof


def _address_of(view: memoryview) -> int:
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
    return _addressof(_Byte.from_buffer(view))  # faster, but not for read-only views
