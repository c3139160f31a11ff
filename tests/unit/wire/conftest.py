"""Connections over sockets, so that these tests need no transport and can also break the bytes."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import pytest

from kvferry.core.buffers import Buf, as_bytes_view
from kvferry.core.clock import time_left
from kvferry.core.errors import ConnectionClosedError, TransferTimeoutError
from kvferry.transports.base import Connection


class SocketConnection(Connection):
    """The transport contract over a connected socket, as simply as possible."""

    def __init__(self, sock: socket.socket, name: str = "fake://peer") -> None:
        self.sock = sock
        self.name = name
        self.sends: list[int] = []
        """How many bytes each call of send took."""

    @property
    def local_address(self) -> str:
        return "fake://here"

    @property
    def peer_address(self) -> str:
        return self.name

    def send(self, parts: Sequence[Buf], deadline: float) -> None:
        data = b"".join(as_bytes_view(part) for part in parts)
        self.sends.append(len(data))
        self.sock.settimeout(max(time_left(deadline), 1e-6))
        try:
            self.sock.sendall(data)
        except TimeoutError as error:
            raise TransferTimeoutError(f"{self.name}: send timed out") from error
        except OSError as error:
            raise ConnectionClosedError(f"{self.name}: {error}") from error

    def recv_into(self, views: Sequence[memoryview], deadline: float) -> None:
        for view in views:
            taken = 0
            while taken < len(view):
                if not self.wait_readable(deadline):
                    raise TransferTimeoutError(f"{self.name}: timed out after {taken} bytes")
                try:
                    count = self.sock.recv_into(view[taken:])
                except OSError as error:
                    raise ConnectionClosedError(f"{self.name}: {error}") from error
                if count == 0:
                    raise ConnectionClosedError(f"{self.name}: closed after {taken} bytes")
                taken += count

    def wait_readable(self, deadline: float) -> bool:
        try:
            return bool(select.select([self.sock], [], [], time_left(deadline))[0])
        except (OSError, ValueError) as error:
            raise ConnectionClosedError(f"{self.name}: {error}") from error

    def close(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def abort(self) -> None:
        self.close()


Pair: TypeAlias = "Callable[[], tuple[SocketConnection, SocketConnection]]"


@pytest.fixture
def socket_pair() -> Iterator[Pair]:
    """Makes pairs of connected :class:`SocketConnection`."""
    made: list[socket.socket] = []

    def make() -> tuple[SocketConnection, SocketConnection]:
        ends = socket.socketpair()
        made.extend(ends)
        return SocketConnection(ends[0], "fake://server"), SocketConnection(ends[1], "fake://client")

    yield make
    for sock in made:
        sock.close()
