"""``codec.adaptive``: the codec that a link chooses by itself, beside raw and fixed ones, at several rates.

Layers of the KV of a text go from one process to another over a connection that is limited to a rate. The
figure is the time from the first layer until all blocks are stored. Every codec streams the same bytes in
turn, once a run on a slow link, and on a fast one so often that a moment that is lost counts little;
a run is the mean of these prompts. What was learnt stays from prompt to prompt, and the choice first has the
link to itself for as long as it may take to follow a change of it.

``raw`` is a contender twice: what the second one differs by, in spite of being the same, is the noise.

The best fixed codec is the one with the least of several noisy medians, which is less than what that codec
takes. ``over_fair_best`` therefore compares each round with the codec that was the best in other ones: the
even in the odd, the odd in the even.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import xxhash

from kvferry.bench.pairing import Progress, run_paired
from kvferry.bench.peer import DIGEST_PREFIX, PeerProcess
from kvferry.bench.results import Param, Result, Sample, summarise
from kvferry.bench.scenarios.codec import CodecOptions
from kvferry.bench.scenarios.codec_kv import ModelKV
from kvferry.core.buffers import ByteArray
from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey, block_keys
from kvferry.core.spec import KeyScope, KVSpec, namespace_id
from kvferry.core.units import format_rate, parse_rate
from kvferry.streaming import LayerSender, StreamCodec, codec_capabilities
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire.messages import Handoff, Ping, Pong, SamplingParams

__all__ = ["run_adaptive"]

_WAIT_S = 300.0
_SAMPLE_S = 0.4
_SETTLE_S = 2.0
_MOST_PROMPTS = 16  # of a small model's few bytes, each takes what a prompt takes besides them
_FASTEST = 2e9  # bytes a second that processes on one machine move, about
_AGAIN = "raw_again"
_HANDOFF = Handoff(prompt_tokens=1, cached_tokens=0, first_token=0, sampling=SamplingParams())


@dataclass(frozen=True)
class _Source:
    """KV of one long prompt: ``[layers, blocks, bytes of a slice]``, the layers of a model over and over."""

    spec: KVSpec
    slices: ByteArray

    @classmethod
    def of(cls, kv: ModelKV, layers: int) -> _Source:
        slices = kv.texts[0].slices
        spec = KVSpec(model="bench", revision="r1", layers=(kv.layer,) * layers, block_tokens=kv.slice_tokens)
        return cls(spec, np.ascontiguousarray(np.resize(slices, (layers, *slices.shape[1:]))))

    @property
    def blocks(self) -> int:
        return int(self.slices.shape[1])

    def layer(self, number: int) -> list[tuple[int, list[memoryview]]]:
        """One layer of all blocks, as a sender takes it."""
        slots = self.spec.layers[number].slots()
        return [
            (block, [row[s.offset : s.offset + s.spec.nbytes].data for s in slots])
            for block, row in enumerate(self.slices[number])
        ]

    def digest(self) -> str:
        """Of all bytes, as the receiver sees them."""
        return xxhash.xxh3_64_hexdigest(self.slices.data)


class _Streamer:
    """Streams the prompt with a codec of its own over a channel that all have."""

    def __init__(self, channel: Channel, source: _Source, codec: StreamCodec) -> None:
        self._channel, self._source = channel, source
        self.link = codec.link("the peer")
        self._lossless = not codec.lossy

    def __call__(self, name: str = "codec") -> Sample:
        spec = self._source.spec
        layers = [self._source.layer(number) for number in range(len(spec.layers))]
        sender = LayerSender(self._channel, spec, codec=self.link)
        sender.begin(name, _keys(self._source), 0, deadline=deadline_in(_WAIT_S))
        start = time.perf_counter()
        for number, views in enumerate(layers):
            sender.put_layer(number, views)
        done = sender.finish(_HANDOFF, deadline_in(_WAIT_S))
        return Sample(time.perf_counter() - start, done.kv_nbytes)

    def verify(self) -> bool:
        """Stream once more; the receiver compares every byte, and a difference ends the channel."""
        if not self._lossless:
            return False
        self(DIGEST_PREFIX + self._source.digest())
        self._channel.call(Ping(), Pong, deadline=deadline_in(_WAIT_S))
        return True


def _dial(peer: PeerProcess, rate: float) -> Channel:
    """One connection for all: of two that are alike one may be slower by half."""
    options = ChannelOptions(role="bench", session="bench", checksum=True, capabilities=codec_capabilities())
    return Channel.connect(f"{peer.address}?rate={rate:.0f}", options, deadline_in(_WAIT_S))


_prompts = count(1)


def _keys(source: _Source) -> list[BlockKey]:
    """Keys that no stream had before, so that every block travels."""
    scope = KeyScope(salt=next(_prompts).to_bytes(8, "little"))
    tokens = np.zeros(source.blocks * source.spec.block_tokens, "<u4")
    return block_keys(namespace_id(source.spec, scope), tokens, source.spec.block_tokens)


def run_adaptive(kv: ModelKV, options: CodecOptions, progress: Progress) -> Iterator[Result]:
    """Every rate in turn."""
    source = _Source.of(kv, options.layers)
    peer = PeerProcess(2 * source.slices.nbytes + (64 << 20))
    try:
        for rate in map(parse_rate, options.rates):
            yield _at_rate(peer, source, options, rate, progress)
    finally:
        peer.close()


def _at_rate(
    peer: PeerProcess, source: _Source, options: CodecOptions, rate: float, progress: Progress
) -> Result:
    fixed = {text: StreamCodec(text) for text in ("raw", *options.adaptive)}
    auto = StreamCodec("auto", candidates=options.adaptive, allow_lossy=any(c.lossy for c in fixed.values()))
    prompts = min(_MOST_PROMPTS, max(1, round(_SAMPLE_S * min(rate, _FASTEST) / source.slices.nbytes)))
    contenders = {"subject": auto, **fixed, _AGAIN: StreamCodec("raw")}
    channel = _dial(peer, rate)
    try:
        streamers = {name: _Streamer(channel, source, c) for name, c in contenders.items()}
        subjects: dict[str, Callable[[], Sample]] = dict(streamers)
        _settle(streamers["subject"])
        rounds = run_paired(
            subjects,
            runs=options.runs * prompts,
            warmup=prompts,
            progress=progress,
            label=f"codec.adaptive at {format_rate(rate)}",
        )
        verified = streamers["subject"].verify()
        link = streamers["subject"].link
        assert link is not None
        status = link.status()
    finally:
        channel.close()
    seconds = {name: _means([s.seconds for s in samples], prompts) for name, samples in rounds.items()}
    best = min(fixed, key=lambda name: statistics.median(seconds[name]))
    fair = _over_fair_best(seconds["subject"], {name: seconds[name] for name in fixed})
    seconds["best_fixed"] = seconds[best]
    noise = statistics.median(a / b for a, b in zip(seconds[_AGAIN], seconds["raw"], strict=True))
    params: dict[str, Param] = {
        "rate": format_rate(rate),
        "prompts": prompts,
        "layers": len(source.spec.layers),
        "blocks": source.blocks,
        "kv_nbytes": source.slices.nbytes,
        "model": options.model,
        "kernels": options.kernels,
        "cores": auto.cores,
        "checksum": "xxh3",
        "best_fixed": best,
        "over_fair_best": round(fair, 4),
        "raw_again_over_raw": round(noise, 4),
        "chosen": status.chosen,
        "why": status.line(),
    }
    return summarise("codec.adaptive", params, "s", seconds, verified=verified)


def _settle(streamer: _Streamer) -> None:
    until = time.monotonic() + _SETTLE_S
    while time.monotonic() < until:
        streamer()


def _means(values: Sequence[float], count: int) -> list[float]:
    """Of each ``count`` in a row."""
    return [statistics.fmean(values[at : at + count]) for at in range(0, len(values), count)]


def _over_fair_best(subject: Sequence[float], fixed: Mapping[str, Sequence[float]]) -> float:
    """Median ratio of ``subject`` to the codec that was the best in other rounds than the same ones."""
    ratios = []
    for number, value in enumerate(subject):
        others = slice(1 - number % 2, None, 2) if len(subject) > 1 else slice(None)
        medians = {name: statistics.median(found[others]) for name, found in fixed.items()}
        ratios.append(value / fixed[min(medians, key=medians.__getitem__)][number])
    return statistics.median(ratios)
