"""The sending half of a connection."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from kvferry.core.buffers import copy_into, page_aligned, total_nbytes
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectionClosedError, ProtocolError
from kvferry.transports.ucx.context import Context
from kvferry.transports.ucx.control import ControlSocket
from kvferry.transports.ucx.frames import (
    CANCEL,
    DATA,
    MAX_ADDRESS_NBYTES,
    MAX_ENTRIES,
    OPEN,
    Piece,
    pack_entries,
    pack_header,
)
from kvferry.transports.ucx.lane import WINDOW, Lane
from kvferry.transports.ucx.library import Endpoint
from kvferry.transports.ucx.settings import Options

__all__ = ["FIRST_TAG", "HELLO_TAG", "LENGTH", "Outgoing"]

HELLO_TAG: Final = 1
FIRST_TAG: Final = 16
LENGTH: Final = struct.Struct("<I")
_CHUNK_NBYTES: Final = 4 << 20
_RUN_NBYTES: Final = 64 << 10
_BOUNCE_NBYTES: Final = 1 << 20
_RETRACT_S: Final = 0.1
_SETTLE_S: Final = 1.0


class _Plan:
    """One frame: what is inline and what goes by UCX, in order."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.inline: list[memoryview] = []
        self.inline_nbytes = 0
        self.messages: list[memoryview] = []

    def add_message(self, view: memoryview) -> None:
        self.pieces.append(Piece(len(view), inline=False))
        self.messages.append(view)

    def add_inline(self, views: Sequence[memoryview], nbytes: int) -> None:
        self.pieces.append(Piece(nbytes, inline=True))
        self.inline.extend(views)
        self.inline_nbytes += nbytes


class Outgoing:
    """Sends; one thread at a time, but :meth:`cancel` from any.

    Args:
        control: The connection's socket.
        context: Of UCX.
        options: Of the address.
        error_handling: Whether UCX watches the peer itself, which keeps it from using shared memory.
    """

    def __init__(
        self, control: ControlSocket, context: Context, options: Options, *, error_handling: bool
    ) -> None:
        self._control = control
        self._context = context
        self._options = options
        self._error_handling = error_handling
        self._lane: Lane | None = None
        self._endpoint: Endpoint | None = None
        self._next_tag = FIRST_TAG
        self._bounce: memoryview | None = None
        self._broken = ""
        self._lock = threading.Lock()  # of the two below
        self._exposed = False  # the peer may read memory of the caller
        self._retracted = False

    def send(self, views: list[memoryview], deadline: float) -> None:
        """Send ``views``, none of them empty."""
        if self._broken:
            raise ConnectionClosedError(f"{self._control.name} sends no more: {self._broken}")
        nbytes = total_nbytes(views)
        if nbytes <= self._options.inline_nbytes:
            if nbytes:
                self._control.send([pack_header(DATA, inline_nbytes=nbytes), *views], deadline)
            return
        try:
            for plan in self._plans(views):
                self._send_plan(plan, deadline)
        except BaseException as error:
            self._give_up(error)
            raise

    def cancel(self) -> None:
        """Tell the peer that what it may be reading is not to be trusted, if it may be reading."""
        with self._lock:
            if self._exposed and not self._retracted:
                self._retracted = True
                self._control.retract(pack_header(CANCEL), _RETRACT_S)

    def settle(self) -> None:
        """Hand over what UCX still holds of what was sent; nobody is sending."""
        if self._lane is not None:
            self._lane.settle(deadline_in(_SETTLE_S))

    def destroy(self) -> None:
        """End the lane; nobody is sending."""
        if self._lane is not None:
            self._lane.destroy()
            self._lane = self._endpoint = None
        self._broken = self._broken or "it was closed"

    # -- frames ----------------------------------------------------------------------------------------

    def _plans(self, views: list[memoryview]) -> Iterator[_Plan]:
        """The frames for ``views``; each has to be sent before the next is asked for."""
        plan = _Plan()
        for run in _runs(views, self._options.inline_nbytes):
            nbytes = total_nbytes(run)
            large = len(run) == 1 and nbytes > self._options.inline_nbytes
            if not large and nbytes <= _RUN_NBYTES:
                if plan.inline_nbytes + nbytes > _RUN_NBYTES or len(plan.pieces) == MAX_ENTRIES:
                    yield plan
                    plan = _Plan()
                plan.add_inline(run, nbytes)
                continue
            if not large and plan.pieces:  # a frame uses the one bounce buffer once
                yield plan
                plan = _Plan()
            for message in _cut(run[0]) if large else self._packed(run):
                if len(plan.pieces) == MAX_ENTRIES or (not large and plan.pieces):
                    yield plan
                    plan = _Plan()
                plan.add_message(message)
        if plan.pieces:
            yield plan

    def _packed(self, run: list[memoryview]) -> Iterator[memoryview]:
        """Many small parts as few messages, each of which is overwritten by the next."""
        if self._bounce is None:
            self._bounce = page_aligned(_BOUNCE_NBYTES)
        used = 0
        for view in run:
            while view:
                n = min(len(view), _BOUNCE_NBYTES - used)
                copy_into(self._bounce[used : used + n], view[:n])
                used, view = used + n, view[n:]
                if used == _BOUNCE_NBYTES:
                    yield self._bounce
                    used = 0
        if used:
            yield self._bounce[:used]

    def _send_plan(self, plan: _Plan, deadline: float) -> None:
        if not plan.messages:
            header = pack_header(DATA, inline_nbytes=plan.inline_nbytes)
            self._control.send([header, *plan.inline], deadline)
            return
        lane, endpoint = self._opened(deadline)
        first_tag = self._next_tag
        self._next_tag += len(plan.messages)
        header = pack_header(
            DATA, entries=len(plan.pieces), inline_nbytes=plan.inline_nbytes, first_tag=first_tag
        )
        doing = f"sending {total_nbytes(plan.messages)} bytes in {len(plan.messages)} messages"
        with self._lock:
            self._exposed = True
        for i, message in enumerate(plan.messages[:WINDOW]):
            lane.post_send(endpoint, message, first_tag + i)
        self._control.send([header, pack_entries(plan.pieces), *plan.inline], deadline)
        for i, message in enumerate(plan.messages[WINDOW:], WINDOW):
            lane.drive(WINDOW - 1, deadline, doing)
            lane.post_send(endpoint, message, first_tag + i)
        lane.drive(0, deadline, doing)
        with self._lock:
            self._exposed = False
            if self._retracted:
                raise ConnectionClosedError(f"{self._control.name} was closed here while {doing}")

    def _opened(self, deadline: float) -> tuple[Lane, Endpoint]:
        """The lane, made by the first large message, once the peer is there to receive it."""
        if self._lane is None or self._endpoint is None:
            self._lane = lane = Lane(self._context, self._control, self._options.spin_s)
            answer = np.zeros(LENGTH.size + MAX_ADDRESS_NBYTES, np.uint8)
            lane.post_recv(answer, HELLO_TAG)
            address = lane.address
            self._control.send([pack_header(OPEN, inline_nbytes=len(address)), address], deadline)
            lane.drive(0, deadline, "waiting for the peer to receive the first large message")
            (nbytes,) = LENGTH.unpack_from(answer.data)
            if not 0 < nbytes <= MAX_ADDRESS_NBYTES:
                raise ProtocolError(f"{self._control.name}: an address of {nbytes} bytes", remote=True)
            there = answer[LENGTH.size : LENGTH.size + nbytes].tobytes()
            self._endpoint = lane.endpoint(there, error_handling=self._error_handling)
        return self._lane, self._endpoint

    def _give_up(self, error: BaseException) -> None:
        """After an error in the middle: take back what the peer may read, and end the lane."""
        with contextlib.suppress(ConnectionClosedError):  # it was closed here, and close has cancelled
            if not self._control.ended():  # who has ended does not read any more
                self.cancel()
        self._broken = str(error) or type(error).__name__
        if self._lane is not None:
            self._lane.destroy()
            self._lane = self._endpoint = None


def _runs(views: list[memoryview], inline_nbytes: int) -> Iterator[list[memoryview]]:
    """``views`` as lists: one large one by itself, small ones that follow each other together."""
    small: list[memoryview] = []
    for view in views:
        if len(view) <= inline_nbytes:
            small.append(view)
            continue
        if small:
            yield small
            small = []
        yield [view]
    if small:
        yield small


def _cut(view: memoryview) -> Iterator[memoryview]:
    if len(view) <= _CHUNK_NBYTES:
        yield view
        return
    for start in range(0, len(view), _CHUNK_NBYTES):
        yield view[start : start + _CHUNK_NBYTES]
