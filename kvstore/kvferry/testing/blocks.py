"""Small specs, blocks of known bytes and bounded waits, for tests of stores."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvferry.core.blockstore import Namespace
from kvferry.core.clock import deadline_in
from kvferry.core.keys import BlockKey
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec

__all__ = ["block_bytes", "save_blocks", "small_spec", "stop_process", "wait_until"]


def small_spec(model: str = "small", *, layers: int = 2, pages: int = 2, block_tokens: int = 4) -> KVSpec:
    """A spec whose blocks take exactly ``pages`` pages of 4,096 bytes.

    Args:
        model: Name of the model; another name is another namespace.
        layers: Layers; must divide the bytes of a block into slices of whole 64 bytes.
        pages: Pages of a block.
        block_tokens: Tokens of a block.
    """
    row = pages * 4096 // (layers * 2 * block_tokens)
    shape = (block_tokens, 1, row)
    layer = LayerSpec((TensorSpec("k", shape, DType.UINT8), TensorSpec("v", shape, DType.UINT8)))
    spec = KVSpec(model=model, revision="r1", layers=(layer,) * layers, block_tokens=block_tokens)
    assert spec.block_nbytes == pages * 4096
    return spec


def block_bytes(key: BlockKey, nbytes: int) -> bytes:
    """The bytes that tests store under ``key``: every 32 of them depend on it and on their place."""
    unit = b"".join(hashlib.blake2b(key, digest_size=32, salt=bytes([i])).digest() for i in range(8))
    return (unit * (nbytes // len(unit) + 1))[:nbytes]


def save_blocks(
    namespace: Namespace,
    keys: Sequence[BlockKey],
    *,
    parent: BlockKey | None = None,
    seconds: float = 20.0,
) -> int:
    """Save the known bytes of ``keys``; returns the blocks newly stored."""
    nbytes = namespace.spec.block_nbytes
    blocks = [(key, block_bytes(key, nbytes)) for key in keys]
    return namespace.save(blocks, parent=parent, deadline=deadline_in(seconds))


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Poll until ``condition`` holds; an ``AssertionError`` after ``seconds``."""
    deadline = deadline_in(seconds)
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.002)


def stop_process(pid: int) -> None:
    """SIGSTOP, and wait until every thread of the process stands still: the signal alone returns before.

    Raises:
        AssertionError: If one runs on for 60 s.
        OSError: If there is no such process.
    """
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")

    def still() -> bool:
        try:
            stats = [(thread / "stat").read_text() for thread in threads.iterdir()]
        except (FileNotFoundError, ProcessLookupError):  # one ended meanwhile
            return False
        states = [stat.rpartition(")")[2].split()[0] for stat in stats]
        return all(state in "TZX" for state in states)

    wait_until(still)
