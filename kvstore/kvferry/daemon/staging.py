"""Staging memory that clients give the daemon, to copy out of what they save."""

from __future__ import annotations

import os
import struct
from typing import Final

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, ProtocolError
from kvferry.core.staging import MappedStaging
from kvferry.core.write_leases import SlotWriteLease
from kvferry.wire import daemon_messages as d
from kvferry.wire.channel import Channel
from kvferry.wire.incoming import Incoming

__all__ = ["Staging"]

_MOST_NBYTES: Final = 4 << 30
_EXCHANGE_S: Final = 10.0
_OFFSET: Final = struct.Struct("<Q")


class Staging:
    """That of one connection. Used by the thread of the connection alone.

    Args:
        channel: The connection.
        may_stage: Whether its client may give any: one of this machine, with the right to write, that does
            not write slots itself.
    """

    def __init__(self, channel: Channel, *, may_stage: bool) -> None:
        self.may_stage = may_stage
        self._channel = channel
        self._memory: MappedStaging | None = None

    def take(self, message: d.OfferStaging, incoming: Incoming) -> None:
        """Answer an offer, and map what comes with it in the place of what was given before.

        Raises:
            ConfigError: If it is not taken; nothing has been answered.
            KVFerryError: If no memory comes, or what comes is not safe to read; the connection cannot go on.
        """
        if not self.may_stage:
            raise ConfigError("blocks are staged by those of this machine who may not write them themselves")
        if not 0 < message.nbytes <= _MOST_NBYTES:
            raise ConfigError(
                f"staging memory of {message.nbytes} bytes; from 1 to {_MOST_NBYTES} bytes are taken"
            )
        deadline = deadline_in(_EXCHANGE_S)
        self._channel.reply(incoming, d.Done(), deadline=deadline)
        (fd,) = self._channel.receive_descriptors(1, deadline)
        try:
            self._memory = MappedStaging(fd, message.nbytes)
        finally:
            os.close(fd)
        self._channel.reply(incoming, d.Done(), deadline=deadline)

    def copy(self, lease: SlotWriteLease, staged: bytes) -> None:
        """Copy blocks from the client's memory into their slots.

        The client can change its memory meanwhile, so that a block is what it was at some moment of the copy;
        what is published is the copy, which nobody else writes.

        Raises:
            ProtocolError: If there is no such memory, or blocks are not inside.
            LeaseExpiredError: If the lease is over.
        """
        if self._memory is None or len(staged) != len(lease) * _OFFSET.size:
            raise ProtocolError(
                f"{self._channel.address}: {len(staged)} bytes of offsets for {len(lease)} blocks, and "
                f"{'no' if self._memory is None else 'its'} staging memory",
                remote=True,
            )
        with lease.writing():
            for index, (offset,) in enumerate(_OFFSET.iter_unpack(staged)):
                self._memory.copy(offset, lease.view(index))
