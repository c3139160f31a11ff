"""The unit for systemd and the configuration beside it: they agree, and commands find the daemon."""

from __future__ import annotations

import configparser
import shlex
import subprocess
from pathlib import Path

import pytest

from kvferry.cli.daemon_http import Port
from kvferry.client import Client
from kvferry.core.config_sources import load_config
from kvferry.daemon.admin import Reload
from kvferry.testing.blocks import save_blocks, small_spec
from kvferry.testing.processes import Command

FOLDER = Path(__file__).parents[2] / "docs" / "systemd"
SPEC = small_spec("unit")


def service() -> dict[str, str]:
    """The section ``[Service]`` of the unit."""
    unit = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",), delimiters=("=",))
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string((FOLDER / "kvferry.service").read_text())
    return dict(unit["Service"])


def test_unit_and_configuration_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFERRY_CONFIG", raising=False)
    unit, config = service(), load_config(FOLDER / "kvferry.toml").config
    run, cache = Path("/run", unit["RuntimeDirectory"]), Path("/var/cache", unit["CacheDirectory"])
    assert Path(config.daemon.socket).parent == run
    assert Path(config.daemon.token_file).parent == run
    assert Path(config.daemon.disk).is_relative_to(cache)
    assert unit["Environment"] == f"KVFERRY_CACHE_DIR={cache}"
    assert unit["ExecStart"].split()[1:] == ["serve", "--config", "/etc/kvferry/kvferry.toml"]
    assert unit["ExecStartPre"].endswith(f">{config.daemon.token_file}'")
    assert unit["PrivateTmp"] == "yes"
    assert int(unit["TimeoutStopSec"]) > config.daemon.drain + config.store.close_timeout


def test_commands_find_socket_and_token_of_a_service_with_a_tmp_of_its_own(tmp_path: Path) -> None:
    run, cache = tmp_path / "run", tmp_path / "cache"
    for folder in (run, cache, tmp_path / "private"):
        folder.mkdir()
    text = (FOLDER / "kvferry.toml").read_text()
    for ours, here in (
        ("/run/kvferry", str(run)),
        ("/var/cache/kvferry", str(cache)),
        ("1GiB", "8MiB"),
        ("16GiB", "64MiB"),
        (":8450", ":0"),
        (":8451", ":0"),
    ):
        text = text.replace(ours, here)
    config = tmp_path / "kvferry.toml"
    config.write_text(text)
    made = shlex.split(service()["ExecStartPre"].replace("/run/kvferry", str(run)))
    subprocess.run(made, check=True, timeout=60)
    private = {"XDG_RUNTIME_DIR": "", "TMPDIR": str(tmp_path / "private")}
    with Command("serve", "--config", str(config), environment=private) as daemon:
        ready = daemon.wait_ready()
        with Client(f"unix://{run}/daemon.sock") as client:
            ns = client.namespace(SPEC)
            save_blocks(ns, ns.keys([1] * 2 * SPEC.block_tokens))
        done = Port.of(ready["http"], str(config)).admin("reload", Reload())
        assert done.done, done.text
        assert daemon.terminate() == 0
    assert not list((tmp_path / "private").iterdir())
