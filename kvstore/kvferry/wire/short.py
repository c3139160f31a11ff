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
from kvferry.core.errors import KVFerryError, TransferTimeoutError, TransportError
from kvferry.core.native import native
from kvferry.transports.base import Connection
from kvferry.transports.hashed_socket import HashedSocketConnection
from kvferry.transports.lanes import LaneConnection
from kvferry.wire.encoding import decode_message, encode_message
from kvferry.wire.messages import Message
from kvferry.wire.protocol import PAYLOAD_TYPES, WireProtocol

__all__ = ["DAMAGED", "DONE", "MessageWay", "ShortWay", "short_way"]

DONE: Final = 1
_DUE: Final = 2
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
        make = _maker("kvc_channel_make")
        if make is None or not lanes or len(place) > stripe:  # what is received ahead is of the first stripe
            return None
        first = lanes[0][2]
        functions = make(
            (
                *(tuple(lanes), *_frames(protocol), place, positions, stripe, first.receive_flags),
                *(*_limits(protocol), round(first.spin_s * 1e9)),
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


class MessageWay:
    """Those of a channel whose connection is no socket, but brings small parts by themselves.

    The native library makes and reads the heads of frames; the connection moves the bytes, by a short way of
    its own, and raises what goes wrong. It has those attributes of a :class:`ShortWay` that a channel uses.
    """

    __slots__ = ("_connection", "_head", "_message", "_payload", "_place", "hand_over")

    def __init__(self, connection: Connection, place: memoryview, functions: tuple[Any, ...]) -> None:
        self._connection = connection
        self._place = place
        self._head: Callable[[Message, int, Sequence[Buf]], bytes | None] = functions[0]
        self._message: Callable[[int], tuple[Message, int, int] | int] = functions[1]
        self._payload: Callable[[Sequence[memoryview]], int | None] = functions[2]
        self.hand_over: Callable[[], tuple[int, int]] = functions[3]

    @classmethod
    def of(cls, connection: Connection, protocol: WireProtocol, place: memoryview) -> MessageWay | None:
        """For an open connection; ``None`` where frames have checksums, or the library is not there."""
        make = _maker("kvc_messages_make")
        if make is None or protocol.checksum:
            return None
        made_of = ((), *_frames(protocol), place, array("Q", (0, 0)), _ONE_STRIPE, 0, *_limits(protocol), 0)
        functions = make(made_of)
        return None if functions is None else cls(connection.carrier, place, functions)

    def send(
        self, message: Message, request_id: int, payload: Sequence[Buf], deadline: float, _lent: bool
    ) -> int | None:
        """See :class:`ShortWay`."""
        head = self._head(message, request_id, payload)
        if head is None:
            return None
        self._connection.send((head, *payload), deadline)
        return DONE

    def receive(self, deadline: float, ahead: bool) -> tuple[Message, int, int] | int | None:
        """See :class:`ShortWay`."""
        if not ahead:
            return None
        try:
            return self._message(self._connection.recv_at_least(self._place, 1, deadline))
        except TransferTimeoutError:  # nothing was taken: the long way says whether that is an error
            return None

    def receive_payload(self, views: Sequence[memoryview], deadline: float) -> int | None:
        """See :class:`ShortWay`."""
        code = self._payload(views)
        if code == _DUE:
            self._connection.recv_into(views, deadline)
            return DONE
        return code

    def progress(self) -> tuple[int, int]:
        """See :class:`ShortWay`; there are no checksums."""
        return 0, 0

    def error(self, code: int, doing: str) -> KVFerryError:
        """See :class:`ShortWay`; there are no such codes."""
        return TransportError(f"{self._connection.peer_address}: code {code} while {doing}")


def short_way(
    connection: Connection, protocol: WireProtocol, place: memoryview
) -> ShortWay | MessageWay | None:
    """That of a channel over an open connection, if there is one; ``place`` is for what is received ahead."""
    if connection.carrier.brings_parts:
        return MessageWay.of(connection, protocol, place)
    return ShortWay.of(connection, protocol, place)


def _frames(protocol: WireProtocol) -> tuple[Any, ...]:
    return (*protocol.kinds, PAYLOAD_TYPES, encode_message, decode_message)


def _limits(protocol: WireProtocol) -> tuple[int, int, int]:
    return protocol.flags, protocol.limits.max_meta_nbytes, protocol.limits.max_payload_nbytes


@functools.cache
def _maker(name: str) -> Callable[[tuple[Any, ...]], tuple[Any, ...] | None] | None:
    found = native()
    if found.library is None or not _HAS_GIL:
        return None
    make: Any = getattr(ctypes.PyDLL(str(found.path)), name)
    make.argtypes, make.restype = (ctypes.py_object,), ctypes.py_object
    return make  # type: ignore[no-any-return]
