"""The benchmark's end that measures: parts over a channel of kvferry, timed until they are acknowledged."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from kvferry.bench.link.memory import LinkMemory, timed
from kvferry.bench.link.requests import Operation, Request
from kvferry.bench.results import Sample
from kvferry.core.clock import deadline_in
from kvferry.core.errors import CorruptBlockError, KVFerryError, ProtocolError, error_from_code
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire.channel import Incoming
from kvferry.wire.messages import Failure, LayerAck, PutLayer

__all__ = ["Link"]

_WAIT_S = 60.0


class Link:
    """Sends to, and takes from, a :class:`~kvferry.bench.link.peer.LinkService`. One thread at a time.

    An operation that fails is counted in ``failed``, and the next one takes a new connection.

    Args:
        address: Of the peer.
        memory: Of this end; others may use it in turn with this.
        checksum: Whether payloads carry one.
        verify: Whether every byte of every operation is compared by who received it, within its time.
        peer_cpu_s: Processor seconds of the peer so far, where they are known.
        lent: Whether what is put, and got, is lent to the kernel, as blocks between the daemon and a client.

    Attributes:
        operations: Operations so far.
        failed: Those that failed.
        checked: Parts that were compared and right.
    """

    def __init__(
        self,
        address: str,
        memory: LinkMemory,
        *,
        checksum: bool,
        verify: bool = False,
        peer_cpu_s: Callable[[], float] | None = None,
        lent: bool = False,
    ) -> None:
        self._address = address
        self._lent = lent
        self._options = ChannelOptions(role="bench", session="bench", checksum=checksum)
        self._memory = memory
        self._nbytes = memory.nbytes
        self._peer_cpu_s = peer_cpu_s
        self._verify = verify
        self._channel: Channel | None = None
        self._asked = (Operation.PUT, 0, False)
        self._request: tuple[int, ...] = ()
        self._touches = False
        self.operations = self.failed = self.checked = 0
        self._open()  # so that what cannot be reached is known before anything is measured

    def put(self, batch: int, count: int) -> Sample:
        """``count`` messages of ``batch`` parts each; the bytes are those that the peer counted."""
        return self._timed(Operation.PUT, batch, count)

    def get(self, batch: int, count: int, *, touch: bool = False) -> Sample:
        """``count`` messages of ``batch`` parts from the peer; the bytes are those that came.

        Every byte is read if ``touch``.
        """
        self._touches = touch
        return self._timed(Operation.GET, batch, count)

    def echo(self, count: int) -> Sample:
        """``count`` parts there and back again."""
        return self._timed(Operation.ECHO, 1, count)

    def verify(self, operation: Operation, batch: int, count: int) -> bool:
        """Move parts into cleared memory and compare every byte, on the side that received them.

        Raises:
            CorruptBlockError: If there is a difference.
        """
        expected = batch * self._nbytes * (2 if operation is Operation.ECHO else 1)
        for _ in range(count):
            moved = self._do(operation, batch, verify=True)
            if moved != expected:
                raise CorruptBlockError(f"{self._address}: {moved} of {expected} bytes were received")
            self.checked += batch
        return count > 0

    def close(self) -> None:
        """End the connection."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _open(self) -> Channel:
        if self._channel is None:
            self._channel = Channel.connect(self._address, self._options, deadline_in(_WAIT_S))
        return self._channel

    def _timed(self, operation: Operation, batch: int, count: int) -> Sample:
        self.operations += count
        self._open()
        calls = (partial(self._do, operation, batch, verify=self._verify) for _ in range(count))
        return timed(calls, self._failed, self._cpu_s)

    def _cpu_s(self) -> float:
        return time.process_time() + (self._peer_cpu_s() if self._peer_cpu_s is not None else 0.0)

    def _failed(self, error: KVFerryError) -> None:
        if self._verify and isinstance(error, CorruptBlockError):
            raise error  # no failure to leave out: what was asked for is whether this happens
        self.failed += 1
        if self._channel is not None:
            self._channel.abort()
            self._channel = None

    def _do(self, operation: Operation, batch: int, *, verify: bool = False) -> int:
        """One operation; the bytes that its receiver counted."""
        channel = self._open()
        deadline = deadline_in(_WAIT_S)
        if operation is Operation.GET:
            return self._get(channel, batch, deadline, verify=verify)
        first, parts = self._memory.parts(batch)
        request = PutLayer(layer=first, blocks=self._fields(operation, batch, verify))
        if operation is Operation.PUT:
            answer = channel.call(request, LayerAck, payload=parts, deadline=deadline, lent=self._lent)
            return answer.count
        channel.send(request, parts, deadline=deadline)
        return 2 * self._receive(channel, first, batch, deadline, verify=verify)

    def _fields(self, operation: Operation, batch: int, verify: bool) -> tuple[int, ...]:
        """Those of a request, made once: a bare socket beside this has next to nothing to prepare."""
        asked = (operation, batch, verify)
        if asked != self._asked:
            self._asked = asked
            walk, lent = self._memory.walk_nbytes, self._lent
            self._request = Request(operation, self._nbytes, walk, batch, verify, lent).fields
        return self._request

    def _get(self, channel: Channel, batch: int, deadline: float, *, verify: bool) -> int:
        first, _ = self._memory.parts(batch)
        request = PutLayer(layer=first, blocks=self._fields(Operation.GET, batch, False))
        channel.send(request, deadline=deadline)
        return self._receive(channel, first, batch, deadline, verify=verify)

    def _receive(self, channel: Channel, first: int, batch: int, deadline: float, *, verify: bool) -> int:
        places = self._memory.places(batch, clear=verify)
        incoming = _answer(channel, deadline)
        incoming.read_into(places, deadline)
        if self._touches:
            for place in places:
                np.frombuffer(place, np.uint64).max()
        if verify:
            self._memory.compare(first, places)
        return incoming.payload_nbytes


def _answer(channel: Channel, deadline: float) -> Incoming:
    incoming = channel.receive(deadline)
    message = incoming.message
    if isinstance(message, Failure):
        raise error_from_code(message.code, f"{channel.address}: {message.message}")
    if not incoming.payload_nbytes:
        raise ProtocolError(f"{channel.address} answered with {type(message).__name__}", remote=True)
    return incoming
