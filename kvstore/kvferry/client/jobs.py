"""Blocks on their way between a store and the paged memory of an engine: what all jobs have in common."""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from kvferry.core.blockstore import Lease
from kvferry.core.clock import checked_deadline, time_left
from kvferry.core.errors import KVFerryError, RequestCancelledError, TransferTimeoutError
from kvferry.core.paged_copy import Copying, Event, Transfer
from kvferry.core.values import require_whole

if TYPE_CHECKING:
    from kvferry.client.registration import Registration

__all__ = ["LATER", "NOW", "Job", "Piece"]

log = logging.getLogger(__name__)

_POLL_S: Final = 100e-6
_TOGETHER_NBYTES: Final = 1 << 20
_FLYING: Final = 8
_NEVER: Final = float("inf")
NOW: Final = 0.0
"""When a job is to be called again: it has done something."""
LATER: Final = None
"""Not before it wakes the mover."""


class Piece(NamedTuple):
    """What is copied at a time."""

    layers: Sequence[int]
    after: Event | None
    first: int = 0
    blocks: int | None = None  # all, if not given


class Job(ABC):
    """What loads and saves have in common. Thread safe.

    Attributes:
        name: The engine's own, as :meth:`poll` reports it.
        kind: ``load`` or ``save``.
        block_ids: The engine's blocks, in order.
        deadline: By when it is over, done or not.
        error: Why it has failed; ``None`` while it has not, or if it was only cut short by a miss.
    """

    kind = ""

    def __init__(
        self, registration: Registration, name: str, block_ids: Sequence[int], deadline: float
    ) -> None:
        self.name = name
        self.block_ids = tuple(int(number) for number in block_ids)
        self.deadline = checked_deadline(deadline)
        self.error: KVFerryError | None = None
        self.registration = registration
        self._mover = registration.mover
        self._cond = registration.mover.cond
        self.began = time.monotonic()
        self._transfer: Transfer | None = None
        self._pieces: deque[Piece] = deque()
        self._flying: deque[tuple[Piece, Copying]] = deque()
        self._layers_done: set[int] = set()
        self._watchers: dict[object, Callable[[], None]] = {}
        self._over = self._ending = self._busy = self._claimed = self._renewing = False
        self._renew_at, self._span = _NEVER, 0.0
        self.nbytes = 0

    def __repr__(self) -> str:
        state = "over" if self._over else f"{len(self._layers_done)} layers done"
        return f"<{self.kind} job {self.name!r} of {len(self.block_ids)} blocks, {state}>"

    @property
    def done(self) -> bool:
        """Whether it is over, well or not: nothing of it touches the region any more. Asks nobody."""
        return self._over

    @property
    def ok(self) -> bool:
        """Whether it is over and nothing has failed."""
        return self._over and not self.failed_blocks()

    @abstractmethod
    def failed_blocks(self) -> tuple[int, ...]:
        """Those of the block ids that it has not done and will not do; final once it is over."""

    def wait_layer(self, layer: int, *, deadline: float) -> bool:
        """Wait until a layer is done in all blocks but the failed ones.

        Returns:
            ``False`` if it will not be, or is not by the deadline; then :meth:`cancel`, or wait on, before
            the blocks are used otherwise.

        Raises:
            ConfigError: For a deadline that is none.
            IndexError: If there is no such layer.
        """
        self._require_layer(layer)
        deadline = checked_deadline(deadline)
        with self._cond:
            while layer not in self._layers_done and not self._over and time.monotonic() < deadline:
                self._cond.wait(time_left(deadline))
            return layer in self._layers_done

    def _require_layer(self, layer: int) -> None:
        require_whole("layer", layer)
        if not 0 <= layer < len(self.registration.plan.layers):
            raise IndexError(f"{self!r} has no layer {layer}")

    def wait(self, *, deadline: float) -> bool:
        """Wait until it is over; whether it is."""
        deadline = checked_deadline(deadline)
        with self._cond:
            while not self._over and time.monotonic() < deadline:
                self._cond.wait(time_left(deadline))
            return self._over

    def cancel(self) -> None:
        """End it, and return when nothing of it can touch the region any more.

        That takes as long as the copy of one layer of one block where the host copies, and as long as what
        is under way on a device. Of a job that is over nothing changes; one that was loaded stays so, and
        a save whose layers have all been read goes on by itself, since that touches the region no more.
        """
        if self.stop():
            with self._cond:
                while not self._over:  # the copy of one block, or the device's own end of what it has begun
                    self._cond.wait(1.0)

    def stop(self) -> bool:
        """:meth:`cancel` without the wait: whether there is something to wait for until it is done."""
        return self._end(RequestCancelledError(f"{self!r} was cancelled"))

    @contextmanager
    def watched(self, tell: Callable[[], None]) -> Iterator[None]:
        """Have ``tell`` called by any thread when what the waits wait for has changed; it must not wait."""
        token = object()
        with self._cond:
            self._watchers[token] = tell
        try:
            yield
        finally:
            with self._cond:
                del self._watchers[token]

    def _tell(self) -> None:
        for tell in tuple(self._watchers.values()):
            tell()

    # ---- how it ends -----------------------------------------------------------------------------

    def _end(self, error: KVFerryError) -> bool:
        """End it; whether something of it is still under way."""
        with self._cond:
            if self._over or self._is_past_region():
                return False
            if not self._ending:
                self._ending, self.error = True, error
            if self._transfer is not None:
                self._transfer.stop.value = 1
            mine = not self._busy and not self._flying and not self._claimed
            self._claimed = self._claimed or mine
        if mine:
            self._finish()
        else:
            self._mover.wake()
        return not mine

    @abstractmethod
    def _is_past_region(self) -> bool:
        """Whether all that is left to do does not touch the region."""

    def _finish(self) -> None:
        """Called once, by who claimed it, with nothing under way."""
        try:
            self._give_up_lease()
        except BaseException:
            log.warning("%r: giving back its lease", self, exc_info=True)
        with self._cond:  # who waits for the end, or for there being no jobs, finds its completion
            self._pieces.clear()
            self._over = True
            self._mover.ended(self)
        self._tell()

    @abstractmethod
    def _give_up_lease(self) -> None:
        """Release or abort its lease, if it has one; called once, at the end."""

    # ---- the mover's side ------------------------------------------------------------------------

    def step(self, now: float) -> float | None:
        """Go on with it. By the mover's thread alone.

        Returns:
            Seconds until it is to be called again: 0 if something was done, ``None`` if not before it wakes
            the mover.
        """
        if now >= self.deadline and not self._ending and not self._is_past_region():
            self._end(TransferTimeoutError(f"{self!r} was not done by its deadline"))
        if self._ending:
            return self._settle()
        self._keep_lease(now)
        landed = self._land()
        with self._cond:
            transfer, piece = self._transfer, self._pieces[0] if self._pieces else None
        if piece is not None and transfer is not None and len(self._flying) < _FLYING:
            if self._may_start(piece):
                return self._launch(transfer, piece)
            return NOW if landed else _POLL_S
        if self._flying:
            return NOW if landed else _POLL_S
        return NOW if landed else self._when_idle()

    def _may_start(self, piece: Piece) -> bool:
        after = piece.after
        return after is None or self._mover.copier(self).orders_events or after.query()

    @abstractmethod
    def _when_idle(self) -> float | None:
        """Nothing is left to be copied for now; returns as :meth:`step`."""

    def next_look(self) -> float:
        """By when it is to be looked at without being woken."""
        if self._over or self._is_past_region():
            return _NEVER
        return min(self.deadline, self._renew_at)

    def _launch(self, transfer: Transfer, piece: Piece) -> float | None:
        with self._cond:
            if self._ending:
                return NOW
            self._busy = True
            self._pieces.popleft()
        copying: Copying | None = None
        try:
            copier = self._mover.copier(self)
            blocks = len(transfer) if piece.blocks is None else piece.blocks
            copying = copier.start(transfer, piece.layers, piece.first, blocks, piece.after)
            if copying is None and not transfer.stop.value:
                self._landed(piece)
        finally:
            with self._cond:
                self._busy = False
                if copying is not None:
                    self._flying.append((piece, copying))
                    self._cond.notify_all()
        return NOW

    def _land(self) -> bool:
        landed = False
        while self._flying:
            piece, copying = self._flying[0]
            try:
                if not copying.query():
                    break
            except BaseException:
                self._flying.popleft()  # it is over, as its contract says
                raise
            if not self._ending:
                self._landed(piece)
            with self._cond:
                self._flying.popleft()
            landed = True
        return landed

    def _settle(self) -> float | None:
        """End it once nothing is under way."""
        with contextlib.suppress(KVFerryError):
            self._land()
        with self._cond:
            if self._flying:
                return _POLL_S
            mine, self._claimed = not self._claimed, True
        if mine:
            self._finish()
        return LATER

    def fail(self, error: KVFerryError) -> None:
        """Something went wrong: it ends as soon as nothing is under way."""
        self._end(error)

    @abstractmethod
    def _landed(self, piece: Piece) -> None:
        """A piece has been copied. What is raised here ends the job."""

    def _together(self, layers: Sequence[int]) -> Iterator[Sequence[int]]:
        """Layers that are copied in one piece: several where they are so small that a piece costs more."""
        specs, start, nbytes = self.registration.plan.spec.layers, 0, 0
        for at, layer in enumerate(layers):
            more = specs[layer].nbytes * len(self.block_ids)
            if at > start and nbytes + more > _TOGETHER_NBYTES:
                yield layers[start:at]
                start, nbytes = at, 0
            nbytes += more
        yield layers[start:]

    def _nbytes_of(self, piece: Piece) -> int:
        blocks = len(self._transfer or ()) if piece.blocks is None else piece.blocks
        layers = self.registration.plan.spec.layers
        return blocks * sum(layers[number].nbytes for number in piece.layers)

    # ---- its lease -------------------------------------------------------------------------------

    def _watch_lease(self, lease: Lease) -> None:
        now = time.monotonic()
        self._span = lease.expires_at - now
        self._renew_at = now + self._span / 2

    def _keep_lease(self, now: float) -> None:
        if now >= self._renew_at and not self._renewing:
            self._renewing, self._renew_at = True, _NEVER
            self._mover.ask(self, self._renew)

    def _renew(self) -> None:
        lease = self._lease_to_renew()
        if lease is None or self._over or self._ending:
            return
        try:
            lease.renew()
        except KVFerryError as error:
            self._renewal_failed(error)
        else:
            with self._cond:
                self._renewing = False
                self._watch_lease(lease)
            self._mover.wake()

    @abstractmethod
    def _lease_to_renew(self) -> Lease | None:
        """The lease, while it is needed."""

    @abstractmethod
    def _renewal_failed(self, error: KVFerryError) -> None:
        """Its lease could not be renewed."""
