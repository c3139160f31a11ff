"""The user's cache folder: what can be made again, such as converted models and digests of files."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_dir"]


def cache_dir() -> Path:
    """``$KVFERRY_CACHE_DIR``, else ``$XDG_CACHE_HOME/kvferry``, else ``~/.cache/kvferry``; not created."""
    if own := os.environ.get("KVFERRY_CACHE_DIR"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvferry"
