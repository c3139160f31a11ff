"""A tier in memory whose faults are made by the test."""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvferry.core.keys import BlockKey
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

__all__ = ["FakeTier", "Fault"]


class Fault(enum.Enum):
    """What goes wrong with one block, or one call."""

    FAIL = "fail"
    """``FAILED``; of a read, after half of the bytes were written into the buffer."""
    CORRUPT = "corrupt"
    """A read finds other bytes: ``CORRUPT``, and the block is gone."""
    LOST = "lost"
    """The block was evicted between lookup and read: a ``MISS``."""
    REFUSE = "refuse"
    """A write finds no room."""
    LATE = "late"
    """``FAILED`` with ``in_flight``: the hand stays on the buffer until :attr:`FakeTier.late` is set."""
    RAISE = "raise"
    """The verb raises, against the contract."""


class _Stored(NamedTuple):
    data: bytes
    parent: BlockKey | None
    position: int


class FakeTier(Tier):
    """Keeps copies of blocks in a dictionary; evicts the least recently used one. Thread safe.

    Args:
        name: Of the tier.
        capacity_nbytes: Bytes of blocks; 0 for no bound.
        can_pin: Whether it keeps pinned blocks.

    Attributes:
        fault: Called with the verb (``read``, ``write``, ``contains``, ``remove``) and the key; what it
            returns happens to that block. Called without the tier's lock.
        gate: Verbs wait until it is set, or their deadline; set at first.
        calls: How often each verb was called.
        late: What ``in_flight`` is after :attr:`Fault.LATE`.
        on_evict: Called under the tier's lock with the key of a block that it evicts or loses by a fault.
        on_write: Called with the key when a write has passed the gate, before it reads the buffer.
    """

    def __init__(self, name: str = "fake", capacity_nbytes: int = 0, *, can_pin: bool = True) -> None:
        self.name = name
        self.capacity_nbytes = capacity_nbytes
        self.fault: Callable[[str, BlockKey], Fault | None] = lambda _verb, _key: None
        self.gate = threading.Event()
        self.gate.set()
        self.late = threading.Event()
        self.on_evict: Callable[[BlockKey], None] = lambda _key: None
        self.calls: Counter[str] = Counter()
        self.on_write: Callable[[BlockKey], None] = lambda _key: None
        self._can_pin = can_pin
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[TierNamespace, BlockKey], _Stored] = OrderedDict()
        self._pins: dict[tuple[TierNamespace, BlockKey], float] = {}
        self._used_nbytes = 0
        self._closed = False

    @classmethod
    def from_options(cls, name: str, options: Mapping[str, object]) -> FakeTier:
        """See :class:`~kvferry.store.tier.Tier`."""
        capacity = options.get("capacity", 0)
        return cls(name, capacity if isinstance(capacity, int) else 0)

    def open(self, namespace: TierNamespace) -> None:
        """Nothing to do."""

    def contains(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, deadline: float) -> list[bool]:  # noqa: ARG002
        """See :class:`~kvferry.store.tier.Tier`."""
        self.calls["contains"] += 1
        self._raise_if_asked("contains", keys)
        with self._lock:
            return [(namespace, key) in self._blocks for key in keys]

    def read_into(
        self, namespace: TierNamespace, blocks: Sequence[BlockRead], *, deadline: float
    ) -> list[ReadResult]:
        """See :class:`~kvferry.store.tier.Tier`."""
        self.calls["read"] += 1
        self._raise_if_asked("read", [block.key for block in blocks])
        if not self.gate.wait(max(0.0, deadline - time.monotonic())):
            return [ReadResult(ReadOutcome.FAILED, "the gate was shut")] * len(blocks)
        return [self._read(namespace, block) for block in blocks]

    def _read(self, namespace: TierNamespace, block: BlockRead) -> ReadResult:
        fault = self.fault("read", block.key)
        name = (namespace, block.key)
        with self._lock:
            stored = self._blocks.get(name)
            if stored is None or self._closed:
                return ReadResult(ReadOutcome.FAILED if self._closed else ReadOutcome.MISS)
            if fault in (Fault.LOST, Fault.CORRUPT):
                self._forget(name)
                self.on_evict(block.key)
            else:
                self._blocks.move_to_end(name)
        if fault is Fault.LOST:
            return ReadResult(ReadOutcome.MISS)
        if fault is Fault.LATE:
            return ReadResult(ReadOutcome.FAILED, "as the test asked", in_flight=self.late)
        if fault is not None:
            half = len(block.into) // 2
            block.into[:half] = bytes(half)  # what a buffer holds after a fault means nothing
            outcome = ReadOutcome.CORRUPT if fault is Fault.CORRUPT else ReadOutcome.FAILED
            return ReadResult(outcome, "as the test asked")
        block.into[:] = stored.data
        return ReadResult(ReadOutcome.HIT, "", stored.parent, stored.position)

    def write(
        self, namespace: TierNamespace, blocks: Sequence[BlockWrite], *, deadline: float
    ) -> list[WriteResult]:
        """See :class:`~kvferry.store.tier.Tier`."""
        self.calls["write"] += 1
        self._raise_if_asked("write", [block.key for block in blocks])
        results = []
        for block in blocks:
            if not self.gate.wait(max(0.0, deadline - time.monotonic())):
                results.append(WriteResult(WriteOutcome.FAILED, "the gate was shut"))
                continue
            self.on_write(block.key)
            results.append(self._write(namespace, block))
        return results

    def _write(self, namespace: TierNamespace, block: BlockWrite) -> WriteResult:
        fault = self.fault("write", block.key)
        name = (namespace, block.key)
        if fault is Fault.LATE:
            return WriteResult(WriteOutcome.FAILED, "as the test asked", in_flight=self.late)
        data = bytes(block.data)
        with self._lock:
            if fault is Fault.FAIL or self._closed:
                return WriteResult(WriteOutcome.FAILED, "as the test asked")
            if name in self._blocks:
                return WriteResult(WriteOutcome.PRESENT)
            if fault is Fault.REFUSE or not self._make_room(len(data)):
                return WriteResult(WriteOutcome.REFUSED, "no room")
            self._blocks[name] = _Stored(data, block.parent, block.position)
            self._used_nbytes += len(data)
        return WriteResult(WriteOutcome.STORED)

    def _make_room(self, nbytes: int) -> bool:
        if not self.capacity_nbytes:
            return True
        now = time.monotonic()
        for name in list(self._blocks):
            if self._used_nbytes + nbytes <= self.capacity_nbytes:
                break
            if self._pins.get(name, 0.0) <= now:
                self._forget(name)
                self.on_evict(name[1])
        return self._used_nbytes + nbytes <= self.capacity_nbytes

    def _forget(self, name: tuple[TierNamespace, BlockKey]) -> bool:
        stored = self._blocks.pop(name, None)
        self._pins.pop(name, None)
        if stored is not None:
            self._used_nbytes -= len(stored.data)
        return stored is not None

    def remove(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, deadline: float) -> list[bool]:  # noqa: ARG002
        """See :class:`~kvferry.store.tier.Tier`."""
        self.calls["remove"] += 1
        self._raise_if_asked("remove", keys)
        with self._lock:
            return [self._forget((namespace, key)) for key in keys]

    def pin(self, namespace: TierNamespace, keys: Sequence[BlockKey], *, until: float) -> list[bool]:
        """See :class:`~kvferry.store.tier.Tier`."""
        with self._lock:
            held = [self._can_pin and (namespace, key) in self._blocks for key in keys]
            self._pins.update({(namespace, k): until for k, h in zip(keys, held, strict=True) if h})
            return held

    def unpin(self, namespace: TierNamespace, keys: Sequence[BlockKey]) -> None:
        """See :class:`~kvferry.store.tier.Tier`."""
        with self._lock:
            for key in keys:
                self._pins.pop((namespace, key), None)

    def usage(self) -> TierUsage:
        """See :class:`~kvferry.store.tier.Tier`."""
        with self._lock:
            return TierUsage(len(self._blocks), self._used_nbytes, self.capacity_nbytes)

    def scan(self) -> Iterator[TierEntry]:
        """See :class:`~kvferry.store.tier.Tier`."""
        with self._lock:
            found = [
                TierEntry(
                    ns.tenant, ns.namespace_id, key, len(block.data), block.parent, block.position,
                    verified=True,
                )
                for (ns, key), block in self._blocks.items()
            ]  # fmt: skip
        yield from found

    def flush(self, *, deadline: float) -> bool:  # noqa: ARG002
        """See :class:`~kvferry.store.tier.Tier`."""
        return True

    def held(self) -> set[BlockKey]:
        """Keys of all blocks that it has, whatever the faults."""
        with self._lock:
            return {key for _, key in self._blocks}

    def reopen(self) -> FakeTier:
        """What a new process would find: the blocks, and no pins; for a new store."""
        with self._lock:
            self._closed = False
            self._pins.clear()
        return self

    def close(self) -> None:
        """See :class:`~kvferry.store.tier.Tier`."""
        self._closed = True
        self.gate.set()

    def _raise_if_asked(self, verb: str, keys: Sequence[BlockKey]) -> None:
        if any(self.fault(verb, key) is Fault.RAISE for key in keys):
            raise ValueError(f"{verb} raises, as the test asked")
