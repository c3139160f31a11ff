"""A small engine with paged attention that keeps its KV in the cache daemon.

Its KV lies in pages of 8 tokens, found by a block table. It registers them once; then a prompt loads what is
stored into pages of its own, each layer just before it is needed, and computes the rest; what is new is saved
layer by layer meanwhile. An engine that starts anew answers as one that has computed everything.

Starts a daemon of its own; `Client()` without an address finds the one that `kvferry serve` runs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.client import Client, LoadJob, SaveJob
from kvferry.core import DType, KVSpec, LayerSpec, TensorSpec, deadline_in
from kvferry.core.regions import Region

LAYERS, HEADS, DIM, VOCABULARY = 4, 2, 16, 211
BLOCK_TOKENS, PAGES = 8, 32
WIDTH = HEADS * DIM
LAYER = LayerSpec(tuple(TensorSpec(n, (BLOCK_TOKENS, HEADS, DIM), DType.FLOAT32) for n in ("k", "v")))
SPEC = KVSpec(model="toy", revision="1", layers=(LAYER,) * LAYERS, block_tokens=BLOCK_TOKENS)
WAIT_S = 10.0

Floats: TypeAlias = npt.NDArray[np.float32]


class Engine:
    """A transformer of random weights over paged KV."""

    def __init__(self, client: Client) -> None:
        rng = np.random.default_rng(1)
        self.embedding = rng.standard_normal((VOCABULARY, WIDTH), np.float32)
        self.weights = rng.standard_normal((LAYERS, 3, WIDTH, WIDTH), np.float32) / WIDTH**0.5
        self.head = rng.standard_normal((VOCABULARY, WIDTH), np.float32)
        self.kv = np.zeros((LAYERS, 2, PAGES, BLOCK_TOKENS, HEADS, DIM), np.float32)
        self.free = list(range(PAGES))
        self.cache = client.namespace(SPEC)
        self.pages = self.cache.register(
            [Region.of(self.kv[n], layer=n, layout="stacked_nhd") for n in range(LAYERS)]
        )
        self.computed = 0

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """The next ``count`` tokens, greedily."""
        pages = -(-(len(prompt) + count) // BLOCK_TOKENS)
        table, self.free = self.free[:pages], self.free[pages:]
        keys, until = self.cache.keys(prompt), deadline_in(WAIT_S)
        usable = keys[: (len(prompt) - 1) // BLOCK_TOKENS]  # the last token is computed in any case
        lease = self.cache.load(usable, deadline=until)
        known = len(lease)
        parent = keys[known - 1] if known else None
        load = self.pages.load("load", lease, table[:known], deadline=until)
        save = self.pages.save("save", keys[known:], table[known : len(keys)], parent=parent, deadline=until)
        try:
            logits = self.forward(prompt[known * BLOCK_TOKENS :], known * BLOCK_TOKENS, table, load, save)
        except LookupError:  # not all of it came: no job may touch the pages any more, then compute it all
            load.cancel()
            save.cancel()
            logits = self.forward(prompt, 0, table)
        found = [int(logits.argmax())]
        while len(found) < count:
            logits = self.forward(found[-1:], len(prompt) + len(found) - 1, table)
            found.append(int(logits.argmax()))
        if not save.wait(deadline=until):
            save.cancel()
        self.free += table  # nobody reads or writes them from here on
        return found

    def forward(
        self, tokens: Sequence[int], first: int, table: Sequence[int],
        load: LoadJob | None = None, save: SaveJob | None = None,
    ) -> Floats:  # fmt: skip
        """Logits behind the last token.

        Raises:
            LookupError: If a layer of what was to be loaded does not come.
        """
        self.computed += len(tokens)
        x = self.embedding[list(tokens)]
        for layer in range(LAYERS):
            if load and load.block_ids and not load.wait_layer(layer, deadline=load.deadline):
                raise LookupError(f"layer {layer}: {load.error}")
            for row in range(len(tokens)):  # one by one: the same bits come out however they are split
                x[row] += self.attend(layer, x[row], first + row, table)
            if save:
                save.layer(layer)  # it is copied while the next one computes
        logits: Floats = self.head @ x[-1]
        return logits

    def attend(self, layer: int, x: Floats, at: int, table: Sequence[int]) -> Floats:
        """Write K and V of one token into its page, and look at those of all before it."""
        query, key, value = (x @ w for w in self.weights[layer])
        page, row = table[at // BLOCK_TOKENS], at % BLOCK_TOKENS
        self.kv[layer, 0, page, row] = key.reshape(HEADS, DIM)
        self.kv[layer, 1, page, row] = value.reshape(HEADS, DIM)
        used = list(table[: at // BLOCK_TOKENS + 1])
        keys, values = self.kv[layer][:, used].reshape(2, -1, HEADS, DIM)[:, : at + 1]
        scores = np.einsum("hd,thd->ht", query.reshape(HEADS, DIM), keys) / DIM**0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        mixed = np.einsum("ht,thd->hd", weights, values).reshape(WIDTH)
        return np.asarray(mixed * WIDTH**0.5 / np.linalg.norm(mixed))


def main() -> None:
    """Answer a prompt in one engine, and again in another that starts with empty pages."""
    with tempfile.TemporaryDirectory() as folder:
        words = f"serve --socket {folder}/d.sock --disk none --capacity 64MiB --http none".split()
        command = [sys.executable, "-m", "kvferry.cli", *words, "--set", "daemon.listen=none"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
            assert daemon.stdout is not None
            print(daemon.stdout.readline().strip())
            prompt = [(7 * n) % VOCABULARY for n in range(60)]
            results = []
            for number in range(2):
                with Client(f"unix://{folder}/d.sock") as client:
                    engine = Engine(client)
                    results.append(engine.generate(prompt, 12))
                    print(f"engine {number} computed {engine.computed} tokens and answers {results[-1]}")
                    for done in client.poll():
                        print(f"  {done.job}: ok={done.ok}, {done.nbytes} bytes, failed {done.failed}")
            assert results[0] == results[1], "what was restored is not what was saved"
            daemon.terminate()


if __name__ == "__main__":
    main()
