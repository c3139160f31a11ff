"""The backend of the mooncake tier: values straight between the pool's memory and that of the caller."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Final

from kvferry.core.buffers import address_of, copy_into, page_aligned, total_nbytes
from kvferry.core.clock import deadline_in
from kvferry.core.errors import TierError
from kvferry.store.problems import Problems
from kvferry.store.remote.backend import Answer, Backend, Done, Get, Listed, Put
from kvferry.store.remote.manifest import MAX_MANIFEST_NBYTES
from kvferry.store.remote.mooncake.client import give_client_back, take_client
from kvferry.store.remote.mooncake.library import Library
from kvferry.store.remote.mooncake.memory import Spans, gathered, spans_of
from kvferry.store.remote.mooncake.options import MooncakeOptions
from kvferry.store.remote.payload import Received
from kvferry.store.remote.requests import Requests
from kvferry.store.tier import ReadOutcome

__all__ = ["MooncakeBackend"]

_log = logging.getLogger(__name__)

_MAX_VALUE_NBYTES: Final = 1 << 40
_START_S: Final = 60.0
_AT_ONCE: Final = 32  # values in one call of the library
_OK: Final = Answer(Done.OK)
_NO: Final = Answer(Done.NO)
_TRIES: Final = 3
_NO_ROOM: Final = -200
_ABSENT: Final = (-703, -704)  # not whole yet, not there
_WHY: Final = {
    -707: "its lease ended while it was read: raise the master's default_kv_lease_ttl",
    -800: "the client that holds it, or is to hold it, does not answer",
    -900: "the master cannot be reached",
    -901: "the master does not answer in time",
}


class MooncakeBackend(Backend):
    """Values in the pool. See :class:`~kvferry.store.remote.backend.Backend`.

    Args:
        tier: Name of the tier.
        options: Of the tier.
        problems: Where lasting problems are told.
    """

    lists = False
    moves_whole = True

    def __init__(self, tier: str, options: MooncakeOptions, problems: Problems) -> None:
        self._options = options
        self._problems = problems
        self._client = take_client(options)
        self._requests = Requests(tier, f"master {options.address().host_port}", options)
        self._closed = False
        if options.contribute_nbytes:
            self._requests.start(self._contribute)

    def _contribute(self) -> None:
        try:
            self._client.library(deadline_in(_START_S))
        except TierError as error:
            _log.warning("memory is given to the pool when it can be reached: %s", error)

    # -- the verbs -------------------------------------------------------------------------------------

    def max_value_nbytes(self, deadline: float) -> int:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        del deadline
        return _MAX_VALUE_NBYTES

    def exists(self, names: Sequence[str], deadline: float) -> list[Answer]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""

        def work(library: Library, span: range) -> list[Answer]:
            codes = library.batch_is_exist([names[n] for n in span])
            return [_OK if code == 1 else _NO if code == 0 else _failed(code) for code in codes]

        return self._run(len(names), work, deadline, each=1024)

    def get(self, gets: Sequence[Get], deadline: float) -> list[Answer]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        return self._run(len(gets), lambda lib, span: self._get(lib, [gets[n] for n in span]), deadline)

    def _get(self, library: Library, gets: Sequence[Get]) -> list[Answer]:
        answers: dict[int, Answer] = {}
        failed: dict[int, tuple[int, int]] = {}  # with the size that was expected, and why
        known = [(n, get.expected()) for n, get in enumerate(gets) if get.expected is not None]
        if known:
            names = [gets[n].name for n, _ in known]
            spans = [spans_of(views) for _, views in known]
            codes = self._move(library.batch_get_into_multi_buffers, library, names, spans)
            for (n, views), code in zip(known, codes, strict=True):
                if code == total_nbytes(views):
                    answers[n] = _poured(gets[n], views)
                elif code in _ABSENT:
                    answers[n] = _NO
                else:
                    failed[n] = total_nbytes(views), code
        for n, get in enumerate(gets):
            if n not in answers:
                answers[n] = self._get_unknown(library, get, *failed.get(n, (-1, 0)))
            for _ in range(_TRIES):
                received = answers[n].received
                if received is None or received.outcome is not ReadOutcome.CORRUPT:
                    break
                answers[n] = self._get_unknown(
                    library, get
                )  # what is removed while it is read looks like that
        return [answers[n] for n in range(len(gets))]

    def _get_unknown(self, library: Library, get: Get, tried: int = -1, why: int = 0) -> Answer:
        """A value whose size has to be asked first; by way of memory of our own."""
        nbytes = library.get_size(get.name)
        if nbytes < 0:
            return _NO if nbytes in _ABSENT else _failed(nbytes)
        if nbytes == tried:  # it was not its size
            return _failed(why)
        if nbytes > self._options.part_nbytes + MAX_MANIFEST_NBYTES:
            reason = f"a value of {nbytes} bytes, more than a part of {self._options.part_nbytes}"
            return Answer(Done.OK, "", Received(ReadOutcome.CORRUPT, reason))
        data = page_aligned(nbytes)
        (code,) = self._move(library.batch_get_into_multi_buffers, library, [get.name], [spans_of([data])])
        if code != nbytes:
            return _NO if code in _ABSENT else _failed(code)
        return _poured(get, [data])

    def put(self, puts: Sequence[Put], deadline: float) -> list[Answer]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        once: dict[str, Put] = {}
        for put in puts:  # for the library a value that is there already is one that it has put
            once.setdefault(put.name, put)
        todo = list(once.values())
        answers = self._run(len(todo), lambda lib, span: self._put(lib, [todo[n] for n in span]), deadline)
        found = dict(zip(once, answers, strict=True))
        results: list[Answer] = []
        for put in puts:
            answer = found[put.name]
            results.append(answer)
            if answer.done is Done.OK:
                found[put.name] = _NO
        return results

    def _put(self, library: Library, puts: Sequence[Put]) -> list[Answer]:
        answers: dict[int, Answer] = {}
        asked = [n for n, put in enumerate(puts) if put.only_new]
        if asked:
            codes = library.batch_is_exist([puts[n].name for n in asked])
            for n, code in zip(asked, codes, strict=True):
                if code:
                    answers[n] = _NO if code == 1 else _failed(code)
        left = [n for n in range(len(puts)) if n not in answers]
        if left:
            spans = [gathered([p for pieces in puts[n].source(False) for p in pieces]) for n in left]
            names = [puts[n].name for n in left]
            for n, code in zip(
                left, self._move(library.batch_put_from_multi_buffers, library, names, spans), strict=True
            ):
                answers[n] = _OK if code == 0 else _failed(code)
        return [answers[n] for n in range(len(puts))]

    def _move(
        self,
        call: Callable[[list[str], list[list[int]], list[list[int]]], list[int]],
        library: Library,
        names: list[str],
        spans: list[Spans],
    ) -> list[int]:
        registered = (
            self._client.registered.during(library, spans) if self._options.registers else nullcontext()
        )
        with registered:
            return call(names, [each.addresses for each in spans], [each.sizes for each in spans])

    def keep(self, names: Sequence[str], deadline: float) -> None:
        """See :class:`~kvferry.store.remote.backend.Backend`. Nothing goes by itself here."""

    def delete(self, names: Sequence[str], deadline: float) -> list[Answer]:
        """See :class:`~kvferry.store.remote.backend.Backend`. Also what somebody is reading: he will see."""

        def work(library: Library, span: range) -> list[Answer]:
            codes = library.batch_remove([names[n] for n in span], True)
            return [_OK if code == 0 else _NO if code in _ABSENT else _failed(code) for code in codes]

        return self._run(len(names), work, deadline, each=1024)

    def delete_under(self, start: str, deadline: float) -> bool:
        """Remove all values whose names begin with ``start``; whether that was done."""
        pattern = f"^{start.replace('.', '[.]')}.*"

        def work(library: Library, span: range) -> list[Answer]:
            del span
            code = library.remove_by_regex(pattern, True)
            return [_OK if code >= 0 else _failed(code)]

        return self._run(1, work, deadline)[0].done is Done.OK

    def listing(self, start: str, deadline: float) -> Iterator[list[Listed]]:
        """See :class:`~kvferry.store.remote.backend.Backend`. The library cannot tell."""
        del start, deadline
        raise TierError("Mooncake Store does not list what it holds")

    # -- what is told ----------------------------------------------------------------------------------

    def problems(self) -> Mapping[str, str]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        return {**self._problems.conditions(), **self._requests.problems()}

    def status(self) -> Mapping[str, str]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        state = "connected" if self._client.running else "not connected yet"
        registered = ", memory of blocks is registered" if self._options.registers else ""
        return {self._requests.place: f"{state}, over {self._options.wire}{registered}"}

    def counters(self) -> Mapping[str, float]:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        return self._requests.counters()

    def close(self) -> None:
        """See :class:`~kvferry.store.remote.backend.Backend`."""
        if self._closed:
            return
        self._closed = True
        ended = self._requests.close()
        give_client_back(self._options, ended=ended)

    def _run(
        self,
        count: int,
        work: Callable[[Library, range], list[Answer]],
        deadline: float,
        *,
        each: int = _AT_ONCE,
    ) -> list[Answer]:
        def with_library(span: range) -> list[Answer]:
            try:
                return work(self._client.library(deadline), span)
            except TierError as error:
                return [Answer(Done.FAILED, str(error))] * len(span)

        share = -(-count // self._options.connections)  # all threads have something to do
        return self._requests.run(count, with_library, deadline, each=max(1, min(each, share)))


def _failed(code: int) -> Answer:
    if code == _NO_ROOM:
        return Answer(Done.REFUSED, "the pool has no room for it now")
    return Answer(Done.FAILED, f"{_WHY.get(code, 'the library refuses it')} ({code})")


def _poured(get: Get, views: list[memoryview]) -> Answer:
    """Give a value that lies in ``views`` to the sink; what it wants at the place where it is stays there."""
    nbytes = total_nbytes(views)
    sink = get.sink(nbytes if get.most is None else min(get.most, nbytes))
    there = deque(views)
    try:
        while True:
            for wanted in next(sink):
                while len(wanted):
                    if not there:
                        return Answer(Done.FAILED, f"{get.name}: it ended before its {nbytes} bytes")
                    step = min(len(wanted), len(there[0]))
                    if address_of(wanted) != address_of(there[0]):
                        copy_into(wanted[:step], there[0][:step])
                    wanted, there[0] = wanted[step:], there[0][step:]
                    if not len(there[0]):
                        there.popleft()
    except StopIteration as end:
        received: Received = end.value
    return Answer(Done.OK, "", received)
