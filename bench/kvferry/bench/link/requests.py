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

    Both ends walk through ``walk_nbytes``, so that a number means the same part for both. ``verify`` has the
    peer clear where it receives, and compare afterwards.
    """

    operation: Operation
    first: int
    nbytes: int
    walk_nbytes: int
    batch: int = 1
    verify: bool = False

    @property
    def message(self) -> PutLayer:
        """As it travels."""
        fields = (self.operation, self.nbytes, self.walk_nbytes, self.batch, int(self.verify))
        return PutLayer(layer=self.first, blocks=fields)

    @classmethod
    def of(cls, message: Message) -> Request:
        """From a message.

        Raises:
            ProtocolError: If it is none.
        """
        if not isinstance(message, PutLayer) or len(message.blocks) != 5 or message.blocks[0] > 2:
            raise ProtocolError(f"{type(message).__name__} is no request of a benchmark", remote=True)
        operation, nbytes, walk_nbytes, batch, verify = message.blocks
        return cls(Operation(operation), message.layer, nbytes, walk_nbytes, batch, bool(verify))
