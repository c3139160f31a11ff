"""What is in a folder of a disk tier, looked at from outside: its size as ``du`` counts it, its blocks."""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.core.keys import BlockKey
from kvferry.store.tier import TierNamespace

__all__ = ["disk_usage", "files_below", "path_of", "stored_files"]


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


def stored_files(folder: Path) -> list[Path]:
    """The files of blocks below ``folder`` but for those in quarantine, sorted; folders may go meanwhile."""
    return [p for p in files_below(folder, ".safetensors") if ".quarantine" not in p.parts]


def files_below(folder: Path, suffix: str) -> list[Path]:
    """All files of that suffix below ``folder``, sorted; unlike with ``rglob``, folders may go meanwhile."""
    paths = (Path(where, name) for where, _, files in os.walk(folder) for name in files)
    return sorted(p for p in paths if p.suffix == suffix)


def path_of(folder: Path, namespace: TierNamespace, key: BlockKey) -> Path:
    """Where the file of a block is, in the folder of a tier."""
    shard = folder / namespace.tenant / namespace.namespace_id.hex() / key.hex()[:2]
    return shard / f"{key.hex()}.safetensors"
