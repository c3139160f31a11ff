"""The model of a benchmark: a small random one, SmolLM2, or a folder."""

from __future__ import annotations

from pathlib import Path

from kvferry.bench.pairing import Progress
from kvferry.engine.tiny import make_tiny

__all__ = ["model_folder"]


def model_folder(name: str, folder: Path, progress: Progress, **shape: int) -> Path:
    """Where the weights are.

    Args:
        name: ``tiny``, ``smollm2`` (fetched once, into the cache folder) or a folder.
        folder: Where to put a tiny one.
        progress: Told what is fetched.
        shape: Of the tiny one.
    """
    if name == "tiny":
        return make_tiny(folder, **shape)  # type: ignore[arg-type]
    if name == "smollm2":
        from kvferry.engine.demo.smollm2 import ensure_smollm2

        return ensure_smollm2(lambda line: progress(line, 0, 1))
    return Path(name)
