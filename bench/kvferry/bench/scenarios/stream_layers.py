"""``stream.layers``: KV from one process to another, layer by layer, over tcp or into a shared arena.

Without ``model`` it measures throughput: how near :class:`~kvferry.streaming.LayerSender` comes to a
bare socket; with ``transport=unix`` the sender writes into the receiver's slots itself, and the ceiling is a
copy of memory. With ``model`` it measures the promise of layer streaming: a real prefill whose KV leaves
while the next layer computes, over a link so slow that the whole transfer takes as long as the whole
compute.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np

from kvferry.bench.ceilings import COLD_NBYTES, MemcpyCold, RawSocket
from kvferry.bench.pairing import Progress, run_paired
from kvferry.bench.peer import VERIFY_PREFIX, PeerProcess, pattern
from kvferry.bench.registry import Options
from kvferry.bench.results import Param, Result, Sample, summarise
from kvferry.core.buffers import page_aligned
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError
from kvferry.core.keys import BlockKey, block_keys
from kvferry.core.spec import DType, KeyScope, KVSpec, namespace_id
from kvferry.streaming import STREAM_CAPABILITIES, LayerSender
from kvferry.testing.prompt_kv import kv_spec
from kvferry.wire import Channel, ChannelOptions, SharedArena, can_share_arena
from kvferry.wire.messages import Handoff, Ping, Pong, SamplingParams

__all__ = ["run"]

_WAIT_S = 120.0
_HANDOFF = Handoff(prompt_tokens=1, cached_tokens=0, first_token=0, sampling=SamplingParams())


def run(options: Options, progress: Progress) -> Iterator[Result]:
    """Run the group; see the module."""
    if options.param("model", ""):
        from kvferry.bench.scenarios.stream_overlap import run_overlap

        yield from run_overlap(options, progress)
        return
    # what is written into slots has no checksum
    for checksum in (True, False) if options.param("transport", "tcp") == "tcp" else (False,):
        yield _throughput(options, progress, checksum=checksum)


class _Source:
    """Cold KV on the sending side: sets of blocks that together walk at least 256 MiB."""

    def __init__(self, spec: KVSpec, blocks: int) -> None:
        self.spec, self.blocks = spec, blocks
        sets = max(1, -(-COLD_NBYTES // (spec.block_nbytes * blocks)))
        self._sets: list[memoryview] = []
        for seed in range(sets):
            whole = page_aligned(spec.block_nbytes * blocks)
            np.frombuffer(whole, np.uint8)[:] = pattern(spec, blocks, seed).reshape(-1)
            self._sets.append(whole)
        self._next = count()

    def take(self) -> tuple[int, memoryview]:
        """The next set, with the seed of its bytes."""
        seed = next(self._next) % len(self._sets)
        return seed, self._sets[seed]

    def layer(self, whole: memoryview, layer: int) -> list[tuple[int, Sequence[memoryview]]]:
        """The tensors of one layer of all blocks, as the sender takes them."""
        size, start = self.spec.block_nbytes, self.spec.layer_slice(layer).start
        slots = self.spec.layers[layer].slots()
        return [
            (block, [whole[at + slot.offset : at + slot.offset + slot.spec.nbytes] for slot in slots])
            for block, at in ((block, block * size + start) for block in range(self.blocks))
        ]


class _Streamer:
    """Sends whole streams over one channel; each has keys of its own, so nothing is present already."""

    def __init__(self, peer: PeerProcess, source: _Source, *, checksum: bool) -> None:
        options = ChannelOptions(
            role="bench", session="bench", checksum=checksum, capabilities=STREAM_CAPABILITIES
        )
        self._channel = Channel.connect(peer.address, options, deadline_in(_WAIT_S))
        self._arena = SharedArena() if can_share_arena(self._channel) else None
        self._source, self._peer = source, peer
        self._streams = count(1)

    def _keys(self) -> list[BlockKey]:
        spec = self._source.spec
        salt = KeyScope(salt=next(self._streams).to_bytes(8, "little"))
        tokens = np.zeros(self._source.blocks * spec.block_tokens, "<u4")
        return block_keys(namespace_id(spec, salt), tokens, spec.block_tokens)

    def __call__(self, name: str = "") -> Sample:
        """Send one stream; timed from its first layer to the receiver's word that all is stored."""
        spec, (seed, whole) = self._source.spec, self._source.take()
        layers = [self._source.layer(whole, layer) for layer in range(len(spec.layers))]
        sender = LayerSender(self._channel, spec, arena=self._arena)
        cpu = time.process_time() + self._peer.cpu_s()
        sender.begin(f"{name}{seed}", self._keys(), 0, deadline=deadline_in(_WAIT_S))
        start = time.perf_counter()
        for layer, views in enumerate(layers):
            sender.put_layer(layer, views)
        done = sender.finish(_HANDOFF, deadline_in(_WAIT_S))
        seconds = time.perf_counter() - start
        cpu = time.process_time() + self._peer.cpu_s() - cpu
        return Sample(seconds, done.kv_nbytes, cpu)

    def verify(self) -> bool:
        """Send one stream whose bytes the receiver compares with its own."""
        self(VERIFY_PREFIX)
        # The receiver answers only after it has compared; a difference ends the channel with an error.
        self._channel.call(Ping(), Pong, deadline=deadline_in(_WAIT_S))
        return True

    def close(self) -> None:
        self._channel.close()


def _throughput(options: Options, progress: Progress, *, checksum: bool) -> Result:
    layers = int(options.param("layers", 30))
    tokens = int(options.param("tokens", 1536))
    spec = kv_spec(
        layers,
        kv_heads=int(options.param("kv_heads", 3)),
        head_dim=int(options.param("head_dim", 64)),
        dtype=DType.FLOAT32,
        model="bench",
    )
    blocks = max(1, tokens // spec.block_tokens)
    layer_nbytes = spec.layers[0].nbytes * blocks
    transport = str(options.param("transport", "tcp"))
    if transport not in ("tcp", "unix"):
        raise ConfigError(f"transport is {transport!r}, a stream is measured over tcp or unix")
    params: dict[str, Param] = {
        "transport": transport,
        "layers": layers,
        "blocks": blocks,
        "layer_nbytes": layer_nbytes,
        "checksum": "xxh3" if checksum else "off",
        "cpus": os.cpu_count() or 1,
    }
    peer = PeerProcess(COLD_NBYTES + 2 * spec.block_nbytes * blocks, transport=transport)
    raw = RawSocket(layer_nbytes, layers)
    try:
        streamer = _Streamer(peer, _Source(spec, blocks), checksum=checksum)
        memcpy = MemcpyCold(layer_nbytes, layers)
        samples = run_paired(
            {"subject": streamer, "raw_socket": raw, "memcpy_cold": memcpy},
            runs=options.runs,
            warmup=options.warmup,
            progress=progress,
            label=f"stream.layers checksum={params['checksum']}",
        )
        verified = streamer.verify()
        streamer.close()
    finally:
        raw.close()
        peer.close()
    values = {name: [s.gb_per_s for s in found] for name, found in samples.items()}
    return summarise("stream.layers", params, "GB/s", values, samples=samples["subject"], verified=verified)
