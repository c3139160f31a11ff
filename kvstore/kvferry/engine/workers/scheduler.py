"""The decode worker's model thread: one step of every running sequence in turn."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from dataclasses import dataclass

from kvferry.core.clock import is_past
from kvferry.core.errors import KVFerryError, OverloadedError, TransferTimeoutError
from kvferry.engine.decode import DecodeSequence
from kvferry.engine.paged_kv import Sequence
from kvferry.engine.workers.admission import Place
from kvferry.engine.workers.common import Engine

__all__ = ["DecodeScheduler", "End", "Generation"]

log = logging.getLogger(__name__)

_TICK_S = 1.0
_WARM_UP_TIMEOUT_S = 60.0
_JOIN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class End:
    """The end of a generation: ``stop``, ``length`` or ``cancelled``; or an error."""

    reason: str
    error: KVFerryError | None = None


class Generation:
    """One request that is being decoded.

    From :meth:`DecodeScheduler.add` on the model thread owns the paged blocks and the place and gives
    them back when the generation ends, whatever ends it. The thread that answers the gateway takes
    tokens here.
    """

    def __init__(self, steps: DecodeSequence, sequence: Sequence, place: Place, deadline: float) -> None:
        self.steps = steps
        self.deadline = deadline
        self.cancelled = threading.Event()
        self._sequence = sequence
        self._place = place
        self._out: queue.SimpleQueue[int | End] = queue.SimpleQueue()

    def put(self, token: int) -> None:
        """One more token."""
        self._out.put(token)

    def retire(self, end: End) -> None:
        """Give everything back, then say that it is over."""
        self._sequence.release()
        self._place.leave()
        self._out.put(end)

    def take(self, timeout_s: float) -> tuple[list[int], End | None]:
        """Tokens that are there, waiting ``timeout_s`` at most for the first; the end if it has come."""
        tokens: list[int] = []
        try:
            item = self._out.get(timeout=timeout_s)
            while not isinstance(item, End):
                tokens.append(item)
                item = self._out.get_nowait()
        except queue.Empty:
            return tokens, None
        return tokens, item


class DecodeScheduler:
    """Steps all running generations round-robin, each alone (batch size 1), in one thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._incoming: deque[Generation] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvferry-decode-model", daemon=True)
        self._warm = threading.Event()
        self._thread.start()
        self._warm.wait(_WARM_UP_TIMEOUT_S)

    def add(self, generation: Generation) -> None:
        """Take over a generation that is not finished yet.

        Raises:
            OverloadedError: If the scheduler is closed; the caller still owns everything.
        """
        with self._changed:
            if self._closing:
                raise OverloadedError("this decode worker is shutting down")
            self._incoming.append(generation)
            self._changed.notify()

    def close(self) -> None:
        """End all generations as cancelled and join the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            log.error("the model thread did not end within %g s", _JOIN_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._engine.warm_up()
        except KVFerryError as error:
            log.warning("warming up failed: %s", error)
        finally:
            self._warm.set()
        running: list[Generation] = []
        while True:
            with self._changed:
                while not running and not self._incoming and not self._closing:
                    self._changed.wait(_TICK_S)
                running.extend(self._incoming)
                self._incoming.clear()
                closing = self._closing
            if closing:
                for generation in running:
                    generation.retire(
                        End("cancelled", OverloadedError("this decode worker is shutting down"))
                    )
                return
            running = [g for g in running if self._advance(g)]

    def _advance(self, generation: Generation) -> bool:
        """One step; ``False`` once the generation has ended."""
        end = self._step(generation)
        if end is not None:
            generation.retire(end)
        return end is None

    @staticmethod
    def _step(generation: Generation) -> End | None:
        if generation.cancelled.is_set():
            return End("cancelled")
        if is_past(generation.deadline):
            return End("cancelled", TransferTimeoutError("the generation was not done by its deadline"))
        try:
            token = generation.steps.step()
        except KVFerryError as error:
            return End("cancelled", error)
        except Exception as error:
            log.exception("a decode step failed")
            return End(
                "cancelled",
                KVFerryError(f"decode failed: {type(error).__name__}; the worker's log says more"),
            )
        if token is not None:
            generation.put(token)
        reason = generation.steps.finish_reason
        return End(reason) if reason is not None else None
