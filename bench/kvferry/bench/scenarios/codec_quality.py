"""``codec.<id>.kl`` and others: what a lossy pipeline does to K and V, and to what the model says next."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvferry.bench.pairing import Progress
from kvferry.bench.results import Param, Result, summarise
from kvferry.bench.scenarios.codec import CodecOptions, short_name
from kvferry.bench.scenarios.codec_kv import ModelKV, TextKV
from kvferry.codecs import CodecPipeline, decode_frame
from kvferry.codecs.error import slice_errors
from kvferry.core.buffers import ByteArray, page_aligned

__all__ = ["METRICS", "Quality", "run_quality", "text_quality"]

METRICS = {
    "relative_l2_k": "|x - decoded| / |x| of K",
    "relative_l2_v": "|x - decoded| / |x| of V",
    "max_error": "largest |x - decoded|",
    "kl": "nats a token",
    "top1": "share of tokens",
    "perplexity": "change, x",
    "out_of_bound": "share of slices",
}


@dataclass(frozen=True, slots=True)
class Quality:
    """One pipeline on one text.

    Attributes:
        relative_l2_k: Relative L2 error of K over all layers.
        relative_l2_v: The same of V.
        max_error: Largest absolute error of either.
        kl: Mean KL divergence of the next token's distribution from that with the KV as it was, in nats.
        top1: Share of tokens whose likeliest next token is the same.
        perplexity: Perplexity of the following tokens over that with the KV as it was.
        out_of_bound: Share of slices that were outside the bound of the pipeline, and so stored as they are.
    """

    relative_l2_k: float
    relative_l2_v: float
    max_error: float
    kl: float
    top1: float
    perplexity: float
    out_of_bound: float


def run_quality(kv: ModelKV, options: CodecOptions, progress: Progress) -> Iterator[Result]:
    """Every pipeline on every text; one result a metric, whose runs are the texts.

    The bound is checked for every slice: a pipeline that does not suit the model shows as ``out_of_bound``.
    """
    before = [kv.predict(text) for text in kv.texts]
    for number, name in enumerate(options.pipelines):
        pipeline = CodecPipeline.parse(name, check="always")
        found = []
        for text, expected in zip(kv.texts, before, strict=True):
            progress(f"quality of {name} on {text.name}", number, len(options.pipelines))
            found.append(text_quality(kv, text, pipeline, expected))
        params: dict[str, Param] = {
            "codec": name,
            "model": options.model,
            "tokens": options.tokens,
            "kept_tokens": kv.kept_tokens,
            "predicted": options.predicted,
            "texts": ", ".join(text.name for text in kv.texts),
        }
        short = short_name(name)
        for metric, unit in METRICS.items():
            values = [float(getattr(quality, metric)) for quality in found]
            yield summarise(f"codec.{short}.{metric}", params, unit, {"subject": values})


def text_quality(kv: ModelKV, text: TextKV, pipeline: CodecPipeline, expected: torch.Tensor) -> Quality:
    """Encode and decode the KV of ``text``, predict with it, and put it back as it was.

    On request the first tokens stay as they are where a pipeline is lossy: that is how KV goes over a link.

    Args:
        kv: The model.
        text: One of its texts.
        pipeline: What encodes.
        expected: :meth:`ModelKV.predict` before.
    """
    before = pipeline.counts
    decoded = _through(pipeline, kv, text.slices)
    calls, outside = (pipeline.counts[name] - before[name] for name in ("calls", "out_of_bound"))
    if not pipeline.lossless:
        kv.keep_first(text.slices, decoded)
    k, v, largest = _errors(kv, text.slices, decoded)
    kv.put(text, decoded)
    try:
        found = kv.predict(text)
    finally:
        kv.put(text, text.slices)
    kl = (expected.exp() * (expected - found)).sum(dim=-1).mean().item()
    same = (expected.argmax(dim=-1) == found.argmax(dim=-1)).double().mean().item()
    target = text.next_tokens[1:, None]
    change = (expected.gather(1, target) - found.gather(1, target)).mean().item()
    return Quality(k, v, largest, max(0.0, kl), same, math.exp(change), outside / calls)


def _through(pipeline: CodecPipeline, kv: ModelKV, slices: ByteArray) -> ByteArray:
    out = np.zeros_like(slices)
    room = page_aligned(pipeline.max_encoded_nbytes(kv.layer))
    for layer in range(slices.shape[0]):
        for number in range(slices.shape[1]):
            used = pipeline.encode_into(slices[layer, number].data, kv.layer, room)
            decode_frame(room[:used], kv.layer, out[layer, number].data)
    return out


def _errors(kv: ModelKV, before: ByteArray, after: ByteArray) -> tuple[float, float, float]:
    """Relative L2 error of K and of V over all layers, and the largest absolute one."""
    found: dict[str, list[float]] = {"k": [], "v": []}
    largest = 0.0
    for layer in range(before.shape[0]):
        for error in slice_errors(before[layer].data.cast("B"), after[layer].data.cast("B"), kv.layer):
            found[error.tensor.name].append(error.relative_l2)
            largest = max(largest, error.maximum)
    return statistics.fmean(found["k"]), statistics.fmean(found["v"]), largest
