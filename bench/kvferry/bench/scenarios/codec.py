"""``codec.<id>.*`` and ``codec.adaptive``: pipelines on the KV of a model and its texts."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvferry.bench.pairing import Progress
from kvferry.bench.registry import Options
from kvferry.bench.results import Result
from kvferry.codecs import CodecPipeline
from kvferry.codecs.kernels import use_kernels
from kvferry.codecs.native import native
from kvferry.core.errors import CodecError, ConfigError
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.core.units import parse_nbytes, parse_rate

__all__ = ["AUTO_CODECS", "DEFAULT_CODECS", "DEFAULT_RATES", "CodecOptions", "run", "short_name"]

DEFAULT_CODECS = "ebp;ebp(bits=4);split;int8;int4;fp8"
AUTO_CODECS = "ebp(bits=4);ebp;split"
"""What ``adaptive`` chooses from: the lossless pipelines of ``stream.codec=auto``."""
DEFAULT_RATES = "50MB/s;200MB/s;500MB/s;1GB/s;2GB/s;4GB/s"
_KV = LayerSpec(tuple(TensorSpec(name, (16, 2, 64), DType.BFLOAT16) for name in ("k", "v")))
_SPEC = KVSpec(model="any", revision="any", layers=(_KV,), block_tokens=16)
_TINY = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "intermediate": 704}


@dataclass(frozen=True, slots=True)
class CodecOptions:
    """The parameters of the group."""

    model: str
    texts: tuple[str, ...]
    own_texts: int
    pipelines: tuple[str, ...]
    tokens: int
    slice_tokens: int
    threads: int
    kernels: str
    only: str
    walk_nbytes: int
    runs: int
    adaptive: tuple[str, ...] = ()
    rates: tuple[str, ...] = ()
    layers: int = 64
    kept_tokens: int = 0
    predicted: int = 64

    @classmethod
    def of(cls, options: Options) -> CodecOptions:
        """Read them.

        Raises:
            ConfigError: For a value that cannot be used.
        """
        only = str(options.param("only", ""))
        if only not in ("", "speed", "quality", "adaptive"):
            raise ConfigError(f"--only is {only!r}; write speed, quality or adaptive")
        kernels = str(options.param("kernels", "native" if native().library is not None else "numpy"))
        texts = tuple(filter(None, str(options.param("text", "")).split("\0")))
        named = str(options.param("codecs", ""))
        pipelines = (named or DEFAULT_CODECS).split(";")
        adaptive = [text for text in (named or AUTO_CODECS).split(";") if text != "raw"]
        found = cls(
            model=str(options.param("model", "smollm2")),
            texts=texts,
            own_texts=int(options.param("texts", 3)),
            pipelines=tuple(map(_canonical, pipelines)),
            tokens=int(options.param("tokens", 2048)),
            slice_tokens=int(options.param("slice_tokens", 256)),
            threads=int(options.param("threads", 1)),
            kernels=kernels,
            only=only,
            walk_nbytes=parse_nbytes(str(options.param("walk", "256MiB"))),
            runs=options.runs,
            adaptive=tuple(map(_canonical, adaptive)),
            rates=tuple(str(options.param("rates", DEFAULT_RATES)).split(";")),
            layers=int(options.param("layers", 64)),
            kept_tokens=int(options.param("kept_tokens", 0)),
            predicted=int(options.param("predicted", 64)),
        )
        for rate in found.rates:
            parse_rate(rate)
        if found.tokens < found.slice_tokens:
            raise ConfigError(
                f"{found.tokens} tokens do not fill a slice of {found.slice_tokens}; lower --slice-tokens too"
            )
        if found.tokens % found.slice_tokens:
            raise ConfigError(
                f"{found.tokens} tokens are no whole number of slices of {found.slice_tokens}; change "
                "--tokens or --slice-tokens"
            )
        cpus = len(os.sched_getaffinity(0))
        if found.threads > cpus:
            raise ConfigError(
                f"--threads is {found.threads}: each needs a CPU of its own, and there are {cpus}"
            )
        return found


def _canonical(text: str) -> str:
    try:
        pipeline = CodecPipeline.parse(text)
    except CodecError as error:
        raise ConfigError(f"--codecs: {error}") from error
    if reason := pipeline.unsupported(_SPEC):  # links and tiers would not use it, so no figure of it is true
        raise ConfigError(
            f"--codecs: {pipeline.text} does not apply to KV in bfloat16, which is what is encoded here: "
            f"{reason}; leave it out"
        )
    return pipeline.text


def short_name(text: str) -> str:
    """What stands in the name of a scenario: the stages without their parameters."""
    return "+".join(stage.partition("(")[0].strip() for stage in text.split("|"))


def run(options: Options, progress: Progress) -> Iterator[Result]:
    """Size and speed of every pipeline, then what each does to answers; or what a link chooses."""
    chosen = CodecOptions.of(options)
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder, contextlib.ExitStack() as stack:
        stack.enter_context(use_kernels(chosen.kernels))
        # import torch, which takes seconds, only now that all arguments are right
        from kvferry.bench.model_folder import model_folder
        from kvferry.bench.scenarios.codec_kv import ModelKV
        from kvferry.bench.scenarios.codec_quality import run_quality
        from kvferry.bench.scenarios.codec_speed import run_speed

        path = model_folder(chosen.model, Path(folder), progress, **_TINY)
        kv = ModelKV(path, chosen, progress)
        if chosen.only == "adaptive":
            from kvferry.bench.scenarios.codec_adaptive import run_adaptive

            yield from run_adaptive(kv, chosen, progress)
            return
        if chosen.only != "quality":
            yield from run_speed(kv, chosen, progress)
        if chosen.only != "speed":
            yield from run_quality(kv, chosen, progress)
