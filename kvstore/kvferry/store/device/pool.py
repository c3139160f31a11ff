"""The first tier: KV blocks in the paged memory of a device, where an engine computes with them.

Pages are handed out by number. Full blocks are published under their keys and shared by all sequences that
have them in common; one that nobody uses stays until its page is needed, and is copied to the store below
first. Who may write a page next is ordered by events: it waits, on the device, for the last user of the page,
and a page whose bytes are on their way out is nobody's until the copy is done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

from kvferry.core.blockstore import Namespace
from kvferry.core.errors import CapacityError, ConfigError, DeviceError, SpecMismatchError
from kvferry.core.eviction import EvictionPolicy, Leave, LRUPolicy
from kvferry.core.paged_copy import BlockCopier, HostCopier, Transfer
from kvferry.core.regions import Region, RegionPlan
from kvferry.core.spec import KeyScope, KVSpec
from kvferry.core.values import require_whole
from kvferry.device.base import Device, Event, Stream
from kvferry.device.block_copier import DeviceCopier, DeviceCopying
from kvferry.device.copy_engine import CopyEngine
from kvferry.store.device.demotion import Demotion
from kvferry.store.device.memory import PagedMemory, page_nbytes_of
from kvferry.store.device.pool_options import PoolOptions, PoolStats
from kvferry.store.device.space import PoolSpace, SpaceBlock
from kvferry.store.device.table import PageTable, PoolBlock, is_held, pending
from kvferry.store.tier import TierNamespace

__all__ = ["DevicePool"]

_LOG = logging.getLogger(__name__)
_LIMBO_PAUSE_S = 0.02
_RECHECK_S = 1.0


_DEFAULTS = PoolOptions()


class DevicePool:
    """Pages of one spec on one device. Thread safe.

    Ownership: what :meth:`allocate` and the verbs of a :class:`PoolSpace` return is held by the caller until
    :meth:`release`. A held page is never evicted nor handed to somebody else. Only pages that the caller
    allocated and has not published may be written.

    Streams: the caller computes on the current stream of the calling thread, or names another. The device
    waits where it must, the host does not, but for room.

    Args:
        spec: Of the blocks.
        device: Where.
        num_blocks: Pages to make; not with ``regions``.
        regions: Memory of an engine, in its own layout, to use instead.
        engine: Makes the copies, and is not closed here; an own one if not given. The host needs none.
        eviction: Makes the policy that says what goes first.
        options: See :class:`PoolOptions`.

    Attributes:
        memory: The pool's own memory; ``None`` with ``regions``.
        plan: Which bytes of the regions are which of a block.

    Raises:
        ConfigError: If sizes or layouts cannot be.
        CapacityError: If the device has not got so much memory; says how many blocks would fit.
        DeviceError: If the device failed.
    """

    def __init__(
        self,
        spec: KVSpec,
        device: Device,
        *,
        num_blocks: int | None = None,
        regions: Sequence[Region] | None = None,
        engine: CopyEngine | None = None,
        eviction: Callable[[int], EvictionPolicy] = LRUPolicy,
        options: PoolOptions = _DEFAULTS,
    ) -> None:
        if (num_blocks is None) == (regions is None):
            raise ConfigError("a pool is made of num_blocks of its own, or of an engine's regions")
        if num_blocks is not None:
            require_whole("num_blocks", num_blocks, least=1)
        self.spec, self.device, self.options = spec, device, options
        self.memory = None if num_blocks is None else PagedMemory(spec, num_blocks, device)
        self.plan = RegionPlan(spec, regions if self.memory is None else self.memory.regions)  # type: ignore[arg-type]
        if self.plan.device != device.kind:
            raise ConfigError(f"the regions are on {self.plan.device}, the pool is to be on {device.name}")
        self.num_blocks = self.plan.blocks
        page = page_nbytes_of(spec) if self.memory is not None else spec.block_nbytes
        self.table = PageTable(self.num_blocks, page, eviction(self.num_blocks * page))
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.promoted_blocks = 0
        self._error: DeviceError | None = None
        self._closed = False
        # each as long as somebody has it, or it has blocks
        self._spaces: WeakValueDictionary[TierNamespace, PoolSpace] = WeakValueDictionary()
        self._limbo: list[tuple[DeviceCopying, list[int], list[Event]]] = []
        on_host = device.kind == "cpu"
        self._own_engine = None if engine is not None or on_host else CopyEngine(device)
        self._engine = None if on_host else engine or self._own_engine
        self._fence: Stream | None = None if on_host else device.new_stream()
        self.demotion = Demotion(self)

    # ---- pages --------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.num_blocks * self.table.page_nbytes

    @property
    def regions(self) -> tuple[Region, ...]:
        """The arrays that the pages are cut from."""
        return self.plan.regions

    @property
    def available_blocks(self) -> int:
        """Pages that an allocation can have, if need be after others were copied down."""
        with self.lock:
            return self.table.free_pages + self.table.idle_pages + self.table.leaving_pages

    def allocate(
        self,
        count: int,
        *,
        after: int | None = None,
        stream: Stream | None = None,
        deadline: float | None = None,
    ) -> list[int]:
        """Take pages, in ascending order, neighbours where possible.

        Args:
            count: How many.
            after: A page that the caller holds: prefer those that follow it.
            stream: Of the kernels that will write them, which wait there for the last users of the pages;
                the current one if not given.
            deadline: By when pages that are on their way out must be free.

        Raises:
            CapacityError: If there are fewer; none is taken.
            ConfigError: If it is no whole number.
            DeviceError: If the device has failed, or the pool is closed.
        """
        require_whole("count", count, least=0)
        pages, events = self.take(count, after=after, deadline=deadline)
        self.order(stream, events)
        return pages

    def order(self, stream: Stream | None, events: Sequence[Event]) -> None:
        """Let a stream, by default the thread's current one, wait for events on the device.

        Raises:
            DeviceError: If the device failed.
        """
        if not events:
            return
        try:
            stream = stream or self.device.current_stream()
            for event in events:
                stream.wait_event(event)
        except RuntimeError as error:  # torch's own
            dead = DeviceError(f"{self.device.name}: {error}")
            self.fail(dead)
            raise dead from error

    def take(
        self, count: int, *, after: int | None = None, deadline: float | None = None
    ) -> tuple[list[int], list[Event]]:
        """As :meth:`allocate`, for who waits for the events himself."""
        until = time.monotonic() + self.options.room_wait_s if deadline is None else deadline
        table = self.table
        with self.lock:
            while True:
                self.require_open()
                self._sweep()
                coming = table.leaving_pages + sum(len(pages) for _, pages, _ in self._limbo)
                if count > table.free_pages + table.idle_pages + coming:
                    raise self._no_room(count)
                short = count - table.free_pages - coming
                if short > 0:
                    self._evict(short)
                if count <= table.free_pages:
                    found = table.take(count, after)
                    self.demotion.look()
                    return found
                now = time.monotonic()
                if now >= until:
                    raise self._no_room(count)
                pause = _LIMBO_PAUSE_S if self._limbo else _RECHECK_S
                self.changed.wait(min(until - now, pause))

    def _no_room(self, count: int) -> CapacityError:
        free, going = self.table.free_pages + self.table.idle_pages, self.table.leaving_pages
        late = f", {going} more are still being copied down" if going else ""
        return CapacityError(
            f"{count} KV blocks of {self.spec.block_tokens} tokens asked, {free} of {self.num_blocks} are "
            f"free{late}; wait for a request to end, or configure more blocks"
        )

    def _evict(self, count: int) -> None:
        """Make so many more pages free, or let them leave; under the lock."""
        table = self.table
        goal = table.free_pages + table.leaving_pages + count
        steps = table.evictions(is_held, self._may_leave)
        while table.free_pages + table.leaving_pages < goal and next(steps, False):
            pass
        steps.close()

    def _may_leave(self, block: PoolBlock) -> Leave:
        assert isinstance(block, SpaceBlock)
        if block.saved or block.space.below is None:
            return Leave.NOW
        self.table.leave(block)
        self.demotion.put(block, leaving=True)
        return Leave.COPIED_FIRST

    def make_spare(self) -> None:
        """Evict until the configured number of pages is free; under the lock."""
        short = self.options.spare_blocks - self.table.free_pages - self.table.leaving_pages
        if short > 0 and self.table.idle_pages:
            self._evict(short)
            self.changed.notify_all()

    def release(self, pages: Sequence[int], *, event: Event | None = None) -> None:
        """Give pages back: a published one when its last holder does, any other at once.

        Args:
            pages: Held by the caller.
            event: Recorded behind the last kernel that reads or writes them; if not given, one is recorded
                here on the thread's current stream.

        Raises:
            ValueError: If one is not held or does not exist; none is given back then.
        """
        if event is None:
            event = self.record()
        with self.lock:
            table = self.table
            try:
                blocks = [table.block_of(page) for page in pages]
            except KeyError as error:
                raise ValueError(f"KV blocks [{error}] are freed twice or do not exist") from None
            idle = [p for p, b in zip(pages, blocks, strict=True) if b is not None and b.holds < 1]
            if idle or len(set(pages)) != len(pages):
                raise ValueError(f"KV blocks {idle or list(pages)} are freed twice or do not exist")
            table.used(pages, event)
            for block in blocks:
                if block is not None:
                    table.drop(block)
            table.give_back([p for p, b in zip(pages, blocks, strict=True) if b is None])
            self.demotion.look()
            self.changed.notify_all()

    def record(self) -> Event | None:
        """An event behind all that the calling thread's current stream has been given, if that matters."""
        if not self.device.asynchronous or self._error is not None:
            return None
        try:
            event = self.device.event()
            event.record(self.device.current_stream())
        except (RuntimeError, DeviceError) as error:  # torch's own error: the device is dead
            self.fail(DeviceError(f"{self.device.name}: {error}"))
            return None
        return event

    # ---- blocks -------------------------------------------------------------------------------------

    def space(
        self,
        below: Namespace | None = None,
        *,
        scope: KeyScope = KeyScope(),  # noqa: B008
        tenant: str = "default",
    ) -> PoolSpace:
        """The published blocks of one scope of a tenant; the same as long as somebody has it, or it has some.

        Args:
            below: Where blocks go when their pages are needed, and come back from; ``None``: nowhere.
            scope: Adapter and salt, without ``below``.
            tenant: Whose blocks.

        Raises:
            SpecMismatchError: If the blocks of ``below`` have other layers, tokens or another layout.
        """
        spec = self.spec
        if below is not None:
            scope, spec = below.scope, below.spec
            if any(getattr(spec, n) != getattr(self.spec, n) for n in ("layers", "block_tokens", "layout")):
                raise SpecMismatchError(f"the pool is of {self.spec}, the store below of {spec}")
        name = TierNamespace.of(tenant, spec, scope)
        with self.lock:
            self.require_open()
            found = self._spaces.get(name)
            if found is None:
                found = self._spaces[name] = PoolSpace(self, name)
            if below is not None:
                found.below = below
                self.demotion.start()
            return found

    def flush(self, *, deadline: float) -> bool:
        """Copy down all blocks that the store below lacks; they stay.

        Returns:
            ``False`` at the deadline, or if some were lost.

        Raises:
            DeviceError: If the device has failed, or the pool is closed.
        """
        with self.lock:
            self.require_open()
            lost = self.demotion.lost_blocks
            for space in self._spaces.values():
                if space.below is not None:
                    self.demotion.put_all(space)
            while not self.demotion.idle:
                left = deadline - time.monotonic()
                self.require_open()
                if left <= 0:
                    return False
                self.changed.wait(min(left, _RECHECK_S))
            self.require_open()  # what was in flight when the device died is neither copied nor lost
            return self.demotion.lost_blocks == lost

    def stats(self) -> PoolStats:
        """Counters and gauges."""
        with self.lock:
            table = self.table
            return PoolStats(
                num_blocks=self.num_blocks,
                free_blocks=table.free_pages,
                idle_blocks=table.idle_pages,
                leaving_blocks=table.leaving_pages,
                entries=table.entries,
                evicted_blocks=table.evicted_blocks,
                demoted_blocks=self.demotion.demoted_blocks,
                promoted_blocks=self.promoted_blocks,
                lost_blocks=self.demotion.lost_blocks,
            )

    def close(self, *, deadline: float | None = None) -> None:
        """End the threads; what is not copied down yet is lost, see :meth:`flush`. Idempotent.

        The memory is freed with its last view, not before the copies in flight are over.

        Args:
            deadline: By when the store below and the device must have let go, see ``close_wait_s`` of the
                options; then a thread that hangs there is left to itself, with a line in the log.
        """
        until = time.monotonic() + self.options.close_wait_s if deadline is None else deadline
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self.changed.notify_all()
            self.demotion.stop()
        self.demotion.join(until)
        if self._own_engine is not None:
            self._own_engine.close(deadline=until)
        with self.lock:
            self._sweep()

    def __enter__(self) -> DevicePool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---- for the parts of a pool --------------------------------------------------------------------

    def require_open(self) -> None:
        """Raise what the device died of, or that the pool is closed."""
        if self._error is not None:
            raise DeviceError(f"{self.device.name} failed before: {self._error}") from self._error
        if self._closed:
            raise DeviceError(f"the pool on {self.device.name} is closed")

    def fail(self, error: DeviceError) -> None:
        """The device is dead: all who wait are told; what is in flight keeps its memory."""
        with self.lock:
            if self._error is None and not self._closed:
                self._error = error
                _LOG.error("%s: %s; its pool gives nothing any more", self.device.name, error)
            self.changed.notify_all()

    def start_copy(
        self, pages: Sequence[int], views: Sequence[memoryview], events: Sequence[Event], *, to_pages: bool
    ) -> DeviceCopying | None:
        """Copy blocks between pages and host memory, behind ``events``; ``None`` if it is done.

        Raises:
            DeviceError: If the device has failed; nothing is under way.
            OverloadedError: If too many copies wait.
        """
        transfer = Transfer(self.plan, pages, views, to_pages=to_pages)
        layers = range(len(self.spec.layers))
        if self._engine is None:
            copier: BlockCopier = HostCopier()
            copier.start(transfer, layers, 0, len(pages), None)
            return None
        try:
            joined = self._joined(events)
            return DeviceCopier(self._engine).start(transfer, layers, 0, len(pages), joined)
        except DeviceError as error:
            self.fail(error)
            raise

    def _joined(self, events: Sequence[Event]) -> Event | None:
        """One event behind all of them."""
        left = pending(events)
        if len(left) < 2:
            return left[0] if left else None
        assert self._fence is not None
        joined = self.device.event()
        with self.lock:
            for event in left:
                self._fence.wait_event(event)
            joined.record(self._fence)
        return joined

    def unused(self, pages: list[int], events: Sequence[Event]) -> None:
        """Give back what :meth:`take` gave, before anybody waited for the pages' last users."""
        with self.lock:
            self._put_back(pages, events)

    def strand(self, copying: DeviceCopying, pages: list[int], events: list[Event]) -> None:
        """A copy into pages was given up while it is in flight: they are nobody's until it is over."""
        with self.lock:
            self.table.strand(pages)
            self._limbo.append((copying, pages, events))

    def _put_back(self, pages: list[int], events: Sequence[Event]) -> None:
        for event in events:
            self.table.used(pages, event)
        self.table.give_back(pages)
        self.changed.notify_all()

    def _sweep(self) -> None:
        over = [one for one in self._limbo if one[0].settled]
        if over:
            self._limbo = [one for one in self._limbo if one not in over]
            for _, pages, events in over:  # a copy that was not begun has waited for nobody
                self.table.unstrand(pages)
                self._put_back(pages, events)
