"""Which folder ``--model`` means: a checkpoint's, or one of two models that are made in the cache folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvferry.core.errors import ConfigError
from kvferry.engine.demo.cache import Progress
from kvferry.engine.demo.smollm2 import ensure_smollm2
from kvferry.engine.demo.tiny import ensure_tiny

__all__ = ["KNOWN_MODELS", "resolve_model_folder"]

KNOWN_MODELS: Mapping[str, str] = {"smollm2": "SmolLM2-135M-Instruct", "tiny": "tiny"}
"""Words that stand for a model, and the name that it has in keys and answers."""


def resolve_model_folder(model: str, progress: Progress) -> Path:
    """The folder of ``model``; that of ``smollm2`` or ``tiny`` is made now if it is not there yet.

    A folder that is really called so is written ``./tiny``.

    Args:
        model: ``smollm2``, ``tiny`` or the path of a checkpoint's folder.
        progress: Called with a line of text before each step that takes time.

    Raises:
        ConfigError: There is no such folder, or the cache folder cannot be used.
        TransportError: SmolLM2 could not be fetched.
    """
    if model == "smollm2":
        return ensure_smollm2(progress)
    if model == "tiny":
        return ensure_tiny(progress)
    folder = Path(os.path.expanduser(model))  # noqa: PTH111  Path.expanduser and is_dir raise on odd names
    if not os.path.isdir(folder):  # noqa: PTH112
        what = "it is no folder" if os.path.lexists(folder) else "there is no such folder"
        raise ConfigError(
            f"--model {model} (model.path): {what}; give the folder of a checkpoint, or smollm2 or tiny"
        )
    return folder
