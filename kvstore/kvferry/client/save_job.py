"""Blocks of an engine on their way from its paged memory into the store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvferry.client.jobs import LATER, Job, Piece
from kvferry.core.blockstore import Lease, WriteLease
from kvferry.core.errors import KVFerryError, StoreError
from kvferry.core.keys import BlockKey
from kvferry.core.paged_copy import Event, Transfer, require_event

if TYPE_CHECKING:
    from kvferry.client.registration import Registration

__all__ = ["SaveJob"]

_RESERVE_S: Final = 1.0


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
            ConfigError: If ``event`` is none.
            IndexError: If there is no such layer.
        """
        self._require_layer(number)
        require_event("event", event)
        self._give([number], event)

    def all_layers(self, event: Event | None = None) -> None:
        """:meth:`layer` of those that were not given yet."""
        require_event("event", event)
        self._give(range(len(self.registration.plan.layers)), event)

    def _give(self, numbers: Sequence[int], event: Event | None) -> None:
        with self._cond:
            new = [number for number in numbers if number not in self._given]
            if not new or self._over or self._ending:
                return
            self._given.update(new)
            self._pieces.extend(Piece(layers, event) for layers in self._together(new))
        self._mover.wake()

    def failed_blocks(self) -> tuple[int, ...]:
        """All of them if it has failed, else none: blocks are published together or not at all."""
        return self.block_ids if self._over and not self._committed else ()

    def begin(self) -> None:
        """Ask for slots; nothing waits for them."""
        self._mover.ask(self, self._reserve)

    def _reserve(self) -> None:
        if self._over or self._ending:
            return
        namespace = self.registration.namespace
        limit = min(self.deadline, time.monotonic() + _RESERVE_S)
        lease = namespace.reserve(self._keys, parent=self._parent, deadline=limit)
        try:
            places = dict(zip(self._keys, self.block_ids, strict=True))
            lease.mark_lossy(range(len(lease)) if self._lossy else ())
            views = [lease.view(index) for index in range(len(lease))]
            pages = [places[key] for key in lease.keys]
            transfer = Transfer(self.registration.plan, pages, views, to_pages=False)
        except BaseException:
            lease.abort()
            raise
        with self._cond:
            late = self._over or self._ending
            if not late:
                self._lease, self._transfer = lease, transfer
                self._watch_lease(lease)
        if late:
            lease.abort()
        self._mover.wake()

    def _landed(self, piece: Piece) -> None:
        with self._cond:
            self.nbytes += self._nbytes_of(piece)
            self._layers_done.update(piece.layers)
            self._cond.notify_all()
        self._tell()

    def _when_idle(self) -> float | None:
        all_read = len(self._layers_done) == len(self.registration.plan.layers)
        with self._cond:
            if self._lease is None or not all_read or self._committing or self._ending:
                return LATER
            self._committing = True
        self._mover.ask(self, self._commit)
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
        except BaseException as error:
            self.error = StoreError(f"{self!r}: {error!r}")
            raise
        finally:
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
