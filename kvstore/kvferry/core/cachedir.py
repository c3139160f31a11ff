"""The user's cache folder: what can be made again, such as converted models and digests of files."""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.core.errors import ConfigError
from kvferry.core.user_path import user_path

__all__ = ["cache_dir"]


def cache_dir() -> Path:
    """``$KVFERRY_CACHE_DIR``, else ``$XDG_CACHE_HOME/kvferry``, else ``~/.cache/kvferry``; not created.

    Raises:
        ConfigError: If nothing of that is known, as of a container's user without a home folder.
    """
    if own := os.environ.get("KVFERRY_CACHE_DIR"):
        return user_path(own, "$KVFERRY_CACHE_DIR")
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "kvferry"
    home = os.path.expanduser("~")  # noqa: PTH111  Path raises RuntimeError
    if home == "~":
        raise ConfigError(
            f"there is no cache folder: uid {os.geteuid()} has no home folder; set KVFERRY_CACHE_DIR or HOME"
        )
    return Path(home) / ".cache" / "kvferry"
