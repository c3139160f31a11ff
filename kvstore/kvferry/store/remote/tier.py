"""A tier over a remote store of values: what is the same for all of them.

A block is one value, its manifest with the data behind it, where the store takes values that large. Else its
data lies in parts, and the manifest is written when all of them are there: who finds no manifest finds no
block. Parts carry the number of their write in their names, so two writers of one block never mix.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, Generic, TypeVar, cast

from kvferry.core.block_events import BlockFeed
from kvferry.core.clock import is_past
from kvferry.core.errors import TierError
from kvferry.core.keys import BlockKey
from kvferry.core.recent import Recent
from kvferry.core.tenants import check_tenant
from kvferry.core.tier_plugins import TierOption
from kvferry.store.batch_checks import READ_COUNTERS, WRITE_COUNTERS, require_reads, require_writes
from kvferry.store.encoding import CODEC_OPTIONS, TierCodec
from kvferry.store.problems import Problems
from kvferry.store.remote.backend import Backend, Done
from kvferry.store.remote.home import Home
from kvferry.store.remote.index import Held, RemoteIndex
from kvferry.store.remote.listing import Finder, block_of, entries_of
from kvferry.store.remote.names import Names
from kvferry.store.remote.options import (
    RemoteOptions,
    describe_options,
    option_names,
    read_options,
    read_secret,
)
from kvferry.store.remote.reading import BlockReads, read_blocks
from kvferry.store.remote.removal import remove_blocks, unchanged
from kvferry.store.remote.writing import BlockWriter
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
from kvferry.store.unfit import UnfitBlocks

__all__ = ["RemoteTier"]

OptionsT = TypeVar("OptionsT", bound=RemoteOptions)
_log = logging.getLogger(__name__)
_COUNTERS: Final = (*READ_COUNTERS.values(), *WRITE_COUNTERS.values(), "evicted", "failed_lookups")


class RemoteTier(Tier, Generic[OptionsT]):
    """Keeps blocks in a remote store. See :class:`~kvferry.store.tier.Tier` for the contract of every verb.

    Others may use the same store: what it holds is asked each time (``indexed`` is ``False``), and the
    figures of :meth:`usage` are of what this process wrote, or found at the start.

    Args:
        name: Name of the tier.
        options: Of the subclass's :attr:`options_class`.
        codec: Encodes blocks on their way there; ``None``: they are stored as they are.

    Attributes:
        options_class: What its table in the configuration becomes.
        separator: Between the fields of a stored name.
        tag: Whether a name has its key in braces; see :class:`~kvferry.store.remote.names.Names`.

    Raises:
        ConfigError: If a file of a secret cannot be read, or the options cannot be used.
    """

    persistent = True
    indexed = False
    options_class: ClassVar[type[RemoteOptions]]
    separator: ClassVar[str] = "/"
    tag: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.option_names = (*option_names(cls.options_class), *CODEC_OPTIONS)

    def __init__(self, name: str, options: OptionsT, codec: TierCodec | None = None) -> None:
        self.name = name
        self.codec = TierCodec() if codec is None else codec
        self.takes_lossy = self.codec.accepts_lossy
        secret = read_secret(options.secret_file, f"tier {name}: secret_file")
        self.names = Names(options.prefix, secret, separator=self.separator, tag=self.tag)
        self.options = options
        self._problems = Problems(name, _log)
        self.backend = self.make_backend(options, self._problems)
        self.codec.announce(name)
        self._index = RemoteIndex(options.capacity_nbytes, name)
        self._unfit = UnfitBlocks[str]()
        self._newer = UnfitBlocks[str]()
        self._writer = BlockWriter(self.backend, self._index, options.part_nbytes, self.codec, self._unfit)
        self._homes = Recent(self._make_home)
        self._tenants: dict[str, str] = {}  # by their names there
        self._counts: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self._lock = threading.Lock()
        self._closed = False
        self._finder = (
            Finder(name, self.names, self.backend, self._index) if options.capacity_nbytes else None
        )

    @abstractmethod
    def make_backend(self, options: OptionsT, problems: Problems) -> Backend:
        """Where the values go, closed by :meth:`close`; it tells of its problems at ``problems``."""

    @classmethod
    def from_options(cls, name: str, options: Mapping[str, object]) -> RemoteTier[OptionsT]:
        """See :class:`~kvferry.store.tier.Tier`."""
        codec, rest = TierCodec.from_options(f"tier {name}", options)
        found: Any = read_options(cls.options_class, f"tier {name}", rest)
        return cls(name, cast("OptionsT", found), codec)

    @classmethod
    def describe_options(cls, name: str, options: Mapping[str, object]) -> list[TierOption]:
        """See :class:`~kvferry.store.tier.Tier`."""
        codec, rest = TierCodec.from_options(f"tier {name}", options)
        return [*describe_options(cls.options_class, f"tier {name}", rest), *codec.describe(options)]

    # -- the verbs -------------------------------------------------------------------------------------

    def open(self, namespace: TierNamespace) -> None:
        """See :class:`~kvferry.store.tier.Tier`."""
        self._home(namespace)

    def _make_home(self, namespace: TierNamespace) -> Home:
        check_tenant(namespace.tenant)
        self._tenants[self.names.tenant(namespace.tenant)] = namespace.tenant
        return Home.of(namespace, self.names)

    def contains(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, deadline: float) -> list[bool]:
        """See :class:`~kvferry.store.tier.Tier`. Asks the store; what cannot be told is not there."""
        home = self._home(namespace)
        if self._closed or not keys:
            return [False] * len(keys)
        names = [home.name(key) for key in keys]
        answers = self.backend.exists(names, deadline)
        failed = [answer for answer in answers if answer.done is Done.FAILED]
        if failed:
            self._count(["failed_lookups"] * len(failed))
        unfit, newer, takes = self._unfit, self._newer, self.codec.accepts_lossy
        return [
            answer.done is Done.OK
            and not unfit.has(name, takes_lossy=takes)
            and not newer.has(name, takes_lossy=takes)
            for name, answer in zip(names, answers, strict=True)
        ]

    def only_lossy(self, namespace: TierNamespace, keys: Sequence[BlockKey]) -> list[bool]:
        """See :class:`~kvferry.store.tier.Tier`. What was read or written here within the last minute."""
        home = self._home(namespace)
        return [self._unfit.has(home.name(key)) for key in keys]

    def read_into(
        self, namespace: TierNamespace, blocks: Sequence[BlockRead], *, deadline: float
    ) -> list[ReadResult]:
        """See :class:`~kvferry.store.tier.Tier`."""
        home = self._home(namespace)
        require_reads(blocks, home.template.data_nbytes)
        if (why := self._why_not(deadline)) is not None:
            return [ReadResult(ReadOutcome.FAILED, why)] * len(blocks)
        found = read_blocks(self.backend, home, self.codec, blocks, deadline)
        results = found.results
        hits = [n for n, r in zip(found.names, results, strict=True) if r.outcome is ReadOutcome.HIT]
        self._index.used(list(reversed(hits)))  # heads of chains count as used last
        self._unfit.add([name for name, lossy in found.unfit if lossy])
        self._unfit.add([name for name, lossy in found.unfit if not lossy], for_all=True)
        if found.newer:
            self._newer.add(found.newer, for_all=True)
            self._problems.incident(
                "blocks of a later release",
                f"{len(found.newer)} are misses here and left alone; upgrade this node",
            )
        if len(hits) < len(blocks):
            self._note_lost(found)
        if found.broken:
            broken = unchanged(self.backend, self.names, found.broken, deadline)
            broken = [self._index.forget(held.name) or held for held in broken]
            remove_blocks(self.backend, self.names, broken, deadline)
        self._count(READ_COUNTERS[result.outcome] for result in found.results)
        return found.results

    def _note_lost(self, found: BlockReads) -> None:
        # of use to others: a miss here, and never removed
        there = {name for name, _ in found.unfit} | set(found.newer)
        for name, result in zip(found.names, found.results, strict=True):
            if result.outcome is ReadOutcome.MISS and name not in there:
                self._index.forget(name)
            elif result.outcome is ReadOutcome.CORRUPT:
                self._problems.incident("corrupt block", f"{name}: {result.reason}")

    def write(
        self, namespace: TierNamespace, blocks: Sequence[BlockWrite], *, deadline: float
    ) -> list[WriteResult]:
        """See :class:`~kvferry.store.tier.Tier`."""
        home = self._home(namespace)
        require_writes(blocks, home.template.data_nbytes)
        if (why := self._why_not(deadline)) is not None:
            return [WriteResult(WriteOutcome.FAILED, why)] * len(blocks)
        results = self._writer.write(home, blocks, deadline)
        self._count(WRITE_COUNTERS[result.outcome] for result in results)
        return results

    def remove(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, deadline: float) -> list[bool]:
        """See :class:`~kvferry.store.tier.Tier`.

        Raises:
            TierError: If some could not be removed by the deadline.
        """
        home = self._home(namespace)
        if self._closed:
            return [False] * len(keys)
        names = [home.name(key) for key in keys]
        self._unfit.discard(names)
        self._newer.discard(names)
        there = None if self.backend.tells_deleted else self.backend.exists(names, deadline)
        gone = [self._index.forget(name) or Held(name, 0, None) for name in names]
        answers = remove_blocks(self.backend, self.names, gone, deadline)
        failed = [answer for answer in answers if answer.done is Done.FAILED]
        if failed:
            raise TierError(f"{len(failed)} of {len(keys)} blocks could not be removed: {failed[0].reason}")
        return [answer.done is Done.OK for answer in there or answers]

    def scan(self) -> Iterator[TierEntry]:
        """See :class:`~kvferry.store.tier.Tier`. Of the tenants whose namespaces were opened.

        Raises:
            TierError: If the store cannot tell.
        """
        return entries_of(self.names, self.backend, dict(self._tenants), self._index)

    def listen(self, tenant: str, feed: BlockFeed) -> dict[bytes, list[BlockKey]]:
        """See :class:`~kvferry.store.tier.Tier`. Of what this process wrote, or found at the start."""
        return self._index.listen(feed, partial(block_of, self.names, self.names.tenant(tenant)))

    def usage(self) -> TierUsage:
        """See :class:`~kvferry.store.tier.Tier`."""
        entries, used = self._index.usage()
        problems = dict(self.backend.problems())
        with self._lock:
            counters: dict[str, float] = {**self._counts, **self.backend.counters()}
        counters["evicted"] = float(self._index.evicted)
        return TierUsage(
            entries=entries,
            used_nbytes=used,
            capacity_nbytes=self.options.capacity_nbytes,
            healthy=not problems,
            counters={**counters, **self.codec.counters()},
            status={**self.backend.status(), **self.codec.status(), **problems},
            problems=problems,
        )

    def flush(self, *, deadline: float) -> bool:
        """See :class:`~kvferry.store.tier.Tier`. What counts as stored has been acknowledged there."""
        del deadline
        return True

    def close(self) -> None:
        """See :class:`~kvferry.store.tier.Tier`."""
        if self._closed:
            return
        self._closed = True
        self.backend.close()
        if self._finder is not None:
            self._finder.close()

    def wait_found(self, *, deadline: float) -> bool:
        """Wait until what lay there at the start is counted; ``False`` at the deadline."""
        return self._finder is None or self._finder.wait(deadline)

    # -- small things ----------------------------------------------------------------------------------

    def _why_not(self, deadline: float) -> str | None:
        if self._closed:
            return f"tier {self.name} is closed"
        return "not begun by the deadline" if is_past(deadline) else None

    def _count(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._counts[name] += 1

    def _home(self, namespace: TierNamespace) -> Home:
        return self._homes.get(namespace)
