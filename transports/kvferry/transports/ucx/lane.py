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
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from kvferry.core.buffers import Buf
from kvferry.core.errors import ConnectionClosedError, TransferTimeoutError, TransportError
from kvferry.transports.sockets import poll_timeout_ms
from kvferry.transports.ucx.context import Context
from kvferry.transports.ucx.control import ControlSocket
from kvferry.transports.ucx.frames import HELLO_TAG, POSITION_MASK, message_tag
from kvferry.transports.ucx.library import Endpoint, Library, Request, Worker

__all__ = ["WINDOW", "Lane"]

WINDOW: Final = 32
"""Messages that are posted at once in one direction."""
_GRACE_S: Final = 0.05
_FLUSH_S: Final = 0.25
# names of the errors of ucxx that mean that the other end, or the way to it, is gone
_GONE: Final = (
    "ConnectionReset",
    "EndpointTimeout",
    "NotConnected",
    "Unreachable",
    "Canceled",
    "Rejected",
    "TimedOut",
    "EndpointFailure",
    "LinkFailure",
)


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
        # with the memory: ucxx keeps the object alive, but would let a bytearray be resized
        self._posted: deque[tuple[Request, Buf]] = deque()
        try:
            self._worker: Worker = self._ucx.new_worker(context.handle)
        except (self._ucx.error, OSError, RuntimeError) as error:
            raise TransportError(
                f"{control.name}: UCX cannot make a worker: {error}; each direction of large messages takes "
                "about 12 descriptors and 5 MB (see ulimit -n, ulimit -l and the size of /dev/shm)"
            ) from error
        self._end = weakref.finalize(self, _destroy, self._ucx, self._worker, self._posted, os.getpid())
        self._end.atexit = False
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

    def endpoint(self, address: bytes, *, error_handling: bool) -> Endpoint:
        """The way to the peer's worker.

        Raises:
            TransportError: If UCX finds none.
        """
        try:
            return self._ucx.new_endpoint(self._worker, address, error_handling=error_handling)
        except (self._ucx.error, ValueError) as error:
            raise TransportError(
                f"{self._control.name}: UCX finds no way to the peer: {error}; compare UCX_TLS and "
                "UCX_NET_DEVICES of both sides (kvferry doctor shows them)"
            ) from error

    # -- sending ---------------------------------------------------------------------------------------

    def post(self, request: Request, memory: Buf) -> None:
        """Have :meth:`drive` complete ``request``, whose bytes are in ``memory``."""
        self._posted.append((request, memory))

    def send(self, endpoint: Endpoint, view: Buf, tag: int) -> Request:
        """Start to send the memory of ``view``, which has to stay as it is until the request is completed."""
        return endpoint.tag_send(self._ucx.array(view), self._ucx.tag(tag))

    def drive(self, left: int, deadline: float, doing: str) -> None:
        """Move bytes until at most ``left`` of the posted requests are not completed.

        Raises:
            TransferTimeoutError: At the deadline.
            ConnectionClosedError: If either side ends, or an operation fails for that.
            TransportError: If an operation fails otherwise.
        """
        posted, progress = self._posted, self._worker.progress_once
        idle_since = 0.0
        while True:
            while posted and posted[0][0].completed:
                self.check(posted.popleft()[0], doing)
            if len(posted) <= left:
                return
            if progress():
                idle_since = 0.0
            else:
                idle_since = self.idle(idle_since, deadline, doing)
                if idle_since < 0 and not self.last_chance(lambda: self._unfinished() <= left):
                    raise self._ended(doing)

    # -- receiving -------------------------------------------------------------------------------------

    def receive(self, view: Buf, tag: int) -> Request:
        """Start to receive the message with ``tag`` into ``view``, which has its size."""
        return self._worker.tag_recv(self._ucx.array(view), self._ucx.tag(tag))

    def probe(self, position: int) -> int:
        """Bytes of the message for ``position`` that has come and that nothing was posted for, or -1."""
        if position != self._probed:
            self._probed, self._probe_tag = position, self._ucx.tag(message_tag(position, 0))
        found = self._worker.tag_probe(self._probe_tag, self._position_mask)
        return int(found.length) if found.matched else -1

    # -- progress --------------------------------------------------------------------------------------

    def progress(self) -> bool:
        """Do what there is to do; whether there was something."""
        return self._worker.progress_once()

    def check(self, request: Request, doing: str) -> None:
        """Raise what a completed request ended with, if that was an error; raises as :meth:`drive`."""
        try:
            request.check_error()
        except self._ucx.error as error:
            name = type(error).__name__
            if any(part in name for part in _GONE) or self._peer_is_gone():
                raise ConnectionClosedError(
                    f"{self._control.name} was ended by the peer while {doing} (UCX: {error})"
                ) from error
            raise TransportError(f"{self._control.name} failed while {doing}: UCX says {error}") from error

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
        if now >= deadline:
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
        pending = self._ucx.flush(self._worker)
        if not pending:
            return
        until, since = min(deadline, time.monotonic() + _FLUSH_S), 0.0
        with contextlib.suppress(TransferTimeoutError):
            while not self._ucx.flushed(pending) and since >= 0:
                if not self._worker.progress_once():
                    since = self.idle(since, until, "flushing")

    def last_chance(self, done: Callable[[], bool]) -> bool:
        """After the peer's end: whether what it did before that makes ``done`` come true."""
        until = time.monotonic() + _GRACE_S
        poll = select.poll()
        poll.register(self._epoll, select.POLLIN)
        while not self._control.closed and time.monotonic() < until:
            if not self._worker.progress_once() and self._worker.arm():
                poll.poll(poll_timeout_ms(until))
            if done():
                return True
        return False

    def destroy(self, pending: Iterable[Request] = ()) -> None:
        """End it at once; when this returns, nothing reads or writes the memory of its messages any more.

        Args:
            pending: Receives that are not completed.
        """
        self._posted.extend((request, b"") for request in pending)
        self._end()

    def _peer_is_gone(self) -> bool:
        """After an error of UCX, which calls the end of a process on this machine an input/output error."""
        with contextlib.suppress(ConnectionClosedError):
            return self._control.ended(_GRACE_S)
        return True  # closed here

    def _unfinished(self) -> int:
        return sum(not request.completed for request, _ in self._posted)

    def _new_poll(self, socket_events: int) -> select.poll:
        poll = select.poll()
        poll.register(self._epoll, select.POLLIN)
        poll.register(self._control_fd, socket_events)
        return poll

    def _ended(self, doing: str) -> ConnectionClosedError:
        who = "was closed here" if self._control.closed else "was ended by the peer"
        return ConnectionClosedError(f"{self._control.name} {who} while {doing}")


def _destroy(ucx: Library, worker: Worker, posted: deque[tuple[Request, Buf]], pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves the parent's alone
        ucx.destroy(worker, [request for request, _ in posted if not request.completed])
        posted.clear()
