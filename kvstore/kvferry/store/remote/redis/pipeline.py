"""Many requests to one server on one connection: sent ahead of their replies, some at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

from kvferry.core.clock import is_past
from kvferry.core.errors import KVFerryError, ProtocolError, TransportError
from kvferry.store.remote.backend import Answer, Done
from kvferry.store.remote.redis.requests import Read, Request, Write
from kvferry.store.remote.redis.resp import ReplyError, command
from kvferry.store.remote.redis.server import Lane, Server

__all__ = ["Outcome", "run_on"]

Outcome = Answer | ReplyError
"""Of one request; the error of a reply is still to be understood."""

_AHEAD_REQUESTS: Final = 256
_AHEAD_NBYTES: Final = 64 << 20
_FIRST_NBYTES: Final = 32 << 10  # the server begins
_JOIN_NBYTES: Final = 512 << 10  # then it does not sleep between two calls, and each is paid for by more
_FIRST_READS: Final = 4
_MOST_PIECES: Final = 512
_VALUES_NBYTES: Final = 1 << 20  # in one call; the store is at work on them while the next ones are made
_TAKEN_NBYTES: Final = 1 << 20  # in one call; more come while they are judged
_LEAST_LIMIT_NBYTES: Final = 1 << 20
_ASKING: Final = command(b"ASKING")
_STOP: Final = frozenset({"OOM"})


def run_on(
    server: Server, requests: Sequence[Request], deadline: float, *, asking: bool = False
) -> list[Outcome]:
    """Make requests of one server; an outcome each, whatever happens.

    A connection that lay idle may have ended meanwhile: then, and if nothing has come, all is sent once more
    on a new one. When the server has no memory left, what was not sent yet is not sent.
    """
    fresh = False
    flying: threading.Event | None = None
    while True:
        outcomes: list[Outcome] = []
        try:
            lane = server.lease(deadline, fresh=fresh)
        except (KVFerryError, OSError) as error:
            return _failed(requests, outcomes, str(error), flying)
        was_used, lane.reader.received = lane.used, False
        try:
            for group in _groups(requests):
                if _exchange(lane, server, group, outcomes, deadline, asking=asking):
                    break
        except (TransportError, ProtocolError) as error:
            if (
                was_used
                and not lane.reader.received
                and not fresh
                and _ended(error)
                and not is_past(deadline)
            ):
                flying = server.drop(lane)
                fresh = True
                continue
            flying = server.drop(lane, error)
            return _failed(requests, outcomes, f"{error}{_hint(requests, error)}", flying)
        except BaseException:
            server.drop(lane)  # the caller's own: replies are still to come on it
            raise
        server.give_back(lane)
        if len(outcomes) < len(requests):
            refused = next(o for o in outcomes if isinstance(o, ReplyError) and o.word in _STOP)
            outcomes += [refused] * (len(requests) - len(outcomes))
        return outcomes


def _hint(requests: Sequence[Request], error: KVFerryError) -> str:
    """What may be the cause of a connection that the server ended; it says nothing itself."""
    largest = max(request.nbytes for request in requests)
    if not _ended(error) or largest <= _LEAST_LIMIT_NBYTES:
        return ""
    return f"; is a value of {largest} bytes over the server's proto-max-bulk-len? Then lower the tier's part"


def _ended(error: KVFerryError) -> bool:
    return error.code == "connection_closed"


def _failed(
    requests: Sequence[Request], outcomes: list[Outcome], reason: str, flying: threading.Event | None
) -> list[Outcome]:
    outcomes += [Answer(Done.FAILED, reason, in_flight=flying)] * (len(requests) - len(outcomes))
    return outcomes


def _groups(requests: Sequence[Request]) -> Iterator[Sequence[Request]]:
    if len(requests) == 1:
        yield requests
        return
    start, nbytes = 0, 0
    for n, request in enumerate(requests):
        if n > start and (n - start >= _AHEAD_REQUESTS or nbytes + request.nbytes > _AHEAD_NBYTES):
            yield requests[start:n]
            start, nbytes = n, 0
        nbytes += request.nbytes
    if start < len(requests):
        yield requests[start:]


def _exchange(
    lane: Lane,
    server: Server,
    group: Sequence[Request],
    outcomes: list[Outcome],
    deadline: float,
    *,
    asking: bool,
) -> bool:
    """Send a group and take its replies; each has the time of a request from when it is its turn.

    Returns:
        Whether the server takes no more.
    """
    stops, began = False, time.monotonic_ns()
    end = None if asking or lane.values is None else _common_end(group)
    nbytes = 0 if end is None else sum(request.nbytes for request in group)
    ways = lane.ways(nbytes) if end is not None else None
    if end is not None and ways is not None and ways.next(nbytes) == 0:
        _send_values(lane, server, group, end, deadline)
    else:
        _send_pieces(lane, server, group, deadline, asking=asking)
    taken = 0 if asking else _take_values(lane, server, group, outcomes, deadline)
    for request in group[taken:]:
        if not asking and (answer := request.at_hand(lane.reader)) is not None:
            outcomes.append(answer)
            continue
        until = server.request_deadline(deadline)
        if asking:
            lane.reader.read(until)
        try:
            outcomes.append(request.take(lane.reader, until))
        except ReplyError as error:
            outcomes.append(error)
            stops = stops or error.word in _STOP
    lane.lent = False
    if ways is not None:
        ways.took(nbytes, time.monotonic_ns() - began)
    return stops


def _take_values(
    lane: Lane, server: Server, group: Sequence[Request], outcomes: list[Outcome], deadline: float
) -> int:
    """Take values that the connection hashes, up to the first one that is not as most; how many."""
    reads = [request for request in group if isinstance(request, Read)]
    form = reads[0].form if len(reads) == len(group) else None
    if form is None or not lane.reader.fits(form) or any(read.form != form for read in reads):
        return 0
    step = max(1, _TAKEN_NBYTES // form.nbytes)
    for at in range(0, len(reads), step):
        some = reads[at : at + step]
        taken = lane.reader.values(form, [read.into for read in some], server.request_deadline(deadline))
        outcomes += [read.taken(value) for read, value in zip(some, taken, strict=False)]
        if len(taken) < len(some):
            return at + len(taken)
    return len(group)


def _send_pieces(
    lane: Lane, server: Server, group: Sequence[Request], deadline: float, *, asking: bool
) -> None:
    waiting: list[memoryview | bytes] = []
    nbytes, enough, last = 0, _FIRST_NBYTES, group[-1]
    most = _FIRST_READS if isinstance(group[0], Read) else _MOST_PIECES
    for request in group:
        until = 0.0
        if asking:
            waiting.append(_ASKING)
        for pieces in request.pieces(last=request is last):
            waiting += pieces
            nbytes += sum(map(len, pieces))
            if nbytes >= enough or len(waiting) >= most:
                until = until or server.request_deadline(deadline)
                lane.connection.send(waiting, until)
                waiting, nbytes, enough, most = [], 0, _JOIN_NBYTES, _MOST_PIECES
    if waiting:
        lane.connection.send(waiting, server.request_deadline(deadline))


def _common_end(group: Sequence[Request]) -> bytes | None:
    """What ends each request, if all are of large values that the connection can hash; else ``None``."""
    ends = {request.end if isinstance(request, Write) else None for request in group}
    return ends.pop() if len(ends) == 1 else None


def _send_values(lane: Lane, server: Server, group: Sequence[Request], end: bytes, deadline: float) -> None:
    """Send a group of large values, hashed by the connection, and lent."""
    connection = lane.values
    assert connection is not None
    lends = lane.lent = lane.lent or server.lends
    at, count = 0, 1  # the server begins with one
    while at < len(group):
        some = [request.value() for request in group[at : at + count] if isinstance(request, Write)]
        connection.send_values(some, end, server.request_deadline(deadline), lends=lends)
        at += count
        count = max(1, _VALUES_NBYTES // group[0].nbytes)
