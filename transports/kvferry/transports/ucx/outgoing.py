"""The sending half of a connection."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import Final

from kvferry.core.buffers import Buf, as_bytes_view, copy_into, page_aligned, total_nbytes
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConnectionClosedError, TransportError
from kvferry.transports.ucx.calls import address_of
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
    MAX_MESSAGE_NBYTES,
    OPEN,
    cut,
    message_tag,
    open_address,
    pack_header,
    seal_address,
)
from kvferry.transports.ucx.lane import WINDOW, Lane
from kvferry.transports.ucx.settings import EAGER_NBYTES, Options
from kvferry.transports.ucx.short import ShortWay

__all__ = ["Outgoing"]

_log = logging.getLogger(__name__)

_RUN_NBYTES: Final = 64 << 10
_BOUNCE_NBYTES: Final = 1 << 20
_JOINED_NBYTES: Final = 1 << 20  # bounds what a receiver has to buffer that takes the parts one by one
_RETRACT_S: Final = 0.1
_SETTLE_S: Final = 1.0
_OPENING: Final = "waiting for the peer to receive the first large message"


class _Burst:
    """The parts of one call, in order: messages leave at once, frames before anything is waited for.

    Args:
        lane: For the messages.
        endpoint: Where they go.
        control: For the frames.
        position: Of the first byte; that of the next one from then on.
        deadline: Of the call.
        doing: For messages of errors.
        join: Whether parts that follow each other in memory are one message.
    """

    def __init__(
        self,
        lane: Lane,
        endpoint: int,
        control: ControlSocket,
        position: int,
        deadline: float,
        doing: str,
        *,
        join: bool,
    ) -> None:
        self.position = position
        self._join_nbytes = _JOINED_NBYTES if join else 0
        self._views: list[memoryview] = []  # the message that may go on, and where it lies
        self._address = self._nbytes = 0
        self._lane = lane
        self._endpoint = endpoint
        self._control = control
        self._deadline = deadline
        self._doing = doing
        self._frames: list[Buf] = []
        self._beside_nbytes = 0  # in frames, since all messages were received

    def add_message(self, view: memoryview) -> None:
        """Send ``view`` as a message, or as a part of one."""
        address, nbytes = address_of(view), len(view)
        joined = self._nbytes + nbytes
        if address == self._address + self._nbytes and joined <= self._join_nbytes:
            self._views.append(view)
            self._nbytes = joined
        else:
            if self._views:
                self._send_message()
            self._views, self._address, self._nbytes = [view], address, nbytes
        self.position += nbytes

    def _send_message(self) -> None:
        lane, nbytes = self._lane, self._nbytes
        if lane.pending >= WINDOW:
            self._send_frames()
            lane.drive(WINDOW - 1, self._deadline, self._doing)
        tag = message_tag(self.position - nbytes, nbytes)
        lane.send(self._endpoint, self._views, self._address, nbytes, tag, self._doing)
        self._views, self._address, self._nbytes = [], 0, 0

    def add_frame(self, views: Sequence[memoryview], nbytes: int) -> None:
        """Send ``views`` as a frame: a receiver has little room for those that come before messages do."""
        if self._views:
            self._send_message()
        if self._beside_nbytes + nbytes > _RUN_NBYTES:
            self.finish()
        self._frames += [pack_header(DATA, nbytes, self.position, flags=BESIDE), *views]
        self._beside_nbytes += nbytes
        self.position += nbytes

    def finish(self) -> None:
        """Wait until all was received."""
        if self._views:
            self._send_message()
        self._send_frames()
        self._lane.drive(0, self._deadline, self._doing)
        self._beside_nbytes = 0

    def _send_frames(self) -> None:
        if self._frames:
            self._control.send(self._frames, self._deadline)
            self._frames = []


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
        self._endpoint: int | None = None
        self._short: ShortWay | None = None
        self._answer: memoryview | None = None  # to be, once the peer was told of the lane
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
                if nbytes < EAGER_NBYTES and self._is_opened(deadline):
                    self._send_small(views, nbytes, deadline)
                else:
                    self._control.send([pack_header(DATA, nbytes, self._position), *views], deadline)
                self._position += nbytes
                return
            self._send_large(views, nbytes, deadline)
        except BaseException as error:
            self._give_up(error)
            raise

    def send_short(self, parts: Sequence[Buf], deadline: float) -> bool:
        """Send ``parts`` in one call, where all of them are messages; whether that was done."""
        short = self._short
        if short is None:
            return False
        self._exposed = True  # before the peer can read anything, so this needs no lock
        try:
            found = short.send(parts, self._position, deadline, 0)
            if type(found) is tuple:
                found = self._go_on(short, parts, found, deadline)
            if type(found) is int:
                self._position += found
        except BaseException as error:
            self._give_up(error)
            raise
        with self._lock:
            self._exposed = False
            if self._retracted:
                raise ConnectionClosedError(f"{self._control.name} was closed here while sending")
        return found is not None

    def _go_on(
        self, short: ShortWay, parts: Sequence[Buf], found: int | tuple[int, ...] | None, deadline: float
    ) -> int | None:
        """What a short way left: wait for what is under way, and send the rest."""
        lane, nbytes = self._lane, sum(as_bytes_view(part).nbytes for part in parts)
        doing = f"sending {nbytes} bytes in {len(parts)} parts"
        assert lane is not None
        while type(found) is tuple:
            status, posted, *handles = found
            for handle in handles:
                lane.post(handle, parts)
            if status:
                raise lane.failure(status, doing)
            lane.drive(0, deadline, doing)
            found = short.send(parts, self._position, deadline, posted)
            if found is None:  # a part was changed meanwhile: what was posted cannot be taken back
                raise TransportError(
                    f"parts changed while {posted} bytes of them were on their way; leave them alone"
                )
        assert not isinstance(found, tuple)
        return found

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
            self._lane = self._endpoint = self._short = None
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
            lane = self._begin_opening(deadline)
            lane.progress()
            if not lane.settled(_OPENING):  # the peer has not come to it
                return False
            self._opened(deadline)
        return True

    def _send_small(self, views: list[memoryview], nbytes: int, deadline: float) -> None:
        """Send by UCX, which copies."""
        lane, endpoint = self._opened(deadline)
        doing = "sending a small message"
        data = views[0] if len(views) == 1 else memoryview(b"".join(views))
        lane.send(endpoint, [data], address_of(data), nbytes, message_tag(self._position, nbytes), doing)
        if lane.pending:
            lane.drive(0, deadline, doing)

    # -- what is sent together -------------------------------------------------------------------------

    def _send_large(self, views: list[memoryview], nbytes: int, deadline: float) -> None:
        """Send ``views``, of which the peer may read some until this returns."""
        lane, endpoint = self._opened(deadline)
        doing = f"sending {nbytes} bytes in {len(views)} parts"
        burst = _Burst(lane, endpoint, self._control, self._position, deadline, doing, join=self._eager)
        with self._lock:
            self._exposed = True
        inline_nbytes = self._options.inline_nbytes
        small: list[memoryview] = []
        for view in views:
            if len(view) <= inline_nbytes:
                small.append(view)
                continue
            if small:
                self._add_run(burst, small)
                small = []
            for piece in cut(view) if len(view) > MAX_MESSAGE_NBYTES else (view,):
                burst.add_message(piece)
        if small:
            self._add_run(burst, small)
        burst.finish()
        self._position = burst.position
        with self._lock:
            self._exposed = False
            if self._retracted:
                raise ConnectionClosedError(f"{self._control.name} was closed here while {doing}")

    def _add_run(self, burst: _Burst, run: list[memoryview]) -> None:
        """Small parts that follow each other."""
        nbytes = total_nbytes(run)
        if nbytes < EAGER_NBYTES and self._eager:
            burst.add_message(run[0] if len(run) == 1 else memoryview(b"".join(run)))
        elif nbytes <= _RUN_NBYTES:
            burst.add_frame(run, nbytes)
        else:
            self._add_packed(burst, run)

    def _add_packed(self, burst: _Burst, run: list[memoryview]) -> None:
        """Many small parts as few messages: they are copied, which is cheaper than a message each."""
        if self._bounce is None:
            self._bounce = page_aligned(_BOUNCE_NBYTES)
        used = 0
        for view in run:
            while view:
                if used == _BOUNCE_NBYTES:
                    burst.add_message(self._bounce)
                    burst.finish()  # it is overwritten
                    used = 0
                n = min(len(view), _BOUNCE_NBYTES - used)
                copy_into(self._bounce[used : used + n], view[:n])
                used, view = used + n, view[n:]
        burst.add_message(self._bounce[:used])
        burst.finish()

    def _opened(self, deadline: float) -> tuple[Lane, int]:
        """The lane, made by the first large message, and its endpoint, once the peer receives."""
        if self._lane is not None and self._endpoint is not None:
            return self._lane, self._endpoint
        lane = self._begin_opening(deadline)
        lane.drive(0, deadline, _OPENING)
        assert self._answer is not None
        (nbytes,) = LENGTH.unpack_from(self._answer)
        sealed = self._answer[LENGTH.size : LENGTH.size + nbytes].tobytes()
        there = open_address(self._key, sealed, self._control.name)
        self._endpoint = lane.endpoint(there, error_handling=self._error_handling)
        if self._eager:
            self._short = lane.short_way(self._options.inline_nbytes, self._endpoint)
        return lane, self._endpoint

    def _begin_opening(self, deadline: float) -> Lane:
        """Tell the peer where the lane is; it answers when it receives."""
        lane = self._lane = self._lane or self._new_lane()
        if self._answer is None:
            answer = page_aligned(LENGTH.size + DIGEST_NBYTES + MAX_ADDRESS_NBYTES)
            lane.post(lane.receive(answer, HELLO_TAG, _OPENING), answer)
            self._answer = answer
            sealed = seal_address(self._key, lane.address)
            self._control.send([pack_header(OPEN, len(sealed), self._position), sealed], deadline)
        return lane

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
            self._lane = self._endpoint = self._short = None
