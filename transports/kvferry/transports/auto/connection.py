"""A connection that knows why it runs over the transport that it runs over."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.core.buffers import Buf
from kvferry.transports.base import Connection, SharedMemoryConnection
from kvferry.transports.choices import Choice

__all__ = ["AutoConnection", "AutoSharedConnection", "wrap"]


class AutoConnection(Connection):
    """The connection ``inner`` under the address that was dialled; owns it.

    The address of who dialled is the one that the transport has for it, so both ends' logs show which one.
    """

    def __init__(self, inner: Connection, choice: Choice, *, local_address: str, peer_address: str) -> None:
        self._inner = inner
        self.choice = choice
        """Which transport, and why."""
        self._local_address = local_address
        self._peer_address = peer_address

    @property
    def local_address(self) -> str:
        """URL of this end."""
        return self._local_address

    @property
    def peer_address(self) -> str:
        """URL of the other end."""
        return self._peer_address

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self._local_address} to {self._peer_address} by {self.choice.scheme}>"
        )

    def send(self, parts: Sequence[Buf], deadline: float) -> None:
        """See :meth:`Connection.send`."""
        self._inner.send(parts, deadline)

    def recv_into(self, views: Sequence[memoryview], deadline: float) -> None:
        """See :meth:`Connection.recv_into`."""
        self._inner.recv_into(views, deadline)

    def recv_at_least(self, view: memoryview, minimum: int, deadline: float) -> int:
        """See :meth:`Connection.recv_at_least`."""
        return self._inner.recv_at_least(view, minimum, deadline)

    def begin_sending(self) -> None:
        """See :meth:`Connection.begin_sending`."""
        self._inner.begin_sending()

    def begin_receiving(self, ahead: int) -> None:
        """See :meth:`Connection.begin_receiving`."""
        self._inner.begin_receiving(ahead)

    def send_hashed(self, head: bytes, views: Sequence[memoryview], deadline: float) -> None:
        """See :meth:`Connection.send_hashed`."""
        self._inner.send_hashed(head, views, deadline)

    def recv_hashed(self, start: bytes, views: Sequence[memoryview], deadline: float) -> tuple[int, int]:
        """See :meth:`Connection.recv_hashed`."""
        return self._inner.recv_hashed(start, views, deadline)

    @property
    def carrier(self) -> Connection:
        """See :meth:`Connection.carrier`."""
        return self._inner.carrier

    def wait_readable(self, deadline: float) -> bool:
        """See :meth:`Connection.wait_readable`."""
        return self._inner.wait_readable(deadline)

    def close(self) -> None:
        """See :meth:`Connection.close`."""
        self._inner.close()

    def abort(self) -> None:
        """See :meth:`Connection.abort`."""
        self._inner.abort()


class AutoSharedConnection(AutoConnection, SharedMemoryConnection):
    """The same over a transport that passes descriptors of memory."""

    def __init__(
        self, inner: SharedMemoryConnection, choice: Choice, *, local_address: str, peer_address: str
    ) -> None:
        super().__init__(inner, choice, local_address=local_address, peer_address=peer_address)
        self._memory = inner

    @property
    def peer_credentials(self) -> tuple[int, int, int]:
        """See :meth:`SharedMemoryConnection.peer_credentials`."""
        return self._memory.peer_credentials

    def send_descriptors(self, descriptors: Sequence[int], deadline: float) -> None:
        """See :meth:`SharedMemoryConnection.send_descriptors`."""
        self._memory.send_descriptors(descriptors, deadline)

    def recv_descriptors(self, count: int, deadline: float) -> list[int]:
        """See :meth:`SharedMemoryConnection.recv_descriptors`."""
        return self._memory.recv_descriptors(count, deadline)


def wrap(inner: Connection, choice: Choice, *, local_address: str, peer_address: str) -> AutoConnection:
    """``inner`` as a connection of ``auto``, one that passes descriptors if ``inner`` does."""
    if isinstance(inner, SharedMemoryConnection):
        return AutoSharedConnection(inner, choice, local_address=local_address, peer_address=peer_address)
    return AutoConnection(inner, choice, local_address=local_address, peer_address=peer_address)
