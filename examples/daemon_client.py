"""An engine's side of the cache daemon: look up, load what is there, save what is not.

Starts a daemon of its own; `Client()` without an address finds the one that `kvferry serve` runs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

import numpy as np

from kvferry.client import Client
from kvferry.core import DType, KVSpec, LayerSpec, TensorSpec, deadline_in

LAYER = LayerSpec(tuple(TensorSpec(name, (16, 8, 64), DType.BFLOAT16) for name in ("k", "v")))
SPEC = KVSpec(model="example", revision="r1", layers=(LAYER,) * 4, block_tokens=16)


def answer(client: Client, prompt: list[int]) -> int:
    """Be an engine with one prompt; returns how many of its blocks need not be computed."""
    blocks = client.namespace(SPEC)
    keys = blocks.keys(prompt)
    with blocks.load(keys, deadline=deadline_in(1.0)) as lease:  # views of the daemon's memory, not copies
        found = len(lease)
        for index in range(found):
            for layer in range(len(SPEC.layers)):
                assert len(lease.layer(index, layer)) == LAYER.nbytes  # here they would go to the device
    parent = keys[found - 1] if found else None
    with blocks.reserve(keys[found:], parent=parent, deadline=deadline_in(1.0)) as slots:
        for index in range(len(slots)):
            np.frombuffer(slots.view(index), np.uint8)[:] = index  # here the engine's KV would be copied in
        slots.commit()  # all of them can be found from here on
    return found


def main() -> None:
    """Run two prompts with a common beginning."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "serve",
            "--socket",
            f"{folder}/d.sock",
            "--disk",
            f"{folder}/disk",
            "--capacity",
            "64MiB",
            "--http",
            "none",
        ]
        command = [sys.executable, "-m", "kvferry.cli", *words, "--set", "daemon.listen=none"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
            assert daemon.stdout is not None
            print(daemon.stdout.readline().strip())
            with Client(f"unix://{folder}/d.sock") as client:
                system = list(range(64))
                print("first prompt, blocks found:", answer(client, [*system, *range(100, 132)]))
                print("second prompt, blocks found:", answer(client, [*system, *range(200, 232)]))
                print("stored:", client.stats().entries)
            daemon.terminate()


if __name__ == "__main__":
    main()
