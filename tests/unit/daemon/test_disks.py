"""Disks that cannot be used are refused at the start; one that is smaller than its capacity is told of."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.app import main
from kvferry.cli.daemon_http import Port
from kvferry.core.config_sources import load_config
from kvferry.core.errors import ConfigError
from kvferry.daemon import Daemon
from kvferry.daemon.checks import store_config
from kvferry.daemon.disks import require_disks
from kvferry.daemon.http import DaemonHttp

from .conftest import Running, Site


@pytest.mark.parametrize(
    ("disk", "reason"),
    [
        ("file", r"file is a file, not a directory \(ENOTDIR\)"),
        ("file/below/it", r"file is a file, not a directory \(ENOTDIR\)"),
        ("nowhere", r"nowhere is a link that leads nowhere"),
        ("/proc/self", r"/proc/self \(daemon.disk, --disk\)"),  # no files, not even of root's
        ("/proc/self/below", r"/proc/self/below \(daemon.disk, --disk\)"),
    ],
)
def test_a_disk_that_cannot_work_is_refused_by_name(tmp_path: Path, disk: str, reason: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    given = [
        f"daemon.socket={tmp_path}/d.sock", "daemon.listen=none", f"daemon.disk={tmp_path / disk}",
        "daemon.disk_capacity=1MiB", "store.dram_capacity=1MiB",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=rf"{reason}.*name a directory.*none to keep"):
        Daemon(load_config(None, assignments=given).config)
    assert not (tmp_path / "d.sock").exists()


def test_of_several_directories_one_is_enough(tmp_path: Path) -> None:
    def check(*folders: str) -> None:
        paths = "&".join(f"directories={tmp_path / folder}" for folder in folders)
        config = load_config(None, assignments=[f"store.tiers=disk:?{paths}&capacity=1MiB"]).config
        require_disks(config, store_config(config))

    for name in ("file", "other"):
        (tmp_path / name).touch()
    check("file", "made")
    with pytest.raises(ConfigError, match=r"file \(store\.tiers\) cannot be used"):
        check("file", "other/below")


def test_a_full_device_is_none_that_cannot_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier makes room among its own, or waits for some: that is told of as long as it lasts."""

    def full(**_: Any) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    config = load_config(None, assignments=[f"daemon.disk={tmp_path}/disk"]).config
    require_disks(config, store_config(config))
    assert (tmp_path / "disk").is_dir()


def test_a_capacity_beyond_the_device_is_told_once(
    site: Site, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    site.token("a")
    site.token("b")
    own = site.folder / "operator"
    own.write_text("operator-s-own-token")
    own.chmod(0o600)
    daemon = site.start(
        f"daemon.disk={site.folder}/disk", "daemon.disk_capacity=1000TiB", f"daemon.token_file={own}"
    )
    told = [r.getMessage() for r in caplog.records if "may take" in r.getMessage()]
    assert told == list(daemon.notes)
    assert len(told) == 1
    for word in ("tier disk may take 1000 TiB", "free", "daemon.disk_capacity (--disk-capacity)"):
        assert word in told[0]
    http = DaemonHttp(daemon, "http://127.0.0.1:0")
    site.stack.callback(http.close)
    http.start()
    assert Port(http.url, str(own)).status().notes == daemon.notes
    with pytest.raises(SystemExit):
        main(["status", "--url", http.url, "--token-file", str(own)])
    assert "at the start: tier disk may take 1000 TiB" in " ".join(capsys.readouterr().out.split())


def test_one_that_fits_is_not_worth_a_word(running: Running) -> None:
    assert not running.daemon.notes
