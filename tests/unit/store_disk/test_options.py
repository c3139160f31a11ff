from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import ConfigError
from kvferry.store.disk import DiskOptions, DiskTier
from kvferry.testing.blocks import small_spec
from kvferry.testing.tiers_common import opened


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


def test_options_as_text() -> None:
    """As they come from a tier that is given in one line."""
    options = DiskOptions.from_mapping(
        "tier disk",
        {"directories": "/a,/b", "capacity": "1GiB", "read_threads": "2", "verify": "off", "retry_s": "2"},
    )
    assert options.directories == ("/a", "/b")
    assert (options.read_threads, options.verify, options.retry_s) == (2, False, 2.0)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"capactiy": 1}, "capacity"),
        ({"capacity": "8G"}, "8G"),
        ({"capacity": 100}, "at least"),
        ({"directories": "/data,,/more"}, "list of paths"),
        ({"directories": 3}, "list of paths"),
        ({"directories": []}, "list of paths"),
        ({"directories": ["/a", "/a"]}, "each once"),
        ({"directories": ["/a\0b"]}, "list of paths"),
        ({"sync": "sometimes"}, "none, data, full"),
        ({"read_threads": 0}, "1..64"),
        ({"read_threads": True}, "whole number"),
        ({"read_threads": "2.5"}, "whole number"),
        ({"verify": 1}, "true or false"),
        ({"verify": "maybe"}, "true or false"),
        ({"keep_free": -1}, "keep_free"),
        ({"capacity": "999PiB"}, "capacity is 999 PiB, may be at most 1 PiB"),
        ({"quarantine": "2GiB"}, "lower quarantine .*134217728.*, or raise capacity"),
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


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_more_kept_free_than_there_is_is_refused_with_the_figures(tmp_path: Path) -> None:
    size = shutil.disk_usage(tmp_path).total
    options = DiskOptions((str(tmp_path / "disk"),), 1 << 20, keep_free_nbytes=2 * size)
    with pytest.raises(
        ConfigError, match=rf"keep_free is {2 * size} bytes, the file system of .*disk has \d+: nothing could"
    ):
        DiskTier("disk", options)
    DiskTier("disk", DiskOptions((str(tmp_path / "disk"),), 1 << 20)).close()  # the lock was given back


def test_more_kept_free_than_is_free_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    usage = shutil.disk_usage(tmp_path)
    keep = (usage.free + usage.used + usage.free) // 2
    DiskTier("disk", DiskOptions((str(tmp_path),), 1 << 20, keep_free_nbytes=keep)).close()
    assert f"and keep_free is {keep}" in lines(caplog)[0]


def test_a_block_larger_than_the_cap_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier("disk", DiskOptions((str(tmp_path),), 64 << 10))
    namespace = opened(tier, small_spec("large", pages=64, layers=4))
    tier.open(namespace)
    assert len(lines(caplog)) == 1
    assert "capacity is 65536" in lines(caplog)[0]
    assert any(key.startswith("large ") and "none is stored" in v for key, v in tier.usage().status.items())
    tier.close()


def test_many_that_are_too_large_are_a_line_and_a_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A client names as many models as it likes: each was a line of the log."""
    tier = DiskTier("disk", DiskOptions((str(tmp_path),), 64 << 10))
    for number in range(100):
        opened(tier, small_spec(f"large-{number}", pages=64, layers=4))
    assert len(lines(caplog)) == 1
    tier.close()
    assert len(lines(caplog)) == 2
    assert "99 more" in lines(caplog)[1]


def test_files_of_others_that_leave_no_room_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "large").write_bytes(bytes(2 << 20))
    tier = DiskTier("disk", DiskOptions((str(tmp_path),), 1 << 20))
    (line,) = lines(caplog)
    assert "capacity is 1048576 bytes" in line
    assert int(line.split("no blocks take ")[1].split()[0]) >= 2 << 20
    tier.close()
