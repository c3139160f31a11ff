"""``stream.layers`` with a model: a real prefill whose KV leaves while the next layer computes.

The link is made so slow that the whole transfer takes as long as the whole compute. If layers leave as
they are written, the receiver holds everything little later than the longer of both; if they leave after
the last one, it takes the sum.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from kvferry.bench.model_folder import model_folder
from kvferry.bench.pairing import Progress, run_paired
from kvferry.bench.peer import PeerProcess
from kvferry.bench.registry import Options
from kvferry.bench.results import Param, Result, Sample, summarise
from kvferry.core.clock import deadline_in
from kvferry.core.keys import block_keys
from kvferry.core.spec import KeyScope, namespace_id
from kvferry.engine.emit import emit_to
from kvferry.engine.model import Model
from kvferry.engine.paged_kv import PagedKV, Sequence
from kvferry.engine.prefill import Emit, PrefillResult, prefill
from kvferry.engine.weights import load_model
from kvferry.streaming import LayerSender
from kvferry.wire import Channel, ChannelOptions
from kvferry.wire.messages import Handoff, SamplingParams

__all__ = ["run_overlap"]

_BLOCK_TOKENS = 16
_CHUNK_TOKENS = 512
_WAIT_S = 600.0
_SAMPLING = SamplingParams(max_tokens=1)
_TINY = {"layers": 24, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "intermediate": 704}

_Emitted: TypeAlias = "tuple[Sequence, int, int, int]"


def run_overlap(options: Options, progress: Progress) -> Iterator[Result]:
    """Run the scenario on ``options``' model (``tiny``, ``smollm2`` or a directory)."""
    name = str(options.param("model", "tiny"))
    threads = int(options.param("threads", 1))
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        path = model_folder(name, Path(folder), progress, **_TINY)
        setup = _Setup(load_model(path, "float32"), int(options.param("tokens", 1536)))
        try:
            yield _measure(setup, name, threads, options, progress)
        finally:
            setup.close()


class _Setup:
    """A model with its pages and a receiving process; one prefill or stream at a time."""

    def __init__(self, model: Model, tokens: int) -> None:
        self._model = model
        self._tokens = np.random.default_rng(5).integers(0, 250, tokens).astype("<u4")
        blocks = -(-tokens // _BLOCK_TOKENS)
        self._kv = PagedKV(model.config, num_blocks=blocks, block_tokens=_BLOCK_TOKENS, dtype=model.dtype)
        self.spec = self._kv.spec("bench", "1")
        self.kv_nbytes = self.spec.block_nbytes * (tokens // _BLOCK_TOKENS)
        self._peer = PeerProcess(capacity_nbytes=2 * self.spec.block_nbytes * blocks)
        self._channel: Channel | None = None
        self._streams = 0

    def limit_link(self, rate: float) -> None:
        """From now on streams go over a connection of ``rate`` bytes a second."""
        address = f"{self._peer.address}?rate={int(rate)}B/s"
        options = ChannelOptions(role="bench", session="bench")
        self._channel = Channel.connect(address, options, deadline_in(_WAIT_S))

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._peer.close()

    def _prefill(self, emit: Emit | None) -> PrefillResult:
        return prefill(
            self._model,
            self._kv,
            self._tokens,
            _SAMPLING,
            chunk_tokens=_CHUNK_TOKENS,
            emit=emit,
            deadline=deadline_in(_WAIT_S),
        )

    def _begin(self) -> LayerSender:
        """Open a stream under keys of its own, so that the receiver has nothing of it."""
        assert self._channel is not None
        self._streams += 1
        scope = KeyScope(salt=self._streams.to_bytes(8, "little"))
        keys = block_keys(namespace_id(self.spec, scope), self._tokens, _BLOCK_TOKENS)
        tail = len(self._tokens) - len(keys) * _BLOCK_TOKENS
        sender = LayerSender(self._channel, self.spec, scope)
        sender.begin(f"bench-{self._streams}", keys, tail, deadline=deadline_in(_WAIT_S))
        return sender

    @staticmethod
    def _finish(sender: LayerSender, result: PrefillResult) -> int:
        handoff = Handoff(
            prompt_tokens=result.computed_tokens,
            cached_tokens=0,
            first_token=result.first_token,
            sampling=_SAMPLING,
        )
        return sender.finish(handoff, deadline_in(_WAIT_S)).kv_nbytes

    def compute(self) -> Sample:
        """Prefill alone."""
        start = time.perf_counter()
        result = self._prefill(None)
        seconds = time.perf_counter() - start
        result.sequence.release()
        return Sample(seconds, self.kv_nbytes)

    def streamed(self) -> Sample:
        """Prefill with each layer sent as soon as it is written, to the receiver's word that it has all."""
        sender = self._begin()
        start = time.perf_counter()
        result = self._prefill(emit_to(sender, len(self._tokens)))
        nbytes = self._finish(sender, result)
        seconds = time.perf_counter() - start
        result.sequence.release()
        return Sample(seconds, nbytes)

    def after_last_layer(self, *, count_compute: bool = True) -> Sample:
        """The same, but nothing leaves before the last layer is written."""
        sender = self._begin()
        emitted: list[_Emitted] = []
        start = time.perf_counter()
        result = self._prefill(lambda *written: emitted.append(written))
        if not count_compute:
            start = time.perf_counter()
        emit = emit_to(sender, len(self._tokens))
        for written in emitted:
            emit(*written)
        nbytes = self._finish(sender, result)
        seconds = time.perf_counter() - start
        result.sequence.release()
        return Sample(seconds, nbytes)


def _measure(setup: _Setup, name: str, threads: int, options: Options, progress: Progress) -> Result:
    progress("stream.layers: timing the compute, for the rate of the link", 0, 1)
    setup.compute()
    compute_s = statistics.median(setup.compute().seconds for _ in range(3))
    rate = setup.kv_nbytes / compute_s
    setup.limit_link(rate)
    subjects: dict[str, Callable[[], Sample]] = {
        "subject": setup.streamed,
        "compute": setup.compute,
        "transfer": partial(setup.after_last_layer, count_compute=False),
        "after_last_layer": setup.after_last_layer,
    }
    samples = run_paired(
        subjects,
        runs=options.runs,
        warmup=options.warmup,
        progress=progress,
        label=f"stream.layers model={name}",
    )
    values = {key: [s.seconds for s in found] for key, found in samples.items()}
    pairs = zip(values["compute"], values["transfer"], strict=True)
    values["max_compute_transfer"] = [max(pair) for pair in pairs]
    params: dict[str, Param] = {
        "transport": "tcp",
        "model": name,
        "layers": len(setup.spec.layers),
        "kv_nbytes": setup.kv_nbytes,
        "rate_mb_per_s": round(rate / 1e6, 1),
        "chunk_tokens": _CHUNK_TOKENS,
        "threads": threads,
        "checksum": "xxh3",
        "cpus": os.cpu_count() or 1,
    }
    return summarise("stream.layers", params, "s", values, samples=samples["subject"])
