"""The prefill worker's model thread: one prompt after the other."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import KVFerryError, OverloadedError
from kvferry.engine.emit import emit_to
from kvferry.engine.prefill import PrefillResult, prefill
from kvferry.engine.workers.common import Engine
from kvferry.streaming import LayerSender, PageSender
from kvferry.wire.messages import Prefill

__all__ = ["PrefillJob", "PrefillThread"]

log = logging.getLogger(__name__)

_TICK_S = 1.0
_WARM_UP_TIMEOUT_S = 60.0
_JOIN_TIMEOUT_S = 10.0


@dataclass(eq=False)
class PrefillJob:
    """One prompt on its way through the model thread, which sets ``result`` or ``error``, then ``done``.

    The paged KV of a result belongs to whoever submitted the job. ``takes_lossy``: it may be computed behind
    blocks that have lost something.
    """

    message: Prefill
    tokens: npt.NDArray[np.uint32]
    sender: LayerSender | PageSender
    deadline: float
    takes_lossy: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    result: PrefillResult | None = None
    error: KVFerryError | None = None

    def should_stop(self) -> bool:
        """Whether nobody wants the result, or it cannot be sent any more."""
        return self.stop.is_set() or self.sender.error is not None


class PrefillThread:
    """Computes jobs first come, first served, in one thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._jobs: deque[PrefillJob] = deque()
        self._current: PrefillJob | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvferry-prefill-model", daemon=True)
        self._warm = threading.Event()
        self._thread.start()
        self._warm.wait(_WARM_UP_TIMEOUT_S)

    def submit(self, job: PrefillJob) -> None:
        """Put a job in line.

        Raises:
            OverloadedError: If the thread is closing.
        """
        with self._changed:
            if self._closing:
                raise OverloadedError("this prefill worker is shutting down")
            self._jobs.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Cancel all jobs and join the thread."""
        with self._changed:
            self._closing = True
            for job in (self._current, *self._jobs):
                if job is not None:
                    job.stop.set()
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
        while (job := self._next()) is not None:
            try:
                job.result = self._compute(job)
            except KVFerryError as error:
                job.error = error
            except Exception as error:
                log.exception("prefill of request %s failed", job.message.request)
                job.error = KVFerryError(
                    f"prefill failed: {type(error).__name__}; the worker's log says more"
                )
            finally:
                job.done.set()

    def _next(self) -> PrefillJob | None:
        with self._changed:
            while not self._jobs:
                self._current = None
                if self._closing:
                    return None
                self._changed.wait(_TICK_S)
            self._current = self._jobs.popleft()
            return self._current

    def _compute(self, job: PrefillJob) -> PrefillResult:
        engine = self._engine
        return prefill(
            engine.model,
            engine.kv,
            job.tokens,
            job.message.sampling,
            namespace=engine.store.namespace(engine.spec, job.message.scope, takes_lossy=job.takes_lossy),
            chunk_tokens=engine.config.prefill.chunk_tokens,
            emit=emit_to(job.sender, len(job.tokens)),
            should_stop=job.should_stop,
            deadline=job.deadline,
            save=False,  # token 0 does not wait for it
        )
