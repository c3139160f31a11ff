"""What a folder takes up on disk, counted as ``du`` does."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["disk_usage"]


def disk_usage(folder: Path) -> int:
    """Bytes of all files and folders below ``folder`` and of itself; what goes meanwhile is not counted."""
    total = folder.lstat().st_blocks * 512
    for path, folders, files in os.walk(folder):
        for name in (*folders, *files):
            try:
                total += Path(path, name).lstat().st_blocks * 512
            except FileNotFoundError:
                continue
    return total
