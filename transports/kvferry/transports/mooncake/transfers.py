"""Transfers: batches of pieces that the engine moves, a few at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from kvferry.core.clock import is_past, time_left
from kvferry.core.errors import ConnectError, KVFerryError, TransferTimeoutError, TransportError
from kvferry.transports.mooncake.engine import DONE, FAILED, Engine
from kvferry.transports.mooncake.grants import Move, WindowGrant
from kvferry.transports.region import Access, RegionPart, RegionTransfer

__all__ = ["MooncakeTransfer"]

_log = logging.getLogger(__name__)
_UNDER_WAY: Final = 32  # the library refuses what waits for more than a second behind 1,024 others
_FIRST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 1e-3
_SLOWER: Final = 1.4


class MooncakeTransfer(RegionTransfer):
    """Pieces to move, those under way, and what went wrong.

    It moves on when it is polled or waited for. Until it is over it holds the local memory, whatever its
    user does.

    Args:
        engine: That moves.
        grant: Where to, or from.
        moves: What; inside the window.
        parts: Holds the local memory.
    """

    def __init__(
        self, engine: Engine, grant: WindowGrant, moves: Sequence[Move], parts: Sequence[RegionPart]
    ) -> None:
        self._engine = engine
        self._grant = grant
        self._access: Access = grant.access
        self._held = [memoryview(part.local) for part in parts]  # views of its own: others may be released
        self._all = len(moves)
        self._todo: deque[Move] = deque(moves)
        self._flying: dict[int, Move] = {}  # by handle
        self._lock = threading.Lock()
        self._met = False
        self._error: KVFerryError | None = None
        self._done = not moves

    def __repr__(self) -> str:
        return f"{self._access} of {self._all} pieces, {self._grant}"

    @property
    def over(self) -> bool:
        """Whether the local memory is free again."""
        return self._done

    # ---- the contract ---------------------------------------------------------------------------

    def poll(self) -> bool:
        """See :meth:`RegionTransfer.poll`."""
        if not self._done and self._lock.acquire(blocking=False):  # else another thread is at it
            try:
                if self._met:
                    self._advance()
            finally:
                self._lock.release()
        if not self._done:
            return False
        if self._error is not None:
            raise type(self._error)(str(self._error)) from self._error
        return True

    def wait(self, deadline: float) -> None:
        """See :meth:`RegionTransfer.wait`."""
        pause = _FIRST_PAUSE_S
        while not self.poll():
            if is_past(deadline):
                left = len(self._todo) + len(self._flying)
                raise TransferTimeoutError(f"{self!r}: {left} were not moved by the deadline")
            time.sleep(min(pause, time_left(deadline)))
            pause = min(pause * _SLOWER, _LONGEST_PAUSE_S)

    # ---- for the endpoint -----------------------------------------------------------------------

    def start(self) -> None:
        """Begin with a peer that is known to answer."""
        with self._lock:
            self._met = True
            if not self._done:
                self._advance()

    def meet_and_start(self) -> None:
        """Begin with a peer that has to be looked for; runs in a thread of its own, and ends with it."""
        try:
            if self._engine.meet(self._grant.session):
                self.start()
                return
            error: KVFerryError = ConnectError(
                f"{self._grant}: {self._grant.session} is not reached; does its process run, and do "
                "firewalls let its ports through?"
            )
        except Exception as exc:  # noqa: BLE001 - thread root
            _log.exception("%r: looking for its peer failed", self)
            error = TransportError(f"{self!r}: {type(exc).__name__}: {exc}")
        with self._lock:
            self._met = True
            self._fail(error)

    def cancel(self, error: KVFerryError) -> None:
        """Start nothing more; what is under way ends by itself."""
        with self._lock:
            self._met = True  # should the peer be met later, there is nothing left to do
            if not self._done:
                self._fail(error)

    # ---- under the lock -------------------------------------------------------------------------

    def _advance(self) -> None:
        for handle in list(self._flying):
            status = self._engine.status(handle)
            if status in (DONE, FAILED):
                self._landed(handle, failed=status == FAILED)
        while self._todo and len(self._flying) < _UNDER_WAY and self._error is None:
            self._launch(self._todo.popleft())
        self._done = not self._flying and not self._todo
        if self._done:
            self._held.clear()

    def _launch(self, move: Move) -> None:
        engine, local = self._engine, engine_local(self._engine, move)
        try:
            if local:
                engine.hold(move.local, move.nbytes)
            handle = engine.submit(self._grant.session, self._access, move.local, move.remote, move.nbytes)
        except TransportError as error:
            self._fail(error)
            return
        if handle:
            self._flying[handle] = move
            return
        if local:
            engine.release(move.local, move.nbytes)
        self._fail(TransportError(f"{self!r}: the engine takes no request to {self._grant.session}"))

    def _landed(self, handle: int, *, failed: bool) -> None:
        move = self._flying.pop(handle)
        if engine_local(self._engine, move):
            self._engine.release(move.local, move.nbytes)
        if failed:
            offset = move.remote - self._grant.address
            self._fail(
                TransportError(
                    f"{self!r}: {move.nbytes} bytes at offset {offset} were not moved: the window was "
                    "closed, or its process is gone"
                )
            )

    def _fail(self, error: KVFerryError) -> None:
        """Keep the first error; nothing further is started."""
        if self._error is None:
            self._error = error
            self._engine.forget(self._grant.session)
        self._todo.clear()
        if not self._flying:
            self._done = True
            self._held.clear()


def engine_local(engine: Engine, move: Move) -> bool:
    """Whether the local memory of a piece has to be registered while it is moved."""
    return engine.registers_locals and move.nbytes > 0
