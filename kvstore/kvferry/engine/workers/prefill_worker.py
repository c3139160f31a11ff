"""The prefill worker: computes the KV of prompts and streams it to a decode worker, layer by layer.

The thread that serves a request does everything but the computing: it waits for room, opens the
stream, and hands the job to the model thread; that one only computes and queues views of the paged KV.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in, earliest
from kvferry.core.errors import (
    ConfigError,
    KVFerryError,
    OverloadedError,
    RequestError,
)
from kvferry.core.keys import BlockKey
from kvferry.engine.paged_kv import Sequence
from kvferry.engine.pools import ChannelPools
from kvferry.engine.prefill import PrefillResult, check_prompt, save_blocks
from kvferry.engine.process import is_loopback
from kvferry.engine.sampling import check_sampling
from kvferry.engine.workers.admission import Admission
from kvferry.engine.workers.common import (
    SEND_TIMEOUT_S,
    Engine,
    answer,
    channel_options,
    check_lengths,
    listen,
    open_regions,
    stream_codec,
)
from kvferry.engine.workers.prefill_thread import PrefillJob, PrefillThread
from kvferry.engine.workers.requests import POLL_S, CancelWatch, serve_requests
from kvferry.streaming import LayerSender, PageSender
from kvferry.wire import Channel, Incoming
from kvferry.wire.messages import Describe, Handoff, Prefill, PrefillDone, Status, StreamDone

__all__ = ["PrefillWorker"]

log = logging.getLogger(__name__)

_ROLE = "prefill"
_AHEAD = 4
"""Requests let in at once: one computes, one has its stream open already, others finish sending."""

_SAVE_TIMEOUT_S = 1.0
_JOIN_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
_PROMPT_TIMEOUT_S = 30.0
"""For the tokens of a prompt to arrive once their message has: a few bytes each."""

_OVER = "the request has ended"

_T = TypeVar("_T")


class PrefillWorker:
    """Owns the port, the model thread and the requests under way; :meth:`close` ends them all."""

    def __init__(self, engine: Engine) -> None:
        config = engine.config
        if config.prefill.chunk_tokens % engine.kv.block_tokens:
            raise ConfigError(
                f"prefill.chunk_tokens is {config.prefill.chunk_tokens}, must be a multiple of "
                f"model.block_tokens, which is {engine.kv.block_tokens}"
            )
        self._engine = engine
        self._codec = stream_codec(config)
        self._takes_lossy = engine.takes_lossy(self._codec)
        self._draining = False
        self._admission = Admission(
            blocks=engine.kv.num_blocks,
            places=_AHEAD,
            max_waiting=config.prefill.max_queue,
            what="prefill worker",
        )
        self._regions = open_regions(config)
        self._pools = ChannelPools(channel_options(config, _ROLE), max_addresses=16)
        self._talking = ThreadPoolExecutor(_AHEAD, thread_name_prefix="kvferry-prefill-talk")
        self._thread = PrefillThread(engine)
        try:
            self._server = listen(
                config.prefill.listen, "--listen (prefill.listen)", config, _ROLE, self._serve, name="prefill"
            )
        except KVFerryError:
            self._thread.close()
            raise

    @property
    def address(self) -> str:
        """Where requests are taken."""
        return self._server.address

    def tick(self) -> bool:
        """What is to be done every second; always ``True``."""
        self._pools.forget_gone()
        return True

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more requests, let those running end for ``drain_s``, then cancel the rest."""
        self._draining = True
        self._admission.close()
        self._admission.wait_idle(deadline_in(drain_s))
        self._thread.close()
        self._server.close()
        self._talking.shutdown(wait=True, cancel_futures=True)
        self._pools.close()
        if self._regions is not None:
            self._regions.close()
        self._engine.close()

    # ---- port ------------------------------------------------------------------------------------

    def _serve(self, channel: Channel) -> None:
        handlers = {Describe: self._describe, Status: self._status, Prefill: self._prefill}
        serve_requests(channel, handlers, lambda: self._draining, self._engine.config.wire.idle_timeout)

    def _describe(self, channel: Channel, incoming: Incoming) -> None:
        running, waiting = self._admission.running, self._admission.waiting
        answer(channel, incoming, self._engine.description(_ROLE, running=running, queued=waiting))

    def _status(self, channel: Channel, incoming: Incoming) -> None:
        report = self._engine.status(
            _ROLE,
            running=self._admission.running,
            waiting=self._admission.waiting,
            draining=self._draining,
            servers=(self._server,),
            codec=self._codec,
        )
        answer(channel, incoming, report)

    # ---- one request -----------------------------------------------------------------------------

    def _prefill(self, channel: Channel, incoming: Incoming) -> None:
        message = incoming.message
        assert isinstance(message, Prefill)
        deadline = deadline_in(message.timeout_s)
        tokens = self._read_tokens(incoming, deadline)
        if self._draining:
            raise OverloadedError("this prefill worker is shutting down")
        check_lengths(len(tokens), message.sampling, self._engine.max_model_len)
        check_sampling(message.sampling)
        check_prompt(self._engine.model, tokens)
        self._check_destination(message.kv_address)
        watch = CancelWatch(channel)
        queue_deadline = earliest(deadline, deadline_in(message.queue_timeout_s))
        room = self._engine.kv.blocks_for(len(tokens))
        place = self._admission.enter(room, queue_deadline, watch.poll)
        try:
            done = self._compute_and_send(message, tokens, watch, deadline)
        finally:
            place.leave()
        channel.reply(incoming, done, deadline=deadline_in(SEND_TIMEOUT_S))

    def _read_tokens(self, incoming: Incoming, deadline: float) -> npt.NDArray[np.uint32]:
        nbytes, limit = incoming.payload_nbytes, self._engine.max_model_len
        deadline = earliest(deadline, deadline_in(_PROMPT_TIMEOUT_S))
        if nbytes % 4 or nbytes > 4 * limit:
            incoming.discard(deadline)
            raise RequestError(
                f"a prompt of {nbytes} bytes: a token has 4, and the limit is {limit} tokens (max_model_len)"
            )
        if nbytes == 0:
            raise RequestError("the prompt is empty; it needs at least 1 token")
        view = page_aligned(nbytes)
        incoming.read_into([view], deadline)
        return np.frombuffer(view, dtype="<u4")

    def _check_destination(self, kv_address: str) -> None:
        """KV goes where the caller says, so not to any host unless the network is trusted."""
        if not self._engine.config.wire.trusted_network and not is_loopback(kv_address):
            raise RequestError(
                f"KV address {kv_address} is not on this host; this prefill worker sends KV to other hosts "
                "only with wire.trusted_network=true"
            )

    def _compute_and_send(
        self, message: Prefill, tokens: npt.NDArray[np.uint32], watch: CancelWatch, deadline: float
    ) -> PrefillDone:
        engine = self._engine
        namespace = engine.store.namespace(engine.spec, message.scope)
        keys = namespace.keys(tokens)
        tail_tokens = len(tokens) - len(keys) * engine.kv.block_tokens
        connected_by = earliest(deadline, deadline_in(_CONNECT_TIMEOUT_S))
        with self._pools.channel(message.kv_address, connected_by) as kv_channel:
            arena = self._pools.arena(message.kv_address, kv_channel)
            codec = self._codec.link(message.kv_address)
            layers = LayerSender(
                kv_channel,
                engine.spec,
                message.scope,
                name=message.stream,
                arena=arena,
                codec=codec,
                regions=self._regions,
            )
            link = engine.link
            with layers if link is None else link.sender(layers) as sender:
                begin = partial(sender.begin, message.stream, keys, tail_tokens, deadline=deadline)
                self._watched(watch, begin)
                job = PrefillJob(message, tokens, sender, deadline, self._takes_lossy and sender.takes_lossy)
                result = self._compute(job, watch)
                try:
                    done = self._finish(job, result, watch)
                    self._save(message, keys, result)
                finally:
                    _let_go(sender, result.sequence)
        log.info(
            "request %s: %d tokens, %d cached, %d bytes of KV sent",
            message.request,
            len(tokens),
            result.cached_tokens,
            done.kv_nbytes,
        )
        return PrefillDone(
            prompt_tokens=len(tokens),
            cached_tokens=result.cached_tokens,
            computed_tokens=result.computed_tokens,
            first_token=result.first_token,
            started_at=result.started_at,
            kv_written_at=result.kv_written_at,
            wire_s=done.wire_s,
            kv_nbytes=done.kv_nbytes,
        )

    def _compute(self, job: PrefillJob, watch: CancelWatch) -> PrefillResult:
        """Wait for the model thread; never leaves before it is done with the job."""
        self._thread.submit(job)
        unwanted: KVFerryError | None = None
        while not job.done.wait(POLL_S):
            if unwanted is None:
                try:
                    watch.poll()
                except KVFerryError as error:
                    unwanted = error
                    job.stop.set()
        if unwanted is None and job.result is not None:
            return job.result
        sending = job.sender.error  # why the model was told to stop, if it was not for us
        if job.result is not None:
            _let_go(job.sender, job.result.sequence)
        else:
            job.sender.abort(_OVER)
        if unwanted is None and self._draining:
            raise OverloadedError("this prefill worker is shutting down")
        raise unwanted or sending or job.error or KVFerryError("prefill ended without a result")

    def _finish(self, job: PrefillJob, result: PrefillResult, watch: CancelWatch) -> StreamDone:
        """Hand over, while watching whether anybody still wants it."""
        handoff = Handoff(
            prompt_tokens=len(job.tokens),
            cached_tokens=result.cached_tokens,
            first_token=result.first_token,
            sampling=job.message.sampling,
            rng=result.sampler.state(),
            started_at=result.started_at,
            kv_written_at=result.kv_written_at,
        )
        limit = earliest(job.deadline, deadline_in(self._engine.config.stream.timeout))
        return self._watched(watch, partial(job.sender.finish, handoff, limit, lossy=result.lossy))

    def _watched(self, watch: CancelWatch, step: Callable[[], _T]) -> _T:
        """What ``step`` of a stream returns; it waits for the decode worker, which may never answer."""
        waiting = self._talking.submit(step)
        while not wait([waiting], POLL_S).done:
            watch.poll()  # what it raises makes the caller abort the stream, which ends the step too
        return waiting.result()

    def _save(self, message: Prefill, keys: list[BlockKey], result: PrefillResult) -> None:
        """Keep the prompt's blocks; done when token 0 is on its way, before the gateway hears the end."""
        takes_lossy = bool(result.lossy)  # exact ones take the place of others
        namespace = self._engine.store.namespace(self._engine.spec, message.scope, takes_lossy=takes_lossy)
        deadline = deadline_in(_SAVE_TIMEOUT_S)
        save_blocks(namespace, result.sequence, keys, deadline=deadline, lossy=result.lossy)


def _let_go(sender: LayerSender | PageSender, sequence: Sequence) -> None:
    """End a stream, unless it has been finished: no page of the sequence is in use then, and they go back."""
    if sender.abort(_OVER) is False:
        sequence.leave_behind()
        log.error("a device still reads pages of a stream that has ended; they stay taken")
    sequence.release()
