"""The threads that move blocks between stores and the paged memory of engines."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from kvferry.client.jobs import Job
from kvferry.client.load_job import LoadJob
from kvferry.client.registration import Registration
from kvferry.core.blockstore import Completion, Namespace
from kvferry.core.clock import deadline_in, time_left
from kvferry.core.errors import ConfigError, KVFerryError, RequestCancelledError, StoreError
from kvferry.core.head_shards import HeadShard
from kvferry.core.nearest import shown
from kvferry.core.paged_copy import BlockCopier, HostCopier
from kvferry.core.regions import Region, RegionPlan

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["BlockMover"]

log = logging.getLogger(__name__)

_MOST_COMPLETIONS: Final = 65536
_JOIN_S: Final = 10.0


class BlockMover:
    """Moves blocks for any number of registrations: one thread copies, one asks the store. Thread safe.

    What copies never waits for the store, so a load under way goes on, and ends by its deadline, also while
    the store does not answer. Loads go before saves. :class:`kvferry.client.Client` has one of its own; make
    another for a store in this process.

    Args:
        copiers: What copies, by kind of device; the host's memory is always there.

    Attributes:
        cond: Held, and notified, where the state of its jobs changes.
    """

    def __init__(self, copiers: Mapping[str, BlockCopier] | None = None) -> None:
        self.cond = threading.Condition()
        self._copiers: dict[str, BlockCopier] = {"cpu": HostCopier(), **(copiers or {})}
        self._loads: dict[Job, None] = {}
        self._saves: dict[Job, None] = {}
        self._asks: deque[tuple[Job, Callable[[], None]]] = deque()
        self._asked = threading.Condition()
        self._completions: deque[Completion] = deque(maxlen=_MOST_COMPLETIONS)
        self._woken = False
        self._closed = False
        self._threads: list[threading.Thread] = []

    def register(
        self, namespace: Namespace, regions: Sequence[Region], *, shard: HeadShard | None = None
    ) -> Registration:
        """An engine's paged memory for the blocks of a namespace.

        Args:
            namespace: Whose blocks.
            regions: All of them; together they hold each tensor of each layer once.
            shard: Which KV heads they have, where a tensor-parallel group of another size stored the blocks.

        Raises:
            ConfigError: As :class:`RegionPlan`, and if nothing here copies on that kind of device.
            StoreError: If it is closed.
        """
        for number, region in enumerate(regions):
            if not isinstance(region, Region):
                raise ConfigError(f"region {number} is {shown(region)}, must be a Region, as of Region.of()")
        plan = RegionPlan(namespace.spec, regions, shard=shard)
        if plan.device not in self._copiers:
            known = ", ".join(self._copiers)
            raise StoreError(f"regions on {plan.device!r}: nothing here copies there; {known} can be had")
        with self.cond:
            self._require_open()
            if not self._threads:
                for name, run in (("kvferry-mover", self._move), ("kvferry-mover-asks", self._ask)):
                    self._threads.append(threading.Thread(target=run, name=name, daemon=True))
                    self._threads[-1].start()
        return Registration(self, namespace, plan)

    def poll(self) -> list[Completion]:
        """Jobs that ended since the last call, at most the last 65,536; near-free when there are none."""
        if not self._completions:
            return []
        found = []
        while self._completions:
            found.append(self._completions.popleft())
        return found

    @property
    def jobs(self) -> int:
        """Jobs that are not over."""
        return len(self._loads) + len(self._saves)

    def close(self) -> None:
        """End all jobs and the threads; a second call does nothing.

        Waits 10 s for a device, or a store, that does not answer. What is under way there then goes on
        behind it, and is said in the log: its jobs, and with them the regions, are kept until it has ended.
        """
        with self.cond:
            if self._closed:
                return
            self._closed = True
            jobs = [*self._loads, *self._saves]
        for job in jobs:
            job.fail(RequestCancelledError(f"{job!r} was cancelled: its client was closed"))
        self.wake()
        with self._asked:
            self._asked.notify_all()
        deadline = deadline_in(_JOIN_S)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(time_left(deadline))
        if self.jobs:
            log.error(
                "closed with %d jobs whose copies have not ended: %s", self.jobs, [*self._loads, *self._saves]
            )

    def __enter__(self) -> BlockMover:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- for its jobs ----------------------------------------------------------------------------

    def copier(self, job: Job) -> BlockCopier:
        """What copies for a job."""
        return self._copiers[job.registration.plan.device]

    def add(self, job: Job) -> None:
        """Take a job on.

        Raises:
            StoreError: If it is closed.
        """
        with self.cond:
            self._require_open()
            (self._loads if isinstance(job, LoadJob) else self._saves)[job] = None
        self.wake()

    def ended(self, job: Job) -> None:
        """A job is over."""
        failed = job.failed_blocks()
        seconds = time.monotonic() - job.began
        with self.cond:
            self._completions.append(Completion(job.name, job.kind, not failed, job.nbytes, seconds, failed))
            self._loads.pop(job, None)
            self._saves.pop(job, None)
            self._woken = True  # it may have been the last that a closed mover waits for
            self.cond.notify_all()

    def ask(self, job: Job, question: Callable[[], None]) -> None:
        """Have something asked of the store for a job by the thread that may wait for it."""
        with self._asked:
            self._asks.append((job, question))
            self._asked.notify()

    def wake(self) -> None:
        """There may be something to do."""
        with self.cond:
            self._woken = True
            self.cond.notify_all()

    # ---- the threads -----------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError("the mover of blocks is closed")

    def _move(self) -> None:
        while True:
            with self.cond:
                if self._closed and not self.jobs:
                    return
                self._woken = False
                jobs = [*self._loads, *self._saves]
            pause = self._step_one(jobs)
            if pause == 0:
                continue
            with self.cond:
                if not self._woken:
                    self.cond.wait(pause)

    def _step_one(self, jobs: Sequence[Job]) -> float | None:
        """Let the first do something that can; seconds until one may."""
        now = time.monotonic()
        pause = float("inf")
        for job in jobs:
            try:
                wait = job.step(now)
            except BaseException as error:  # noqa: BLE001 - thread root: whatever an engine's event raises
                self._failed(job, error)
                wait = 0.0
            if wait == 0:
                return 0.0
            pause = min(pause, job.next_look() - now if wait is None else wait)
        return None if pause == float("inf") else max(1e-6, pause)

    def _ask(self) -> None:
        while True:
            with self._asked:
                while not self._asks:
                    if self._closed:
                        return
                    self._asked.wait(1.0)
                job, question = self._asks.popleft()
            try:
                question()
            except BaseException as error:  # noqa: BLE001 - thread root: whatever a store of others raises
                self._failed(job, error)

    def _failed(self, job: Job, error: BaseException) -> None:
        """End a job by an error; one that nobody expected is logged. The threads go on for the others."""
        if not isinstance(error, KVFerryError):
            log.warning("%r failed", job, exc_info=error)
            error = StoreError(f"{job!r}: {error!r}")
        job.fail(error)
