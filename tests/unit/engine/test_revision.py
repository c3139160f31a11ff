from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest

from kvferry.core.errors import UnsupportedModelError
from kvferry.engine import revision as module
from kvferry.engine.revision import cache_file, revision
from kvferry.engine.tiny import make_tiny


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("KVFERRY_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_file()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were really read, in order."""
    names: list[str] = []
    digest = module.file_digest

    def counted(file: Path) -> str:
        names.append(file.name)
        return digest(file)

    monkeypatch.setattr(module, "file_digest", counted)
    return names


def _make(path: Path, shards: int = 2) -> Path:
    make_tiny(path, layers=1, hidden=16, heads=1, kv_heads=1, head_dim=16, intermediate=16, shards=shards)
    return _age(path)


def _age(path: Path, seconds: float = 60) -> Path:
    """Let the files be older than what may still change within the resolution of a time stamp."""
    for file in path.glob("*.safetensors"):
        os.utime(file, (time.time() - seconds, time.time() - seconds))
    return path


def _flip_last_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_is_the_same_for_the_same_files_wherever_they_are(tmp_path: Path) -> None:
    a, b = revision(_make(tmp_path / "a")), revision(_make(tmp_path / "b"))
    assert a == b
    assert len(bytes.fromhex(a)) == 32


def test_changes_with_one_byte_of_any_file(tmp_path: Path) -> None:
    path = _make(tmp_path / "m")
    seen = {revision(path)}
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "config.json"):
        if name == "config.json":
            (path / name).write_text((path / name).read_text() + " ")
        else:
            _flip_last_byte(path / name)
        seen.add(revision(path))
    assert len(seen) == 4


def test_files_that_did_not_change_are_not_read_again(tmp_path: Path, read: list[str], cache: Path) -> None:
    path = _make(tmp_path / "m")
    first = revision(path)
    assert read == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert cache.exists()
    assert revision(path) == first
    assert len(read) == 2
    _flip_last_byte(path / read[1])
    assert revision(path) != first
    assert read[2:] == [read[1]]


def test_a_time_stamp_that_changed_is_enough_to_read_again(tmp_path: Path, read: list[str]) -> None:
    path = _make(tmp_path / "m", shards=1)
    first = revision(path)
    _age(path, 50)
    assert revision(path) == first
    assert len(read) == 2


def test_a_file_just_written_is_not_trusted_by_its_time_stamp(tmp_path: Path, read: list[str]) -> None:
    path = _make(tmp_path / "m", shards=1)
    _age(path, 0)
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    first = revision(path)
    _flip_last_byte(path / "model.safetensors")
    os.utime(
        path / "model.safetensors", ns=(stamp, stamp)
    )  # as a second write within one tick would leave it
    assert revision(path) != first
    assert len(read) == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[" * 100_000, b"[1, 2]", b"\xff\xfe", b'{"x": 3}', None])
def test_a_damaged_cache_is_ignored_and_replaced(
    tmp_path: Path, read: list[str], cache: Path, damage: bytes | None
) -> None:
    path = _make(tmp_path / "m", shards=1)
    first = revision(path)
    if damage is None:
        entries = json.loads(cache.read_text())
        damage = json.dumps({name: [*entry[:2], "0" * 63] for name, entry in entries.items()}).encode()
    cache.write_bytes(damage)
    assert revision(path) == first
    assert len(read) == 2
    assert revision(path) == first
    assert len(read) == 2


@pytest.mark.parametrize("entry", [None, 5, [], [1], "text", [1, 2, None], [1, 2, 3, 4]])
def test_a_damaged_entry_is_ignored(tmp_path: Path, read: list[str], cache: Path, entry: object) -> None:
    path = _make(tmp_path / "m", shards=1)
    first = revision(path)
    (name,) = json.loads(cache.read_text())
    cache.write_text(json.dumps({name: entry}))
    assert revision(path) == first
    assert len(read) == 2


def test_a_cache_that_cannot_be_written_is_only_slower(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _make(tmp_path / "m", shards=1)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made in a file
    assert revision(path) == revision(path)
    assert len(read) == 2


def test_two_models_share_the_cache(tmp_path: Path, read: list[str], cache: Path) -> None:
    a, b = _make(tmp_path / "a"), _make(tmp_path / "b")
    revision(a)
    revision(b)
    assert len(json.loads(cache.read_text())) == 4
    revision(a)
    assert len(read) == 4
    assert stat.S_IMODE(cache.stat().st_mode) & 0o022 == 0  # nobody else decides what a revision is
    assert list(cache.parent.iterdir()) == [cache]


def test_missing_files_are_named(tmp_path: Path) -> None:
    path = _make(tmp_path / "m")
    (path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=r"shard model-00001-of-00002\.safetensors"):
        revision(path)
    (path / "config.json").unlink()
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        revision(path)
