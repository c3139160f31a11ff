"""Runs requests against the workers: one thread for the decode leg, one for the prefill leg."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

from kvferry.core.clock import deadline_in, earliest, is_past, time_left
from kvferry.core.errors import (
    ConnectError,
    ConnectionClosedError,
    KVFerryError,
    OverloadedError,
    ProtocolError,
    RequestCancelledError,
    TransferTimeoutError,
    error_from_code,
)
from kvferry.core.log import LogLimiter
from kvferry.engine.gateway.events import Done, Failed, OnEvent, Tokens
from kvferry.engine.gateway.fleet import Fleet, Pair, Worker
from kvferry.engine.gateway.model import GatewayModel
from kvferry.engine.gateway.request import CompletionRequest, ServedModel
from kvferry.engine.gateway.timing import Marks, clock_offset, on_our_clock
from kvferry.engine.pools import ChannelPools
from kvferry.wire import Channel
from kvferry.wire.messages import (
    Cancel,
    Failure,
    Finished,
    Generate,
    GenerateReady,
    Message,
    Prefill,
    PrefillDone,
    TokensOut,
)

__all__ = ["Router", "TimeLimits"]

log = logging.getLogger(__name__)

_POLL_S = 0.1
_SEND_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0
_LEAST_TIMEOUT_S = 0.001

M = TypeVar("M", bound=Message)
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits of one request, in seconds.

    Attributes:
        connect_s: To reach a worker.
        queue_s: In line at a worker.
        kv_s: From arrival until decode holds all KV: queueing, prefill and transfer.
        total_s: From arrival to the last token.
    """

    connect_s: float = 5.0
    queue_s: float = 60.0
    kv_s: float = 300.0
    total_s: float = 600.0


class Router:
    """Picks a pair of workers for a request and runs it there. Thread safe; :meth:`close` ends all.

    Args:
        fleet: The workers.
        pools: Channels to them.
        model: The gateway's own folder of the model, for the tokenizer; absent if none was given.
        limits: Time limits.
        max_in_flight: Requests under way at once; one more is refused.
    """

    def __init__(
        self,
        fleet: Fleet,
        pools: ChannelPools,
        *,
        model: GatewayModel | None,
        limits: TimeLimits,
        max_in_flight: int,
    ) -> None:
        self.fleet = fleet
        self.pools = pools
        self.limits = limits
        self.limiter = LogLimiter(log)
        self._model = model
        self._max_in_flight = max_in_flight
        self._lock = threading.Lock()
        self._runs: set[_Run] = set()
        self.closing = False
        # Two legs a request: never fewer threads than legs, or one would wait for the other for ever.
        self._threads = ThreadPoolExecutor(2 * max_in_flight, thread_name_prefix="kvferry-gateway-leg")

    def served(self) -> ServedModel:
        """What can be asked for now.

        Raises:
            NoWorkerError: If no matching pair of workers is up.
        """
        description = self.fleet.description()
        served = ServedModel(description.model, description.vocab_size, description.max_model_len)
        if self._model is None:
            return served
        if self._model.tokenizer is None:
            return replace(served, no_tokenizer=self._model.problem)
        return replace(served, tokenizer=self._model.tokenizer)

    def submit(self, request: CompletionRequest, arrived: float, on_event: OnEvent) -> _Run:
        """Start a request.

        Raises:
            OverloadedError: If as many as allowed are under way, or the gateway is shutting down.
            NoWorkerError: If no matching pair of workers is up.
        """
        self.fleet.description()
        run = _Run(self, request, arrived, on_event)
        with self._lock:
            if self.closing:
                raise OverloadedError("the gateway is shutting down")
            if len(self._runs) >= self._max_in_flight:
                raise OverloadedError(
                    f"{len(self._runs)} requests are under way, no more than {self._max_in_flight} may; "
                    "try again later"
                )
            self._runs.add(run)
        try:
            self.start(run.main)
        except OverloadedError:
            self.forget(run)
            raise
        return run

    def start(self, work: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Run ``work`` in a thread.

        Raises:
            OverloadedError: If the gateway is shutting down.
        """
        try:
            return self._threads.submit(work, *args, **kwargs)
        except RuntimeError as error:  # shut down between a check and here
            raise OverloadedError("the gateway is shutting down") from error

    def forget(self, run: _Run) -> None:
        """A request has ended."""
        with self._lock:
            self._runs.discard(run)

    def close(self) -> None:
        """Cancel what is under way, join the threads."""
        with self._lock:
            self.closing = True
            runs = list(self._runs)
        for run in runs:
            run.cancel()
        self.fleet.close()
        self._threads.shutdown(wait=True)
        self.pools.close()
        self.limiter.flush()


class _Run:
    """One request: the decode leg in :meth:`main`, beside it the prefill leg."""

    def __init__(self, router: Router, request: CompletionRequest, arrived: float, on_event: OnEvent) -> None:
        self._router = router
        self._request = request
        self._arrived = arrived
        self._on_event = on_event
        self._name = request.id
        self._deadline = arrived + router.limits.total_s
        self._kv_deadline = min(self._deadline, arrived + router.limits.kv_s)
        self._cancelled = threading.Event()
        self._stopping = threading.Event()
        self._failed = threading.Event()  # the decode leg has failed: prefill has nothing to work for
        self._prefill_failed = threading.Event()  # nor has decode, until it has token 0 and so all KV
        self._prefill_offset = 0.0
        self._first_token_at = 0.0
        self._tokens = 0

    def stop(self) -> None:
        """Enough tokens: the decode worker ends the request in good order."""
        self._stopping.set()

    def cancel(self) -> None:
        """Nobody wants the answer; both legs end within a fraction of a second."""
        self._cancelled.set()

    # ---- both legs -------------------------------------------------------------------------------

    def main(self) -> None:
        """Run the request and report how it ended; never raises."""
        try:
            with self._router.fleet.pair() as pair:
                done = self._serve(pair)
        except KVFerryError as error:
            if not self._cancelled.is_set():
                text = "request %s failed after %d tokens: %s"
                self._router.limiter.log(logging.WARNING, error.code, text, self._name, self._tokens, error)
            self._on_event(Failed(error))
        except Exception as error:
            log.exception("request %s failed", self._name)
            self._on_event(Failed(KVFerryError(f"{type(error).__name__} in the gateway; its log says more")))
        else:
            log.info(
                "request %s: %d prompt tokens, %d of them cached, %d generated, %s",
                self._name,
                done.prompt_tokens,
                done.cached_tokens,
                done.generated_tokens,
                "stopped by a stop string" if done.reason == "cancelled" else done.reason,
            )
            self._on_event(done)
        finally:
            self._router.forget(self)

    def _serve(self, pair: Pair) -> Done:
        prefilling: Future[None] | None = None
        try:
            with self._leg(pair.decode, self._deadline) as channel:
                ready = self._admit(channel)
                prefilling = self._router.start(self._prefill, pair.prefill, ready.kv_address)
                finished = self._decode(channel)
                offset = _offset(channel)
        except KVFerryError:
            self._failed.set()
            self._blame(prefilling)
            raise
        self._let_prefill_end(prefilling)
        return self._done(finished, offset)

    def _blame(self, prefilling: Future[None] | None) -> None:
        """If the prefill leg failed by itself, its reason is the one that counts."""
        if prefilling is None:
            return
        if not wait([prefilling], _STOP_TIMEOUT_S).done:
            log.error("request %s: the prefill leg does not end", self._name)
        elif not isinstance(prefilling.exception(), (RequestCancelledError, type(None))):
            prefilling.result()

    def _let_prefill_end(self, prefilling: Future[None]) -> None:
        """After the last token: the prompt's blocks are kept by now, so that the next turn finds them."""
        if not wait([prefilling], _STOP_TIMEOUT_S).done:
            self._failed.set()
            log.warning("request %s: the prefill worker does not say that it is done", self._name)
        elif (error := prefilling.exception()) is not None:
            log.warning("request %s: complete, though its prefill leg ended so: %s", self._name, error)

    def _leg(self, worker: Worker, deadline: float) -> _Leg:
        return _Leg(self._router, worker, earliest(deadline, deadline_in(self._router.limits.connect_s)))

    def _receive(self, channel: Channel, deadline: float) -> Message | None:
        """The next message of a worker; ``None`` if there was none for a moment.

        Raises:
            RequestCancelledError: If nobody wants the answer, or the other leg failed while it mattered.
            KVFerryError: What the worker reports, or what became of it.
        """
        if self._router.closing:
            raise OverloadedError("the gateway is shutting down")
        if self._cancelled.is_set():
            raise RequestCancelledError("the client has gone")
        if self._failed.is_set() or (self._prefill_failed.is_set() and not self._tokens):
            raise RequestCancelledError("the other half of the request has failed")
        if is_past(deadline):
            raise TransferTimeoutError(f"{channel.address} was not done within the time allowed")
        incoming = channel.receive_idle(deadline_in(_POLL_S))
        if incoming is None:
            return None
        if isinstance(incoming.message, Failure):
            raise error_from_code(incoming.message.code, incoming.message.message)
        return incoming.message

    def _expect(self, channel: Channel, kind: type[M], deadline: float) -> M:
        while (message := self._receive(channel, deadline)) is None:
            pass
        if not isinstance(message, kind):
            channel.abort()
            raise ProtocolError(
                f"{channel.address} sent {type(message).__name__}, expected was {kind.__name__}", remote=True
            )
        return message

    # ---- prefill leg -----------------------------------------------------------------------------

    def _prefill(self, worker: Worker, kv_address: str) -> None:
        try:
            with self._leg(worker, self._kv_deadline) as channel:
                self._prefill_offset = _offset(channel)
                message = Prefill(
                    request=self._name,
                    stream=self._name,
                    kv_address=kv_address,
                    sampling=self._request.sampling,
                    scope=self._request.scope,
                    timeout_s=max(_LEAST_TIMEOUT_S, time_left(self._kv_deadline)),
                    queue_timeout_s=self._router.limits.queue_s,
                )
                channel.send(message, [self._request.tokens], deadline=deadline_in(_SEND_TIMEOUT_S))
                self._expect(channel, PrefillDone, self._kv_deadline)
        except BaseException:
            self._prefill_failed.set()
            raise

    # ---- decode leg ------------------------------------------------------------------------------

    def _admit(self, channel: Channel) -> GenerateReady:
        message = Generate(
            request=self._name,
            stream=self._name,
            prompt_tokens=len(self._request.tokens),
            sampling=self._request.sampling,
            timeout_s=max(_LEAST_TIMEOUT_S, time_left(self._deadline)),
            kv_timeout_s=max(_LEAST_TIMEOUT_S, time_left(self._kv_deadline)),
            scope=self._request.scope,
            queue_timeout_s=self._router.limits.queue_s,
        )
        channel.send(message, deadline=deadline_in(_SEND_TIMEOUT_S))
        return self._expect(channel, GenerateReady, self._kv_deadline)

    def _decode(self, channel: Channel) -> Finished:
        asked_to_stop = False
        limit = self._deadline
        while True:
            message = self._receive(channel, limit)
            if isinstance(message, Finished):
                return message
            if isinstance(message, TokensOut) and message.index == self._tokens:
                self._tokens += len(message.token_ids)
                self._on_event(Tokens(message.index, message.token_ids))
                self._first_token_at = self._first_token_at or time.monotonic()
            elif message is not None:
                raise ProtocolError(
                    f"{channel.address} sent {message!r}, expected was token {self._tokens}", remote=True
                )
            if self._stopping.is_set() and not asked_to_stop:
                asked_to_stop = True
                channel.send(Cancel(), deadline=deadline_in(_SEND_TIMEOUT_S))
                limit = earliest(limit, deadline_in(_STOP_TIMEOUT_S))

    def _done(self, finished: Finished, offset: float) -> Done:
        marks = Marks(
            arrived=self._arrived,
            prefill_started=on_our_clock(finished.prefill_started_at, self._prefill_offset),
            kv_written=on_our_clock(finished.kv_written_at, self._prefill_offset),
            kv_complete=on_our_clock(finished.kv_complete_at, offset),
            token_sent=self._first_token_at,
        )
        prompt_tokens = len(self._request.tokens)
        return Done(
            reason=finished.reason,
            marks=marks,
            prompt_tokens=prompt_tokens,
            cached_tokens=finished.cached_tokens,
            computed_tokens=prompt_tokens - finished.cached_tokens,
            generated_tokens=finished.generated_tokens,
            kv_nbytes=finished.kv_nbytes,
            wire_s=finished.wire_s,
        )


def _offset(channel: Channel) -> float:
    return clock_offset(channel.peer.clock_offset, channel.peer.clock_error)


class _Leg:
    """A channel to one worker for one request; a worker that went away is reported to the fleet."""

    def __init__(self, router: Router, worker: Worker, deadline: float) -> None:
        self._router = router
        self._worker = worker
        self._pool = router.pools.pool(worker.address)
        self._deadline = deadline
        self._channel: Channel | None = None

    def __enter__(self) -> Channel:
        try:
            self._channel = self._pool.acquire(self._deadline)
        except ConnectError:
            self._router.fleet.suspect(self._worker)
            raise
        return self._channel

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        channel = self._channel
        assert channel is not None
        if error is None:
            self._pool.release(channel)
            return
        # Closed already: the worker left; else the error came from the worker, which stands.
        gone = isinstance(error, ConnectionClosedError) and channel.closed
        self._pool.discard(channel)
        if gone and not self._router.closing:
            self._router.fleet.suspect(self._worker)
