from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.core.cachedir import cache_dir


def test_cache_folder_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("KVFERRY_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path("/home/me/.cache/kvferry")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/kvferry")
    monkeypatch.setenv("KVFERRY_CACHE_DIR", "~/kv")
    assert cache_dir() == Path("/home/me/kv")
