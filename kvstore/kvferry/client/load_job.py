"""Blocks of a read lease on their way into the paged memory of an engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kvferry.client.jobs import LATER, NOW, Job, Piece
from kvferry.core.blockstore import Lease, ReadLease
from kvferry.core.clock import time_left
from kvferry.core.errors import KVFerryError
from kvferry.core.paged_copy import Event, OrderedCopying, Transfer

if TYPE_CHECKING:
    from kvferry.client.registration import Registration

__all__ = ["LoadJob"]

_PIECE_NBYTES: Final = 8 << 20


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
            self._pieces.extend(Piece(layers, after) for layers in self._together(range(len(plan.layers))))
        else:
            step = max(1, _PIECE_NBYTES // max(1, plan.spec.block_nbytes))
            layers = range(len(plan.layers))
            for at in range(0, self._held, step):
                self._pieces.append(Piece(layers, after, at, min(step, self._held - at)))
        if not self._held:
            self._pieces.clear()
        self._watch_lease(lease)

    def failed_blocks(self) -> tuple[int, ...]:
        """Blocks that are to be computed: those that missed and, once it is over, what was not loaded whole.

        What layers of theirs have been loaded is right all the same, where :meth:`wait_layer` said so.
        """
        return self.block_ids[self._blocks_done if self._over else self._held :]

    def order_layer(self, layer: int, stream: Any, *, deadline: float) -> bool:  # noqa: ANN401
        """Let a device wait for a layer: what is queued in ``stream`` from here on finds it in place.

        The host waits for no bytes, only until the copies are queued, which is long before, unless more is
        to be copied than the device takes at a time. Whether the bytes were right to the end is known later:
        what was computed from them counts once :meth:`wait_layer` or :attr:`ok` has said so. Where the
        host copies, and by blocks, it is :meth:`wait_layer`.

        Args:
            layer: Number of the layer.
            stream: Of the device that the regions are on.
            deadline: By when it returns; a past one never waits.

        Returns:
            ``False`` if the layer will not be in place, or its copies are not queued yet by the deadline.
        """
        with self._cond:
            while (found := self._copying_of(layer)) is None and time.monotonic() < deadline:
                if layer in self._layers_done or self._over:
                    break
                self._cond.wait(time_left(deadline))
        if found is None:
            return self.wait_layer(layer, deadline=deadline)
        try:
            found.order(stream, deadline)
        except KVFerryError:
            return False
        return True

    def _copying_of(self, layer: int) -> OrderedCopying | None:
        """What is under way of a layer, all of it, if a device can wait for it."""
        if self.order == "layer":
            for piece, copying in self._flying:
                if layer in piece.layers and isinstance(copying, OrderedCopying):
                    return copying
        return None

    def _landed(self, piece: Piece) -> None:
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
        self._tell()

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
        with contextlib.suppress(KVFerryError):  # each piece was checked after it was read
            self._lease.release()

    def _lease_to_renew(self) -> Lease | None:
        return self._lease

    def _renewal_failed(self, error: KVFerryError) -> None:
        """What is read is checked anyhow."""
