"""Blocks on their way between a store and the paged memory of an engine: one job a request."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvferry.core.blockstore import Lease, ReadLease, WriteLease
from kvferry.core.clock import checked_deadline, time_left
from kvferry.core.errors import KVFerryError, LeaseExpiredError, RequestCancelledError, TransferTimeoutError
from kvferry.core.keys import BlockKey
from kvferry.core.paged_copy import Copying, Event, Transfer

if TYPE_CHECKING:
    from kvferry.client.registration import Registration

__all__ = ["Job", "LoadJob", "SaveJob"]

_POLL_S: Final = 100e-6
_PIECE_NBYTES: Final = 8 << 20
_TOGETHER_NBYTES: Final = 1 << 20
_FLYING: Final = 8
_RESERVE_S: Final = 1.0
_NEVER: Final = float("inf")
NOW: Final = 0.0
LATER: Final = None


class _Piece(NamedTuple):
    """What is copied at a time."""

    layers: Sequence[int]
    after: Event | None
    first: int = 0
    blocks: int | None = None  # all, if not given


class Job:
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
        self._pieces: deque[_Piece] = deque()
        self._flying: deque[tuple[_Piece, Copying]] = deque()
        self._layers_done: set[int] = set()
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

    def failed_blocks(self) -> tuple[int, ...]:
        """Those of the block ids that it has not done and will not do; final once it is over."""
        raise NotImplementedError

    def wait_layer(self, layer: int, *, deadline: float) -> bool:
        """Wait until a layer is done in all blocks but the failed ones.

        Returns:
            ``False`` if it will not be, or is not by the deadline; then :meth:`cancel`, or wait on, before
            the blocks are used otherwise.
        """
        with self._cond:
            while layer not in self._layers_done and not self._over and time.monotonic() < deadline:
                self._cond.wait(time_left(deadline))
            return layer in self._layers_done

    def wait(self, *, deadline: float) -> bool:
        """Wait until it is over; whether it is."""
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
        self._end(RequestCancelledError(f"{self!r} was cancelled"), wait=True)

    # ---- how it ends -----------------------------------------------------------------------------

    def _end(self, error: KVFerryError, *, wait: bool = False) -> None:
        with self._cond:
            if self._over or self._is_past_region():
                return
            if not self._ending:
                self._ending, self.error = True, error
            if self._transfer is not None:
                self._transfer.stop.value = 1
            mine = not self._busy and not self._flying and not self._claimed
            self._claimed = self._claimed or mine
        if mine:
            self._finish()
        elif wait:
            self._mover.wake()
            with self._cond:
                while not self._over:  # the copy of one block, or the device's own end of what it has begun
                    self._cond.wait(1.0)

    def _is_past_region(self) -> bool:
        """Whether all that is left to do does not touch the region."""
        return False

    def _finish(self) -> None:
        """Called once, by who claimed it, with nothing under way."""
        self._give_up_lease()
        with self._cond:  # who waits for the end, or for there being no jobs, finds its completion
            self._pieces.clear()
            self._over = True
            self._mover.ended(self)

    def _give_up_lease(self) -> None:
        raise NotImplementedError

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

    def _may_start(self, piece: _Piece) -> bool:
        after = piece.after
        return after is None or self._mover.copier(self).orders_events or after.query()

    def _when_idle(self) -> float | None:
        """Nothing is left to be copied for now."""
        return LATER

    def next_look(self) -> float:
        """By when it is to be looked at without being woken."""
        if self._over or self._is_past_region():
            return _NEVER
        return min(self.deadline, self._renew_at)

    def _launch(self, transfer: Transfer, piece: _Piece) -> float | None:
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

    def _landed(self, piece: _Piece) -> None:
        raise NotImplementedError

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

    def _nbytes_of(self, piece: _Piece) -> int:
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
            self._mover.ask(self._renew)

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

    def _lease_to_renew(self) -> Lease | None:
        raise NotImplementedError

    def _renewal_failed(self, error: KVFerryError) -> None:
        """What is read is checked anyhow; who writes need not go on."""


class LoadJob(Job):
    """Blocks of a read lease on their way into the engine's blocks; made by :meth:`Registration.load`.

    A layer counts as done when its bytes are in place and the lease has said that they were right to the
    end. Blocks behind those that the lease has are misses: they have failed from the start.

    Attributes:
        lossy: Whether a block of it has lost something; what is computed behind it has then too.
    """

    kind = "load"

    def __init__(
        self, registration: Registration, name: str, lease: ReadLease, block_ids: Sequence[int], *,
        first: int, order: str, after: Event | None, deadline: float,
    ) -> None:  # fmt: skip
        super().__init__(registration, name, block_ids, deadline)
        self._lease = lease
        self._held = len(lease) - first
        self.lossy = any(index >= first for index in lease.lossy)
        self._blocks_done = 0
        plan = registration.plan
        views = [lease.view(first + index) for index in range(self._held)]
        self._transfer = Transfer(plan, self.block_ids[: self._held], views, to_pages=True)
        self.order = order
        if order == "layer":
            self._pieces.extend(_Piece(layers, after) for layers in self._together(range(len(plan.layers))))
        else:
            step = max(1, _PIECE_NBYTES // max(1, plan.spec.block_nbytes))
            layers = range(len(plan.layers))
            for at in range(0, self._held, step):
                self._pieces.append(_Piece(layers, after, at, min(step, self._held - at)))
        if not self._held:
            self._pieces.clear()
        self._watch_lease(lease)

    def failed_blocks(self) -> tuple[int, ...]:
        """Blocks that are to be computed: those that missed and, once it is over, what was not loaded whole.

        What layers of theirs have been loaded is right all the same, where :meth:`wait_layer` said so.
        """
        return self.block_ids[self._blocks_done if self._over else self._held :]

    def _landed(self, piece: _Piece) -> None:
        self._lease.check()
        with self._cond:
            self.nbytes += self._nbytes_of(piece)
            if self.order == "layer":
                self._layers_done.update(piece.layers)
                if len(self._layers_done) == len(self.registration.plan.layers):
                    self._blocks_done = self._held
            else:
                self._blocks_done = piece.first + (piece.blocks or 0)
                if self._blocks_done == self._held:
                    self._layers_done.update(piece.layers)
            self._cond.notify_all()

    def _is_past_region(self) -> bool:
        return len(self._layers_done) == len(self.registration.plan.layers)

    def _when_idle(self) -> float | None:
        with self._cond:
            if self._claimed:
                return LATER
            self._claimed = True
        self._finish()
        return NOW

    def _give_up_lease(self) -> None:
        with contextlib.suppress(LeaseExpiredError):  # each piece was checked after it was read
            self._lease.release()

    def _lease_to_renew(self) -> Lease | None:
        return self._lease


class SaveJob(Job):
    """Blocks of the engine on their way into the store; made by :meth:`Registration.save`.

    The engine says of each layer when it may be read; the blocks are published, all at once, when all
    layers have been. What is stored already is not copied.

    Attributes:
        stored: Blocks newly stored, once it is over.
    """

    kind = "save"

    def __init__(
        self, registration: Registration, name: str, keys: Sequence[BlockKey], block_ids: Sequence[int], *,
        parent: BlockKey | None, deadline: float, lossy: bool,
    ) -> None:  # fmt: skip
        super().__init__(registration, name, block_ids, deadline)
        self._keys, self._lossy = tuple(keys), lossy
        self._parent = parent
        self._lease: WriteLease | None = None
        self._given: set[int] = set()
        self._committing = self._committed = False
        self.stored = 0

    def layer(self, number: int, event: Event | None = None) -> None:
        """The layer is written in all blocks, or will be when ``event`` is done. Waits for nobody.

        Blocks must stay as they are until :meth:`wait_layer` or :meth:`wait` has said so, or :meth:`cancel`
        has returned. Given again, or after the end, it changes nothing.

        Raises:
            IndexError: If there is no such layer.
        """
        count = len(self.registration.plan.layers)
        if not 0 <= number < count:
            raise IndexError(f"{self!r} has no layer {number}")
        self._give([number], event)

    def all_layers(self, event: Event | None = None) -> None:
        """:meth:`layer` of those that were not given yet."""
        self._give(range(len(self.registration.plan.layers)), event)

    def _give(self, numbers: Sequence[int], event: Event | None) -> None:
        with self._cond:
            new = [number for number in numbers if number not in self._given]
            if not new or self._over or self._ending:
                return
            self._given.update(new)
            self._pieces.extend(_Piece(layers, event) for layers in self._together(new))
        self._mover.wake()

    def failed_blocks(self) -> tuple[int, ...]:
        """All of them if it has failed, else none: blocks are published together or not at all."""
        return self.block_ids if self._over and not self._committed else ()

    def begin(self) -> None:
        """Ask for slots; nothing waits for them."""
        self._mover.ask(self._reserve)

    def _reserve(self) -> None:
        if self._over or self._ending:
            return
        namespace = self.registration.namespace
        limit = min(self.deadline, time.monotonic() + _RESERVE_S)
        try:
            lease = namespace.reserve(self._keys, parent=self._parent, deadline=limit)
        except KVFerryError as error:
            self.fail(error)
            return
        try:
            places = dict(zip(self._keys, self.block_ids, strict=True))
            lease.mark_lossy(range(len(lease)) if self._lossy else ())
            views = [lease.view(index) for index in range(len(lease))]
            pages = [places[key] for key in lease.keys]
            transfer = Transfer(self.registration.plan, pages, views, to_pages=False)
        except KVFerryError as error:
            lease.abort()
            self.fail(error)
            return
        with self._cond:
            late = self._over or self._ending
            if not late:
                self._lease, self._transfer = lease, transfer
                self._watch_lease(lease)
        if late:
            lease.abort()
        self._mover.wake()

    def _landed(self, piece: _Piece) -> None:
        with self._cond:
            self.nbytes += self._nbytes_of(piece)
            self._layers_done.update(piece.layers)
            self._cond.notify_all()

    def _when_idle(self) -> float | None:
        all_read = len(self._layers_done) == len(self.registration.plan.layers)
        with self._cond:
            if self._lease is None or not all_read or self._committing or self._ending:
                return LATER
            self._committing = True
        self._mover.ask(self._commit)
        return LATER

    def _is_past_region(self) -> bool:
        return self._committing

    def _commit(self) -> None:
        assert self._lease is not None
        try:
            self.stored = self.registration.commit(self._lease, self.deadline)
            self._committed = True
        except KVFerryError as error:
            self.error = error
        with self._cond:
            self._claimed = True
        self._finish()

    def _give_up_lease(self) -> None:
        if self._lease is not None and not self._committed:
            self._lease.abort()

    def _lease_to_renew(self) -> Lease | None:
        return None if self._committing else self._lease

    def _renewal_failed(self, error: KVFerryError) -> None:
        self.fail(error)
