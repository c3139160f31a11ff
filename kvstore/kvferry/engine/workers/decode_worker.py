"""The decode worker: takes the KV of a prompt from a prefill worker and generates from it.

Two ports: one for requests of the gateway, one for KV. A request is admitted (or refused) before
anything else happens; then the KV is copied layer by layer, as it arrives, from the store's slots into
paged KV by the thread that serves the request; the model thread only steps sequences that are complete.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from kvferry.core.address import parse_url
from kvferry.core.clock import deadline_in, earliest, is_past
from kvferry.core.config import Config
from kvferry.core.errors import (
    KVFerryError,
    OverloadedError,
    ProtocolError,
    RequestCancelledError,
    RequestError,
    TransferTimeoutError,
)
from kvferry.device import Event
from kvferry.engine.decode import DecodeSequence
from kvferry.engine.device_link import Landing
from kvferry.engine.paged_kv import Sequence
from kvferry.engine.sampling import Sampler, check_sampling
from kvferry.engine.workers.admission import Admission, Place
from kvferry.engine.workers.common import (
    SEND_TIMEOUT_S,
    Engine,
    answer,
    check_lengths,
    listen,
    open_regions,
    stream_codec,
)
from kvferry.engine.workers.requests import POLL_S, CancelWatch, serve_requests
from kvferry.engine.workers.scheduler import DecodeScheduler, End, Generation
from kvferry.engine.workers.streams import ExpectedStream, StreamTable
from kvferry.streaming import LayerReceiver
from kvferry.wire import Channel, Incoming
from kvferry.wire.messages import (
    BeginStream,
    Describe,
    Finished,
    Generate,
    GenerateReady,
    Handoff,
    Status,
    TokensOut,
)

__all__ = ["DecodeWorker"]

log = logging.getLogger(__name__)

_ROLE = "decode"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Received:
    """What a finished stream leaves: the handoff, and the figures of its transfer."""

    handoff: Handoff
    kv_nbytes: int
    wire_s: float
    complete_at: float


class DecodeWorker:
    """Owns the ports, the model thread and the requests under way; :meth:`close` ends them all."""

    def __init__(self, engine: Engine) -> None:
        config = engine.config
        self._engine = engine
        self._draining = False
        self._admission = Admission(
            blocks=engine.kv.num_blocks,
            places=config.decode.max_running,
            max_waiting=config.decode.max_queue,
            what="decode worker",
        )
        self._codec = stream_codec(config)
        self._regions = open_regions(config)
        self._streams = StreamTable(
            engine.store, engine.spec, ring=config.stream.ring, codec=self._codec, regions=self._regions,
            takes_lossy=engine.takes_lossy(self._codec),
        )  # fmt: skip
        self._scheduler = DecodeScheduler(engine)
        self._kv_server = listen(*_kv_place(config), config, _ROLE, self._serve_kv, name="decode-kv")
        self.kv_address = self._kv_server.address
        try:
            self._server = listen(
                config.decode.listen, "--listen (decode.listen)", config, _ROLE, self._serve, name="decode"
            )
        except KVFerryError:
            self._kv_server.close()
            self._scheduler.close()
            raise

    @property
    def address(self) -> str:
        """Where requests are taken."""
        return self._server.address

    def tick(self) -> bool:
        """What is to be done every second; always ``True``."""
        self._streams.reap()
        return True

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more requests, let those running end for ``drain_s``, then cancel the rest."""
        self._draining = True
        self._admission.close()
        self._admission.wait_idle(deadline_in(drain_s))
        self._scheduler.close()
        self._server.close()
        self._kv_server.close()
        if self._regions is not None:
            self._regions.close()
        self._streams.close()
        self._engine.close()

    # ---- ports -----------------------------------------------------------------------------------

    def _serve(self, channel: Channel) -> None:
        handlers = {Describe: self._describe, Status: self._status, Generate: self._generate}
        serve_requests(channel, handlers, lambda: self._draining, self._engine.config.wire.idle_timeout)

    def _serve_kv(self, channel: Channel) -> None:
        serve_requests(
            channel,
            {BeginStream: partial(self._streams.serve, grant=self._streams.grant(channel))},
            lambda: self._draining and not len(self._streams),
            self._engine.config.wire.idle_timeout,
        )

    def _describe(self, channel: Channel, incoming: Incoming) -> None:
        running, waiting = self._admission.running, self._admission.waiting
        answer(
            channel,
            incoming,
            self._engine.description(_ROLE, kv_address=self.kv_address, running=running, queued=waiting),
        )

    def _status(self, channel: Channel, incoming: Incoming) -> None:
        report = self._engine.status(
            _ROLE,
            running=self._admission.running,
            waiting=self._admission.waiting,
            streams=len(self._streams),
            streams_nbytes=self._streams.received_nbytes(),
            draining=self._draining,
            servers=(self._server, self._kv_server),
            codec=self._codec,
        )
        answer(channel, incoming, report)

    # ---- one request -----------------------------------------------------------------------------

    def _generate(self, channel: Channel, incoming: Incoming) -> None:
        message = incoming.message
        assert isinstance(message, Generate)
        if self._draining:
            raise OverloadedError("this decode worker is shutting down")
        check_lengths(message.prompt_tokens, message.sampling, self._engine.max_model_len)
        check_sampling(message.sampling)
        self._check_store_room(message.prompt_tokens)
        watch = CancelWatch(channel)
        deadline = deadline_in(message.timeout_s)
        kv_deadline = earliest(deadline, deadline_in(message.kv_timeout_s))
        room = self._engine.kv.blocks_for(message.prompt_tokens + message.sampling.max_tokens)
        queue_deadline = earliest(kv_deadline, deadline_in(message.queue_timeout_s))
        place = self._admission.enter(room, queue_deadline, watch.poll)
        sequence: Sequence | None = None
        handed_over = False
        try:
            pages, events = self._engine.kv.take(room)
            sequence = Sequence(self._engine.kv, pages)
            received = self._receive(channel, incoming, message, sequence, events, watch, kv_deadline)
            generation = self._start(message, received, sequence, place, deadline)
            handed_over = True
            self._answer_tokens(channel, message, received, generation, watch)
        finally:
            if not handed_over:
                if sequence is not None:
                    sequence.release()
                place.leave()

    def _check_store_room(self, prompt_tokens: int) -> None:
        """Refuse a prompt whose blocks could not be received even into an empty store."""
        spec, capacity = self._engine.spec, self._engine.store.stats().capacity_nbytes
        nbytes = prompt_tokens // spec.block_tokens * spec.block_nbytes
        if nbytes > capacity:
            raise RequestError(
                f"the KV of {prompt_tokens} tokens has {nbytes} bytes, the store of this decode worker "
                f"{capacity}: shorten the prompt, or raise store.dram_capacity"
            )

    def _receive(
        self,
        channel: Channel,
        incoming: Incoming,
        message: Generate,
        sequence: Sequence,
        events: list[Event],
        watch: CancelWatch,
        deadline: float,
    ) -> _Received:
        """Announce the stream, say that we are ready, and copy the KV as it comes."""
        link = self._engine.link
        landing = None if link is None else link.landing(sequence.blocks, events)
        expected = self._streams.expect(message.stream, message.prompt_tokens, message.scope, deadline)
        try:
            ready = GenerateReady(kv_address=self.kv_address)
            channel.reply(incoming, ready, deadline=deadline_in(SEND_TIMEOUT_S))
            receiver = self._await_stream(expected, watch)
            for layer in range(self._engine.kv.num_layers):
                self._await(receiver, partial(receiver.wait_layer, layer), watch, deadline)
                self._copy_layer(receiver, layer, sequence, message.prompt_tokens, landing)
            handoff = self._await(receiver, receiver.wait, watch, deadline)
            complete_at = receiver.complete_at
            if landing is not None:
                landing.wait(deadline)
                receiver.close()  # checks that the views that were read until now were right
                complete_at = time.monotonic()
            received = _Received(handoff, receiver.kv_nbytes, receiver.wire_s, complete_at)
        finally:
            if landing is not None and not landing.end():
                sequence.leave_behind()
            self._streams.forget(expected)
        self._check_handoff(handoff, message)
        sequence.length = message.prompt_tokens
        return received

    def _check_handoff(self, handoff: Handoff, message: Generate) -> None:
        """Refuse a handoff that is not of this request: its text would be another one's."""
        if handoff.prompt_tokens != message.prompt_tokens:
            raise ProtocolError(
                f"handoff of {handoff.prompt_tokens} tokens, {message.prompt_tokens} were asked", remote=True
            )
        if handoff.cached_tokens >= handoff.prompt_tokens:
            raise ProtocolError(
                f"handoff says that {handoff.cached_tokens} of {handoff.prompt_tokens} tokens were cached; "
                "the last one is always computed",
                remote=True,
            )
        greedy = message.sampling.temperature == 0
        if handoff.sampling != message.sampling or (handoff.rng is None) != greedy:
            raise ProtocolError(
                f"handoff of a token drawn by {handoff.sampling}, generator state "
                f"{'missing' if handoff.rng is None else 'given'}; asked was {message.sampling}",
                remote=True,
            )
        if handoff.first_token >= self._engine.shape.vocab_size:
            raise RequestError(f"handoff names token {handoff.first_token}, outside the vocabulary")

    @staticmethod
    def _await_stream(expected: ExpectedStream, watch: CancelWatch) -> LayerReceiver:
        while True:
            receiver = expected.receiver(deadline_in(POLL_S))
            if receiver is not None:
                return receiver
            watch.poll()
            if is_past(expected.deadline):
                raise TransferTimeoutError(
                    f"stream {expected.stream!r}: no prefill worker opened it within the time allowed"
                )

    @staticmethod
    def _await(
        receiver: LayerReceiver, wait: Callable[[float], _T], watch: CancelWatch, deadline: float
    ) -> _T:
        """What ``wait`` returns, looking in between whether anybody still wants it."""
        while True:
            try:
                return wait(earliest(deadline, deadline_in(POLL_S)))
            except TransferTimeoutError:
                # the stream's own failure, which may be a timeout too, does not pass by waiting on
                if is_past(deadline) or receiver.error is not None:
                    raise
                watch.poll()

    def _copy_layer(
        self, receiver: LayerReceiver, layer: int, sequence: Sequence, tokens: int, landing: Landing | None
    ) -> None:
        kv, size = self._engine.kv, self._engine.kv.block_tokens
        if landing is not None:
            blocks = range(kv.blocks_for(tokens))
            landing.put_layer(layer, [receiver.view(layer, number) for number in blocks], tokens)
            return
        for number in range(kv.blocks_for(tokens)):
            rows = min(size, tokens - number * size)
            kv.write_slice(layer, sequence.blocks[number], receiver.view(layer, number), rows)

    def _start(
        self, message: Generate, received: _Received, sequence: Sequence, place: Place, deadline: float
    ) -> Generation:
        """Hand the request to the model thread; token 0 is there already."""
        first = received.handoff.first_token
        sampler = Sampler(message.sampling, received.handoff.rng)
        steps = DecodeSequence(self._engine.model, sequence, first, sampler, message.sampling)
        generation = Generation(steps, sequence, place, deadline)
        generation.put(first)
        if steps.finish_reason is not None:
            generation.retire(End(steps.finish_reason))
        else:
            self._scheduler.add(generation)
        return generation

    def _answer_tokens(
        self,
        channel: Channel,
        message: Generate,
        received: _Received,
        generation: Generation,
        watch: CancelWatch,
    ) -> None:
        """Send tokens as they come, until the end; ends the generation if nobody wants it any more."""
        sent, first_token_at = 0, 0.0
        end: End | None = None
        try:
            while end is None:
                tokens, end = generation.take(POLL_S)
                if tokens:
                    out = TokensOut(index=sent, token_ids=tuple(tokens))
                    channel.send(out, deadline=deadline_in(SEND_TIMEOUT_S))
                    first_token_at = first_token_at or time.monotonic()
                    sent += len(tokens)
                try:
                    if end is None:
                        watch.poll()
                except RequestCancelledError:
                    generation.cancelled.set()
        finally:
            generation.cancelled.set()
        if end.error is not None:
            raise end.error
        # the gateway cancels a generation that it still listens to only for a stop string
        reason = "stopped by the gateway (stop string)" if end.reason == "cancelled" else end.reason
        log.info("request %s: %d tokens, %s", message.request, sent, reason)
        finished = Finished(
            reason=end.reason,
            generated_tokens=sent,
            kv_complete_at=received.complete_at,
            first_token_at=first_token_at,
            kv_nbytes=received.kv_nbytes,
            wire_s=received.wire_s,
            finished_at=time.monotonic(),
            cached_tokens=received.handoff.cached_tokens,
            prefill_started_at=received.handoff.started_at,
            kv_written_at=received.handoff.kv_written_at,
        )
        channel.send(finished, deadline=deadline_in(SEND_TIMEOUT_S))


def _kv_place(config: Config) -> tuple[str, str]:
    """Where KV is taken, and the option that says so.

    As configured, or any free port of the host, or a path beside that, for requests.
    """
    if config.decode.kv_listen is not None:
        return config.decode.kv_listen, "--kv-listen (decode.kv_listen)"
    address = parse_url(config.decode.listen)
    if address.path:
        address = replace(address, path=f"{address.path}.kv")
    url = address.url if address.port is None else replace(address, port=0).url
    return url, "--listen (decode.listen), for KV"
