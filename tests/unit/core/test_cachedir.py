from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from kvferry.core.cachedir import cache_dir
from kvferry.core.errors import ConfigError
from kvferry.core.user_path import user_path


def test_cache_folder_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("KVFERRY_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path("/home/me/.cache/kvferry")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/kvferry")
    monkeypatch.setenv("KVFERRY_CACHE_DIR", "~/kv")
    assert cache_dir() == Path("/home/me/kv")


def test_without_a_home_folder_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a container that runs as a user with neither HOME nor an account."""
    for name in ("KVFERRY_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_account(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", no_account)
    with pytest.raises(ConfigError, match="KVFERRY_CACHE_DIR"):
        cache_dir()


def test_a_home_folder_that_nobody_knows_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/x", "the file") == Path("/home/me/x")
    assert user_path("a/~x", "the file") == Path("a/~x")
    with pytest.raises(ConfigError, match="the file is '~nobody-of-that-name/x'"):
        user_path("~nobody-of-that-name/x", "the file")
    monkeypatch.setenv("KVFERRY_CACHE_DIR", "~nobody-of-that-name/x")
    with pytest.raises(ConfigError, match=r"\$KVFERRY_CACHE_DIR"):
        cache_dir()
