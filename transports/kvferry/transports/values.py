"""Values for a store that takes them by name: many commands with their data, hashed and sent in one call.

Each value is a head, data, and the xxh3_64 of the data, 8 bytes little-endian; behind it comes what ends a
command. Data of 64 KiB or more may be lent to the kernel, which then takes no copy of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvferry.core.buffers import address_of, addresses_of
from kvferry.transports.native_calls import NativeCall, native_call

__all__ = ["Value", "ValueStream", "value_stream"]

_HASH_NBYTES: Final = 8
_MAX_END_NBYTES: Final = 56
_PIPE_NBYTES: Final = 1 << 20
_SET_PIPE_SIZE: Final = 1031  # F_SETPIPE_SZ; Python knows it from 3.10 on only where its headers did
_NO_PIPE: Final = (-1, -1)

# kvc_values of values.h up to its tail
_STATE: Final = struct.Struct("@PQPQdiiii10Q")
_UNTIL_AT, _LENT_AT, _MOVED_AT = 32, 56, 64
_U64, _DOUBLE = struct.Struct("@Q"), struct.Struct("@d")


class Value(NamedTuple):
    """What is sent of one value: the command before the data, and the data."""

    head: bytes
    data: memoryview


def value_stream() -> ValueStream | None:
    """For one connection; ``None`` where the library is not."""
    call = native_call("values", "send")
    return None if call is None else ValueStream(call)


class ValueStream:
    """Sends over a socket that blocks, with limits of its own; one thread at a time.

    Each call takes ``until`` and returns a code as those of :class:`~kvferry.transports.hashed.HashedStream`.
    What is sent must live until all is done; see :attr:`lent` for how long it must not change.
    """

    def __init__(self, call: NativeCall) -> None:
        self._call = call.function
        self._state = ctypes.create_string_buffer(call.state_nbytes)
        self._address = ctypes.addressof(self._state)
        self._pipe: tuple[int, int] | None = None  # made when first used
        self._held: tuple[object, ...] = ()
        self._total = 0

    def send(
        self, fd: int, flags: int, values: Sequence[Value], end: bytes, until: float, *, lends: bool
    ) -> int:
        """Send ``values``, each with its checksum and ``end`` behind it; data is lent if ``lends``."""
        assert len(end) <= _MAX_END_NBYTES
        heads = b"".join(value.head for value in values)
        views = [value.data for value in values]
        parts = array("Q")
        at = address_of(memoryview(heads))
        for (head, view), address in zip(values, addresses_of(views), strict=True):
            parts.extend((at, address, len(head), len(view)))
            at += len(head)
        self._total = len(heads) + sum(map(len, views)) + len(values) * (_HASH_NBYTES + len(end))
        ends = address_of(memoryview(end))
        self._held = (heads, views, parts, end)
        pipe = self._lending() if lends else _NO_PIPE
        where = parts.buffer_info()[0]
        _STATE.pack_into(
            self._state, 0, where, len(values), ends, len(end), until, fd, flags, *pipe, *(0,) * 10
        )
        return int(self._call(self._address))

    def go_on(self, until: float) -> int:
        """Do the rest."""
        _DOUBLE.pack_into(self._state, _UNTIL_AT, until)
        return int(self._call(self._address))

    @property
    def lent(self) -> int:
        """Bytes of the last call that are not copied: the peer's kernel, or this one, reads them later."""
        return int(_U64.unpack_from(self._state, _LENT_AT)[0])

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that have moved, and all of them."""
        return int(_U64.unpack_from(self._state, _MOVED_AT)[0]), self._total

    def end(self) -> None:
        """What was sent need not live any more."""
        self._held = ()

    def _lending(self) -> tuple[int, int]:
        if self._pipe is None:
            self._pipe = _NO_PIPE
            with contextlib.suppress(OSError):  # too many descriptors, or pipes: then it is copied
                self._pipe = os.pipe()
                fcntl.fcntl(self._pipe[1], _SET_PIPE_SIZE, _PIPE_NBYTES)
        return self._pipe

    def __del__(self) -> None:
        for fd in self._pipe or ():
            if fd >= 0:
                os.close(fd)
