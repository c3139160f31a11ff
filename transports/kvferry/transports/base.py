"""The transport contract: bytes between two processes, no messages.

A transport is chosen by the scheme of a URL. Connections are blocking; every call has a deadline (an
absolute ``time.monotonic()`` value). One thread may send while another receives; two senders, or two
receivers, need the caller's own lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from xxhash import xxh3_64

from kvferry.core.buffers import Buf, total_nbytes
from kvferry.core.errors import TransferTimeoutError
from kvferry.transports.hashed import HASH_NBYTES, PIECE_NBYTES, pieces_of

__all__ = ["Connection", "Listener", "SharedMemoryConnection", "Transport"]


class Connection(ABC):
    """A stream of bytes each way, reliable and in order.

    After a fork it stays the parent's: in the child every call raises :class:`ConnectionClosedError` at once,
    saying so, and ``close`` and ``abort`` leave the stream alone.
    """

    brings_parts: ClassVar[bool] = False
    """Whether :meth:`recv_at_least` brings no byte of a large part behind its minimum: asked for more than is
    needed it takes nothing that would have to be copied to its place."""

    @property
    @abstractmethod
    def local_address(self) -> str:
        """URL of this end, for messages and logs."""

    @property
    @abstractmethod
    def peer_address(self) -> str:
        """URL of the other end, for messages and logs."""

    @abstractmethod
    def send(self, parts: Sequence[Buf], deadline: float) -> None:
        """Send the bytes of all ``parts`` in order; they may be reused when it returns.

        Raises:
            TransferTimeoutError: At the deadline. Some bytes may be gone: abort the connection.
            ConnectionClosedError: If this end or the peer closed it.
        """

    @abstractmethod
    def recv_into(self, views: Sequence[memoryview], deadline: float) -> None:
        """Fill all ``views`` (contiguous, writable, of any items and shape) in order, exactly.

        Raises:
            TransferTimeoutError: At the deadline. Some bytes may be taken: abort the connection.
            ConnectionClosedError: If the stream ends first; the message says after how many bytes.
            TypeError: If a view cannot be filled so; nothing was received.
        """

    def recv_at_least(self, view: memoryview, minimum: int, deadline: float) -> int:
        """Take ``minimum`` bytes, and those that are there already behind them, into ``view``.

        For reading ahead: a short message and its header come with one call. This one takes the minimum only;
        a transport that can do better does.

        Args:
            view: Flat bytes (format ``B``) and writable; ``minimum`` bytes or more.
            minimum: At least 1.
            deadline: By which it is done.

        Returns:
            How many bytes came: from ``minimum`` to all of ``view``.

        Raises:
            TransferTimeoutError: As :meth:`recv_into`.
            ConnectionClosedError: As :meth:`recv_into`.
        """
        self.recv_into([view[:minimum]], deadline)
        return minimum

    def begin_sending(self) -> None:  # noqa: B027 - most have nothing to do
        """A message begins with the next byte sent.

        For a connection that deals each message to several streams. Both ends must say so of the same bytes;
        whoever moves bytes without messages says nothing at either end.
        """

    def begin_receiving(self, ahead: int) -> None:  # noqa: B027 - most have nothing to do
        """A message begins with the next byte received, or began with the last ``ahead`` bytes that were."""

    def send_hashed(self, head: bytes, views: Sequence[memoryview], deadline: float) -> None:
        """Send ``head``, then ``views``, then the xxh3_64 of all of them (8 bytes, little-endian).

        Args:
            head: At least one byte.
            views: Flat.
            deadline: By which everything was handed over.

        Raises:
            TransferTimeoutError: As :meth:`send`.
            ConnectionClosedError: As :meth:`send`.
        """
        digest = xxh3_64(head)
        parts: list[Buf] = [head]
        last: Sequence[memoryview] = views
        done, nbytes = 0, total_nbytes(views)
        if nbytes > PIECE_NBYTES:
            last = []
            for piece in pieces_of(views):
                if last:
                    self._send_piece([*parts, *last], deadline, done, nbytes)
                    done += total_nbytes(last)
                    _hash_into(digest, last)
                    parts = []
                last = piece
        # the last piece is hashed first, so that it leaves together with the hash
        _hash_into(digest, last)
        self._send_piece(
            [*parts, *last, digest.intdigest().to_bytes(HASH_NBYTES, "little")], deadline, done, nbytes
        )

    def _send_piece(self, parts: Sequence[Buf], deadline: float, done: int, nbytes: int) -> None:
        """Send a piece of ``nbytes``, behind ``done`` of them."""
        try:
            self.send(parts, deadline)
        except TransferTimeoutError as error:
            raise TransferTimeoutError(f"{error}, behind {done} of a payload of {nbytes}") from error

    def recv_hashed(self, start: bytes, views: Sequence[memoryview], deadline: float) -> tuple[int, int]:
        """Fill ``views``, as :meth:`recv_into` does, then take the 8 bytes behind them.

        Args:
            start: What came before the views, for the hash.
            views: Flat, writable, at least one byte; no byte is in two of them.
            deadline: By which it is done.

        Returns:
            The xxh3_64 of ``start`` and the views, and the one that came: who calls compares them.

        Raises:
            TransferTimeoutError: As :meth:`recv_into`.
            ConnectionClosedError: As :meth:`recv_into`.
        """
        digest, sent = xxh3_64(start), memoryview(bytearray(HASH_NBYTES))
        left = total_nbytes(views)
        for piece in pieces_of(views):
            left -= total_nbytes(piece)
            self.recv_into(piece if left else [*piece, sent], deadline)
            _hash_into(digest, piece)
        return digest.intdigest(), int.from_bytes(sent, "little")

    @property
    def carrier(self) -> Connection:
        """The connection that moves the bytes: this one, unless it only stands in front of another."""
        return self

    @abstractmethod
    def wait_readable(self, deadline: float) -> bool:
        """Wait until bytes, or the end of the stream, are there; ``False`` at the deadline."""

    @abstractmethod
    def close(self) -> None:
        """End the stream after what was sent has been handed over; a second call does nothing.

        Wakes threads blocked in this connection with :class:`ConnectionClosedError`.
        """

    @abstractmethod
    def abort(self) -> None:
        """End the stream at once, dropping what was not delivered; safe from any thread."""


def _hash_into(digest: xxh3_64, views: Sequence[memoryview]) -> None:
    for view in views:
        digest.update(view)


class SharedMemoryConnection(Connection):
    """A connection between processes of one machine, which also passes descriptors of memory.

    Descriptors travel in the order of the bytes: what is received with :meth:`recv_descriptors` lies between
    the same bytes as on the sending side, so a message says how many follow it.
    """

    @property
    @abstractmethod
    def peer_credentials(self) -> tuple[int, int, int]:
        """(pid, uid, gid) of the peer as the kernel recorded them when it connected, never as it says."""

    @abstractmethod
    def send_descriptors(self, descriptors: Sequence[int], deadline: float) -> None:
        """Pass ``descriptors``, one or more; they stay the caller's and may be closed when it returns.

        Raises:
            TransferTimeoutError: At the deadline. Some may be gone: abort the connection.
            ConnectionClosedError: If this end or the peer closed it.
        """

    @abstractmethod
    def recv_descriptors(self, count: int, deadline: float) -> list[int]:
        """Take ``count`` descriptors, closed on exec; the caller owns them.

        Raises:
            TransferTimeoutError: At the deadline; none is left open. Abort the connection.
            ConnectionClosedError: If the stream ends first; none is left open.
            ProtocolError: If there are others than the peer announced; none is left open.
        """


class Listener(ABC):
    """Accepts connections on one address."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The dialable URL that was bound: never a wildcard host, never port 0."""

    @abstractmethod
    def accept(self, deadline: float) -> Connection:
        """The next connection.

        Raises:
            TransferTimeoutError: At the deadline.
            ConnectionClosedError: If the listener was closed, also while waiting.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop listening, wake waiting threads; connections already made live on."""


class Transport(ABC):
    """Makes connections for one URL scheme."""

    scheme: ClassVar[str]

    @abstractmethod
    def connect(self, address: str, deadline: float) -> Connection:
        """Connect to ``address``.

        Raises:
            ConnectError: If it cannot be reached by the deadline; the message names the address.
            ConfigError: If the address or one of its options is malformed.
        """

    @abstractmethod
    def listen(self, address: str) -> Listener:
        """Listen on ``address``; port 0 takes a free one.

        Raises:
            ConnectError: If it cannot be bound; the message names the address and the reason.
            ConfigError: If the address is malformed.
        """
