"""One direction of a connection through UCX: a worker of its own, driven by the thread whose call it serves.

No thread runs beside the calls. Large messages are matched and moved within a ``send`` of one side and a
``recv_into`` of the other, so nothing is left to do for UCX when neither is called.
"""

from __future__ import annotations

import os
import select
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from kvferry.core.buffers import Buf
from kvferry.core.errors import ConnectionClosedError, TransferTimeoutError, TransportError
from kvferry.transports.sockets import poll_timeout_ms
from kvferry.transports.ucx.context import Context
from kvferry.transports.ucx.control import ControlSocket
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


@dataclass(frozen=True, slots=True)
class _Posted:
    request: Request
    memory: Any  # held meanwhile: ucxx keeps the object alive, but would let a bytearray be resized


class Lane:
    """A worker with the operations that were posted on it. One thread at a time.

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
        self._posted: deque[_Posted] = deque()
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
        self._poll = select.poll()
        self._poll.register(self._epoll, select.POLLIN)
        with control.descriptor() as fd:
            self._control_fd = fd
            self._poll.register(fd, select.POLLRDHUP)

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

    def post_send(self, endpoint: Endpoint, view: Buf, tag: int) -> None:
        """Start to send the memory of ``view``, which stays as it is until :meth:`drive` has seen the end."""
        array = self._ucx.array(view)
        self._posted.append(_Posted(endpoint.tag_send(array, self._ucx.tag(tag)), view))

    def post_recv(self, view: Buf, tag: int) -> None:
        """Start to receive the message with ``tag`` into ``view``, which has its size or more."""
        array = self._ucx.array(view)
        self._posted.append(_Posted(self._worker.tag_recv(array, self._ucx.tag(tag)), view))

    def drive(self, left: int, deadline: float, doing: str) -> None:
        """Move bytes until at most ``left`` operations are not completed.

        Raises:
            TransferTimeoutError: At the deadline.
            ConnectionClosedError: If either side ends, or an operation fails for that.
            TransportError: If an operation fails otherwise.
        """
        posted, progress, clock = self._posted, self._worker.progress_once, time.monotonic
        idle_since = 0.0
        while True:
            while posted and posted[0].request.completed:
                self._check(posted.popleft().request, doing)
            if len(posted) <= left:
                return
            if progress():
                idle_since = 0.0
                continue
            now = clock()
            if now >= deadline:
                raise TransferTimeoutError(f"{self._control.name}: the deadline passed while {doing}")
            if not idle_since:
                idle_since = now
            if now - idle_since < self._spin_s:
                os.sched_yield()
            elif self._sleep(deadline) and not self._last_chance(left):
                raise self._ended(doing)

    def settle(self, deadline: float) -> None:
        """Hand over what UCX still holds back, for a quarter of a second at most.

        Nobody drives the worker after the call, so an answer that the peer waits for must not stay here.
        """
        pending = self._ucx.flush(self._worker)
        until = min(deadline, time.monotonic() + _FLUSH_S)
        while pending and not self._ucx.flushed(pending):
            if not self._worker.progress_once() and (self._sleep(until) or time.monotonic() >= until):
                return

    def destroy(self) -> None:
        """End it at once; when this returns, nothing reads or writes the memory of its messages any more."""
        self._end()

    def _check(self, request: Request, doing: str) -> None:
        try:
            request.check_error()
        except self._ucx.error as error:
            name = type(error).__name__
            if any(part in name for part in _GONE):
                raise ConnectionClosedError(
                    f"{self._control.name} was ended by the peer while {doing} (UCX: {error})"
                ) from error
            raise TransportError(f"{self._control.name} failed while {doing}: UCX says {error}") from error

    def _sleep(self, until: float) -> bool:
        """Sleep until there is something to do; whether either side has ended the connection."""
        if not self._worker.arm():
            return False
        with self._control.descriptor():
            events = self._poll.poll(poll_timeout_ms(until))
        return any(fd == self._control_fd for fd, _ in events)

    def _last_chance(self, left: int) -> bool:
        """After the peer's end: whether what it did before that completes the operations."""
        until = time.monotonic() + _GRACE_S
        poll = select.poll()
        poll.register(self._epoll, select.POLLIN)
        while not self._control.closed and time.monotonic() < until:
            if not self._worker.progress_once() and self._worker.arm():
                poll.poll(poll_timeout_ms(until))
            if sum(not posted.request.completed for posted in self._posted) <= left:
                return True
        return False

    def _ended(self, doing: str) -> ConnectionClosedError:
        who = "was closed here" if self._control.closed else "was ended by the peer"
        return ConnectionClosedError(f"{self._control.name} {who} while {doing}")


def _destroy(ucx: Library, worker: Worker, posted: deque[_Posted], pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves the parent's alone
        ucx.destroy(worker, [one.request for one in posted if not one.request.completed])
        posted.clear()
