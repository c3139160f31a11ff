"""A slower tier as the store uses it: its policies, its breakers, its counts, and its faults contained."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvferry.core.block_events import BlockFeed
from kvferry.core.cause import kind_of
from kvferry.core.errors import ConfigError, KVFerryError, TierError
from kvferry.core.interrupts import from_signal_handler
from kvferry.core.keys import BlockKey
from kvferry.core.values import require_number, require_whole
from kvferry.store.breaker import Breaker
from kvferry.store.hands import UNKNOWN, drop_frames, trace_of
from kvferry.store.hidden import Hidden
from kvferry.store.policies import (
    AdmissionPolicy,
    AlwaysAdmit,
    AlwaysPromote,
    PromotionPolicy,
    WritePolicy,
    WriteThrough,
    require_policies,
)
from kvferry.store.tier import (
    BlockRead,
    BlockWrite,
    ReadOutcome,
    ReadResult,
    Tier,
    TierEntry,
    TierNamespace,
    TierUsage,
    WriteOutcome,
    WriteResult,
)

__all__ = ["Level", "LevelOptions", "end_levels", "with_options"]

_LOG = logging.getLogger(__name__)
_PATIENCE_S = 0.5  # a tier that was given less time than this and was late is not to blame
_NEVER = float("inf")
_BROKEN = "the tier broke its contract"
T = TypeVar("T")
_READ_WORKS = frozenset({ReadOutcome.HIT, ReadOutcome.CORRUPT})
_WRITE_WORKS = frozenset({WriteOutcome.STORED, WriteOutcome.REFUSED})
_COUNTS = (  # always shown: a counter that appears with its first event is hard to watch
    *(f"read_{outcome.value}" for outcome in ReadOutcome),
    *(f"write_{outcome.value}" for outcome in WriteOutcome),
    *("read_skipped", "write_skipped", "write_dropped", "write_dropped_nbytes"),
    *("promoted", "remove_failed", "faults"),
)


@dataclass(frozen=True)
class LevelOptions:
    """How the store uses one slower tier.

    Attributes:
        write: When blocks are written to it, and what happens when its queue is full.
        admission: Which blocks are written to it.
        promotion: Which blocks read from it stay in memory.
        queue_nbytes: Most bytes queued for it; at least one block is always taken.
        errors: Failures in a row that open its breaker for reads, or that for writes.
        pause_s: Seconds before it is tried again.
        lookup_timeout_s: Longest wait for its answer to a lookup.
        read_timeout_s: Longest wait for a read, if the caller's deadline is not sooner.
        write_timeout_s: Longest wait for a write in the background.
    """

    write: WritePolicy = field(default_factory=WriteThrough)
    admission: AdmissionPolicy = field(default_factory=AlwaysAdmit)
    promotion: PromotionPolicy = field(default_factory=AlwaysPromote)
    queue_nbytes: int = 256 << 20
    errors: int = 3
    pause_s: float = 1.0
    lookup_timeout_s: float = 1.0
    read_timeout_s: float = 30.0
    write_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        require_policies(self.write, self.admission, self.promotion)
        require_whole("queue_nbytes", self.queue_nbytes, least=1)
        require_whole("errors", self.errors, least=1)
        for name in ("pause_s", "lookup_timeout_s", "read_timeout_s", "write_timeout_s"):
            require_number(name, getattr(self, name), above=0)


def with_options(tiers: Sequence[object]) -> list[tuple[Tier, LevelOptions]]:
    """Each tier with how it is used, given alone or as a pair.

    Raises:
        ConfigError: If one is none; the others are closed.
    """
    pairs: list[tuple[Tier, LevelOptions]] = []
    wrong: list[object] = []
    for given in tiers:
        tier, used = given if isinstance(given, tuple) and len(given) == 2 else (given, LevelOptions())
        if not isinstance(used, LevelOptions) or not isinstance(tier, Tier):
            wrong.append(given)
        if isinstance(tier, Tier):
            pairs.append((tier, used))
    if wrong:
        for tier, _ in pairs:
            tier.close()
        raise ConfigError(f"tiers has {wrong[0]!r}, must be a Tier, alone or with its LevelOptions")
    return pairs


class Level:
    """One slower tier, with its faults contained: whatever it does, the calls here return a result a key.

    Reads and writes have a breaker each: a device that has turned read-only goes on giving what it has.

    Thread safe. No call is made under the store's lock, but for :attr:`Breaker.ready`, the policies and
    :attr:`hidden`.

    Args:
        tier: The tier; closed by :meth:`close`.
        number: Its place among the slower tiers, from 0.
        options: See :class:`LevelOptions`.

    Attributes:
        hidden: Removed blocks that are not shown, though it may hold them.
        reads: The breaker of lookups and reads.
        writes: The breaker of writes; removals are always tried.
    """

    def __init__(self, tier: Tier, number: int, options: LevelOptions) -> None:
        self.tier = tier
        self.name = tier.name
        self.number = number
        self.bit = 1 << number
        self.options = options
        self.hidden = Hidden(tier.name)
        self.reads, self.writes = (
            Breaker(
                tier.name,
                work=work,
                errors=options.errors,
                pause_s=options.pause_s,
                max_pause_s=60 * options.pause_s,
            )
            for work in ("reads", "writes")
        )
        self._counts: Counter[str] = Counter(dict.fromkeys(_COUNTS, 0))
        self._lock = threading.Lock()
        self._told = False

    def figures(self) -> dict[str, float]:
        """Gauges and counters for ``stats``: the tier's own, and what the store counts of its calls."""
        usage = self.usage()
        return {
            "entries": float(usage.entries),
            "used_nbytes": float(usage.used_nbytes),
            "capacity_nbytes": float(usage.capacity_nbytes),
            "healthy": float(usage.healthy and not (self.reads.is_open or self.writes.is_open)),
            "reads_work": float(not self.reads.is_open),
            "writes_work": float(not self.writes.is_open),
            "read_breaker_opened": float(self.reads.opened),
            "write_breaker_opened": float(self.writes.opened),
            **{name: float(count) for name, count in usage.counters.items()},
            **{name: float(count) for name, count in self.counts.items()},
        }

    def problems(self) -> dict[str, str]:
        """What does not work now, and why, by what it is about: ``reads``, ``writes``, a server."""
        found = dict(self.usage().problems)
        known = {kind_of(reason) for reason in found.values()}
        for breaker in (self.reads, self.writes):
            if (reason := breaker.reason) and kind_of(reason) not in known:
                found[breaker.work] = reason
        return found

    @property
    def counts(self) -> dict[str, int]:
        """Counts by name, as they are now; also those that are 0."""
        with self._lock:
            return dict(self._counts)

    def count(self, name: str, number: int = 1) -> None:
        """Add to a count."""
        with self._lock:
            self._counts[name] += number

    # ---- verbs -------------------------------------------------------------------------------------

    def open(self, namespace: TierNamespace) -> None:
        """Tell the tier of a namespace."""
        self._contained("open", self.tier.open, namespace)

    def contains(
        self,
        namespace: TierNamespace,
        keys: Sequence[BlockKey],
        deadline: float = _NEVER,
        *,
        takes_lossy: bool = True,
    ) -> list[bool]:
        """Whether each key can be had from the tier; none while its breaker for reads is open."""
        nothing = [False] * len(keys)
        if not keys or not self.reads.ready:
            return nothing
        deadline = min(deadline, time.monotonic() + self.options.lookup_timeout_s)
        found = self._answers(
            "contains", bool, len(keys), self.tier.contains, namespace, keys, deadline=deadline
        )
        if found is None:
            self.reads.leave(failures=1, successes=0, reason=f"{self.name} could not tell what it holds")
            return nothing
        hidden = self.hidden.among(namespace.namespace_id, keys)
        if hidden:
            found = [f and k not in hidden for f, k in zip(found, keys, strict=True)]
        if not takes_lossy and True in found:
            lossy = self._answers("only_lossy", bool, len(keys), self.tier.only_lossy, namespace, keys)
            found = [f and not n for f, n in zip(found, lossy or [True] * len(keys), strict=True)]
        return found

    def read(
        self, namespace: TierNamespace, blocks: Sequence[BlockRead], *, deadline: float
    ) -> list[ReadResult]:
        """Read blocks; one result a block. One that is being removed is a miss, though it was seen."""
        hidden = self.hidden.among(namespace.namespace_id, [block.key for block in blocks])
        if not hidden:
            return self._read(namespace, blocks, deadline)
        shown = [block for block in blocks if block.key not in hidden]
        results = iter(self._read(namespace, shown, deadline) if shown else ())
        gone = ReadResult(ReadOutcome.MISS, "it is being removed")
        return [gone if block.key in hidden else next(results) for block in blocks]

    def _read(
        self, namespace: TierNamespace, blocks: Sequence[BlockRead], deadline: float
    ) -> list[ReadResult]:
        if not self.reads.enter():
            self.count("read_skipped", len(blocks))
            return [ReadResult(ReadOutcome.FAILED, "its breaker for reads is open")] * len(blocks)
        started = time.monotonic()
        deadline = min(deadline, started + self.options.read_timeout_s)
        results: list[ReadResult] | None = None
        try:
            results = self._answers(
                "read", ReadResult, len(blocks), self.tier.read_into, namespace, blocks, deadline=deadline
            )
        except BaseException:
            self.reads.leave(failures=0, successes=0)  # the caller's own exception: nothing was learnt
            raise
        if results is None:
            results = [ReadResult(ReadOutcome.FAILED, _BROKEN, in_flight=UNKNOWN)] * len(blocks)
        for outcome, number in Counter(r.outcome for r in results).items():
            self.count(f"read_{outcome.value}", number)
        failed = [r for r in results if r.outcome is ReadOutcome.FAILED]
        works = sum(r.outcome in _READ_WORKS for r in results)
        self._judge(self.reads, len(failed), works, failed[0].reason if failed else "", started, deadline)
        return results

    def write(self, namespace: TierNamespace, blocks: Sequence[BlockWrite]) -> list[WriteResult]:
        """Write blocks; one result a block, whatever the tier does."""
        if not self.writes.enter():
            self.count("write_skipped", len(blocks))
            return [WriteResult(WriteOutcome.FAILED, "its breaker for writes is open")] * len(blocks)
        started = time.monotonic()
        deadline = started + self.options.write_timeout_s
        results = self._answers(
            "write", WriteResult, len(blocks), self.tier.write, namespace, blocks, deadline=deadline
        )
        if results is None:
            results = [WriteResult(WriteOutcome.FAILED, _BROKEN, UNKNOWN)] * len(blocks)
        for outcome, number in Counter(r.outcome for r in results).items():
            self.count(f"write_{outcome.value}", number)
        failed = [r for r in results if r.outcome is WriteOutcome.FAILED]
        works = sum(r.outcome in _WRITE_WORKS for r in results)
        self._judge(self.writes, len(failed), works, failed[0].reason if failed else "", started, deadline)
        return results

    def remove(
        self, namespace: TierNamespace, keys: Sequence[BlockKey], deadline: float = _NEVER
    ) -> list[bool]:
        """Forget blocks; asked also while a breaker is open, since a removed block must not come back."""
        deadline = min(deadline, time.monotonic() + self.options.write_timeout_s)
        found = self._answers("remove", bool, len(keys), self.tier.remove, namespace, keys, deadline=deadline)
        if found is None:
            self.hidden.keep(namespace.namespace_id, keys)
            self.count("remove_failed", len(keys))
            return [False] * len(keys)
        self.hidden.stored(namespace.namespace_id, keys)  # nothing is left that would have to be hidden
        return found

    def forget(self, namespace: TierNamespace) -> None:
        """All of a namespace is being removed, also what :meth:`entries` does not name."""
        self._contained("forget", self.tier.forget, namespace)

    def entries(self, namespace: TierNamespace) -> list[BlockKey]:
        """Keys of all blocks that the tier knows of in one namespace, which are about to be removed.

        If it can't tell, none of those that it has now is shown again.
        """
        found = self.keys(namespace)
        if found is None:
            self.hidden.keep_all(namespace.namespace_id)
        else:
            self.hidden.named(namespace.namespace_id)
        return found or []

    def keys(self, namespace: TierNamespace) -> list[BlockKey] | None:
        """Keys of all blocks that the tier knows of in one namespace; ``None`` if it can't tell."""

        def scan() -> list[BlockKey]:
            wanted = (namespace.tenant, namespace.namespace_id)
            found: Iterator[TierEntry] = self.tier.scan()
            return [e.key for e in found if (e.tenant, e.namespace_id) == wanted]

        return self._contained("scan", scan)

    def listen(self, tenant: str, feed: BlockFeed) -> dict[bytes, list[BlockKey]] | None:
        """See :meth:`Tier.listen`."""
        return self._contained("listen", self.tier.listen, tenant, feed)

    def found_namespaces(self) -> list[TierNamespace]:
        """See :meth:`Tier.found_namespaces`."""
        return self._contained("found_namespaces", self.tier.found_namespaces) or []

    def pin(self, namespace: TierNamespace, keys: Sequence[BlockKey], until: float) -> list[bool]:
        """Keep held blocks from eviction; whether each is kept."""
        nothing = [False] * len(keys)
        found = self._answers("pin", bool, len(keys), self.tier.pin, namespace, keys, until=until)
        return nothing if found is None else found

    def unpin(self, namespace: TierNamespace, keys: Sequence[BlockKey]) -> None:
        """End :meth:`pin` early."""
        self._contained("unpin", self.tier.unpin, namespace, keys)

    def resize(self, capacity_nbytes: int) -> None:
        """See :meth:`Tier.resize`."""
        self._contained("resize", self.tier.resize, capacity_nbytes)

    def usage(self) -> TierUsage:
        """What the tier holds and how it goes."""
        found = self._contained("usage", self.tier.usage)
        if isinstance(found, TierUsage):
            return found
        return TierUsage(healthy=False, problems={"usage": "it could not tell how it goes"})

    def flush(self, deadline: float) -> bool:
        """Make durable what was stored; ``False`` if not."""
        return bool(self._contained("flush", self.tier.flush, deadline=deadline))

    def close(self) -> None:
        """Close the tier."""
        self._contained("close", self.tier.close)

    # ---- faults --------------------------------------------------------------------------------------

    def _contained(self, verb: str, call: Callable[..., T], *args: object, **kwargs: object) -> T | None:
        """Make ``call``; an exception of the tier's, which is against its contract, is counted and said once.

        What a signal handler raised, or what is no ``Exception``, is the caller's and goes on to it. No
        closures: the frames of an exception that somebody keeps can be cleared, but not what they close over.
        """
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            # in a thread of ours nobody but the tier can have raised it, SystemExit included
            if not threading.current_thread().name.startswith("kvferry-") and from_signal_handler(error):
                raise
            self._fault(verb, error)
            return None

    def _answers(
        self,
        verb: str,
        kind: type[T],
        count: int,
        call: Callable[..., list[T]],
        *args: object,
        **kwargs: float,
    ) -> list[T] | None:
        """As :meth:`_contained`, for a verb that gives ``count`` answers of a kind."""
        return self._contained(verb, _checked, kind, count, call, *args, **kwargs)

    def _fault(self, verb: str, error: BaseException) -> None:
        self.count("faults", 1)
        if not self._told:
            self._told = True
            trace = "" if isinstance(error, KVFerryError | OSError) else f"\n{trace_of(error)}"
            _LOG.error(
                "tier %s raised in %s, against its contract; further ones are only counted: %s: %s%s",
                self.name, verb, type(error).__name__, str(error), trace,  # a record must not keep its frames
            )  # fmt: skip
        drop_frames(error)

    def _judge(
        self, breaker: Breaker, failures: int, works: int, reason: str, started: float, deadline: float
    ) -> None:
        if failures and time.monotonic() >= deadline and deadline - started < _PATIENCE_S:
            failures = 0
        told = failures > 0 and breaker.is_open and bool(self.usage().problems)
        breaker.leave(failures=failures, successes=works, reason=reason, told=told)


def end_levels(levels: Sequence[Level], deadline: float, last: float) -> None:
    """Flush and close all tiers side by side: one that hangs must not keep the others.

    Args:
        levels: The tiers.
        deadline: By when they are to be flushed.
        last: Until when they are waited for.
    """

    def end(level: Level) -> None:
        level.flush(deadline)
        level.close()  # what still runs in it fails now

    threads = [
        threading.Thread(target=end, args=(level,), name=f"kvferry-close-{level.name}", daemon=True)
        for level in levels
    ]
    for thread in threads:
        thread.start()
    for thread, level in zip(threads, levels, strict=True):
        thread.join(max(0.0, last - time.monotonic()))
        if thread.is_alive():
            _LOG.warning("tier %s does not close; it is left to end by itself", level.name)


def _checked(
    kind: type[T], count: int, call: Callable[..., list[T]], *args: object, **kwargs: float
) -> list[T]:
    found = call(*args, **kwargs)
    if len(found) != count or (kind is not bool and not all(isinstance(f, kind) for f in found)):
        kinds = sorted({type(f).__name__ for f in found})
        raise TierError(f"{count} answers were asked for, it gave {len(found)}: {', '.join(kinds)}")
    return found
