"""One direction of a connection through UCX: a worker of its own, driven by the thread whose call it serves.

No thread runs beside the calls. Large messages are matched and moved within a ``send`` of one side and a
``recv_into`` of the other, so nothing is left to do for UCX when neither is called.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvferry.core.clock import is_past
from kvferry.core.errors import CapacityError, ConnectionClosedError, TransferTimeoutError, TransportError
from kvferry.transports.sockets import poll_timeout_ms
from kvferry.transports.ucx.calls import IN_PROGRESS, address_of, is_gone
from kvferry.transports.ucx.context import Context
from kvferry.transports.ucx.control import ControlSocket
from kvferry.transports.ucx.frames import HELLO_TAG, POSITION_MASK, message_tag
from kvferry.transports.ucx.library import Library, Worker
from kvferry.transports.ucx.short import ShortWay
from kvferry.transports.ucx.target import Slot

__all__ = ["LOOK_EVERY", "WINDOW", "Lane"]

WINDOW: Final = 32
"""Messages that are posted at once in one direction."""
_SMALL_NBYTES: Final = 8 << 10  # comes through the socket, or in shared memory
# From this size on one place is given to UCX as two. What goes to several places it moves in pieces through
# shared memory, with both ends at work; what goes to one the kernel copies page by page, in one of them.
_HALVED_NBYTES: Final = 16 << 10
LOOK_EVERY: Final = 256
"""Rounds of progress to one look at the clock and the socket."""
_GRACE_S: Final = 0.05
_FLUSH_S: Final = 0.25


class Lane:
    """A worker with the operations that were posted on it. One thread at a time, inside the socket's guard.

    Args:
        context: Of UCX.
        control: The connection's socket, which tells when the peer is gone.
        spin_s: How long to look for progress before sleeping.

    Raises:
        TransportError: If UCX cannot make a worker.
    """

    def __init__(self, context: Context, control: ControlSocket, spin_s: float) -> None:
        self._ucx: Final = context.ucx
        self._control = control
        self._spin_s = spin_s
        # handles, with the memory, which has to stay
        self._posted: deque[tuple[int, object]] = deque()
        try:
            self._worker: Worker = self._ucx.new_worker(context.handle)
        except (self._ucx.error, OSError, RuntimeError, CapacityError) as error:
            raise TransportError(
                f"{control.name}: UCX cannot make a worker: {error}; each direction of large messages takes "
                "about 12 descriptors and 5 MB (see ulimit -n, ulimit -l and the size of /dev/shm)"
            ) from error
        self._end = weakref.finalize(self, _destroy, self._ucx, self._worker, self._posted, os.getpid())
        self._end.atexit = False
        self._handle = self._worker.handle
        self._calls = self._ucx.calls
        self._status, self._free = self._calls.status, self._calls.free
        self.progress: Final[Callable[[], bool]] = self._worker.progress_once
        """Do what there is to do; whether there was something."""
        self._epoll = self._worker.epoll_file_descriptor
        with control.descriptor() as self._control_fd:
            self._poll = self._new_poll(select.POLLRDHUP)
            self._poll_both = self._new_poll(select.POLLIN | select.POLLRDHUP)
            self._poll_socket = select.poll()
            self._poll_socket.register(self._control_fd, select.POLLIN | select.POLLRDHUP)
        self._probed = 0
        self._probe_tag = self._ucx.tag(message_tag(0, 0))
        self._position_mask = self._ucx.tag_mask(POSITION_MASK | HELLO_TAG)

    @property
    def address(self) -> bytes:
        """Where the peer's worker reaches this one."""
        return bytes(self._worker.address)

    def endpoint(self, address: bytes, *, error_handling: bool) -> int:
        """The way to the peer's worker; it ends with the lane.

        Raises:
            TransportError: If UCX finds none.
        """
        try:
            return self._ucx.new_endpoint(self._worker, address, error_handling=error_handling).handle
        except (self._ucx.error, ValueError) as error:
            raise TransportError(
                f"{self._control.name}: UCX finds no way to the peer: {error}; compare UCX_TLS and "
                "UCX_NET_DEVICES of both sides (kvferry doctor shows them)"
            ) from error

    def short_way(self, inline_nbytes: int, endpoint: int = 0) -> ShortWay | None:
        """What does all of a burst, or of a receive, in one call, as long as the lane is there."""
        calls = self._calls.addresses
        return ShortWay.of(calls, self._handle, endpoint, self._control_fd, inline_nbytes, self._spin_s)

    # -- sending ---------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """How many operations are posted, as far as :meth:`drive` knows."""
        return len(self._posted)

    def post(self, request: int, memory: object) -> None:
        """Have :meth:`drive` complete the operation ``request``, whose bytes are in ``memory``."""
        if request:
            self._posted.append((request, memory))

    def send(
        self, endpoint: int, views: Sequence[memoryview], address: int, nbytes: int, tag: int, doing: str
    ) -> None:
        """Send one message: ``views``, which follow each other in memory and stay until it is completed.

        Args:
            endpoint: Where to.
            views: One or more.
            address: Of the first.
            nbytes: Of all.
            tag: Of the message.
            doing: For messages of errors.

        Raises:
            ConnectionClosedError: If UCX knows that the peer is gone.
            TransportError: If it cannot send otherwise.
        """
        request = self._calls.send(endpoint, address, nbytes, tag)
        if request:
            if request < 0:
                raise self.failure(request, doing)
            self._posted.append((request, views))

    def drive(self, left: int, deadline: float, doing: str) -> None:
        """Move bytes until at most ``left`` of the posted operations are not completed.

        Raises:
            TransferTimeoutError: At the deadline.
            ConnectionClosedError: If either side ends, or an operation fails for that.
            TransportError: If an operation fails otherwise.
        """
        progress, settled, idle_since, rounds = self.progress, self.settled, 0.0, 0
        while not settled(doing, left):
            rounds += 1
            if progress() and rounds % LOOK_EVERY:
                idle_since = 0.0
                continue
            idle_since = self.idle(idle_since, deadline, doing)
            # towards a peer that is gone, UCX may make what it calls progress for ever
            ended = idle_since < 0 or (rounds % LOOK_EVERY == 0 and self._control.ended())
            if ended and not self.last_chance(lambda: self._unfinished() <= left):
                raise self._ended(doing)

    def settled(self, doing: str, left: int = 0) -> bool:
        """Whether at most ``left`` of the posted operations are not completed. Raises as :meth:`drive`."""
        posted, finished = self._posted, self.finished
        while posted and finished(posted[0][0], doing):
            posted.popleft()
        return len(posted) <= left

    # -- receiving -------------------------------------------------------------------------------------

    def receive(self, view: memoryview, tag: int, doing: str) -> int:
        """Start to receive the message with ``tag`` into ``view``, which has its size.

        Returns:
            A handle for :meth:`finished` or :meth:`post`, or 0 if it has come. Raises as :meth:`send`.
        """
        request = self._calls.receive(self._handle, address_of(view), len(view), tag)
        if request < 0:
            raise self.failure(request, doing)
        return request

    def scatter(self, views: Sequence[memoryview], tag: int, doing: str) -> None:
        """Receive one message into ``views``, which have its size together; :meth:`drive` completes it.

        Raises as :meth:`send`.
        """
        if len(views) == 1:
            nbytes = len(views[0])
            if nbytes < _HALVED_NBYTES:
                self.post(self.receive(views[0], tag, doing), views)
                return
            half = nbytes // 2
            views = [views[0][:half], views[0][half:]]
        places = array("Q")
        for view in views:
            places.append(address_of(view))
            places.append(len(view))
        request = self._calls.scatter(self._handle, places.buffer_info()[0], len(views), tag)
        if request < 0:
            raise self.failure(request, doing)
        self.post(request, (places, views))

    def receive_ahead(self, slots: Iterable[Slot], position: int, doing: str) -> int:
        """Start to receive the messages that come if the parts of the sender are cut as ``slots`` are.

        Args:
            slots: In order; what is small, or is being received already, is left out.
            position: Of the first byte.
            doing: For messages of errors.

        Returns:
            The position of the byte behind them. Raises as :meth:`send`.
        """
        receive, worker = self._calls.receive, self._handle
        for slot in slots:
            view = slot.view
            nbytes = len(view)
            if slot.request is None and nbytes > _SMALL_NBYTES:
                request = receive(worker, address_of(view), nbytes, message_tag(position, nbytes))
                if request < 0:
                    raise self.failure(request, doing)
                slot.request = request
            position += nbytes
        return position

    def finished(self, request: int, doing: str) -> bool:
        """Whether an operation is over; the handle is of no use then. Raises as :meth:`drive`."""
        status = self._status(request)
        if status == IN_PROGRESS:
            return False
        self._free(request)
        if status:
            raise self.failure(status, doing)
        return True

    def in_progress(self, request: int | None) -> bool | None:
        """Whether an operation is not over; ``None`` if there is none."""
        if request is None:
            return None
        return request != 0 and self._calls.status(request) == IN_PROGRESS

    def give_up(self, requests: Iterable[int]) -> None:
        """Take back receives for which no message has come."""
        for request in requests:
            self._calls.cancel(self._handle, request)
            self._calls.free(request)

    def probe(self, position: int) -> int:
        """Bytes of the message for ``position`` that has come and that nothing was posted for, or -1."""
        if position != self._probed:
            self._probed, self._probe_tag = position, self._ucx.tag(message_tag(position, 0))
        found = self._worker.tag_probe(self._probe_tag, self._position_mask)
        return int(found.length) if found.matched else -1

    # -- progress --------------------------------------------------------------------------------------

    def failure(self, status: int, doing: str) -> TransportError:
        """The error for what UCX says."""
        text = self._calls.text(status).decode(errors="replace")
        if is_gone(status) or self._peer_is_gone():
            return ConnectionClosedError(
                f"{self._control.name} was ended by the peer while {doing} (UCX: {text})"
            )
        return TransportError(f"{self._control.name} failed while {doing}: UCX says {text}")

    def idle(self, since: float, deadline: float, doing: str, *, reading: bool = False) -> float:
        """Pass the time after progress that made none: a short spin, then sleep until there is an event.

        Args:
            since: What the last call returned; 0 after progress.
            deadline: Of the call.
            doing: For the message.
            reading: Whether bytes in the socket wake it too.

        Returns:
            What the next call gets; negative if the socket woke it: it has bytes, if asked for, or an end.
        """
        now = time.monotonic()
        if is_past(deadline):
            raise TransferTimeoutError(f"{self._control.name}: the deadline passed while {doing}")
        since = since or now
        if now - since < self._spin_s:
            os.sched_yield()
        elif self._worker.arm():
            events = (self._poll_both if reading else self._poll).poll(poll_timeout_ms(deadline))
            if any(fd == self._control_fd for fd, _ in events):
                return -1.0
        return since

    def socket_ready(self) -> bool:
        """Whether the socket has bytes or its end."""
        return bool(self._poll_socket.poll(0))

    def arm(self) -> bool:
        """Make ready for :meth:`wait_socket`; ``False`` if there is something to do at once."""
        return self._worker.arm()

    def wait_socket(self, until: float) -> bool:
        """Wait for events; whether the socket has bytes or its end. Uses nothing of UCX."""
        events = self._new_poll(select.POLLIN | select.POLLRDHUP).poll(poll_timeout_ms(until))
        return any(fd == self._control_fd for fd, _ in events)

    def settle(self, deadline: float) -> None:
        """Hand over what UCX still holds back, for a quarter of a second at most.

        Nobody drives the worker after the call, so an answer that the peer waits for must not stay here.
        """
        pending = self._calls.flush(self._handle)
        if pending <= 0:
            return
        until, since, rounds = min(deadline, time.monotonic() + _FLUSH_S), 0.0, 0
        with contextlib.suppress(TransferTimeoutError):
            while not self._ucx.flushed(pending) and since >= 0:
                rounds += 1
                if not self.progress() or rounds % LOOK_EVERY == 0:
                    since = self.idle(since, until, "flushing")

    def last_chance(self, done: Callable[[], bool]) -> bool:
        """After the peer's end: whether what it did before that makes ``done`` come true."""
        until = time.monotonic() + _GRACE_S
        poll = select.poll()
        poll.register(self._epoll, select.POLLIN)
        while not self._control.closed and time.monotonic() < until:
            if not self.progress() and self._worker.arm():
                poll.poll(poll_timeout_ms(until))
            if done():
                return True
        return False

    def destroy(self) -> None:
        """End it at once; when this returns, nothing reads or writes the memory of its messages any more."""
        self._end()

    def _peer_is_gone(self) -> bool:
        """After an error of UCX, which calls the end of a process on this machine an input/output error."""
        with contextlib.suppress(ConnectionClosedError):
            return self._control.ended(_GRACE_S)
        return True  # closed here

    def _unfinished(self) -> int:
        return sum(self._calls.status(request) == IN_PROGRESS for request, _ in self._posted)

    def _new_poll(self, socket_events: int) -> select.poll:
        poll = select.poll()
        poll.register(self._epoll, select.POLLIN)
        poll.register(self._control_fd, socket_events)
        return poll

    def _ended(self, doing: str) -> ConnectionClosedError:
        who = "was closed here" if self._control.closed else "was ended by the peer"
        return ConnectionClosedError(f"{self._control.name} {who} while {doing}")


def _destroy(ucx: Library, worker: Worker, posted: deque[tuple[int, object]], pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves the parent's alone
        ucx.destroy(worker)
        posted.clear()
