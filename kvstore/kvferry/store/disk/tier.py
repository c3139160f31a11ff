"""The disk tier: one safetensors file a block, in one or several directories."""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from operator import itemgetter

from kvferry.core.block_events import BlockFeed
from kvferry.core.clock import deadline_in, time_left
from kvferry.core.errors import ConfigError
from kvferry.core.eviction import EvictionPolicy, LRUPolicy
from kvferry.core.keys import BlockKey
from kvferry.core.log import LogLimiter
from kvferry.core.recent import Recent
from kvferry.store.batch_checks import READ_COUNTERS, WRITE_COUNTERS, require_reads, require_writes
from kvferry.store.disk.batches import (
    Missing,
    collect,
    placed,
    share_of,
    shares_of,
)  # fmt: skip
from kvferry.store.disk.blocks import BlockReader
from kvferry.store.disk.entries import DiskEntry, NamespaceIndex
from kvferry.store.disk.files import Files, reason_of
from kvferry.store.disk.found import found_namespaces
from kvferry.store.disk.header import HeaderTemplate
from kvferry.store.disk.index import DiskIndex
from kvferry.store.disk.maintenance import Maintenance
from kvferry.store.disk.names import tenant_folder
from kvferry.store.disk.options import DiskOptions
from kvferry.store.disk.places import require_apart
from kvferry.store.disk.probe import PROBE_NBYTES
from kvferry.store.disk.reads import read_blocks
from kvferry.store.disk.root import Root
from kvferry.store.disk.scan import FoundBlock
from kvferry.store.disk.state import DiskState, Home
from kvferry.store.disk.writes import Writes, least_room
from kvferry.store.encoding import CODEC_OPTIONS, TierCodec
from kvferry.store.io_pool import IoPool
from kvferry.store.policies import eviction_policy
from kvferry.store.problems import Problems
from kvferry.store.tier import (
    UNKNOWN_PARENT,
    BlockRead,
    BlockWrite,
    ReadOutcome,
    ReadResult,
    Tier,
    TierEntry,
    TierNamespace,
    TierOption,
    TierUsage,
    WriteOutcome,
    WriteResult,
)

__all__ = ["DiskTier"]

_log = logging.getLogger(__name__)


class DiskTier(Tier):
    """Keeps blocks in files. See :class:`~kvferry.store.tier.Tier` for the contract of every verb.

    What it holds is known when the constructor returns; headers are compared in the background, and always
    before a block is served. A directory that cannot be used costs its blocks and nothing else; it is tried
    again every ``retry_s`` seconds.

    Args:
        name: Name of the tier.
        options: See :class:`DiskOptions`.
        policy: Makes the eviction policy from the capacity in bytes; ``None``: that named in the options.
        files: System calls; for tests.
        codec: Encodes blocks on their way to files; ``None``: they are stored as they are.

    Raises:
        TierError: If another store uses one of the directories, or one that lies inside of it or around it.
        ConfigError: If two of the directories are the same, or one lies inside another, or there is no
            eviction policy of that name.
    """

    persistent = True
    indexed = True
    option_names = (
        "directory",
        *(f.name.removesuffix("_nbytes") for f in fields(DiskOptions)),
        *CODEC_OPTIONS,
    )

    def __init__(
        self,
        name: str,
        options: DiskOptions,
        *,
        policy: Callable[[int], EvictionPolicy] | None = None,
        files: Files | None = None,
        codec: TierCodec | None = None,
    ) -> None:
        require_apart(options.directories)
        self.name = name
        self.options = options
        self.codec = TierCodec() if codec is None else codec
        self.takes_lossy = self.codec.accepts_lossy
        self._closed = False
        self._notes: dict[str, str] = {}
        self.files = files or Files()
        problems = Problems(name, _log)
        self.codec.announce(name)
        if policy is None:
            policy = LRUPolicy if options.eviction == "lru" else eviction_policy(options.eviction)
        index = DiskIndex(options.capacity_nbytes, policy(options.capacity_nbytes), name)
        roots = [
            Root(number, path, self.files, problems, lambda n: index.release(-n), options)
            for number, path in enumerate(options.directories)
        ]
        for root in roots:
            index.drop_root(root.number)  # until it was looked through
        self._state = DiskState(options, self.files, index, roots, problems, self.codec)
        self._writes = Writes(self._state)
        self._limiter = LogLimiter(_log)
        self._told = Recent(self._tell)
        self._readers = IoPool(f"kvferry-{name}-read", options.read_threads)
        # one more gets ready while the others write
        ready = int(self._state.runs is not None and options.write_threads > 1)
        self._writers = IoPool(f"kvferry-{name}-write", options.write_threads + ready)
        self._maintenance = Maintenance(name, self._state, self._readers, self._start_root)
        self._state.wake, self._state.shrunk = self._maintenance.wake, self._compare_blocks
        try:
            self._maintenance.start(self._start_all())
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_options(cls, name: str, options: Mapping[str, object]) -> DiskTier:
        """Build the tier from its table in the configuration.

        See :meth:`DiskOptions.from_mapping` and :meth:`~kvferry.store.encoding.TierCodec.from_options`.
        """
        codec, rest = TierCodec.from_options(f"tier {name}", options)
        return cls(name, DiskOptions.from_mapping(f"tier {name}", rest), codec=codec)

    @classmethod
    def describe_options(cls, name: str, options: Mapping[str, object]) -> list[TierOption]:
        """See :class:`~kvferry.store.tier.Tier`."""
        codec, rest = TierCodec.from_options(f"tier {name}", options)
        found = DiskOptions.describe(f"tier {name}", rest)
        require_apart(DiskOptions.from_mapping(f"tier {name}", rest).directories)
        eviction_policy(str(next(option.value for option in found if option.name == "eviction")))
        return [*found, *codec.describe(options)]

    # -- starting --------------------------------------------------------------------------------------

    def _start_all(self) -> list[DiskEntry]:
        found: list[DiskEntry] = []
        for root in self._state.roots:
            try:
                found += self._start_root(root, make=True)
                self._compare_sizes(root)
            except OSError as error:
                self._state.problems.begin(root.path, "down", reason_of(error))
        return found

    def _compare_sizes(self, root: Root) -> None:
        """Refuse what can never work, and tell what does not work now."""
        keep, size, free = self.options.keep_free_nbytes, root.size_nbytes(), root.free_nbytes()
        if keep and size and keep >= size:
            raise ConfigError(
                f"tier {self.name}: keep_free is {keep} bytes, the file system of {root.path} has {size}"
                ": nothing could ever be written; lower it"
            )
        if free < keep:
            _log.warning(
                "tier %s: %s: %d bytes are free, and keep_free is %d: a block only comes where one of the "
                "tier's own goes",
                self.name, root.path, free, keep,
            )  # fmt: skip

    def _start_root(self, root: Root, *, make: bool = False) -> list[DiskEntry]:
        """Open a directory and enter what it holds; returns what is to be verified."""
        index = self._state.index
        scan = root.start(make=make)
        # in the order of their last use over all namespaces, without a second list of a million blocks
        runs = [_in_order(index.namespace(*name), found) for name, found in scan.blocks.items()]
        merged = heapq.merge(*runs, key=itemgetter(0))
        loaded = index.load(((home, key, nbytes) for _, home, key, nbytes in merged), root.number)
        self._state.problems.end(root.path, "down")
        self._state.retry_removals()
        if remarks := scan.remarks:
            _log.info("tier %s: %s: %s", self.name, root.path, remarks)
        if self._state.shrink() > 0:
            _log.warning(
                "tier %s: capacity is %d bytes, and folders and files that are no blocks take %d of it: "
                "no block is stored; raise it, or remove what is not the tier's",
                self.name, self.options.capacity_nbytes, self._overhead_nbytes(),
            )  # fmt: skip
        self._choose_direct(root)
        return loaded

    def resize(self, capacity_nbytes: int) -> None:
        """See :class:`~kvferry.store.tier.Tier`."""
        self.options = self._state.options = replace(self.options, capacity_nbytes=capacity_nbytes)
        self._state.index.resize(capacity_nbytes)
        self._compare_blocks()
        self._state.is_shrinking = True
        self._maintenance.wake()

    def _overhead_nbytes(self) -> int:
        return sum(root.overhead_nbytes for root in self._state.roots)

    def _choose_direct(self, root: Root) -> None:
        mode = self.options.direct
        room = self.options.capacity_nbytes - self._state.index.used_nbytes
        if mode != "auto":
            root.direct_read = root.direct_write = mode == "on"
            root.direct_text = f"configured: {mode}"
        elif room < 2 * PROBE_NBYTES:
            root.direct_text = "too little room to measure"
        else:
            root.direct_text = root.probe()

    # -- the verbs -------------------------------------------------------------------------------------

    def open(self, namespace: TierNamespace) -> None:
        """See :class:`~kvferry.store.tier.Tier`.

        Raises:
            ConfigError: If the tenant's id cannot name a folder.
        """
        self._told.get(namespace)

    def _tell(self, namespace: TierNamespace) -> NamespaceIndex:
        tenant_folder(namespace.tenant)
        index = self._state.index.namespace(namespace.tenant, namespace.namespace_id)
        template = self._state.templates.get(index, namespace)
        index.told = namespace
        self._compare_block(namespace, template, self._notes)
        return index

    def _compare_blocks(self) -> None:
        """Blocks may fit, or not fit any more, into another capacity, or beside less that is no block."""
        notes: dict[str, str] = {}
        for namespace, index in self._told.items():
            self._compare_block(namespace, self._state.templates.get(index, namespace), notes)
        self._notes = notes

    def _compare_block(
        self, namespace: TierNamespace, template: HeaderTemplate, notes: dict[str, str]
    ) -> None:
        """Tell of blocks that can never be stored."""
        needed, other = least_room(template.file_nbytes), self._overhead_nbytes()
        capacity = self.options.capacity_nbytes
        if needed + other > capacity:
            text = (
                f"a block takes {needed} bytes with header and folders; capacity is {capacity}, of which "
                f"folders and files that are no blocks take {other}: none is stored"
                f"{' that the codec does not make smaller' if self.codec.is_on else ''}"
            )
            if len(notes) >= _MOST_NOTES:
                notes.pop(next(iter(notes)))
            key = f"{namespace.spec.model} {namespace.namespace_id.hex()[:16]}…"
            if key not in self._notes:
                self._limiter.log(
                    logging.WARNING, "too large", "tier %s: %s: %s", self.name, namespace.spec.model, text
                )
            notes[key] = text

    def contains(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, deadline: float) -> list[bool]:
        """See :class:`~kvferry.store.tier.Tier`. From memory; the deadline has no effect."""
        del deadline
        held = self._held(namespace)
        return [False] * len(keys) if self._closed else self._state.index.contains(held, keys)

    def only_lossy(self, namespace: TierNamespace, keys: Sequence[BlockKey]) -> list[bool]:
        """See :class:`~kvferry.store.tier.Tier`. Of files whose header was compared."""
        return [
            entry is not None and entry.is_lossy for entry in map(self._held(namespace).entries.get, keys)
        ]

    def read_into(
        self, namespace: TierNamespace, blocks: Sequence[BlockRead], *, deadline: float
    ) -> list[ReadResult]:
        """See :class:`~kvferry.store.tier.Tier`."""
        home = self._home(namespace)
        require_reads(blocks, home.template.data_nbytes)
        if self._closed:
            return [ReadResult(ReadOutcome.FAILED, f"tier {self.name} is closed")] * len(blocks)
        keys = [block.key for block in blocks]
        held = self._state.index.contains(home.held, keys)
        if self.takes_lossy and not all(block.takes_lossy for block in blocks):
            lossy = self.only_lossy(namespace, keys)
            held = [h and (b.takes_lossy or not n) for b, h, n in zip(blocks, held, lossy, strict=True)]
        results = [ReadResult(ReadOutcome.MISS)] * len(blocks)
        wanted = [number for number, is_held in enumerate(held) if is_held]

        share = share_of(len(wanted), home.template.file_nbytes, self.options.read_threads)

        def read(number: int) -> list[tuple[ReadResult, DiskEntry | None]]:
            some = [blocks[n] for n in wanted[number * share : (number + 1) * share]]
            return read_blocks(self._state, home, some, deadline)

        used: list[DiskEntry] = []
        done = collect(self._readers.run(-(-len(wanted) // share), read, deadline))
        for at, found in zip(range(0, len(wanted), share), done, strict=True):
            for n, number in enumerate(wanted[at : at + share]):
                if isinstance(found, Missing):
                    results[number] = ReadResult(ReadOutcome.FAILED, found.reason, in_flight=found.in_flight)
                else:
                    results[number], entry = found[n]
                    used += [entry] if entry is not None else []
        self._state.index.accessed(reversed(used))
        self._state.count(READ_COUNTERS[result.outcome] for result in results)
        return results

    def write(
        self, namespace: TierNamespace, blocks: Sequence[BlockWrite], *, deadline: float
    ) -> list[WriteResult]:
        """See :class:`~kvferry.store.tier.Tier`."""
        home = self._home(namespace)
        require_writes(blocks, home.template.data_nbytes)
        if self._closed:
            return [WriteResult(WriteOutcome.FAILED, f"tier {self.name} is closed")] * len(blocks)

        if self.takes_lossy and not self.codec.lossy:
            keys = [block.key for block in blocks if not block.lossy]
            lossy = self.only_lossy(namespace, keys)
            if True in lossy:  # what is written now takes their place
                self.remove(namespace, [k for k, n in zip(keys, lossy, strict=True) if n], deadline=deadline)
        threads, nbytes = self.options.write_threads, home.template.file_nbytes
        # room that a thread has taken cannot be made by another one: in a small tier it takes little at once
        share = min(
            share_of(len(blocks), nbytes, threads), self.options.capacity_nbytes // (8 * threads * nbytes)
        )
        share = max(1, share)

        shares = shares_of(len(blocks), share, threads)

        def write(number: int) -> list[tuple[WriteResult, DiskEntry | None]]:
            some = shares[number]
            return self._writes.write(home, blocks[some.start : some.stop], deadline)

        blocks = placed(home, blocks)
        results: list[WriteResult] = []
        stored: list[DiskEntry] = []
        for some, found in zip(shares, collect(self._writers.run(len(shares), write, deadline)), strict=True):
            if isinstance(found, Missing):
                missing = WriteResult(WriteOutcome.FAILED, found.reason, found.in_flight)
                results += [missing] * len(some)
            else:
                results += [result for result, _ in found]
                stored += [entry for _, entry in found if entry is not None]
        self._state.index.accessed(reversed(stored))  # files were written side by side, in any order
        self._state.count(WRITE_COUNTERS[result.outcome] for result in results)
        return results

    def remove(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, deadline: float) -> list[bool]:
        """See :class:`~kvferry.store.tier.Tier`.

        A block is forgotten at once; its file goes later if it cannot be removed now, also if its directory
        is down: then when that is back.
        """
        held = self._held(namespace)
        if self._closed:
            return [False] * len(keys)
        going: deque[DiskEntry] = deque()
        try:
            found = self._state.index.take(held, keys, going)
            # not by the writers: those may be waiting for these very keys
            self._readers.run(len(going), lambda _: self._state.remove_first(going), deadline)
        except BaseException:  # a signal handler's: nobody does what was not begun
            self._state.abandon(going)
            raise
        return found

    def forget(self, namespace: TierNamespace) -> None:
        """See :class:`~kvferry.store.tier.Tier`."""
        self._state.index.forget(self._held(namespace))

    def pin(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, until: float) -> list[bool]:
        """See :class:`~kvferry.store.tier.Tier`."""
        return self._state.index.pin(self._held(namespace), keys, until)

    def unpin(self, namespace: TierNamespace, keys: Sequence[BlockKey]) -> None:
        """See :class:`~kvferry.store.tier.Tier`."""
        self._state.index.unpin(self._held(namespace), keys)

    def scan(self) -> Iterator[TierEntry]:
        """See :class:`~kvferry.store.tier.Tier`."""
        index = self._state.index
        for entry in chain.from_iterable(map(index.snapshot, index.namespaces())):
            home, how = entry.index, entry.encoding
            yield TierEntry(
                home.tenant,
                home.namespace_id,
                entry.key,
                entry.nbytes,
                entry.parent if entry.verified else UNKNOWN_PARENT,
                entry.position,
                entry.verified,
                *(("", False) if how is None else (how.codec, how.lossy)),
            )

    def listen(self, tenant: str, feed: BlockFeed) -> dict[bytes, list[BlockKey]] | None:
        """See :class:`~kvferry.store.tier.Tier`."""
        return self._state.index.listen(tenant, feed)

    def found_namespaces(self) -> list[TierNamespace]:
        """See :class:`~kvferry.store.tier.Tier`. Those told of, or of which a header can be read."""
        return [] if self._closed else found_namespaces(self._state)

    def usage(self) -> TierUsage:
        """See :class:`~kvferry.store.tier.Tier`."""
        state, maintenance = self._state, self._maintenance
        status = {"verified": f"{maintenance.verified} of {maintenance.found} headers found at the start"}
        for root in state.roots:
            reads, writes = ("direct" if on else "cached" for on in (root.direct_read, root.direct_write))
            status[f"{root.path}: O_DIRECT"] = f"reads {reads}, writes {writes} ({root.direct_text})"
            if left := len(root.leftovers):
                status[f"{root.path}: left behind"] = f"{left} files that could not be removed; tried again"
        problems = state.problems.conditions()
        return TierUsage(
            entries=state.index.entry_count,
            used_nbytes=state.index.used_nbytes,
            capacity_nbytes=self.options.capacity_nbytes,
            quarantined_nbytes=sum(root.quarantined_nbytes for root in state.roots),
            healthy=not problems,
            counters={**state.counters(), **self.codec.counters()},
            status={**status, **self.codec.status(), **self._notes, **problems},
            problems=problems,
        )

    def wait_verified(self, *, deadline: float) -> bool:
        """Wait until the headers found at the start have been compared; ``False`` at the deadline."""
        return self._maintenance.wait_verified(deadline)

    def flush(self, *, deadline: float) -> bool:
        """See :class:`~kvferry.store.tier.Tier`. With ``sync=none`` it waits for running writes, no more."""
        for event in self._state.index.writes_running():
            if not event.wait(time_left(deadline)):
                return False
        if self.options.sync != "data":
            return True
        batch = self._writers.run(1, lambda _: self._sync_folders(), deadline)
        done, _ = batch.cancel()
        return done == [True]

    def _sync_folders(self) -> bool:
        try:
            self._writes.sync_folders()
        except OSError as error:
            self._state.problems.incident("flush failed", reason_of(error))
            return False
        return True

    def close(self) -> None:
        """See :class:`~kvferry.store.tier.Tier`."""
        if self._closed:
            return
        self._closed = True
        deadline = deadline_in(_CLOSE_S)
        hanging = [*self._readers.close(deadline), *self._writers.close(deadline)]
        if not self._maintenance.close(deadline):
            hanging.append("maintain")
        self._limiter.flush()
        if hanging:
            _log.warning("tier %s: threads hang in the device and are left behind: %s", self.name, hanging)
        for root in self._state.roots:
            root.stop()

    def _home(self, namespace: TierNamespace) -> Home:
        held = self._told.get(namespace)
        namespace = held.told or namespace  # the same object each time
        template = self._state.templates.get(held, namespace)
        return Home(
            namespace, held, template, BlockReader(self._state.files, namespace, template, self.codec)
        )

    def _held(self, namespace: TierNamespace) -> NamespaceIndex:
        return self._state.index.namespace(namespace.tenant, namespace.namespace_id)


def _in_order(
    home: NamespaceIndex, found: list[FoundBlock]
) -> Iterator[tuple[int, NamespaceIndex, BlockKey, int]]:
    found.sort()
    return ((used_at, home, key, nbytes) for used_at, key, nbytes in found)


_MOST_NOTES = 16
_CLOSE_S = 5.0
