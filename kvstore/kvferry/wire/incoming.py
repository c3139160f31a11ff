"""A received frame whose payload still waits in the connection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from kvferry.core.buffers import as_bytes_view
from kvferry.core.errors import ProtocolError
from kvferry.wire.messages import Message
from kvferry.wire.payload import scratch_pieces

__all__ = ["Incoming", "PayloadSource"]


class PayloadSource(Protocol):
    """What an :class:`Incoming` needs of its channel."""

    @property
    def address(self) -> str:
        """URL of the other end."""
        ...

    def holds_payload_of(self, incoming: Incoming) -> bool:
        """Whether the payload of ``incoming`` is the next thing in the connection."""
        ...

    def read_directly(self, incoming: Incoming, views: Sequence[memoryview], deadline: float) -> bool:
        """Fill ``views`` in one call and compare the trailer; ``False`` if that is for the long way."""
        ...

    def read_payload(self, incoming: Incoming, pieces: Iterable[list[memoryview]], deadline: float) -> None:
        """Fill ``pieces``, which hold the whole payload, then take the trailer."""
        ...


class Incoming(msgspec.Struct, eq=False):  # a struct: one is made for every frame
    """A frame that was received; its payload waits in the connection.

    Attributes:
        message: The message.
        payload_nbytes: Bytes of its payload.
        request_id: To be echoed in the answer.
        started_at: Monotonic time at which the frame began to arrive.
        has_trailer: Whether a checksum follows the payload.
    """

    _channel: PayloadSource
    message: Message
    payload_nbytes: int
    request_id: int
    started_at: float
    has_trailer: bool

    def __repr__(self) -> str:
        return f"<Incoming {type(self.message).__name__} #{self.request_id} +{self.payload_nbytes} bytes>"

    def read_into(self, views: Sequence[memoryview], deadline: float) -> None:
        """Receive the payload into ``views``, in order.

        Args:
            views: Writable contiguous memory of ``payload_nbytes`` bytes in all. What they hold after
                an exception is undefined.
            deadline: By which it is done.

        Raises:
            ProtocolError: If the views do not fit or the payload was taken already; nothing was
                received, and the channel stays usable.
            CorruptBlockError: If the checksum does not match; the connection is aborted.
            TransferTimeoutError: At the deadline; the connection is aborted.
            ConnectionClosedError: If the stream ends first.
        """
        if self._channel.read_directly(self, views, deadline):
            return
        flat: list[memoryview] = []
        nbytes, writable = 0, True
        for one in views:
            view = as_bytes_view(one)
            if n := len(view):
                flat.append(view)
                nbytes += n
                writable = writable and not view.readonly
        if nbytes != self.payload_nbytes or not writable:
            raise ProtocolError(
                f"{self._channel.address}: payload of {type(self.message).__name__} has "
                f"{self.payload_nbytes} bytes, to be received into {nbytes} writable ones"
            )
        self._take((flat,), deadline)

    def read_pieces(self, pieces: Iterable[list[memoryview]], deadline: float) -> None:
        """As :meth:`read_into`, one list of views after the other, so that several may name the same memory.

        Raises as :meth:`read_into`; that all of them hold ``payload_nbytes`` bytes is the caller's to see to.
        """
        self._take(pieces, deadline)

    def discard(self, deadline: float) -> None:
        """Receive the payload and drop it; does nothing if there is none or it was taken already.

        Memory use does not depend on the size. The checksum is compared, since it is the message's too.
        Raises as :meth:`read_into`.
        """
        if self._channel.holds_payload_of(self):
            self._take(scratch_pieces(self.payload_nbytes), deadline)

    def _take(self, pieces: Iterable[list[memoryview]], deadline: float) -> None:
        if not self.payload_nbytes:
            return
        if not self._channel.holds_payload_of(self):
            raise ProtocolError(
                f"{self._channel.address}: payload of {type(self.message).__name__} was taken already"
            )
        self._channel.read_payload(self, pieces, deadline)
