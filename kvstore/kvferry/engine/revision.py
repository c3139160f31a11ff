"""The revision of a model directory: a hash over its configuration and every weight file.

It is part of the identity of all KV, so that KV of other weights is never taken for this model's.
Hashing gigabytes takes seconds, so the digest of each weight file is kept in the user's cache folder,
by name, size and modification time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from pathlib import Path

from kvferry.core.cachedir import cache_dir
from kvferry.core.errors import UnsupportedModelError

__all__ = ["INDEX_FILE", "SINGLE_FILE", "cache_file", "file_digest", "read_index", "revision", "weight_files"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DIGEST_NBYTES = 32
_CHUNK_NBYTES = 4 << 20
# A file written again within the resolution of its time stamp would look unchanged: a digest is kept only
# if the file was last written this long before it was read.
_SETTLED_S = 2.0

_log = logging.getLogger(__name__)


def read_index(path: Path) -> dict[str, str]:
    """The shard (file name) of each tensor, from the index of a sharded checkpoint.

    Raises:
        UnsupportedModelError: If the index is not what transformers writes, or names a file outside the
            model directory.
    """
    try:
        loaded = json.loads((path / INDEX_FILE).read_text(encoding="utf-8"))
        entries = loaded["weight_map"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedModelError(f"{path / INDEX_FILE} has no readable weight_map: {error!r}") from error
    found: dict[str, str] = {}
    for name, shard in entries:
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise UnsupportedModelError(
                f"{path / INDEX_FILE}: {shard!r}, for tensor {name!r}, is no .safetensors file there"
            )
        found[name] = shard
    return found


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory, sorted by name.

    Raises:
        UnsupportedModelError: If there are none, or one that the index names is missing.
    """
    if (path / SINGLE_FILE).exists():
        return [path / SINGLE_FILE]
    if not (path / INDEX_FILE).exists():
        others = sorted(p.name for p in path.glob("*") if p.suffix in {".bin", ".pt", ".pth", ".gguf"})
        hint = f"; {', '.join(others[:3])} cannot be read, convert to safetensors" if others else ""
        raise UnsupportedModelError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")
    index = read_index(path)
    files = [path / shard for shard in sorted(set(index.values()))]
    for file in files:
        if not file.exists():
            count = sum(1 for shard in index.values() if shard == file.name)
            raise UnsupportedModelError(
                f"shard {file.name} of {path} is missing ({len(files)} in all), with {count} tensors"
            )
    return files


def revision(path: str | Path) -> str:
    """Hash over ``config.json`` and every weight file of a model directory: 64 hex digits.

    The names of the weight files are part of it, their place is not.

    Raises:
        UnsupportedModelError: If a file is missing or cannot be read.
    """
    folder = Path(path)
    total = hashlib.blake2b(digest_size=_DIGEST_NBYTES, person=b"kvferry.revision")
    try:
        total.update(
            hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=_DIGEST_NBYTES).digest()
        )
        digests = _digests(weight_files(folder))
    except OSError as error:
        raise UnsupportedModelError(f"the revision of {folder} cannot be computed: {error}") from error
    for name, digest in digests.items():
        encoded = name.encode()
        total.update(len(encoded).to_bytes(4, "little") + encoded + bytes.fromhex(digest))
    return total.hexdigest()


def cache_file() -> Path:
    """Where digests are kept: ``digests.json`` in the user's cache folder."""
    return cache_dir() / "digests.json"


def file_digest(file: Path) -> str:
    """blake2b-256 of a file's bytes, in hex."""
    digest = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
    buffer = bytearray(_CHUNK_NBYTES)
    view = memoryview(buffer)
    with file.open("rb", buffering=0) as f:
        while count := f.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def _digests(files: list[Path]) -> dict[str, str]:
    """Digest of each file by its name; only what changed since it was last kept is read."""
    kept = _read_cache()
    found: dict[str, str] = {}
    new: dict[str, object] = {}
    for file in files:
        stat, full = file.stat(), str(file.resolve())
        known = _known_digest(kept.get(full), stat.st_size, stat.st_mtime_ns)
        if known is not None:
            found[file.name] = known
            continue
        started = time.time()
        found[file.name] = file_digest(file)
        after = file.stat()
        unchanged = (after.st_size, after.st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
        if unchanged and started - stat.st_mtime > _SETTLED_S:
            new[full] = [stat.st_size, stat.st_mtime_ns, found[file.name]]
    if new:
        _write_cache({**_read_cache(), **new})
    return found


def _known_digest(entry: object, size: int, mtime_ns: int) -> str | None:
    """The digest that an entry of the cache holds for a file of this size and time, if it is a sound one."""
    if not isinstance(entry, list) or len(entry) != 3 or entry[:2] != [size, mtime_ns]:
        return None
    digest = entry[2]
    if not isinstance(digest, str) or len(digest) != 2 * _DIGEST_NBYTES:
        return None
    return digest if all(c in "0123456789abcdef" for c in digest) else None


def _read_cache() -> dict[str, object]:
    """What is kept; empty if the file is not there or not readable: it is only a cache."""
    try:
        loaded = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _write_cache(entries: dict[str, object]) -> None:
    """Replace the cache file in one step, so that a reader never sees half of it."""
    target = cache_file()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as f:
                json.dump(entries, f)
            Path(temporary).replace(target)
        except OSError:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        _log.warning("digests of weight files are not kept: %s", error)
