"""A tier in spare memory of a device: another card's, or what a prefill card does not need just now.

The blocks lie in pages of one allocation. All bytes pass through the copy engine; checksums are made and
compared on the host, since not every device can. A block that is being copied is held until its copy is done.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from kvferry.core.clock import is_past
from kvferry.core.errors import CapacityError, ConfigError, DeviceError, KVFerryError, TransferTimeoutError
from kvferry.core.eviction import Entry
from kvferry.core.keys import BlockKey
from kvferry.core.tier_plugins import TierOption
from kvferry.core.units import format_nbytes
from kvferry.device.base import Device
from kvferry.device.copy_engine import CopyEngine
from kvferry.device.registry import open_device
from kvferry.device.tickets import CopyPart
from kvferry.store.batch_checks import READ_COUNTERS, WRITE_COUNTERS, require_reads, require_writes
from kvferry.store.device.flights import Flight, TierBlock, parts_of
from kvferry.store.device.table import PageTable, is_held
from kvferry.store.device.tier_options import DeviceTierOptions
from kvferry.store.policies import eviction_policy
from kvferry.store.remote.options import describe_options, option_names, read_options
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

__all__ = ["DeviceTier"]

_STORED = WriteResult(WriteOutcome.STORED)
_PRESENT = WriteResult(WriteOutcome.PRESENT)
_MISS = ReadResult(ReadOutcome.MISS)
_LATE = "not begun by its deadline"
_COUNTERS = (*READ_COUNTERS.values(), *WRITE_COUNTERS.values(), "evicted")


@dataclass(eq=False)
class _Read:
    """A read under way; the block is held."""

    wanted: BlockRead
    block: TierBlock
    flight: Flight


@dataclass(eq=False)
class _Write:
    """A write under way into pages that are nobody else's."""

    space: TierNamespace
    block: TierBlock
    flight: Flight | None = None
    removed: bool = False


class DeviceTier(Tier):
    """Blocks in the memory of a device. See :class:`~kvferry.store.tier.Tier`.

    Args:
        name: Of the tier.
        options: See :class:`DeviceTierOptions`.
        device: Where; opened by its name in the options if not given.

    Raises:
        ConfigError: If there is no such device, or a value cannot be.
        CapacityError: If the device has not got so much memory.
        DeviceError: If it failed, or host memory cannot be pinned and that is not allowed.
    """

    option_names = option_names(DeviceTierOptions)

    def __init__(self, name: str, options: DeviceTierOptions, device: Device | None = None) -> None:
        self.name, self.options = name, options
        self.device = device or _opened(name, options.device)
        nbytes = options.num_pages * options.page_nbytes
        try:
            self.memory = self.device.empty(nbytes)
        except CapacityError as error:
            free = format_nbytes(self.device.memory().free_nbytes)
            raise CapacityError(
                f"tier {name}: it takes {format_nbytes(nbytes)} of {self.device.name} at once, {free} are "
                "free: lower its capacity"
            ) from error
        self.engine = CopyEngine(
            self.device,
            slots=options.slots,
            slot_nbytes=options.slot_nbytes,
            on_pin_failure=options.pin_failure,
        )
        policy = eviction_policy(options.eviction)(nbytes)
        self.table = PageTable(options.num_pages, options.page_nbytes, policy)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._writing: dict[tuple[TierNamespace, BlockKey], _Write] = {}
        self._pins: dict[TierBlock, float] = {}
        self._counts: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self._closed = False

    @classmethod
    def from_options(cls, name: str, options: Mapping[str, object]) -> DeviceTier:
        """See :meth:`Tier.from_options`."""
        return cls(name, read_options(DeviceTierOptions, f"tier {name}", options))

    @classmethod
    def describe_options(cls, name: str, options: Mapping[str, object]) -> list[TierOption]:
        """See :meth:`Tier.describe_options`."""
        return describe_options(DeviceTierOptions, f"tier {name}", options)

    def open(self, namespace: TierNamespace) -> None:
        """See :meth:`Tier.open`; nothing is kept of a namespace without blocks."""

    def contains(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, deadline: float) -> list[bool]:
        """See :meth:`Tier.contains`; never waits."""
        del deadline
        with self._lock:
            found = self._entries(namespace)
            return [not self._closed and key in found for key in keys]

    # ---- reading ------------------------------------------------------------------------------------

    def read_into(
        self, namespace: TierNamespace, blocks: Sequence[BlockRead], *, deadline: float
    ) -> list[ReadResult]:
        """See :meth:`Tier.read_into`; all blocks are copied at once."""
        require_reads(blocks, namespace.spec.block_nbytes)
        begun = [self._begin_read(namespace, block, deadline) for block in blocks]
        results = [self._end_read(one, deadline) if isinstance(one, _Read) else one for one in begun]
        with self._lock:
            self._counts.update(READ_COUNTERS[result.outcome] for result in results)
        return results

    def _begin_read(self, namespace: TierNamespace, wanted: BlockRead, deadline: float) -> _Read | ReadResult:
        if is_past(deadline):
            return ReadResult(ReadOutcome.FAILED, _LATE)
        with self._lock:
            if self._closed:
                return ReadResult(ReadOutcome.FAILED, "the tier is closed")
            block = self._entries(namespace).get(wanted.key)
            if block is None:
                return _MISS
            if wanted.parent not in (UNKNOWN_PARENT, block.parent):
                self._forget(block)
                return ReadResult(ReadOutcome.CORRUPT, "it was stored with another parent")
            self.table.hold(block)
            self.table.touch([block])
        flight = Flight(lambda: self._drop(block))
        try:
            flight.start(self.engine.copy_out, self._parts(block, wanted.into))
        except KVFerryError as error:
            self._drop(block)
            return ReadResult(ReadOutcome.FAILED, str(error))
        return _Read(wanted, block, flight)

    def _end_read(self, read: _Read, deadline: float) -> ReadResult:
        error = read.flight.wait(deadline)
        if isinstance(error, TransferTimeoutError) and not read.flight.over.is_set():
            return ReadResult(ReadOutcome.FAILED, str(error), in_flight=read.flight.over)
        self._drop(read.block)
        if error is not None:
            return ReadResult(ReadOutcome.FAILED, str(error))
        if xxhash.xxh3_64_intdigest(read.wanted.into) != read.block.checksum:
            with self._lock:
                self._forget(read.block)
            return ReadResult(ReadOutcome.CORRUPT, "its checksum is another")
        return ReadResult(ReadOutcome.HIT, "", read.block.parent, read.block.position)

    def _drop(self, block: TierBlock) -> None:
        with self._lock:
            self.table.drop(block)
            self._changed.notify_all()

    # ---- writing ------------------------------------------------------------------------------------

    def write(
        self, namespace: TierNamespace, blocks: Sequence[BlockWrite], *, deadline: float
    ) -> list[WriteResult]:
        """See :meth:`Tier.write`; as many blocks as there is room for are copied at once."""
        require_writes(blocks, namespace.spec.block_nbytes)
        results: list[WriteResult | None] = [None] * len(blocks)
        begun: dict[int, _Write] = {}
        for number, block in enumerate(blocks):
            found = self._begin_write(namespace, block, deadline, patient=not begun)
            if found is None:  # what this call itself copies is in the way
                self._end_writes(begun, results, deadline)
                found = self._begin_write(namespace, block, deadline, patient=True)
                assert found is not None
            if isinstance(found, _Write):
                begun[number] = found
            else:
                results[number] = found
        self._end_writes(begun, results, deadline)
        done = [result for result in results if result is not None]
        with self._lock:
            self._counts.update(WRITE_COUNTERS[result.outcome] for result in done)
        return done

    def _begin_write(
        self, namespace: TierNamespace, block: BlockWrite, deadline: float, *, patient: bool
    ) -> _Write | WriteResult | None:
        """Start a write, or say what becomes of it; ``None`` if it has to wait and should not."""
        need = max(1, -(-len(block.data) // self.options.page_nbytes))
        if need > self.options.num_pages:
            what = f"{len(block.data)} bytes into a tier of {self.table.num_pages * self.table.page_nbytes}"
            return WriteResult(WriteOutcome.REFUSED, what)
        checksum = xxhash.xxh3_64_intdigest(block.data)
        with self._lock:
            while True:
                if self._closed or is_past(deadline):
                    return WriteResult(WriteOutcome.FAILED, "the tier is closed" if self._closed else _LATE)
                if block.key in self._entries(namespace):
                    return _PRESENT
                if (namespace, block.key) not in self._writing:
                    if need > self.table.free_pages:
                        self._evict(need)
                    if need <= self.table.free_pages:
                        break
                    if not self._may_get_room():
                        return WriteResult(WriteOutcome.REFUSED, "no room: what is there may not be evicted")
                if not patient:
                    return None
                self._changed.wait(max(0.0, deadline - time.monotonic()))
            pages, _ = self.table.take(need, neighbours=False)
            index = self.table.index(namespace, namespace.namespace_id)
            made = TierBlock(index, block.key, block.parent, tuple(pages), checksum, block.position)
            write = self._writing[namespace, block.key] = _Write(namespace, made)
        write.flight = Flight(lambda: self._give_up(write))
        try:
            write.flight.start(self.engine.copy_in, self._parts(made, block.data))
        except KVFerryError as error:
            self._give_up(write)
            return WriteResult(WriteOutcome.FAILED, str(error))
        return write

    def _end_writes(
        self, begun: dict[int, _Write], results: list[WriteResult | None], deadline: float
    ) -> None:
        for number, write in begun.items():
            results[number] = self._end_write(write, deadline)
        begun.clear()

    def _end_write(self, write: _Write, deadline: float) -> WriteResult:
        assert write.flight is not None
        error = write.flight.wait(deadline)
        if isinstance(error, TransferTimeoutError) and not write.flight.over.is_set():
            return WriteResult(WriteOutcome.FAILED, str(error), write.flight.over)
        if error is not None:
            self._give_up(write, dead=isinstance(error, DeviceError))
            return WriteResult(WriteOutcome.FAILED, str(error))
        with self._lock:
            del self._writing[write.space, write.block.key]
            if write.removed or self._closed:
                self.table.give_back(write.block.pages)
            else:
                self.table.store(write.block)
            self._changed.notify_all()
        return _STORED

    def _give_up(self, write: _Write, *, dead: bool = False) -> None:
        """Nothing is left of a write; but a dead device may still write into its pages."""
        with self._lock:
            del self._writing[write.space, write.block.key]
            if not dead:
                self.table.give_back(write.block.pages)
            self._changed.notify_all()

    def _parts(self, block: TierBlock, view: memoryview) -> list[CopyPart]:
        return parts_of(self.memory, block.pages, self.options.page_nbytes, view)

    # ---- room ---------------------------------------------------------------------------------------

    def _evict(self, pages: int) -> None:
        now = time.monotonic()
        for block in [block for block, until in self._pins.items() if until <= now]:
            self._unpin(block)
        before = self.table.evicted_blocks
        steps = self.table.evictions(self._is_kept)
        while self.table.free_pages < pages and next(steps, False):
            pass
        steps.close()
        self._counts["evicted"] += self.table.evicted_blocks - before

    def _is_kept(self, entry: Entry) -> bool:
        return is_held(entry) or entry in self._pins

    def _may_get_room(self) -> bool:
        """Whether copies under way hold pages that will be free, or may be evicted, when they are done."""
        if self._writing:
            return True
        return self.table.held_pages > 0

    def pin(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, until: float) -> list[bool]:
        """See :meth:`Tier.pin`."""
        with self._lock:
            found = [self._entries(namespace).get(key) for key in keys]
            for block in found:
                if block is not None:
                    self._pins[block] = max(until, self._pins.get(block, 0.0))
        return [block is not None for block in found]

    def unpin(self, namespace: TierNamespace, keys: Sequence[BlockKey]) -> None:
        """See :meth:`Tier.unpin`."""
        with self._lock:
            for key in keys:
                block = self._entries(namespace).get(key)
                if block is not None:
                    self._unpin(block)
            self._changed.notify_all()

    def _unpin(self, block: TierBlock) -> None:
        if self._pins.pop(block, None) is not None and block.stored:
            self.table.policy.released(block)

    # ---- the rest -----------------------------------------------------------------------------------

    def remove(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, deadline: float) -> list[bool]:
        """See :meth:`Tier.remove`; never waits. A write that is under way leaves nothing."""
        del deadline
        gone: list[bool] = []
        with self._lock:
            for key in keys:
                block = self._entries(namespace).get(key)
                if block is not None:
                    self._forget(block)
                write = self._writing.get((namespace, key))
                if write is not None:
                    write.removed = True
                gone.append(block is not None)
            self._changed.notify_all()
        return gone

    def _forget(self, block: TierBlock) -> None:
        self._pins.pop(block, None)
        if block.stored:
            self.table.forget(block)

    def usage(self) -> TierUsage:
        """See :meth:`Tier.usage`."""
        with self._lock:
            table, error = self.table, self.engine.error
            status = {"device": self.device.name, "pinned": "yes" if self.engine.pinned else "no"}
            if error is not None:
                status["problem"] = str(error)
            return TierUsage(
                entries=table.entries,
                used_nbytes=(table.num_pages - table.free_pages) * table.page_nbytes,
                capacity_nbytes=table.num_pages * table.page_nbytes,
                healthy=error is None,
                counters={name: float(count) for name, count in self._counts.items()},
                status=status,
                problems={} if error is None else {self.device.name: str(error)},
            )

    def scan(self) -> Iterator[TierEntry]:
        """See :meth:`Tier.scan`."""
        with self._lock:
            found = [
                TierEntry(
                    space.tenant,
                    space.namespace_id,
                    block.key,
                    block.nbytes,
                    block.parent,
                    block.position,
                    True,
                )
                for space in self.table.indexes
                for block in self._entries(space).values()
            ]
        yield from found

    def flush(self, *, deadline: float) -> bool:
        """See :meth:`Tier.flush`: what is stored is as durable as it can be."""
        del deadline
        return True

    def close(self) -> None:
        """See :meth:`Tier.close`; the memory is freed when no copy can be in flight any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self.engine.close()

    def _entries(self, namespace: TierNamespace) -> dict[BlockKey, TierBlock]:
        index = self.table.indexes.get(namespace)
        return {} if index is None else index.entries  # type: ignore[return-value]


def _opened(tier: str, device: str) -> Device:
    try:
        return open_device(device)
    except (ConfigError, DeviceError) as error:
        raise ConfigError(
            f"tier {tier}: its device cannot be had: {error}; everything else works without the tier"
        ) from error
