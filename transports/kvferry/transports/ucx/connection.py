"""A connection of the ``ucx`` transport."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

import numpy as np

from kvferry.core.buffers import Buf, as_bytes_view, as_places
from kvferry.core.clock import is_past, remaining
from kvferry.core.errors import ConnectionClosedError, TransferTimeoutError
from kvferry.transports.base import Connection
from kvferry.transports.ucx.context import Context
from kvferry.transports.ucx.control import ControlSocket
from kvferry.transports.ucx.incoming import Incoming
from kvferry.transports.ucx.outgoing import Outgoing
from kvferry.transports.ucx.settings import Options

__all__ = ["UcxConnection"]

_PAUSE_S = 0.05


class UcxConnection(Connection):
    """A socket for what is small and for signs of life, and UCX for what is large.

    Args:
        control: The connected socket, after the preambles; owned from here on.
        context: Of UCX.
        options: Of the address.
        key: Of the digests of addresses: what both ends chose for this connection.
        error_handling: Whether UCX watches the peer itself, which keeps it from using shared memory.
        eager: Whether small messages may go by UCX, as they end up in shared memory.
    """

    brings_parts = True

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
        self._guard = control.guard
        self._name = control.name
        self._out = Outgoing(control, context, options, key=key, error_handling=error_handling, eager=eager)
        self._in = Incoming(control, context, options, key=key, error_handling=error_handling, eager=eager)
        self._sending = threading.Lock()
        self._receiving = threading.Lock()

    @property
    def local_address(self) -> str:
        """URL of this end."""
        return self._control.local_address

    @property
    def peer_address(self) -> str:
        """URL of the other end."""
        return self._control.peer_address

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.local_address} to {self.peer_address}>"

    # The short ways are written out in one piece: what runs between two messages is cold each time.

    def send(self, parts: Sequence[Buf], deadline: float) -> None:
        """See :meth:`Connection.send`. Host memory only."""
        guard = self._guard
        guard.enter(self._name)
        try:
            with self._sending:
                if remaining(deadline) <= 0:
                    raise self._late("sending")
                if self._out.send_short(parts, deadline):
                    return
                if self._in.lane is not None:
                    self._out.expect_answers()
                if views := [view for part in parts if len(view := _host_view(part))]:
                    self._out.send(views, deadline)
        finally:
            guard.inside.pop()  # as leave(), but for one call
            if guard.closed:
                self._left()

    def recv_into(self, views: Sequence[memoryview], deadline: float) -> None:
        """See :meth:`Connection.recv_into`. Host memory only."""
        views = as_places(views)
        guard = self._guard
        guard.enter(self._name)
        try:
            with self._receiving:
                if remaining(deadline) <= 0:
                    raise self._late("receiving")
                found = self._in.receive_short(views, 0, deadline)
                if type(found) is not int:
                    self._in.recv_into(views, deadline, found)
        finally:
            guard.inside.pop()  # as leave(), but for one call
            if guard.closed:
                self._left()

    def recv_at_least(self, view: memoryview, minimum: int, deadline: float) -> int:
        """See :meth:`Connection.recv_at_least`."""
        guard = self._guard
        guard.enter(self._name)
        try:
            with self._receiving:
                if remaining(deadline) <= 0:
                    raise self._late("receiving")
                found = self._in.receive_short((view,), minimum, deadline) if minimum else None
                if type(found) is int:
                    return found
                return self._in.recv_at_least(view, minimum, deadline, found)
        finally:
            guard.inside.pop()  # as leave(), but for one call
            if guard.closed:
                self._left()

    def wait_readable(self, deadline: float) -> bool:
        """See :meth:`Connection.wait_readable`."""
        while True:
            try:
                with self._control.descriptor():
                    ready = self._wait_once(deadline)
                    if self._control.closed:
                        raise ConnectionClosedError(f"{self._control.name} was closed while it was waiting")
                    if ready or is_past(deadline):
                        return ready
            finally:
                if self._guard.closed:
                    self._release()

    def _wait_once(self, deadline: float) -> bool:
        """Wait for events once; whether something is there to be received."""
        if not self._receiving.acquire(blocking=False):
            # another thread receives, which is more than the contract allows: leave UCX to it
            return self._control.wait_readable(min(deadline, time.monotonic() + _PAUSE_S))
        try:
            if self._in.ready():
                return True
            lane = self._in.lane
            if lane is not None and not lane.arm():
                return False
        finally:
            self._receiving.release()
        return self._control.wait_readable(deadline) if lane is None else lane.wait_socket(deadline)

    def close(self) -> None:
        """End the stream; what was sent still arrives."""
        self._out.cancel()
        if self._sending.acquire(blocking=False):  # else that thread is told by the end of the socket
            try:
                with contextlib.suppress(ConnectionClosedError), self._control.descriptor():
                    self._out.settle()
            finally:
                self._sending.release()
        self._control.close()
        if self._guard.closed:  # not so in a forked child
            self._release()

    def abort(self) -> None:
        """End the stream at once: the peer gets a reset, what it has not received is dropped."""
        self._control.abort()
        if self._guard.closed:
            self._release()

    def _left(self) -> None:
        """The last thread out closes the descriptor, and ends what no thread uses."""
        self._guard.inside.append(None)
        self._guard.leave()
        self._release()

    def _late(self, doing: str) -> TransferTimeoutError:
        return TransferTimeoutError(f"{self._name}: the deadline passed while {doing}")

    def _release(self) -> None:
        """After the end: destroy the halves that no thread is inside; who is comes here when it leaves."""
        for lock, half in ((self._sending, self._out), (self._receiving, self._in)):
            if lock.acquire(blocking=False):
                try:
                    half.destroy()
                finally:
                    lock.release()


def _host_view(part: Buf) -> memoryview:
    if type(part) is memoryview and part.ndim == 1 and part.format == "B" and part.c_contiguous:
        return part
    if isinstance(part, (bytes, memoryview, bytearray, np.ndarray)):
        return as_bytes_view(part)
    if hasattr(part, "__cuda_array_interface__"):
        raise TypeError(_on_device(part, "CUDA"))
    try:
        return as_bytes_view(part)
    except (TypeError, BufferError) as error:
        device = getattr(part, "device", None)
        if device is not None and str(device) != "cpu":
            raise TypeError(_on_device(part, str(device))) from error
        raise


def _on_device(part: object, device: str) -> str:
    return (
        f"a {type(part).__module__}.{type(part).__qualname__} in {device} memory cannot be sent: the ucx "
        "transport moves host memory; copy it into pinned host memory first"
    )
