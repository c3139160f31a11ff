"""What answers the transport benchmarks: over kvferry's channels and, beside them, over bare sockets."""

from __future__ import annotations

import threading

from kvferry.bench.link.memory import LinkMemory, MemoryPool, SharedMemory
from kvferry.bench.link.requests import Operation, Request
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ProtocolError
from kvferry.wire import Channel
from kvferry.wire.channel import Incoming
from kvferry.wire.messages import LayerAck, PutLayer

__all__ = ["LinkService"]

_WAIT_S = 60.0
_IDLE_S = 3600.0
_MAX_NBYTES = 4 << 30


class LinkService:
    """Receives, sends and echoes parts, of one size at a time on each connection.

    Args:
        pool: Memory that others use in turn with this; else its own.

    Attributes:
        received_nbytes: Payload that has come whole, on all connections.
    """

    def __init__(self, pool: MemoryPool | None = None) -> None:
        self._pool = pool or MemoryPool()
        self._lock = threading.Lock()
        self.received_nbytes = 0

    def serve(self, channel: Channel) -> None:
        """The handler of a channel: until it ends."""
        shared: SharedMemory | None = None
        last: Request | None = None
        while (incoming := channel.receive_idle(deadline_in(_IDLE_S))) is not None:
            request = Request.of(incoming.message)
            if shared is None or request is not last:  # equal ones are remembered as one
                self._check(request)
                shared = self._pool.of(request.nbytes, request.walk_nbytes)
                last = request
            memory = shared.take()
            try:
                self._answer(channel, incoming, request, memory)
            finally:
                shared.give_back(memory)

    def _check(self, request: Request) -> None:
        most = max(request.nbytes * request.batch, request.walk_nbytes)
        if not (request.nbytes * request.batch > 0 and most <= _MAX_NBYTES):
            raise ProtocolError(
                f"{request.batch} parts of {request.nbytes} bytes from {request.walk_nbytes} are more than "
                f"the {_MAX_NBYTES} that a benchmark moves at once",
                remote=True,
            )

    def _answer(self, channel: Channel, incoming: Incoming, request: Request, memory: LinkMemory) -> None:
        deadline = deadline_in(_WAIT_S)
        assert isinstance(incoming.message, PutLayer)  # else it is no request
        first = incoming.message.layer
        if request.operation is Operation.GET:
            answer = PutLayer(layer=first, blocks=())
            parts = memory.numbered(first, request.batch)
            channel.reply(incoming, answer, parts, deadline=deadline, lent=request.lent)
            return
        places = memory.places(request.batch, clear=request.verify)
        incoming.read_into(places, deadline)
        with self._lock:
            self.received_nbytes += incoming.payload_nbytes
        if request.verify:
            memory.compare(first, places)
        if request.operation is Operation.ECHO:
            channel.reply(incoming, incoming.message, places, deadline=deadline)
        else:
            channel.reply(incoming, LayerAck(count=incoming.payload_nbytes), deadline=deadline)
