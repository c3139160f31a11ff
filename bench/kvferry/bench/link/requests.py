"""What a benchmark asks its peer: carried by the messages of layer streams, whose cost is what counts."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvferry.core.errors import ProtocolError
from kvferry.wire.messages import Message, PutLayer

__all__ = ["Operation", "Request"]


class Operation(enum.IntEnum):
    """What is done with the parts of a message."""

    PUT = 0
    """They are received; the answer says how many bytes that were."""
    GET = 1
    """The peer sends them."""
    ECHO = 2
    """They come back as they are."""


@dataclass(frozen=True, slots=True)
class Request:
    """One operation: ``batch`` parts of ``nbytes`` each, from number ``first`` on.

    ``verify`` has the peer clear where it receives, and compare afterwards.
    """

    operation: Operation
    first: int
    nbytes: int
    batch: int = 1
    verify: bool = False

    @property
    def message(self) -> PutLayer:
        """As it travels."""
        return PutLayer(layer=self.first, blocks=(self.operation, self.nbytes, self.batch, int(self.verify)))

    @classmethod
    def of(cls, message: Message) -> Request:
        """From a message.

        Raises:
            ProtocolError: If it is none.
        """
        if not isinstance(message, PutLayer) or len(message.blocks) != 4 or message.blocks[0] > 2:
            raise ProtocolError(f"{type(message).__name__} is no request of a benchmark", remote=True)
        operation, nbytes, batch, verify = message.blocks
        return cls(Operation(operation), message.layer, nbytes, batch, bool(verify))
