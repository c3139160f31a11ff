"""The namespaces that a connection has opened, by the numbers that its requests call them by."""

from __future__ import annotations

import msgspec

from kvferry.core.errors import OverloadedError, ProtocolError, SpecMismatchError
from kvferry.core.memory_namespace import MemoryNamespace
from kvferry.core.session_store import SessionStore
from kvferry.wire.daemon_messages import MOST_NAMESPACES, OpenNamespace

__all__ = ["OpenedNamespaces"]


class OpenedNamespaces:
    """At most :data:`MOST_NAMESPACES` at a time. Used by the thread of the connection alone.

    Args:
        store: That of the client's session.
        address: Of the connection, for messages.
    """

    def __init__(self, store: SessionStore, address: str) -> None:
        self._store = store
        self._address = address
        self._opened: list[MemoryNamespace] = []
        self._numbers: dict[tuple[bytes, bool], int] = {}  # by id, and whether it takes lossy blocks
        self._to_peer: dict[tuple[int, bool], MemoryNamespace] = {}

    def open(self, message: OpenNamespace) -> int:
        """The number of a namespace, opened if it has not been.

        Raises:
            SpecMismatchError: If the client computes its id otherwise.
            OverloadedError: If there are as many as there may be, and it is in no other's place.
            ProtocolError: If the one in whose place it is to be was not opened.
        """
        takes_lossy = message.lossless is not True
        name = (message.namespace_id, takes_lossy)
        found = self._numbers.get(name)
        if found is not None:
            return found
        if message.instead_of is msgspec.UNSET and len(self._opened) >= MOST_NAMESPACES:
            raise OverloadedError(
                f"a connection has at most {MOST_NAMESPACES} namespaces; a client as new as the daemon "
                "opens others in the place of its oldest"
            )
        number = len(self._opened) if message.instead_of is msgspec.UNSET else message.instead_of
        namespace = self._store.namespace(message.spec, message.scope, takes_lossy=takes_lossy)
        if namespace.namespace_id != message.namespace_id:
            raise SpecMismatchError(
                f"the client computes namespace {message.namespace_id[:32].hex()} of "
                f"{message.spec.describe()}, the daemon {namespace.namespace_id.hex()}: they are of "
                "different versions, update one of them"
            )
        if message.instead_of is not msgspec.UNSET:
            self._replace(number, namespace)
        else:
            self._opened.append(namespace)
        self._numbers[name] = number
        return number

    def _replace(self, number: int, namespace: MemoryNamespace) -> None:
        before = self.get(number)
        del self._numbers[before.namespace_id, before.takes_lossy]
        self._opened[number] = namespace
        for takes_lossy in (False, True):
            self._to_peer.pop((number, takes_lossy), None)

    def get(self, number: int) -> MemoryNamespace:
        """The one of that number.

        Raises:
            ProtocolError: If there is none.
        """
        if number >= len(self._opened):
            raise ProtocolError(
                f"{self._address}: namespace {number} was not opened on this connection", remote=True
            )
        return self._opened[number]

    def for_peer(self, number: int, *, takes_lossy: bool = True) -> MemoryNamespace:
        """A namespace as it answers a daemon: from tiers of its own, so that nothing goes round in a ring.

        That daemon hears what has lost something, and knows what its own readers take. What it writes is
        stored in the place of what has lost something, unless it has lost something itself.
        """
        found = self._to_peer.get((number, takes_lossy))
        if found is None:
            own = self.get(number)
            found = self._store.namespace(own.spec, own.scope, takes_lossy=takes_lossy)
            found.local_only = True
            self._to_peer[number, takes_lossy] = found
        return found
