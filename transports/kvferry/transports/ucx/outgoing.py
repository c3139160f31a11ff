"""The sending half of a connection."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from kvferry.core.buffers import Buf, ByteArray, copy_into, page_aligned, total_nbytes
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectionClosedError, TransportError
from kvferry.transports.ucx.context import Context
from kvferry.transports.ucx.control import ControlSocket
from kvferry.transports.ucx.frames import (
    BESIDE,
    CANCEL,
    DATA,
    DIGEST_NBYTES,
    HELLO_TAG,
    LENGTH,
    MAX_ADDRESS_NBYTES,
    OPEN,
    cut,
    message_tag,
    open_address,
    pack_header,
    seal_address,
)
from kvferry.transports.ucx.lane import WINDOW, Lane
from kvferry.transports.ucx.library import Endpoint, Request
from kvferry.transports.ucx.settings import Options

__all__ = ["Outgoing"]

_log = logging.getLogger(__name__)

_RUN_NBYTES: Final = 64 << 10
_EAGER_NBYTES: Final = 8 << 10  # shorter ones do not wait for their receiver
_BOUNCE_NBYTES: Final = 1 << 20
_RETRACT_S: Final = 0.1
_SETTLE_S: Final = 1.0


class _Plan:
    """What is sent together: frames, and messages with their tags."""

    def __init__(self, position: int) -> None:
        self.position = position  # behind all of it
        self.frames: list[Buf] = []
        self.frames_nbytes = 0
        self.messages: list[tuple[int, memoryview]] = []

    def __bool__(self) -> bool:
        return bool(self.frames or self.messages)

    def add_message(self, view: memoryview) -> None:
        self.messages.append((message_tag(self.position, len(view)), view))
        self.position += len(view)

    def add_frame(self, views: Sequence[memoryview], nbytes: int) -> None:
        self.frames += [pack_header(DATA, nbytes, self.position, flags=BESIDE), *views]
        self.frames_nbytes += nbytes
        self.position += nbytes


class Outgoing:
    """Sends; one thread at a time, but :meth:`cancel` from any.

    Args:
        control: The connection's socket.
        context: Of UCX.
        options: Of the address.
        key: Of the digests of addresses.
        error_handling: Whether UCX watches the peer itself, which keeps it from using shared memory.
        eager: Whether small messages may go by UCX, as they end up in shared memory.
    """

    def __init__(
        self,
        control: ControlSocket,
        context: Context,
        options: Options,
        *,
        key: bytes,
        error_handling: bool,
        eager: bool,
    ) -> None:
        self._control = control
        self._context = context
        self._options = options
        self._key = key
        self._error_handling = error_handling
        self._eager = eager
        self._lane: Lane | None = None
        self._endpoint: Endpoint | None = None
        self._hello: Request | None = None
        self._answer: ByteArray = np.zeros(0, np.uint8)
        self._wanted = False  # a lane for small messages
        self._declined = False  # it could not be made
        self._position = 0
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
        try:
            if nbytes <= self._options.inline_nbytes:
                if nbytes < _EAGER_NBYTES and self._is_opened(deadline):
                    self._send_small(views, nbytes, deadline)
                else:
                    self._control.send([pack_header(DATA, nbytes, self._position), *views], deadline)
                self._position += nbytes
                return
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

    # -- small messages --------------------------------------------------------------------------------

    def expect_answers(self) -> None:
        """The peer sends large messages: open the lane with the next small one, so that answers are fast."""
        self._wanted = True

    def _is_opened(self, deadline: float) -> bool:
        """Whether small messages may go by UCX: where they end up in shared memory, whoever reads."""
        if not self._eager or self._declined or not (self._wanted or self._lane):
            return False
        if self._endpoint is None:
            try:
                self._lane = self._lane or self._new_lane()
            except TransportError as error:  # small messages can do without
                _log.info("small messages go through the socket: %s", error)
                self._declined = True
                return False
            lane, hello = self._begin_opening(deadline)
            lane.progress()
            if not hello.completed:  # the peer has not come to it
                return False
            self._opened(deadline)
        return True

    def _send_small(self, views: list[memoryview], nbytes: int, deadline: float) -> None:
        """Send by UCX, which copies."""
        lane, endpoint = self._opened(deadline)
        data = views[0] if len(views) == 1 else b"".join(views)
        request = lane.send(endpoint, data, message_tag(self._position, nbytes))
        if not request.completed:
            lane.post(request, data)
            lane.drive(0, deadline, f"sending {nbytes} bytes")

    # -- what is sent together -------------------------------------------------------------------------

    def _plans(self, views: list[memoryview]) -> Iterator[_Plan]:
        """What to send for ``views``; each has to be sent before the next is asked for."""
        plan = _Plan(self._position)
        for run in _runs(views, self._options.inline_nbytes):
            nbytes = total_nbytes(run)
            if len(run) == 1 and nbytes > self._options.inline_nbytes:
                for message in cut(run[0]):
                    plan.add_message(message)
            elif nbytes < _EAGER_NBYTES and self._eager:
                plan.add_message(run[0] if len(run) == 1 else memoryview(b"".join(run)))
            elif nbytes <= _RUN_NBYTES:
                if plan.frames_nbytes + nbytes > _RUN_NBYTES:
                    yield plan
                    plan = _Plan(self._position)
                plan.add_frame(run, nbytes)
            else:
                if plan:
                    yield plan
                for message in self._packed(run):  # each is overwritten by the next
                    plan = _Plan(self._position)
                    plan.add_message(message)
                    yield plan
                plan = _Plan(self._position)
        if plan:
            yield plan

    def _packed(self, run: list[memoryview]) -> Iterator[memoryview]:
        """Many small parts as few messages: they are copied, which is cheaper than a message each."""
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
        lane, endpoint = self._opened(deadline)
        doing = (
            f"sending {sum(len(view) for _, view in plan.messages)} bytes in {len(plan.messages)} messages"
        )
        with self._lock:
            self._exposed = True
        for tag, message in plan.messages[:WINDOW]:
            lane.post(lane.send(endpoint, message, tag), message)
        if plan.frames:
            self._control.send(plan.frames, deadline)
        for tag, message in plan.messages[WINDOW:]:
            lane.drive(WINDOW - 1, deadline, doing)
            lane.post(lane.send(endpoint, message, tag), message)
        lane.drive(0, deadline, doing)
        self._position = plan.position
        with self._lock:
            self._exposed = False
            if self._retracted:
                raise ConnectionClosedError(f"{self._control.name} was closed here while {doing}")

    def _opened(self, deadline: float) -> tuple[Lane, Endpoint]:
        """The lane, made by the first large message, once the peer is there to receive it."""
        if self._lane is not None and self._endpoint is not None:
            return self._lane, self._endpoint
        lane, _ = self._begin_opening(deadline)
        lane.drive(0, deadline, "waiting for the peer to receive the first large message")
        (nbytes,) = LENGTH.unpack_from(self._answer.data)
        sealed = self._answer[LENGTH.size : LENGTH.size + nbytes].tobytes()
        there = open_address(self._key, sealed, self._control.name)
        self._endpoint = lane.endpoint(there, error_handling=self._error_handling)
        return lane, self._endpoint

    def _begin_opening(self, deadline: float) -> tuple[Lane, Request]:
        """Tell the peer where the lane is; it answers when it receives."""
        lane = self._lane = self._lane or self._new_lane()
        if self._hello is None:
            self._answer = np.zeros(LENGTH.size + DIGEST_NBYTES + MAX_ADDRESS_NBYTES, np.uint8)
            self._hello = lane.receive(self._answer, HELLO_TAG)
            lane.post(self._hello, self._answer)
            sealed = seal_address(self._key, lane.address)
            self._control.send([pack_header(OPEN, len(sealed), self._position), sealed], deadline)
        return lane, self._hello

    def _new_lane(self) -> Lane:
        return Lane(self._context, self._control, self._options.spin_s)

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
