"""The receiving half of a connection."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvferry.core.buffers import ByteArray, copy_into, page_aligned, total_nbytes
from kvferry.core.errors import ConnectionClosedError, ProtocolError, TransferTimeoutError
from kvferry.transports.ucx.context import Context
from kvferry.transports.ucx.control import ControlSocket
from kvferry.transports.ucx.frames import (
    CANCEL,
    HEADER_NBYTES,
    OPEN,
    Header,
    Piece,
    parse_entries,
    parse_header,
)
from kvferry.transports.ucx.lane import WINDOW, Lane
from kvferry.transports.ucx.outgoing import HELLO_TAG, LENGTH
from kvferry.transports.ucx.settings import Options

__all__ = ["Incoming"]

_MAX_BOUNCE_NBYTES: Final = 64 << 20
_LENGTH_NBYTES: Final = 8


class _Target:
    """The views of one call, filled in order."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = deque(view for view in views if len(view))
        self.wanted = total_nbytes(self._views)
        self.left = self.wanted

    @property
    def got(self) -> int:
        return self.wanted - self.left

    @property
    def room(self) -> int:
        """Bytes that can be taken in one piece."""
        return len(self._views[0]) if self._views else 0

    def take(self, nbytes: int) -> memoryview:
        """The next ``nbytes``, which is :attr:`room` at most."""
        view = self._views[0]
        if nbytes < len(view):
            self._views[0] = view[nbytes:]
            view = view[:nbytes]
        else:
            self._views.popleft()
        self.left -= nbytes
        return view

    def take_all(self, nbytes: int) -> list[memoryview]:
        """Views of the next ``nbytes``, or of all that is left."""
        taken = []
        while nbytes and self._views:
            n = min(nbytes, self.room)
            taken.append(self.take(n))
            nbytes -= n
        return taken


class Incoming:
    """Receives; one thread at a time.

    Args:
        control: The connection's socket.
        context: Of UCX.
        options: Of the address.
        error_handling: As for :class:`Outgoing`.
    """

    def __init__(
        self, control: ControlSocket, context: Context, options: Options, *, error_handling: bool
    ) -> None:
        self._control = control
        self._context = context
        self._options = options
        self._error_handling = error_handling
        self._lane: Lane | None = None
        self._header = memoryview(bytearray(HEADER_NBYTES))
        self._next: Header | None = None  # read ahead
        self._plain = 0  # bytes of an inline frame that are still in the socket
        self._pieces: deque[Piece] = deque()  # of the frame that is being received
        self._inline = memoryview(b"")  # its inline bytes
        self._tag = 0  # of its next message
        self._held = memoryview(b"")  # bytes that came and were not asked for yet
        self._bounce: memoryview | None = None
        self._unproven = False  # messages came whose sender may have given up
        self._broken = ""

    @property
    def holds_bytes(self) -> bool:
        """Whether bytes are there, or announced, beyond what is in the socket."""
        return bool(self._held or self._plain or self._pieces or self._next)

    def recv_into(self, views: Sequence[memoryview], deadline: float) -> None:
        """Fill ``views``."""
        target = _Target(views)
        self._fill(target, target.wanted, deadline)

    def recv_at_least(self, view: memoryview, minimum: int, deadline: float) -> int:
        """Fill ``minimum`` bytes of ``view``, and more with what is left of a small message."""
        target = _Target([view])
        self._fill(target, minimum, deadline)
        return target.got

    def _fill(self, target: _Target, minimum: int, deadline: float) -> None:
        if self._broken:
            raise ConnectionClosedError(f"{self._control.name} receives no more: {self._broken}")
        try:
            while target.got < minimum:
                self._step(target, deadline)
            self._finish(deadline)
        except BaseException as error:
            if self._in_the_middle:
                self._give_up(error)
            if isinstance(error, ConnectionClosedError):
                who = "was closed here" if self._control.closed else "was ended by the peer"
                raise ConnectionClosedError(
                    f"{self._control.name} {who} after {target.got} of {minimum} bytes"
                ) from error
            if isinstance(error, TransferTimeoutError):
                raise TransferTimeoutError(f"{error}, {target.got} of {minimum} bytes had come") from error
            raise

    def destroy(self) -> None:
        """End the lane; nobody is receiving."""
        if self._lane is not None:
            self._lane.destroy()
            self._lane = None
        self._broken = self._broken or "it was closed"

    # -- one step --------------------------------------------------------------------------------------

    @property
    def _in_the_middle(self) -> bool:
        """Whether an error now leaves the stream at an unknown place."""
        return bool(self._plain or self._pieces or self._unproven or self._next)

    def _step(self, target: _Target, deadline: float) -> None:
        if self._held:
            n = min(len(self._held), target.room)
            copy_into(target.take(n), self._held[:n])
            self._held = self._held[n:]
        elif self._plain:
            n = min(self._plain, target.left)
            self._control.recv_into(target.take_all(n), deadline)
            self._plain -= n
        elif self._pieces:
            self._take_piece(target, deadline)
        else:
            self._finish(deadline)
            self._open_frame(deadline)

    def _take_piece(self, target: _Target, deadline: float) -> None:
        piece = self._pieces[0]
        if piece.inline:
            self._held, self._inline = self._inline[: piece.nbytes], self._inline[piece.nbytes :]
        elif piece.nbytes <= target.room:
            self._post(target.take(piece.nbytes), deadline)
        else:
            # the views are cut otherwise than the parts: the only case in which bytes are copied
            bounce = self._bounce_of(piece.nbytes)
            self._post(bounce, deadline)
            self._drive(0, deadline)
            self._held = bounce
        self._pieces.popleft()

    def _post(self, view: memoryview, deadline: float) -> None:
        self._drive(WINDOW - 1, deadline)
        self._unproven = True
        self._opened().post_recv(view, self._tag)
        self._tag += 1

    def _drive(self, left: int, deadline: float) -> None:
        self._opened().drive(left, deadline, "receiving")

    def _opened(self) -> Lane:
        if self._lane is None:
            raise ProtocolError(f"{self._control.name}: the peer announced messages first", remote=True)
        return self._lane

    def _bounce_of(self, nbytes: int) -> memoryview:
        if nbytes > _MAX_BOUNCE_NBYTES:
            raise ProtocolError(
                f"{self._control.name}: a message of {nbytes} bytes does not fit the next view, and is "
                f"larger than the {_MAX_BOUNCE_NBYTES} that are buffered",
                remote=True,
            )
        if self._bounce is None or len(self._bounce) < nbytes:
            self._bounce = page_aligned(nbytes)
        return self._bounce[:nbytes]

    # -- frames ----------------------------------------------------------------------------------------

    def _open_frame(self, deadline: float) -> None:
        header = self._next or self._read_header(deadline)
        self._next = header  # an error from here on leaves the stream in the middle of it
        if header.kind == CANCEL:
            raise ConnectionClosedError(f"{self._control.name}: the peer gave up sending")
        if header.kind == OPEN:
            self._answer(header, deadline)
        elif not header.entries:
            self._plain = header.inline_nbytes
        else:
            body = np.empty(header.entries * _LENGTH_NBYTES + header.inline_nbytes, np.uint8).data
            self._control.recv_into([body], deadline)
            self._pieces = deque(parse_entries(header, body, self._control.name))
            self._inline = body[header.entries * _LENGTH_NBYTES :]
            self._tag = header.first_tag
        self._next = None

    def _read_header(self, deadline: float) -> Header:
        self._wait(deadline)
        self._control.recv_into([self._header], deadline)
        return parse_header(self._header, self._control.name)

    def _wait(self, deadline: float) -> None:
        """Wait for a header, for a moment without sleep."""
        if self._lane is not None and self._options.spin_s:
            until = min(deadline, time.monotonic() + self._options.spin_s)
            while time.monotonic() < until:
                if self._control.readable(0.0):
                    return
                os.sched_yield()
        if not self._control.readable(deadline):
            raise TransferTimeoutError(f"{self._control.name}: the deadline passed while receiving")

    def _answer(self, header: Header, deadline: float) -> None:
        """The peer is about to send large messages: make the lane, and tell its worker where it is."""
        if self._lane is not None:
            raise ProtocolError(f"{self._control.name}: the peer opened its lane twice", remote=True)
        address = memoryview(bytearray(header.inline_nbytes))
        self._control.recv_into([address], deadline)
        self._lane = lane = Lane(self._context, self._control, self._options.spin_s)
        endpoint = lane.endpoint(bytes(address), error_handling=self._error_handling)
        own = lane.address
        hello: ByteArray = np.frombuffer(LENGTH.pack(len(own)) + own, np.uint8)
        lane.post_send(endpoint, hello, HELLO_TAG)
        lane.drive(0, deadline, "answering the peer")
        lane.settle(deadline)

    def _finish(self, deadline: float) -> None:
        """Complete what was posted, and make sure that its sender stands by it."""
        if not self._unproven:
            return
        self._drive(0, deadline)
        self._opened().settle(deadline)
        if self._next is None and self._control.readable(0.0):
            try:
                self._next = self._read_header(deadline)
            except ConnectionClosedError as error:
                if (
                    error.__cause__ is not None
                ):  # reset; else it is an orderly end, found again by the next call
                    raise
        if self._next is not None and self._next.kind == CANCEL:
            raise ConnectionClosedError(f"{self._control.name}: the peer gave up sending")
        self._unproven = False

    def _give_up(self, error: BaseException) -> None:
        self._broken = str(error) or type(error).__name__
        self._plain, self._next, self._held = 0, None, memoryview(b"")
        self._pieces.clear()
        if self._lane is not None:
            self._lane.destroy()
            self._lane = None
