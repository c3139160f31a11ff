"""Random life of a device pool, with every byte checked; see :class:`PoolStress`."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.core.memory import MemoryStore
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.device.base import Device, DeviceBytes, Event
from kvferry.store.device import DevicePool, PoolSpace

__all__ = ["PoolStress", "WrongBytesError", "page_runs", "stress_spec"]

_POISON: Final = 0xDD
_AMPLE_S: Final = 60.0
_CHAINS: Final = 24
_BLOCKS: Final = 5  # of a chain, at most


class WrongBytesError(AssertionError):
    """A page or a stored block did not hold what its key stands for."""


def stress_spec(*, mla: bool = False) -> KVSpec:
    """Small blocks, of a size that is no multiple of 64 bytes a layer."""
    if mla:
        tensors: tuple[TensorSpec, ...] = (TensorSpec("latent", (4, 18), DType.BFLOAT16),)
    else:
        tensors = tuple(TensorSpec(name, (4, 2, 10), DType.BFLOAT16) for name in ("k", "v"))
    return KVSpec(model="stress", revision="r", layers=(LayerSpec(tensors),) * 2, block_tokens=4)


def page_runs(pool: DevicePool, page: int) -> list[DeviceBytes]:
    """The bytes of a page of the pool's own memory, run by run: a tensor of a layer each."""
    assert pool.memory is not None
    found = []
    for region, start in zip(pool.regions, pool.memory.starts, strict=True):
        outer = region.strides[0] if region.layout.startswith("stacked") else 0
        size = region.strides[1] if outer else region.strides[0]
        for number in range(2 if outer else 1):
            at = start + number * outer + page * size
            found.append(pool.memory.memory[at : at + size])
    return found


@dataclass
class _Reading:
    """A read that the device may still make: where to, and what should be there then."""

    event: Event
    slot: int
    expected: bytes
    what: str


@dataclass
class PoolStress:
    """Saves, loads, removes and evicts blocks of a pool at random, with kernels that take their time.

    A page that is allocated is overwritten at once by a kernel, so that a reader or a copy that comes too
    late sees it. Pages are given back while their last reader has not begun yet.

    Attributes:
        device: Where.
        kernel: ``kernel(target, byte, seconds)``: queued on the current stream.
        seed: Of everything random.
        pages: Of the pool.
        spec: Of its blocks.
        slow_s: A kernel takes up to this long.
        actions: How often what was done.
    """

    device: Device
    kernel: Callable[[DeviceBytes, int, float], None]
    seed: int = 0
    pages: int = 12
    spec: KVSpec = field(default_factory=stress_spec)
    slow_s: float = 0.002
    actions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("save", "load", "remove"), 0))

    def run(self, steps: int) -> DevicePool:
        """Take so many steps; returns the closed pool, whose figures remain.

        Raises:
            WrongBytesError: If a reader or the store below got other bytes than were written.
        """
        self._random = random.Random(self.seed)
        self._streams = [self.device.current_stream(), self.device.new_stream()]
        store = MemoryStore(_CHAINS * _BLOCKS * 2 * 4096)
        with DevicePool(self.spec, self.device, num_blocks=self.pages) as pool:
            self._start(pool, pool.space(store.namespace(self.spec)))
            try:
                for _ in range(steps):
                    with self.device.use(self._random.choice(self._streams)):
                        self._step()
                self._check_all()
                assert pool.flush(deadline=deadline_in(_AMPLE_S)), "blocks were lost on their way down"
                self._check_below()
            finally:
                self.device.synchronize()
                self.device.host_unregister(self._memory)
        store.close()
        return pool

    def _start(self, pool: DevicePool, space: PoolSpace) -> None:
        self._pool, self._space = pool, space
        self._size = pool.table.page_nbytes
        room = -(-self._size // 64) * 64
        self._memory = page_aligned(64 * room)
        self.device.host_register(self._memory)
        self._slots = [self._memory[i * room : i * room + self._size] for i in range(64)]
        self._free = list(range(64))
        self._readings: deque[_Reading] = deque()
        self._scratch = self.device.empty(64)

    def _step(self) -> None:
        number = self._random.randrange(_CHAINS)
        namespace = self._space.below
        assert namespace is not None
        keys = namespace.keys([number] * 4 * self._random.randint(1, _BLOCKS))
        chance = self._random.random()
        if chance < 0.15:
            gone = namespace.keys([number] * 4 * _BLOCKS)[len(keys) - 1 :]
            self.actions["remove"] += max(self._space.remove(gone), namespace.remove(gone))
            return
        held = self._space.restore(keys, deadline=deadline_in(_AMPLE_S))
        self.actions["load"] += len(held.pages)
        self._read(keys, held.pages)
        more = keys[len(held.pages) :]
        if more and chance < 0.8:
            made = self._pool.allocate(len(more), deadline=deadline_in(_AMPLE_S))
            for page in made:  # as if it had been somebody else's for a while
                for run in page_runs(self._pool, page):
                    self.kernel(run, _POISON, 0.0)
            for key, page in zip(more, made, strict=True):
                self._compute(key, page)
            parent = keys[len(held.pages) - 1] if held.pages else None
            self._space.publish(more, made, parent=parent)
            self.actions["save"] += len(more)
            if chance < 0.4:
                self._read(more, made)
            self._pool.release(made)
        self._pool.release(held.pages)

    def _compute(self, key: BlockKey, page: int) -> None:
        seconds = self._random.random() * self.slow_s
        for number, run in enumerate(page_runs(self._pool, page)):
            self.kernel(run, key[number], 0.0 if number else seconds)

    def _expected(self, key: BlockKey) -> bytes:
        runs = page_runs(self._pool, 0)
        return b"".join(bytes([key[number]]) * run.numel() for number, run in enumerate(runs))

    def _read(self, keys: Sequence[BlockKey], pages: Sequence[int]) -> None:
        """Queue reads on the current stream, behind a kernel that keeps them waiting."""
        stream = self.device.current_stream()
        self.kernel(self._scratch, 0, self._random.random() * 2 * self.slow_s)
        for key, page in zip(keys, pages, strict=False):
            if not self._free:
                self._check(self._readings.popleft())
            slot, at = self._free.pop(), 0
            host = self.device.host_bytes(self._slots[slot])
            for run in page_runs(self._pool, page):
                self.device.copy(host[at : at + run.numel()], run, stream)
                at += run.numel()
            event = self.device.event()
            event.record(stream)
            self._readings.append(_Reading(event, slot, self._expected(key), f"page {page}"))

    def _check(self, reading: _Reading) -> None:
        reading.event.synchronize()
        if bytes(self._slots[reading.slot]) != reading.expected:
            seen = sorted(set(bytes(self._slots[reading.slot])))
            raise WrongBytesError(f"{reading.what}: read {seen}, not {sorted(set(reading.expected))}")
        self._free.append(reading.slot)

    def _check_all(self) -> None:
        while self._readings:
            self._check(self._readings.popleft())

    def _check_below(self) -> None:
        """All that was ever copied down."""
        namespace = self._space.below
        assert namespace is not None
        sizes = [t.nbytes for layer in self.spec.layers for t in layer.tensors]
        for number in range(_CHAINS):
            keys = namespace.keys([number] * 4 * _BLOCKS)
            with namespace.load(keys, deadline=deadline_in(_AMPLE_S)) as lease:
                for index in range(len(lease)):
                    found = np.frombuffer(lease.view(index), np.uint8)
                    expected = self._block(keys[index], sizes)
                    if not np.array_equal(found, expected):
                        raise WrongBytesError(f"block {index} of chain {number} below: {sorted(set(found))}")

    def _block(self, key: BlockKey, sizes: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        block = np.zeros(self.spec.block_nbytes, np.uint8)
        number = 0
        for layer, held in enumerate(self.spec.layers):
            at = self.spec.layer_slice(layer).start
            for slot in held.slots():
                block[at + slot.offset : at + slot.offset + sizes[number]] = key[number]
                number += 1
        return block
