"""What a benchmark asks its peer: carried by the messages of layer streams, whose cost is what counts."""

from __future__ import annotations

import enum
from functools import lru_cache
from typing import NamedTuple

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


class Request(NamedTuple):
    """One operation: ``batch`` parts of ``nbytes`` each. Its message says from which number on.

    Both ends walk through ``walk_nbytes``, so that a number means the same part for both. ``verify`` has the
    peer clear where it receives, and compare afterwards; ``lent`` has it lend what it sends to the kernel.
    """

    operation: Operation
    nbytes: int
    walk_nbytes: int
    batch: int = 1
    verify: bool = False
    lent: bool = False

    def message(self, first: int) -> PutLayer:
        """As it travels, with the number of the first part."""
        return PutLayer(layer=first, blocks=self.fields)

    @property
    def fields(self) -> tuple[int, ...]:
        """What a message says but for the number of the first part."""
        return tuple(map(int, self))

    @classmethod
    def of(cls, message: Message) -> Request:
        """From a message, whose ``layer`` is the number of the first part.

        Raises:
            ProtocolError: If it is none.
        """
        if not isinstance(message, PutLayer):
            raise ProtocolError(f"{type(message).__name__} is no request of a benchmark", remote=True)
        return _request(message.blocks)


# Remembered, since a bare socket beside it has next to nothing to prepare: what counts is the channel.
@lru_cache(maxsize=256)
def _request(fields: tuple[int, ...]) -> Request:
    if len(fields) != 6 or fields[0] > 2:
        raise ProtocolError("PutLayer is no request of a benchmark", remote=True)
    operation, nbytes, walk_nbytes, batch, verify, lent = fields
    return Request(Operation(operation), nbytes, walk_nbytes, batch, bool(verify), bool(lent))
