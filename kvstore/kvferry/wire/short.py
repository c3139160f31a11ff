"""The short ways of a channel: a frame, or a payload, in one call of the native library (``channel.h``).

Between a wake-up and the last byte no Python runs there, which is cold each time. What is unusual is left to
the long ways of :mod:`kvferry.wire.channel` and :mod:`kvferry.wire.reader`, which do all of it in Python.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvferry.core.buffers import Buf
from kvferry.core.errors import KVFerryError
from kvferry.core.native import native
from kvferry.transports.base import Connection
from kvferry.transports.hashed_socket import HashedSocketConnection
from kvferry.transports.lanes import LaneConnection
from kvferry.wire.encoding import decode_message, encode_message
from kvferry.wire.messages import Message
from kvferry.wire.protocol import PAYLOAD_TYPES, WireProtocol

__all__ = ["DAMAGED", "DONE", "ShortWay"]

DONE: Final = 1
DAMAGED: Final = -100002
_ENDED: Final = 0
_STRAY: Final = -100000
_LATE: Final = -100001
_ONE_STRIPE: Final = 1 << 62
_HAS_GIL: Final = getattr(sys, "_is_gil_enabled", lambda: True)()


class ShortWay:
    """Those of one channel; one thread may send while another receives.

    Attributes:
        send: ``(message, request_id, payload, deadline, lent)``: :data:`DONE`, or ``None`` if nothing was
            sent and it is for the long way, or another code: see :meth:`error`.
        receive: ``(deadline, ahead)``: (message, request id, bytes of the payload); ``None`` if nothing was
            taken; how many bytes of a frame are in the place for what is received ahead, for the long way to
            go on with; or another code.
        receive_payload: ``(views, deadline)``: :data:`DONE` when they hold the payload of the last message;
            ``None`` if nothing was taken; or another code.
        hand_over: For the long way: bytes of the head of the frame whose payload is due, 0 if none is, and
            bytes in the place for what is received ahead.
        looked: How many waits for a frame began with a look, as ``spin`` of an address allows.
    """

    __slots__ = (
        "_connection",
        "hand_over",
        "looked",
        "progress",
        "receive",
        "receive_payload",
        "send",
        "sent",
    )

    def __init__(self, connection: HashedSocketConnection, functions: tuple[Any, ...]) -> None:
        self._connection = connection
        self.send: Callable[[Message, int, Sequence[Buf], float, bool], int | None] = functions[0]
        self.receive: Callable[[float, bool], tuple[Message, int, int] | int | None] = functions[1]
        self.receive_payload: Callable[[Sequence[memoryview], float], int | None] = functions[2]
        self.hand_over: Callable[[], tuple[int, int]] = functions[3]
        self.progress: Callable[[], tuple[int, int]] = functions[4]
        self.looked: Callable[[], int] = functions[5]
        self.sent: Callable[[], tuple[int, int]] = functions[6]

    @classmethod
    def of(cls, connection: Connection, protocol: WireProtocol, place: memoryview) -> ShortWay | None:
        """For an open connection; ``None`` where it does more than call its socket, or the library is not."""
        connection = connection.carrier
        sockets: tuple[object, ...]
        if isinstance(connection, LaneConnection):
            sockets, positions, stripe = connection.bare_lanes, connection.positions, connection.stripe_nbytes
        else:
            sockets, positions, stripe = (connection,), array("Q", (0, 0)), _ONE_STRIPE
        lanes = []
        for one in sockets:
            if not isinstance(one, HashedSocketConnection) or (guard := one.bare) is None:
                return None
            if (number := guard.sock.fileno()) < 0:  # closed meanwhile: whoever uses it next hears of it
                return None
            lanes.append((guard, guard.inside, one, number))
        make = _maker()
        if make is None or not lanes or len(place) > stripe:  # what is received ahead is of the first stripe
            return None
        limits, first = protocol.limits, lanes[0][2]
        functions = make(
            (
                *(tuple(lanes), *protocol.kinds, PAYLOAD_TYPES, encode_message, decode_message),
                *(place, positions, stripe, first.receive_flags, protocol.flags),
                *(limits.max_meta_nbytes, limits.max_payload_nbytes, round(first.spin_s * 1e9)),
            )
        )
        return None if functions is None else cls(first, functions)

    def error(self, code: int, doing: str) -> KVFerryError:
        """What is raised for ``code``, which is none of a damaged payload."""
        connection = self._connection
        moved, wanted = self.sent() if doing == "sending" else self.progress()
        if code == _ENDED:
            return connection.ended(doing, moved, wanted)
        if code == _STRAY:
            return connection.truncated()
        if code == _LATE:
            return connection.late(doing, moved, wanted)
        return connection.failed(OSError(-code, os.strerror(-code)), doing)


@functools.lru_cache(1)
def _maker() -> Callable[[tuple[Any, ...]], tuple[Any, ...] | None] | None:
    found = native()
    if found.library is None or not _HAS_GIL:
        return None
    make: Any = ctypes.PyDLL(str(found.path)).kvc_channel_make
    make.argtypes, make.restype = (ctypes.py_object,), ctypes.py_object
    return make  # type: ignore[no-any-return]
