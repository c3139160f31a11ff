"""The peer tier: other kvferry daemons, each with its share of the keys."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from kvferry.core.clock import is_past
from kvferry.core.errors import CapacityError, ConfigError, KVFerryError, TierError, UnavailableError
from kvferry.core.keys import BlockKey
from kvferry.core.recent import Recent
from kvferry.core.tenants import check_tenant
from kvferry.core.tier_plugins import TierOption
from kvferry.store.batch_checks import require_reads, require_writes
from kvferry.store.problems import Problems
from kvferry.store.remote.options import describe_options, option_names, read_options
from kvferry.store.remote.peer.asked import AskedPeer, PeerMaker
from kvferry.store.remote.peer.options import PeerOptions, peer_id
from kvferry.store.remote.peer.placement import Placement
from kvferry.store.tier import (
    UNKNOWN_PARENT,
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
from kvferry.store.unfit import UnfitBlocks

__all__ = ["PeerTier"]

_log = logging.getLogger(__name__)
T = TypeVar("T")
B = TypeVar("B", BlockRead, BlockWrite, BlockKey)

_COUNTERS: Final = (
    "hits", "misses", "corrupt_reads", "failed_reads", "stored", "present", "refused", "failed_writes",
    "failed_lookups", "peer_failures",
)  # fmt: skip
_MOST_REMEMBERED: Final = 100_000


class _Written(NamedTuple):
    """What is remembered of a block."""

    parent: BlockKey | None
    position: int
    lossy: bool


def _failed_at(peer: str) -> str:
    """The counter of requests that a peer failed or was away for; it is a name of the configuration."""
    return f"failed_at {peer}"


class PeerTier(Tier):
    """Keeps blocks at other daemons. See :class:`~kvferry.store.tier.Tier` for the contract of every verb.

    Each key has one peer. Peers are asked side by side, each with one batch. One that fails costs its own
    keys: they are misses, and are not stored there; only where all peers fail the tier does.

    What peers hold is asked each time (``indexed`` is ``False``); :meth:`usage` and :meth:`scan` are of what
    this process wrote.

    Args:
        name: Name of the tier.
        options: See :class:`~kvferry.store.remote.peer.options.PeerOptions`.
        peers: Makes what the peers are asked with; may come later, by :meth:`connect`.
    """

    option_names = option_names(PeerOptions)
    indexed = False
    takes_lossy = True
    to_daemons = True

    def __init__(self, name: str, options: PeerOptions, peers: PeerMaker | None = None) -> None:
        self.name = name
        self.options = options
        self.peers: list[AskedPeer] = []
        addresses = options.addresses()
        self.urls = [str(address) for address in addresses]
        self._ids = [peer_id(address) for address in addresses]
        self.placement = Placement(self._ids)
        self._problems = Problems(name, _log)
        self._written: OrderedDict[tuple[TierNamespace, BlockKey], _Written] = OrderedDict()
        self._lossy = UnfitBlocks[tuple[TierNamespace, BlockKey]]()
        self._used = 0
        self._known = Recent(self._check)
        self._counts: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self._counts.update(dict.fromkeys(map(_failed_at, self._ids), 0))
        self._failing: dict[int, str] = {}
        self._lock = threading.Lock()
        self._closed = False
        if peers is not None:
            self.connect(peers)

    def connect(self, peers: PeerMaker | None) -> None:
        """Take what the peers are asked with. Nobody is asked yet.

        Raises:
            ConfigError: If there is nothing, since no daemon runs here.
        """
        if peers is None:
            raise ConfigError(f"tier {self.name}: peers are asked by a daemon; run kvferry serve")
        options = self.options
        self.peers = [
            peers(url, connections=options.connections, timeout_s=options.timeout_s) for url in self.urls
        ]

    @classmethod
    def from_options(cls, name: str, options: Mapping[str, object]) -> PeerTier:
        """See :class:`~kvferry.store.tier.Tier`; :meth:`connect` must follow."""
        return cls(name, read_options(PeerOptions, f"tier {name}", options))

    @classmethod
    def describe_options(cls, name: str, options: Mapping[str, object]) -> list[TierOption]:
        """See :class:`~kvferry.store.tier.Tier`."""
        return describe_options(PeerOptions, f"tier {name}", options)

    # -- the verbs -------------------------------------------------------------------------------------

    def open(self, namespace: TierNamespace) -> None:
        """See :class:`~kvferry.store.tier.Tier`.

        Raises:
            ConfigError: If its names cannot be told to a peer.
        """
        self._known.get(namespace)

    def _check(self, namespace: TierNamespace) -> bool:
        check_tenant(namespace.tenant)
        spec, scope = namespace.spec, namespace.scope
        for text in (
            spec.model,
            spec.revision,
            spec.group,
            spec.layout,
            scope.adapter,
            scope.adapter_revision,
        ):
            try:
                (text or "").encode()
            except UnicodeEncodeError as error:
                raise ConfigError(f"tier {self.name}: {text!a} cannot be told to a peer: {error}") from error
        return True

    def contains(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, deadline: float) -> list[bool]:
        """See :class:`~kvferry.store.tier.Tier`. Asks the peers; what cannot be told is not there."""
        self._known.get(namespace)
        found = [False] * len(keys)
        if self._closed or is_past(deadline):
            return found

        def ask(peer: AskedPeer, mine: Sequence[BlockKey], limit: float) -> list[bool]:
            return peer.has(namespace, mine, limit)

        def failed(count: int, error: KVFerryError) -> list[bool]:
            del error
            self._count("failed_lookups", count)
            return [False] * count

        return self._at_peers(keys, keys, ask, failed, deadline)

    def only_lossy(self, namespace: TierNamespace, keys: Sequence[BlockKey]) -> list[bool]:
        """See :class:`~kvferry.store.tier.Tier`. What was seen at peers within the last minute."""
        return [self._lossy.has((namespace, key)) for key in keys]

    def read_into(
        self, namespace: TierNamespace, blocks: Sequence[BlockRead], *, deadline: float
    ) -> list[ReadResult]:
        """See :class:`~kvferry.store.tier.Tier`."""
        self._known.get(namespace)
        require_reads(blocks, namespace.spec.block_nbytes)
        if (why := self._why_not(deadline)) is not None:
            return [ReadResult(ReadOutcome.FAILED, why)] * len(blocks)

        def ask(peer: AskedPeer, mine: Sequence[BlockRead], limit: float) -> list[ReadResult]:
            results = peer.read(namespace, mine, limit)
            wrong = [_compared(block, result) for block, result in zip(mine, results, strict=True)]
            corrupt = [b.key for b, r in zip(mine, wrong, strict=True) if r.outcome is ReadOutcome.CORRUPT]
            if corrupt:
                self._problems.incident("corrupt block", f"{len(corrupt)} with another parent than asked")
                peer.remove(namespace, corrupt, limit)
            return wrong

        def failed(count: int, error: KVFerryError) -> list[ReadResult]:
            outcome = ReadOutcome.FAILED if self._all_fail() else ReadOutcome.MISS
            self._count("failed_reads", count)
            return [ReadResult(outcome, str(error))] * count

        results = self._at_peers(blocks, [block.key for block in blocks], ask, failed, deadline)
        outcomes = Counter(
            result.outcome for result in results if not result.reason or result.outcome is _CORRUPT
        )
        self._count("hits", outcomes[ReadOutcome.HIT])
        self._count("misses", outcomes[ReadOutcome.MISS])
        self._count("corrupt_reads", outcomes[_CORRUPT])
        self._lossy.add((namespace, b.key) for b, r in zip(blocks, results, strict=True) if r.lossy)
        for block, result in zip(blocks, results, strict=True):
            if result.outcome is _CORRUPT or (result.outcome is ReadOutcome.MISS and not result.reason):
                self._forget_one(namespace, block.key)
        return results

    def write(
        self, namespace: TierNamespace, blocks: Sequence[BlockWrite], *, deadline: float
    ) -> list[WriteResult]:
        """See :class:`~kvferry.store.tier.Tier`."""
        self._known.get(namespace)
        require_writes(blocks, namespace.spec.block_nbytes)
        if (why := self._why_not(deadline)) is not None:
            return [WriteResult(WriteOutcome.FAILED, why)] * len(blocks)
        unique = list({block.key: block for block in reversed(blocks)}.values())[::-1]

        def ask(peer: AskedPeer, mine: Sequence[BlockWrite], limit: float) -> list[WriteResult]:
            try:
                stored = peer.write(namespace, mine, limit)
            except UnavailableError:
                raise
            except CapacityError as error:
                return [WriteResult(WriteOutcome.REFUSED, str(error))] * len(mine)
            return [_STORED if new else _PRESENT for new in stored]

        def failed(count: int, error: KVFerryError) -> list[WriteResult]:
            outcome = WriteOutcome.FAILED if self._all_fail() else WriteOutcome.REFUSED
            self._count("failed_writes", count)
            return [WriteResult(outcome, str(error))] * count

        found = self._at_peers(unique, [block.key for block in unique], ask, failed, deadline)
        by_key = {block.key: result for block, result in zip(unique, found, strict=True)}
        self._remember(namespace, unique, found)
        results = []
        for block in blocks:
            results.append(by_key[block.key])
            if results[-1] is _STORED:
                by_key[block.key] = _PRESENT
        return results

    def remove(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, deadline: float) -> list[bool]:
        """See :class:`~kvferry.store.tier.Tier`.

        Raises:
            TierError: If some could not be removed by the deadline.
        """
        self._known.get(namespace)
        if self._closed:
            return [False] * len(keys)
        errors: list[KVFerryError] = []

        def ask(peer: AskedPeer, mine: Sequence[BlockKey], limit: float) -> list[bool]:
            held = peer.remove(namespace, mine, limit)
            for key in mine:
                self._forget_one(namespace, key)
            return held

        def failed(count: int, error: KVFerryError) -> list[bool]:
            errors.append(error)
            return [False] * count

        found = self._at_peers(keys, keys, ask, failed, deadline)
        if errors:
            raise TierError(f"not all of {len(keys)} blocks could be removed at the peers: {errors[0]}")
        return found

    def scan(self) -> Iterator[TierEntry]:
        """See :class:`~kvferry.store.tier.Tier`. What this process wrote."""
        with self._lock:
            written = list(self._written.items())
        for (space, key), about in written:
            yield TierEntry(
                space.tenant, space.namespace_id, key, space.spec.block_nbytes, about.parent, about.position,
                verified=True, lossy=about.lossy,
            )  # fmt: skip

    def usage(self) -> TierUsage:
        """See :class:`~kvferry.store.tier.Tier`. ``entries`` and ``used_nbytes`` are of what was written."""
        away = {url: peer.away for url, peer in zip(self.urls, self.peers, strict=False)}
        with self._lock:
            counters = {name: float(count) for name, count in self._counts.items()}
            entries, used = len(self._written), self._used
        problems = {f"peer {url}": why for url, why in away.items() if why}
        return TierUsage(
            entries=entries,
            used_nbytes=used,
            healthy=not problems,
            counters=counters,
            status={"peers": " ".join(self.urls), **problems},
            problems=problems,
        )

    def flush(self, *, deadline: float) -> bool:
        """See :class:`~kvferry.store.tier.Tier`. What counts as stored is at the peer, in its memory."""
        del deadline
        return True

    def close(self) -> None:
        """See :class:`~kvferry.store.tier.Tier`."""
        if self._closed:
            return
        self._closed = True
        for peer in self.peers:
            peer.close()

    # -- asking ----------------------------------------------------------------------------------------

    def _at_peers(
        self,
        items: Sequence[B],
        keys: Sequence[BlockKey],
        ask: Callable[[AskedPeer, Sequence[B], float], list[T]],
        failed: Callable[[int, KVFerryError], list[T]],
        deadline: float,
    ) -> list[T]:
        """Ask each peer for its share, side by side; the answers in the order of the items."""
        if not self.peers:
            raise ConfigError(f"tier {self.name} was not connected: see PeerTier.connect")
        shares: dict[int, list[int]] = {}
        for index, key in enumerate(keys):
            shares.setdefault(self.placement.owner(key), []).append(index)
        limit = min(deadline, time.monotonic() + self.options.timeout_s)
        answers: dict[int, list[T] | KVFerryError] = {}

        def one(number: int) -> None:
            try:
                answers[number] = ask(self.peers[number], [items[i] for i in shares[number]], limit)
            except KVFerryError as error:
                answers[number] = error
            except Exception as error:  # noqa: BLE001 - root of a thread: it must give an answer
                _log.exception("tier %s: asking %s", self.name, self.urls[number])
                answers[number] = TierError(f"asking {self.urls[number]} failed: {error!r}")

        others = list(shares)[1:]
        threads = [
            threading.Thread(target=one, args=(number,), name=f"kvferry-peer-{self.name}", daemon=True)
            for number in others
        ]
        for thread in threads:
            thread.start()
        for number in list(shares)[:1]:
            one(number)
        for thread in threads:  # each ends by the limit
            thread.join()
        self._judge(answers)
        found: dict[int, T] = {}
        for number, mine in shares.items():
            answer = answers[number]
            if isinstance(answer, KVFerryError):
                answer = failed(len(mine), answer)
            found.update(zip(mine, answer, strict=True))
        return [found[index] for index in range(len(items))]

    def _judge(self, answers: Mapping[int, object]) -> None:
        """Note which peers work; one that is away was told of by its client."""
        for number, answer in answers.items():
            if not isinstance(answer, KVFerryError):
                with self._lock:
                    self._failing.pop(number, None)
                continue
            with self._lock:
                self._failing[number] = str(answer)
            self._count(_failed_at(self._ids[number]), 1)
            if not isinstance(answer, UnavailableError):
                self._count("peer_failures", 1)
                self._problems.incident(f"peer {self.urls[number]}", str(answer))

    def _all_fail(self) -> bool:
        """Whether no peer is known to work: what one fails is that one's, and not the tier's."""
        with self._lock:
            return len(self._failing) == len(self.peers)

    # -- small things ----------------------------------------------------------------------------------

    def _remember(
        self, namespace: TierNamespace, blocks: Sequence[BlockWrite], results: Sequence[WriteResult]
    ) -> None:
        counts = Counter(r.outcome for r in results)
        self._count("stored", counts[WriteOutcome.STORED])
        self._count("present", counts[WriteOutcome.PRESENT])
        self._count("refused", counts[WriteOutcome.REFUSED])
        for block, result in zip(blocks, results, strict=True):
            if result.outcome in (WriteOutcome.STORED, WriteOutcome.PRESENT):
                change = self._lossy.add if block.lossy else self._lossy.discard
                change([(namespace, block.key)])
        with self._lock:
            for block, result in zip(blocks, results, strict=True):
                if result.outcome is WriteOutcome.STORED and (namespace, block.key) not in self._written:
                    about = _Written(block.parent, block.position, block.lossy)
                    self._written[namespace, block.key] = about
                    self._used += namespace.spec.block_nbytes
            while len(self._written) > _MOST_REMEMBERED:
                (space, _), _ = self._written.popitem(last=False)
                self._used -= space.spec.block_nbytes

    def _forget_one(self, namespace: TierNamespace, key: BlockKey) -> None:
        with self._lock:
            if self._written.pop((namespace, key), None) is not None:
                self._used -= namespace.spec.block_nbytes

    def _count(self, name: str, number: int) -> None:
        if number:
            with self._lock:
                self._counts[name] += number

    def _why_not(self, deadline: float) -> str | None:
        if self._closed:
            return f"tier {self.name} is closed"
        return "not begun by the deadline" if is_past(deadline) else None


_STORED: Final = WriteResult(WriteOutcome.STORED)
_PRESENT: Final = WriteResult(WriteOutcome.PRESENT)
_CORRUPT: Final = ReadOutcome.CORRUPT


def _compared(block: BlockRead, result: ReadResult) -> ReadResult:
    """A hit whose stored parent is another one than asked for is corrupt."""
    if result.outcome is not ReadOutcome.HIT or block.parent in (UNKNOWN_PARENT, result.parent):
        return result
    return ReadResult(_CORRUPT, "stored with another parent than asked for")
