from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import ConfigError
from kvferry.store.disk import DiskOptions, DiskTier


def test_options_from_a_configuration() -> None:
    options = DiskOptions.from_mapping(
        "tier disk",
        {"directory": "/data/kv", "capacity": "2GiB", "keep_free": 10**9, "sync": "data", "retry_s": "200ms"},
    )
    assert options.directories == ("/data/kv",)
    assert options.capacity_nbytes == 2 << 30
    assert options.keep_free_nbytes == 10**9
    assert options.sync == "data"
    assert options.retry_s == 0.2


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"capactiy": 1}, "capacity"),
        ({"capacity": "8G"}, "8G"),
        ({"capacity": 100}, "at least"),
        ({"directories": "/data"}, "list of paths"),
        ({"directories": []}, "one or more"),
        ({"directories": ["/a", "/a"]}, "each once"),
        ({"directories": ["/a\0b"]}, "list of paths"),
        ({"sync": "sometimes"}, "none, data, full"),
        ({"read_threads": 0}, "1..64"),
        ({"read_threads": True}, "int"),
        ({"verify": 1}, "bool"),
        ({"keep_free": -1}, "keep_free"),
        ({"retry_s": 0}, "retry_s"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], word: str) -> None:
    values = {"directories": ["/data/kv"], "capacity": "1GiB", **change}
    with pytest.raises(ConfigError, match=word):
        DiskOptions.from_mapping("tier disk", values)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="tier cold: directories"):
        DiskTier.from_options("cold", {"capacity": "1GiB"})
    with pytest.raises(ConfigError, match="capacity must be given"):
        DiskTier.from_options("cold", {"directory": "/data/kv"})


def test_an_unknown_eviction_policy_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sometimes"):
        DiskTier("disk", DiskOptions((str(tmp_path),), 1 << 20, eviction="sometimes"))
