"""The backend of the redis tier: requests to the servers that have the names, and what their errors mean."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from kvferry.core.address import Address
from kvferry.core.clock import is_past, time_left
from kvferry.core.errors import KVFerryError, TierError
from kvferry.core.units import format_nbytes
from kvferry.store.io_pool import IoPool
from kvferry.store.problems import Problems
from kvferry.store.remote.backend import Answer, Backend, Done, Get, Listed, Put
from kvferry.store.remote.payload import Received
from kvferry.store.remote.redis.cluster import Servers
from kvferry.store.remote.redis.options import RedisOptions
from kvferry.store.remote.redis.pipeline import Outcome, run_on
from kvferry.store.remote.redis.requests import Exists, Plain, Read, Request, Write
from kvferry.store.remote.redis.resp import Reply, ReplyError, command
from kvferry.store.remote.redis.server import Server, ServerFacts
from kvferry.store.tier import ReadOutcome

__all__ = ["RedisBackend"]

_log = logging.getLogger(__name__)

FULL_S: Final = 5.0  # without a refusal, and a server is not called full any more
_PART_S: Final = 600  # parts of a write that did not end go after this
_MOST_TRIES: Final = 6
_TRY_AGAIN_S: Final = 0.02
_GRACE_S: Final = 0.25
_SCAN_COUNT: Final = 500
_MAX_BULK_NBYTES: Final = 512 << 20  # what servers take that do not say
_VALUE_SLACK_NBYTES: Final = 64 << 10
_LOST: Final = Answer(Done.FAILED, "redirected too often")
_OTHER_TYPE: Final = Received(ReadOutcome.CORRUPT, "what is stored there is no string")


class RedisBackend(Backend):
    """Values in Redis. See :class:`~kvferry.store.remote.backend.Backend`.

    Args:
        tier: Name of the tier.
        options: Of the tier.
        problems: Where lasting problems are told.
    """

    def __init__(self, tier: str, options: RedisOptions, problems: Problems) -> None:
        self._tier = tier
        self._options = options
        self._problems = problems
        self._lock = threading.Lock()
        self._facts: dict[str, ServerFacts] = {}
        self._advice: dict[str, str] = {}
        self._full_at: dict[str, float] = {}
        self._max_value_nbytes = _MAX_BULK_NBYTES
        self._redirected = 0
        self._pool: IoPool | None = None
        self._closed = False
        self._servers = Servers(tier, options, self._met)

    # -- the verbs -------------------------------------------------------------------------------------

    def max_value_nbytes(self, deadline: float) -> int:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        if not self._facts:
            with contextlib.suppress(KVFerryError, OSError):  # told by the requests themselves
                self._servers.prepare(deadline)
                if not self._facts:
                    server = self._servers.primaries()[0]
                    server.give_back(server.lease(deadline))
        return self._max_value_nbytes

    def exists(self, names: Sequence[str], deadline: float) -> list[Answer]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        return self._run([Exists(name) for name in names], deadline)

    def get(self, gets: Sequence[Get], deadline: float) -> list[Answer]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        return self._run([Read(get) for get in gets], deadline)

    def put(self, puts: Sequence[Put], deadline: float) -> list[Answer]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        ttl = int(self._options.ttl_s)
        return self._run([Write(put, ttl if put.final else _PART_S) for put in puts], deadline)

    def keep(self, names: Sequence[str], deadline: float) -> None:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        ttl = int(self._options.ttl_s)
        words = (b"EXPIRE", b"%d" % ttl) if ttl else (b"PERSIST",)
        self._run([Plain(name, *words) for name in names], deadline)

    def delete(self, names: Sequence[str], deadline: float) -> list[Answer]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        return self._run([Plain(name, b"UNLINK") for name in names], deadline)

    def listing(self, start: str, deadline: float) -> Iterator[list[Listed]]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        self._servers.prepare(deadline)
        for server in self._servers.primaries():
            cursor = b"0"
            while True:
                cursor, found = self._scan(server, start, cursor, deadline)
                yield found
                if cursor == b"0":
                    break

    # -- what is told ----------------------------------------------------------------------------------

    def problems(self) -> Mapping[str, str]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        down = {f"server {s.address.host_port or s.address.path}": s.problem for s in self._servers.all()}
        return {**self._problems.conditions(), **{where: text for where, text in down.items() if text}}

    def status(self) -> Mapping[str, str]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        with self._lock:
            found = {f"server {place}": _describe(facts) for place, facts in self._facts.items()}
            return found | {f"advice for {place}": text for place, text in self._advice.items()}

    def counters(self) -> Mapping[str, float]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        servers = self._servers.all()
        return {
            "connects": float(sum(server.connects for server in servers)),
            "server_failures": float(sum(server.failures for server in servers)),
            "redirected": float(self._redirected),
        }

    def close(self) -> None:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        self._closed = True
        self._servers.close()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None and (hanging := pool.close()):
            _log.warning("tier %s: threads did not end: %s", self._tier, ", ".join(hanging))

    def _met(self, address: Address, facts: ServerFacts) -> None:
        place = address.host_port or address.path
        advice = _advice(facts, self._options)
        with self._lock:
            self._facts[place] = facts
            told = self._advice.get(place, "")
            self._advice.pop(place, None)
            told_nbytes = [one.max_value_nbytes for one in self._facts.values() if one.max_value_nbytes]
            self._max_value_nbytes = min(told_nbytes, default=_MAX_BULK_NBYTES)
            if advice:
                self._advice[place] = advice
        if advice and advice != told and facts.max_memory_nbytes:
            _log.warning("tier %s, server %s: %s", self._tier, place, advice)

    # -- requests --------------------------------------------------------------------------------------

    def _run(self, requests: Sequence[Request], deadline: float) -> list[Answer]:
        """Make requests, wherever their names are; redirections are followed."""
        answers: list[Answer] = [_LOST] * len(requests)
        only = self._servers.only
        if only is not None:
            outcomes = run_on(only, requests, deadline)
            where = self._settle(requests, answers, only, range(len(requests)), outcomes, deadline)
        else:
            try:
                self._servers.prepare(deadline)
                where = {n: (self._servers.of(request.name), False) for n, request in enumerate(requests)}
            except (KVFerryError, OSError) as error:
                return [Answer(Done.FAILED, str(error))] * len(requests)
        tries = _MOST_TRIES - (only is not None)
        while where and tries:
            tries -= 1
            by_server: dict[tuple[int, bool], list[int]] = {}
            for n, (server, asking) in where.items():
                by_server.setdefault((id(server), asking), []).append(n)
            groups = [(where[numbers[0]][0], asking, numbers) for (_, asking), numbers in by_server.items()]
            where = {}
            for (server, _, numbers), outcomes in zip(
                groups, self._run_groups(requests, groups, deadline), strict=True
            ):
                where |= self._settle(requests, answers, server, numbers, outcomes, deadline)
        return answers

    def _settle(
        self,
        requests: Sequence[Request],
        answers: list[Answer],
        server: Server,
        numbers: Sequence[int],
        outcomes: Sequence[Outcome],
        deadline: float,
    ) -> dict[int, tuple[Server, bool]]:
        """Take what one server answered; returns where to ask again for which, and whether only once."""
        again: dict[int, tuple[Server, bool]] = {}
        for n, outcome in zip(numbers, outcomes, strict=True):
            if type(outcome) is Answer and outcome.done is not Done.FAILED and not self._full_at:
                answers[n] = outcome
                continue
            next_try = self._redirection(outcome, server, deadline)
            if next_try is not None:
                again[n] = next_try
            answers[n] = self._answer(requests[n], outcome, server)
        self._redirected += len(again)
        return again

    def _run_groups(
        self, requests: Sequence[Request], groups: list[tuple[Server, bool, list[int]]], deadline: float
    ) -> list[list[Outcome]]:
        """One server in this thread, several side by side."""

        def run(number: int) -> list[Outcome]:
            server, asking, numbers = groups[number]
            return run_on(server, [requests[n] for n in numbers], deadline, asking=asking)

        if len(groups) == 1:
            return [run(0)]
        pool = self._threads()
        if pool is None:
            return [[Answer(Done.FAILED, "the tier is closed")] * len(group[2]) for group in groups]
        batch = pool.run(len(groups), run, deadline)
        batch.settled.wait(min(_GRACE_S, max(time_left(deadline), _GRACE_S)))  # they have the same deadline
        results, begun = batch.cancel()
        flying = None if batch.settled.is_set() else batch.settled
        late = Answer(Done.FAILED, "not done by the deadline")
        return [
            result
            if result is not None
            else [late._replace(in_flight=flying if n in begun else None)] * len(g[2])
            for n, (result, g) in enumerate(zip(results, groups, strict=True))
        ]

    def _threads(self) -> IoPool | None:
        with self._lock:
            if self._pool is None and not self._closed:
                self._pool = IoPool(f"kvferry-{self._tier}", 2 * self._options.connections)
            return self._pool

    def _redirection(self, outcome: Outcome, asked: Server, deadline: float) -> tuple[Server, bool] | None:
        """Where to ask next, and whether only this once; ``None``: nowhere."""
        if isinstance(outcome, Answer):
            if outcome.done is Done.FAILED:
                self._servers.note_change()  # a server is gone: others may have its slots
            return None
        if outcome.word not in ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "READONLY"):
            return None
        self._servers.note_change()
        if is_past(deadline) or outcome.word in ("CLUSTERDOWN", "READONLY"):
            return None
        if outcome.word == "TRYAGAIN":
            time.sleep(min(_TRY_AGAIN_S, time_left(deadline)))
            return asked, False
        _, _, place = outcome.rest.partition(" ")
        try:
            return self._servers.named(place, asked), outcome.word == "ASK"
        except TierError:
            return None

    def _answer(self, request: Request, outcome: Outcome, server: Server) -> Answer:
        place = server.address.host_port or server.address.path
        if isinstance(outcome, Answer):
            if outcome.done is Done.OK and isinstance(request, Write) and place in self._full_at:
                self._end_full(place)
            return outcome
        text = f"{server.address}: {str(outcome)[:200]}"
        if outcome.word == "OOM":
            with self._lock:
                advice = self._advice.get(place, "raise maxmemory there")
            self._full_at[place] = time.monotonic()
            self._problems.begin(f"server {place}", "full", f"it has no memory left for writes; {advice}")
            return Answer(Done.REFUSED, f"{text}; {advice}")
        if outcome.word == "WRONGTYPE":
            return Answer(Done.OK, "", _OTHER_TYPE)
        if "bulk length" in text:
            text += f"; a value of {request.nbytes} bytes is over proto-max-bulk-len: lower the tier's part"
        return Answer(Done.FAILED, text)

    def _end_full(self, place: str) -> None:
        """A write was taken; one that just fitted in says nothing yet."""
        if time.monotonic() >= self._full_at.get(place, 0.0) + FULL_S:
            self._full_at.pop(place, None)
            self._problems.end(f"server {place}", "full")

    # -- listing ---------------------------------------------------------------------------------------

    def _scan(self, server: Server, start: str, cursor: bytes, deadline: float) -> tuple[bytes, list[Listed]]:
        lane = server.lease(deadline)
        try:
            until = server.request_deadline(deadline)
            reply = lane.call(
                until, b"SCAN", cursor, b"MATCH", _pattern(start), b"COUNT", b"%d" % _SCAN_COUNT
            )
            cursor, names = _page(reply)
            lane.connection.send([b"".join(command(b"STRLEN", name) for name in names)], until)
            sizes = [_size(partial(lane.reader.read, until)) for _ in names]
        except ReplyError as error:
            server.give_back(lane)
            raise TierError(f"{server.address} does not list what it has: {error}") from error
        except BaseException as error:
            server.drop(lane, error if isinstance(error, KVFerryError) else None)
            raise
        server.give_back(lane)
        found = zip(names, sizes, strict=True)
        return cursor, [Listed(name.decode("utf-8", "replace"), size) for name, size in found]


def _size(read: Callable[[], Reply]) -> int:
    try:
        reply = read()
    except ReplyError:
        return 0  # of another type
    return reply if isinstance(reply, int) else 0


def _page(reply: Reply) -> tuple[bytes, list[bytes]]:
    if isinstance(reply, list) and len(reply) == 2 and isinstance(reply[1], list):
        cursor, names = reply
        if isinstance(cursor, bytes) and isinstance(names, list):
            return cursor, [name for name in names if isinstance(name, bytes)]
    raise TierError("SCAN was answered in a way that is not known")


def _pattern(start: str) -> bytes:
    return "".join(f"\\{c}" if c in "\\*?[]^" else c for c in start).encode() + b"*"


def _describe(facts: ServerFacts) -> str:
    memory = format_nbytes(facts.max_memory_nbytes) if facts.max_memory_nbytes else "without bound"
    return (
        f"{facts.product}, {facts.mode}, {facts.role}, memory {memory}, {facts.policy or 'policy not told'}"
    )


def _advice(facts: ServerFacts, options: RedisOptions) -> str:
    """What to change there before it refuses writes."""
    policy, memory = facts.policy, facts.max_memory_nbytes
    if not policy or (memory and 0 < options.capacity_nbytes < memory):
        return ""
    if not memory:
        return "it has no maxmemory: it grows until the system has no memory left; set maxmemory and a policy"
    keeps = policy == "noeviction" or (policy.startswith("volatile") and not options.ttl_s)
    if not keeps:
        return ""
    why = (
        "evicts nothing"
        if policy == "noeviction"
        else "evicts only what has a ttl, and these blocks have none"
    )
    return (
        f"its maxmemory-policy {policy} {why}: when {format_nbytes(memory)} are used up it refuses writes; "
        "set maxmemory-policy allkeys-lru there, or a capacity below that for this tier"
    )
