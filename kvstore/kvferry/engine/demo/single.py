"""The single process of the demo: the engine with nothing in between, asked through pipes.

Run as ``python -m kvferry.engine.demo.single --directory=… …``. It answers each line of JSON on standard
input with one on standard output, and ends when its input does. ``ttft_s`` is the time from the call to
token 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
import torch

from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError
from kvferry.core.memory import MemoryStore
from kvferry.core.spec import KeyScope
from kvferry.engine.local import LocalEngine
from kvferry.engine.model import Model
from kvferry.engine.paged_kv import PagedKV
from kvferry.engine.revision import revision
from kvferry.engine.tokenizer import load_tokenizer
from kvferry.engine.weights import load_model
from kvferry.wire.messages import SamplingParams

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Load the model, say so, and answer until the input ends."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print goes to the log, not between the replies
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    model = load_model(options.directory, options.dtype, "cpu")
    answer = _Answers(model, options).answer
    _reply(replies, {"ready": True})
    for line in sys.stdin.buffer:
        _reply(replies, _guarded(answer, json.loads(line)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvferry.engine.demo.single", description=__doc__)
    for name in ("directory", "name", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("threads", "block-tokens", "chunk-tokens", "kv-nbytes", "store-nbytes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser


def _reply(replies: BinaryIO, body: dict[str, Any]) -> None:
    replies.write(json.dumps(body).encode() + b"\n")


def _guarded(answer: Callable[[dict[str, Any]], dict[str, Any]], request: dict[str, Any]) -> dict[str, Any]:
    try:
        return answer(request)
    except KVFerryError as error:
        return {"error": str(error)}


class _Answers:
    """The model with its pages and store; one engine a salt, so that nothing is reused between salts."""

    def __init__(self, model: Model, options: argparse.Namespace) -> None:
        self._model, self._options = model, options
        page = PagedKV(
            model.config, num_blocks=1, block_tokens=options.block_tokens, dtype=model.dtype
        ).nbytes
        self._kv = PagedKV(
            model.config,
            num_blocks=max(1, options.kv_nbytes // page),
            block_tokens=options.block_tokens,
            dtype=model.dtype,
        )
        self._store = MemoryStore(options.store_nbytes)
        self._revision = revision(options.directory)
        self._tokenizer = load_tokenizer(options.directory)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Generate one answer."""
        engine = LocalEngine(
            self._model,
            kv=self._kv,
            store=self._store,
            model_name=self._options.name,
            revision=self._revision,
            scope=KeyScope(salt=request["salt"].encode()),
            chunk_tokens=self._options.chunk_tokens,
        )
        prompt = np.asarray(request["prompt"], dtype="<u4")
        sampling = SamplingParams(
            max_tokens=request["max_tokens"], temperature=request["temperature"], seed=request["seed"]
        )
        started = time.monotonic()
        generation = engine.generate(prompt, sampling, deadline=deadline_in(request["timeout_s"]))
        steps = iter(generation)
        next(steps)
        ttft_s = time.monotonic() - started
        for _ in steps:
            pass
        stream = self._tokenizer.stream()
        text = "".join([*map(stream.push, generation.tokens), stream.finish()])
        return {
            "ttft_s": ttft_s,
            "token_ids": generation.tokens,
            "text": text,
            "cached_tokens": generation.cached_tokens,
            "computed_tokens": generation.computed_tokens,
        }


if __name__ == "__main__":
    main()
