"""The tiny seeded checkpoint of ``kvferry demo --model tiny``: no download, no transformers.

Its tokens are bytes and its weights are random, so it answers with noise. The rows of its output layer
are zero but for letters and the space, so that the noise can be printed.
"""

from __future__ import annotations

import string
from pathlib import Path

from kvferry.core.errors import PluginUnavailableError
from kvferry.core.install_hint import install_hint
from kvferry.engine.demo.cache import Progress, make_once

__all__ = ["ensure_tiny", "write_tiny"]

_NAME = "tiny-1"  # another number when the weights change
_LETTERS = string.ascii_lowercase + " "


def ensure_tiny(progress: Progress) -> Path:
    """The tiny checkpoint in the cache folder, made now if it is not there yet.

    Raises:
        PluginUnavailableError: The extra ``engine`` is not installed.
        ConfigError: The cache folder cannot be used.
    """

    def build(work: Path) -> Path:
        write_tiny(work / "model")
        return work / "model"

    return make_once(_NAME, _is_complete, build, progress, timeout_s=60.0)


def write_tiny(directory: Path) -> None:
    """Write the checkpoint into ``directory``, which is created.

    Raises:
        PluginUnavailableError: The extra ``engine`` is not installed.
    """
    try:
        import torch
        from safetensors.torch import load_file, save_file
    except ImportError as error:
        raise PluginUnavailableError(
            f"the tiny model needs {error.name}: {install_hint('engine')}"
        ) from error
    from kvferry.engine.tiny import make_tiny

    make_tiny(directory, layers=8, hidden=64, heads=4, kv_heads=2, head_dim=16, max_positions=4096)
    weights = load_file(directory / "model.safetensors")
    printable = torch.zeros(len(weights["lm_head.weight"]), 1)
    printable[[ord(letter) for letter in _LETTERS]] = 1
    weights["lm_head.weight"] *= printable
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _is_complete(directory: Path) -> bool:
    return (directory / "config.json").is_file() and (directory / "model.safetensors").is_file()
