"""Requests in threads of their own, for stores whose clients block: each call is back by its deadline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvferry.core.cause import LEFT_ALONE
from kvferry.core.clock import deadline_in, is_past
from kvferry.store.breaker import Breaker
from kvferry.store.io_pool import IoPool
from kvferry.store.remote.backend import Answer, Done
from kvferry.store.remote.options import RemoteOptions

__all__ = ["LATE", "Requests"]

_log = logging.getLogger(__name__)
LATE: Final = "not done by the deadline"


class Requests:
    """Makes requests to one store side by side, and leaves it alone for a while when it fails.

    Args:
        tier: Name of the tier.
        place: What is asked, for messages: ``bucket kv``.
        options: Of the tier: ``connections`` threads, the breaker's values.
        late: What is said of a request that nobody waits for any more.

    Attributes:
        made: Requests begun.
        failures: Requests that failed.
    """

    def __init__(self, tier: str, place: str, options: RemoteOptions, *, late: str = LATE) -> None:
        self._tier = tier
        self._late = late
        self.place = place
        self._pool = IoPool(f"kvferry-{tier}", options.connections)
        self._breaker = Breaker(
            f"{tier}, {place}",
            work="requests",
            errors=options.server_errors,
            pause_s=options.server_pause_s,
            max_pause_s=20 * options.server_pause_s,
        )
        self.made = self.failures = 0

    def run(
        self, count: int, work: Callable[[range], Sequence[Answer]], deadline: float, *, each: int = 1
    ) -> list[Answer]:
        """Make ``count`` requests, ``each`` of them in one call of ``work``.

        Args:
            count: How many.
            work: Given their numbers, makes them; one answer a request. It should end by the deadline; what
                does not is answered all the same, with ``in_flight``.
            deadline: Of the call.
            each: How many to one thread at once.
        """
        if not count:
            return []
        if not self._breaker.enter():
            text = f"{self.place} {LEFT_ALONE}{self._breaker.reason}"
            return [Answer(Done.FAILED, text)] * count
        spans = [range(at, min(at + each, count)) for at in range(0, count, each)]
        try:
            batch = self._pool.run(len(spans), lambda n: self._begin(work, spans[n], deadline), deadline)
            results, begun = batch.cancel()
        except BaseException:
            self._breaker.leave(failures=0, successes=0)
            raise
        flying = None if batch.settled.is_set() else batch.settled
        answers: list[Answer] = []
        for n, (span, result) in enumerate(zip(spans, results, strict=True)):
            late = Answer(Done.FAILED, self._late, in_flight=flying if n in begun else None)
            answers += [late] * len(span) if result is None else result
        self._judge(answers)
        return answers

    def _begin(
        self, work: Callable[[range], Sequence[Answer]], span: range, deadline: float
    ) -> Sequence[Answer]:
        if is_past(deadline):
            return [Answer(Done.FAILED, "not begun by the deadline")] * len(span)
        self.made += len(span)
        return work(span)

    def _judge(self, answers: Sequence[Answer]) -> None:
        failed = [answer for answer in answers if answer.done is Done.FAILED]
        if failed:
            self.failures += len(failed)
        self._breaker.leave(
            failures=int(bool(failed)),
            successes=len(answers) - len(failed),
            reason=failed[0].reason if failed else "",
        )

    def start(self, work: Callable[[], object]) -> None:
        """Have something done by one of the threads, without waiting for it."""

        def once(_: int) -> None:
            work()

        self._pool.run(1, once, deadline_in(0))

    def problems(self) -> Mapping[str, str]:
        """What does not work now."""
        reason = self._breaker.reason
        return {self.place: reason} if reason else {}

    def counters(self) -> Mapping[str, float]:
        """Counts that only grow."""
        return {"requests": float(self.made), "server_failures": float(self.failures)}

    def close(self) -> bool:
        """End the threads; ``False`` if some hang in a request and are left behind."""
        hanging = self._pool.close()
        if hanging:
            _log.warning("tier %s: requests under way are left behind: %s", self._tier, ", ".join(hanging))
        return not hanging
