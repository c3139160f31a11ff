"""One connection of a client, and what was agreed on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from kvferry.client.staging import Staging
from kvferry.core.buffers import Buf
from kvferry.core.errors import KVFerryError, ProtocolError, error_from_code
from kvferry.wire import daemon_messages as d
from kvferry.wire.channel import Channel
from kvferry.wire.incoming import Incoming
from kvferry.wire.messages import Failure, Message
from kvferry.wire.options import Peer
from kvferry.wire.printable import printable

if TYPE_CHECKING:
    from kvferry.client.link import Link

__all__ = ["Line"]

log = logging.getLogger(__name__)

_JUST_NOW_S: Final = 0.001

M = TypeVar("M", bound=Message)


@dataclass(eq=False)
class Line:
    """One connection. Used by one thread at a time.

    Attributes:
        link: Whose it is.
        channel: It.
        epoch: The run of the daemon at its other end.
        shares: Whether blocks are exchanged by address.
        opened: Namespaces opened on it, by id and whether lossy blocks are taken.
        ended: Leases whose end was sent with the request under way.
        abandoned: The same of those whose answer never came.
        answered: Whether a call on it was answered with what was asked for; a refusal may be the last word.
        stages: Whether the daemon has the client's staging memory on it; ``None`` before it was offered.
    """

    link: Link
    channel: Channel
    shares: bool
    opened: dict[tuple[bytes, bool], d.NamespaceOpened] = field(default_factory=dict)
    ended: tuple[int, ...] = ()
    abandoned: tuple[int, ...] = ()
    idle_since: float = 0.0
    answered: bool = False
    stages: bool | None = None

    def __post_init__(self) -> None:
        self.epoch = self.channel.peer.epoch
        self._shift = _clock_shift(self.channel.peer)
        self._asked = 1 << 32  # apart from the numbers that the channel gives by itself

    def take_ended(self) -> tuple[int, ...]:
        """Leases whose end goes with the next request."""
        if self.link.has_ends:
            self.ended += self.link.take_ended()
        return self.ended

    def take_abandoned(self) -> tuple[int, ...]:
        """The same of those whose answer never came."""
        if self.link.has_ends:
            self.abandoned += self.link.take_abandoned()
        return self.abandoned

    def is_quiet(self) -> bool:
        """Whether nothing has come since its last use: neither its end nor what nobody asked for.

        Of one that has answered, and was used just now, nobody asks: that takes a call of the system.
        """
        just_now = self.answered and time.monotonic() - self.idle_since < _JUST_NOW_S
        return just_now or not self.channel.readable()

    def local(self, moment: float) -> float:
        """A deadline on the daemon's clock as one of ours, rather too early than too late."""
        return moment - self._shift

    def call(
        self, message: Message, reply: type[M], deadline: float, payload: Sequence[Buf] = (), *,
        lent: bool = False,
    ) -> M:  # fmt: skip
        """:meth:`Channel.call`."""
        answer = self.channel.call(message, reply, payload=payload, deadline=deadline, lent=lent)
        self.answered = True
        return answer

    def ask(self, message: Message, reply: type[Message], deadline: float) -> Incoming:
        """The answer to ``message``, a ``reply`` whose payload is still to be received.

        Raises:
            KVFerryError: As :meth:`Channel.call`.
        """
        self._asked += 1
        self.channel.send(message, deadline=deadline, request_id=self._asked)
        incoming = self.channel.receive(deadline)
        found = incoming.message
        if isinstance(found, Failure):
            raise error_from_code(found.code, f"{self.channel.address}: {printable(found.message, 4000)}")
        if not isinstance(found, reply) or incoming.request_id != self._asked:
            raise self.wrong(f"answered with {type(found).__name__} where {reply.__name__} was due")
        self.answered = True
        return incoming

    def open(self, request: d.OpenNamespace, name: tuple[bytes, bool], deadline: float) -> d.NamespaceOpened:
        """Open a namespace on it, in the place of the oldest if there are as many as there may be.

        Raises:
            KVFerryError: As :meth:`Channel.call`.
        """
        oldest = next(iter(self.opened)) if len(self.opened) >= d.MOST_NAMESPACES else None
        if oldest is not None:
            request = msgspec.structs.replace(request, instead_of=self.opened[oldest].namespace)
        found = self.call(request, d.NamespaceOpened, deadline)
        if oldest is not None:
            del self.opened[oldest]
        self.opened[name] = found
        return found

    def has_staging(self, staging: Staging, deadline: float) -> bool:
        """Whether the daemon can copy out of staging memory; it is given to it if it has not been.

        Raises:
            KVFerryError: If the connection fails; a refusal is no error.
        """
        memory = staging.memory
        if self.stages is None and memory is not None:
            try:
                self.call(d.OfferStaging(nbytes=memory.nbytes), d.Done, deadline)
                self.channel.send_descriptors([memory.fd], deadline)
                self.channel.expect(d.Done, deadline)
                self.stages = True
            except KVFerryError as error:
                if self.channel.closed:
                    raise
                log.warning("%s: blocks are sent, not staged: %s", self.channel.address, error)
                self.stages = False
        return bool(self.stages)

    def wrong(self, what: str) -> ProtocolError:
        """What is raised when the daemon broke the protocol; the connection is aborted."""
        self.channel.abort()
        return ProtocolError(f"{self.channel.address}: {what}", remote=True)


def _clock_shift(peer: Peer) -> float:
    same = abs(peer.clock_offset) <= peer.clock_error  # processes of one host share the clock
    return 0.0 if same else peer.clock_offset + peer.clock_error
